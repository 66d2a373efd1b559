"""Load a published transcript: a view that any attack can run on, and the questions about it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind, is_silent
from ppbench.base import tree
from ppbench.base.errors import UsageError, because, first_fault, shown
from ppbench.base.fence import check_answers, guard
from ppbench.base.registry import STOCK_PREFIX, admit, find, plugins
from ppbench.federation.contract import Defense, evidence_faults
from ppbench.federation.plan import Data, Plan
from ppbench.federation.threats import THREATS, threat_model
from ppbench.federation.view import PublicDefense, View
from ppbench.federation.wire import SERVER, Slot
from ppbench.ledger.form import ABOUT, TENSOR_BYTES, VIEW, TranscriptInfo, parse_json, read_bounded
from ppbench.nets.net import parameters_of
from ppbench.questions.base import MissingQuestion, question_of
from ppbench.records.scores import Scalar
from ppbench.run.experiment import make_attack, make_defense

# -- Whether a transcript is consistent: its author's content, checked before anything large is made of it --
# An author knows the format and can give every change its matching digest. So the content is compared with itself,
# with what this ppbench knows, and with the size of its files; networks are counted before they are built.

AXES = 4
"""Most axes of one input."""
VIEW_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError, AssertionError)
"""Errors of code that reads a view with wrong parts."""


def transcript_faults(about: TranscriptInfo, plan: Plan) -> Iterator[str]:
    """Yield the inconsistencies of a transcript, a clause each; nothing is built yet."""
    yield from _of_plan(about, plan)
    yield from _of_party(about, plan)
    yield from _of_questions(about, plan)
    for kind in about.kinds:
        yield from _of_kind(kind)
    if len(set(about.kinds)) != len(about.kinds):
        yield "it names a question twice"
    if len({(probe, round_) for probe, round_, _ in about.sessions}) != len(about.sessions):
        yield "it states two sessions of one round"


def _of_plan(about: TranscriptInfo, plan: Plan) -> Iterator[str]:
    spec, (low, high) = plan.spec, plan.data_range
    stated = about.model.id, tuple(about.model.shape), about.model.classes, about.federation.clients
    if (spec.model, spec.shape, spec.classes, plan.clients) != stated:
        yield "its plan describes another federation than its other fields"
    elif len(spec.shape) > AXES:
        yield f"its inputs have {len(spec.shape):,} axes"
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        yield f"no values lie from {low:g} to {high:g}"
    if plan.local.epochs < 1 or plan.local.batch < 1:
        yield "its clients train for no epochs, or on no examples"
    images = sum(len(one.unit) for one in about.questions) * about.batch
    if 4 * images * math.prod(spec.shape) > TENSOR_BYTES:
        yield f"no file of answers could hold {images:,} inputs of shape {shown(spec.shape)}"


def _of_party(about: TranscriptInfo, plan: Plan) -> Iterator[str]:
    threat, party = THREATS.get(about.threat), about.party
    if threat is None:
        yield f"no threat model is called {shown(about.threat, 40)}"
    elif threat.acts:
        yield f"nobody can choose again what a server of {threat} sent"
    elif not threat.server and threat.client is None:
        right = party is None
        yield from () if right else ("a listener is no party",)
    elif threat.server:
        yield from () if party == SERVER else (f"the server is party {SERVER}",)
    elif party is None or not 0 <= party < plan.clients:
        yield f"of {plan.clients} clients none is party {shown(party, 20)}"


def _of_questions(about: TranscriptInfo, plan: Plan) -> Iterator[str]:
    slots = [tuple(slot) for one in about.questions for slot in one.unit]
    if len({len(one.unit) for one in about.questions}) > 1:
        yield "its questions are about different numbers of clients"
    if len(set(slots)) != len(slots):
        yield "it asks about one client's batch twice"
    if strange := next((client for _, client in slots if client >= plan.clients), None):
        yield f"it asks about client {strange:,} of {plan.clients:,}"
    if any(one.question >= len(about.questions) for one in about.observed):
        yield "it observes what is not asked about"


def _of_kind(kind: Kind) -> Iterator[str]:
    question = question_of(kind)
    if isinstance(question, MissingQuestion):
        yield f"the question {shown(kind, 40)} is not installed here"
    elif question.source != "probe" or question.follows:
        yield f"the question {shown(kind, 40)} is not asked about uploads"


def network_faults(about: TranscriptInfo, plan: Plan) -> Iterator[str]:
    """Yield the faults of the network of a published view, a clause each; the last check builds it."""
    count = parameters_of(plan.spec)
    if count is not None and 4 * count > TENSOR_BYTES:
        yield f"its network has {count:,} parameters, more than a view can hold"
    elif count is not None and count != about.model.parameters:
        yield f"its network has {count:,} parameters here, and {about.model.parameters:,} there"
    elif plan.net.parameter_count != about.model.parameters:
        yield f"its network has {plan.net.parameter_count:,} parameters here, and {about.model.parameters:,} there"


def read_view(about: TranscriptInfo, plan: Plan, defense: PublicDefense, parts: Any) -> View:
    """Return the view made of a tree's `parts`; UsageError, a clause: they are no view."""
    empty = View(threat_model(about.threat), about.party, plan, defense, (), (), sessions=about.sessions)
    try:
        view = empty.with_parts(parts)
    except VIEW_ERRORS as cause:
        raise UsageError("it is not made of mail, states and examples") from cause
    for fault in (*_of_mail(view, about), *_of_examples(view)):
        raise UsageError(fault)
    _check_evidence(view)
    return view


def _of_mail(view: View, about: TranscriptInfo) -> Iterator[str]:
    parties = range(SERVER, view.plan.clients)
    for one in (*view.mail, *view.set_up):
        numbers = (one.probe, one.round, one.step, one.sender, one.receiver, one.nbytes)
        if any(type(part) is not int for part in numbers) or one.nbytes < 0:
            yield "a message has no place or size"
        elif one.sender not in parties or one.receiver not in parties:
            yield "a message passes between parties that are none"
    for record in view.states:
        if any(type(part) is not int for part in (record.probe, record.round, record.step, record.party)):
            yield "a state has no place"
    probes = {one.probe for one in view.mail if type(one.probe) is int}
    if absent := next((probe for one in about.questions for probe, _ in one.unit if probe not in probes), None):
        yield f"nothing was sent in probe {absent:,}, which is asked about"
    elif is_silent(view):
        yield "nothing was sent"


def _of_examples(view: View) -> Iterator[str]:
    shape = view.plan.spec.shape
    for probe, one in (*view.data, *([] if view.public is None else [(0, view.public)])):
        fits = isinstance(one, Data) and isinstance(one.x, Tensor) and isinstance(one.y, Tensor)
        fits = fits and one.x.dtype == torch.float32 and tuple(one.x.shape[1:]) == shape and len(one.x) == len(one.y)
        if type(probe) is not int or not fits:
            yield "its examples are none of this task"


def _check_evidence(view: View) -> None:
    """Compute the defense's evidence of the view, as every attack does; UsageError: that fails."""
    name, net = view.defense.name, view.plan.net
    shapes = {one: tuple(value.shape) for one, value in net.module.named_parameters()}
    try:
        check_answers("defenses", name, lambda: evidence_faults(view.defense.evidence(view)))
        for one in view.defense.evidence(view):
            for tensors in (one.observed, one.params or {}):
                wrong = [n for n, value in tensors.items() if n in shapes and tuple(value.shape) != shapes[n]]
                if wrong:
                    raise UsageError(f"{wrong[0]} has not the shape that it has in this network")
    except VIEW_ERRORS as cause:
        raise UsageError(f"{name} cannot read its messages: {because(cause, 80)}") from cause


@dataclass(frozen=True, eq=False)
class FrozenView:
    """A loaded transcript. view: as in the cell it was made for; challenges: one per question, in order."""

    about: TranscriptInfo
    view: View
    challenges: tuple[Challenge, ...]

    def draws(self, attack: str) -> torch.Generator:
        """Return the generator of an attack's draws: that of the original cell for the attacks of its portfolio."""
        known = self.about.draws.get(attack)
        if known is None:
            known = int.from_bytes(hashlib.sha256(f"{self.about.id}/{attack}".encode()).digest()[:8], "big") >> 1
        return torch.Generator().manual_seed(known)

    def run(self, attack: str | Attack, **parameters: Scalar) -> list[Guess]:
        """Return the guesses of an attack, one per question.

        attack: a name, with `parameters` in place of its defaults, or an attack. Raises UsageError: an unknown name, or
        it answers another question, or cannot use such a view.
        """
        own = make_attack(attack, parameters) if isinstance(attack, str) else attack
        if own.kind not in self.about.kinds:
            raise UsageError(
                f"Attack {own.name!r} answers {own.kind}; the transcript asks for {' or '.join(self.about.kinds)}."
            )
        with guard("attacks", own.name):
            if not self.view.threat.among(own.threats) or not own.suits(self.view.plan):
                raise UsageError(f"Attack {own.name!r} has no use for a view of {self.view.threat} on this network.")
            if lacking := own.lacks_rounds(self.about.probe_rounds):
                raise UsageError(f"Attack {own.name!r} {lacking}, as in this transcript.")
            return own.run(self.view, list(self.challenges), self.draws(own.name))


def load_transcript(path: Path | str, *, trust: bool = False, device: str = "cpu") -> FrozenView:
    """Return the transcript in a folder, after checking form, digests and shapes.

    trust: whether a network or a defense may be code at an address (MODULE:NAME): opening such a transcript
    imports that module. device: where the tensors go. Raises UsageError: the folder holds no transcript, was
    altered, or needs a plugin that is not installed.
    """
    home = Path(path)
    about = read_info(home)
    plan, defense = _plan(about, home, trust), _defense(about, home, trust)
    with _named(home / ABOUT):
        for fault in chain(transcript_faults(about, plan), network_faults(about, plan)):
            raise UsageError(fault)
        defense.check(plan)
    data = read_checked(home, about, VIEW)
    with _named(home / VIEW):
        view = read_view(about, plan, defense, tree.moved(tree.unpacked(data), torch.device(device)))
    challenges = [Challenge(tuple(Slot(*slot) for slot in one.unit), about.batch) for one in about.questions]
    return FrozenView(about, view, tuple(challenges))


def read_info(home: Path) -> TranscriptInfo:
    """Return transcript.json of a folder; UsageError: it is missing or was altered."""
    about = parse_json(TranscriptInfo, home / ABOUT)
    if about.id != about.name():
        raise UsageError(f"{home / ABOUT} was altered: its id is {about.id}, its content has {about.name()}.")
    return about


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file's name to a UsageError in the body."""
    try:
        yield
    except (UsageError, RecursionError) as cause:
        why = "nested too deep" if isinstance(cause, RecursionError) else because(cause, 240)
        raise UsageError(f"{path} is not valid in a transcript ({why}); fetch it again.") from cause


def read_checked(home: Path, about: TranscriptInfo, name: str) -> bytes:
    """Return the bytes of a transcript's file; UsageError: they are not the published ones."""
    data, stated = read_bounded(home / name, TENSOR_BYTES), about.files.get(name)
    if stated is None or hashlib.sha256(data).hexdigest() != stated.sha256:
        raise UsageError(f"{home / name} is not the file that {ABOUT} describes; fetch the transcript again.")
    return data


def _plan(about: TranscriptInfo, home: Path, trust: bool) -> Plan:
    try:
        plan = TypeAdapter(Plan).validate_python(about.plan)
    except ValidationError as error:
        raise UsageError(f"{home / ABOUT} holds no plan ({first_fault(error)}); publish it again.") from error
    _permit(plan.spec.model in plugins("models"), "network", plan.spec.model, trust)
    if any(value for name, value in plan.spec.options if name == "weights") or plan.spec.model == "frozen_backbone":
        raise UsageError(f"{home / ABOUT} names a file of weights on another machine; such networks are not published.")
    return plan


def _defense(about: TranscriptInfo, home: Path, trust: bool) -> Defense:
    name = about.defense.id
    _permit(name in plugins("defenses") or name.partition(":")[2].startswith(STOCK_PREFIX), "defense", name, trust)
    if trust:
        admit(name)
    if find("defenses", name) is None:
        raise UsageError(f"{home / ABOUT} is about the defense {shown(name)}, which is not installed here.")
    made = make_defense(name, about.defense.parameters)
    if made.version != about.defense.version:
        versions = f"version {about.defense.version}, here is {made.version}"
        raise UsageError(f"{home / ABOUT} is about {shown(name)} in {versions}; install the one that it was made with.")
    return made


def _permit(installed: bool, what: str, name: str, trust: bool) -> None:
    if not installed and not trust:
        raise UsageError(
            f"The {what} {shown(name)} is not installed here; code at an address is imported only "
            "with your consent: load_transcript(path, trust=True), --trust."
        )


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as a JSON object, without a kind of inputs that it does not name."""
    about = TypeAdapter(Plan).dump_python(plan, mode="json")
    return {name: value for name, value in about.items() if name != "kind" or value}


def model_code(name: str) -> str:
    """Return where the code of a network is: MODULE:NAME."""
    plugin = find("models", name)
    return name if plugin is None else plugin.target
