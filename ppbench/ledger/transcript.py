"""Load a published transcript: a view that any attack can run on, and the questions about it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.base import tree
from ppbench.base.blame import guard
from ppbench.base.errors import UsageError, because, first_fault, shown
from ppbench.base.registry import STOCK_PREFIX, admit, find, plugins
from ppbench.federation.contract import Defense
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.ledger.form import ABOUT, TENSOR_BYTES, VIEW, TranscriptInfo, parse_json, read_bounded
from ppbench.ledger.sound import network_faults, read_view, transcript_faults
from ppbench.records.scores import Scalar
from ppbench.run.choice import make_attack, make_defense


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
        if not self.view.threat.among(own.threats) or not own.suits(self.view.plan):
            raise UsageError(f"Attack {own.name!r} has no use for a view of {self.view.threat} on this network.")
        with guard("attacks", own.name):
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


def pack_view(view: View) -> bytes:
    """Return the bytes of view.safetensors: `View.parts` with equal tensors merged: every probe receives the model."""
    known: dict[tuple[str, torch.Size, bytes], torch.Tensor] = {}

    def one(leaf: torch.Tensor) -> torch.Tensor:
        here = leaf.detach().cpu().contiguous()
        digest = hashlib.sha256(here.reshape(-1).view(torch.uint8).numpy().tobytes() if here.numel() else b"").digest()
        return known.setdefault((str(here.dtype), here.shape, digest), here)

    return tree.packed(tree.tree_map(one, view.parts()))


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as a JSON object."""
    return dict(TypeAdapter(Plan).dump_python(plan, mode="json"))


def model_code(name: str) -> str:
    """Return where the code of a network is: MODULE:NAME."""
    plugin = find("models", name)
    return name if plugin is None else plugin.target
