"""Whether a transcript is consistent: its author's content, checked before anything large is made of it.

An author knows the format and can give every change its matching digest. So the content is compared with itself, with
what this ppbench knows, and with the size of its files; networks are counted before they are built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ppbench.adversary.attack import Kind
from ppbench.adversary.reading import is_silent
from ppbench.base.blame import guard
from ppbench.base.errors import UsageError, because, shown
from ppbench.federation.plan import Data, Plan
from ppbench.federation.threats import THREATS, threat_model
from ppbench.federation.view import PublicDefense, StateRecord, View
from ppbench.federation.wire import SERVER, Envelope
from ppbench.ledger.form import TENSOR_BYTES, TranscriptInfo
from ppbench.nets.net import parameters_of
from ppbench.questions.base import MissingQuestion, question_of

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
    try:
        mail, states, data, public = parts
        letters = tuple(Envelope(*letter) for letter in mail)
        kept = tuple(StateRecord(*state) for state in states)
        own = tuple((probe, one) for probe, one in data)
    except VIEW_ERRORS as cause:
        raise UsageError("it is not made of mail, states and examples") from cause
    view = View(threat_model(about.threat), about.party, plan, defense, letters, kept, own, public, about.sessions)
    for fault in (*_of_mail(view, about), *_of_examples(view)):
        raise UsageError(fault)
    _check_evidence(view)
    return view


def _of_mail(view: View, about: TranscriptInfo) -> Iterator[str]:
    parties = range(SERVER, view.plan.clients)
    for one in view.mail:
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
        with guard("defenses", name):
            evidence = view.defense.evidence(view)
        for one in evidence:
            for tensors in (one.observed, one.params or {}):
                wrong = [n for n, value in tensors.items() if n in shapes and tuple(value.shape) != shapes[n]]
                if wrong:
                    raise UsageError(f"{wrong[0]} has not the shape that it has in this network")
    except VIEW_ERRORS as cause:
        raise UsageError(f"{name} cannot read its messages: {because(cause, 80)}") from cause
