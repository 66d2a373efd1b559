"""`ppbench.audit`: who was among the training data of a finished model, by the bench's own membership attacks.

The model is put into the view of a curious client of an undefended federation, who was sent it; attacks answer the same
question as in the bench, with the same draws. Equal weights, records and seed give the figures of the bench's cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ppbench.adversary.attack import Attack
from ppbench.adversary.victims import are_among
from ppbench.base.device import check_device, computing
from ppbench.base.errors import UsageError, count_of, shown
from ppbench.base.fence import built
from ppbench.base.registry import ADDRESS, load_plugin, plugins
from ppbench.base.seeds import Seeds
from ppbench.federation.threats import CURIOUS_CLIENT
from ppbench.nets.classifier import OutputName
from ppbench.nets.model_object import module_with_weights
from ppbench.questions.membership import ASR, TPR_1, Membership
from ppbench.report.page.finished_model import AuditedModel, AuditSubject, Limit
from ppbench.run.experiment import built_for, make_attack
from ppbench.run.model_controls import controls_of
from ppbench.run.model_subject import AttackedModel, Trainer, TrainingFunction, evaluated_network
from ppbench.run.user_inputs import LabelledBatch, int_between, to_dense
from ppbench.task.member_sets import MemberSet, open_member_sets

STACKED = "mia_stack"
"""Stacks the scores of the others; it says that it needs an audit's rounds, and does without where there are none."""
CANDIDATES, FEWEST, MOST = 5000, 10, 1_000_000
"""Members that are attacked by default, at least, and at most; and as many others."""
REFERENCES, MOST_REFERENCES = 16, 256
"""Reference models by default, where a training function is given; and at most."""


@computing()
def audit(
    model: nn.Module,
    members: LabelledBatch,
    nonmembers: LabelledBatch,
    *,
    train: TrainingFunction | None = None,
    references: int | None = None,
    max_asr: float | None = None,
    max_tpr: float | None = None,
    candidates: int = CANDIDATES,
    output: OutputName | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> AuditedModel:
    """Return what membership attacks find out about the training data of a finished model.

    Args:
        model: a network that answers by logits, with its trained weights. A copy in eval mode is attacked.
        members: what it was trained on, or a part: inputs [N, *shape] as the network takes them, and classes [N].
        nonmembers: the same from the same source, but not trained on. Those that are also members are dropped.
        train: trains a network as the model was, from scratch, on inputs float32 [N, *shape] and classes int64 [N]; it
            may take a `seed`. With it reference models are trained, for the strongest attacks (LiRA, RMIA), and a
            control without the members.
        references: how many, an even number; by default 16.
        max_asr: the limit on the share of right decisions, above 0.5.
        max_tpr: the limit on the share of members found at a false-positive rate of 1 %, above 0.01.
        candidates: members, and as many non-members, that are attacked, at most.
        output: the part of the network's answer that is the logits: a key, index or attribute.
        seed: of all draws: one seed, one result.
        device: where it is computed, as torch names it.

    Raises UsageError, one sentence: an argument cannot be used.
    """
    own, others = member_set("members", members), member_set("nonmembers", nonmembers)
    names = type(model).__name__, "the members", "the non-members"
    order = AuditOrder(train, references, limits_of(max_asr, max_tpr), candidates, output, seed, device)
    return audited(model, own, others, names, order)


@dataclass(frozen=True)
class AuditOrder:
    """How a model is audited: the arguments of `audit`; say: gets a line before what takes long."""

    train: TrainingFunction | None = None
    references: int | None = None
    limits: tuple[Limit, ...] = ()
    candidates: int = CANDIDATES
    output: OutputName | None = None
    seed: int = 0
    device: str = "cpu"
    say: Callable[[str], None] = lambda _: None


def audit_files(model: str, weights: Path, members: str, nonmembers: str, order: AuditOrder) -> AuditedModel:
    """Return the audit of a model in files, as `ppbench audit` takes them.

    model: a function by address, MODULE:FUNCTION; members, nonmembers: as of `open_member_sets`. UsageError: one cannot
    be used.
    """
    own, others = open_member_sets(members, nonmembers, order.seed)
    shape, classes = tuple(own.x.shape[1:]), max(len(own.classes), int(torch.cat([own.y, others.y]).max()) + 1, 2)
    module = built("models", model, lambda made: module_with_weights(model, made, weights, shape, classes))
    with computing():
        return audited(module, own, others, (model, members, nonmembers), order)


def training_function(address: str) -> TrainingFunction:
    """Return the function at an address, MODULE:FUNCTION; UsageError: there is none."""
    if not ADDRESS.fullmatch(address):
        raise UsageError(f"--train {shown(address)} is no address; give MODULE:FUNCTION, as my_code:train.")
    try:
        function: TrainingFunction = load_plugin("models", address)
    except UsageError as cause:
        raise UsageError(f"--train: {cause}") from cause
    return function


def limits_of(max_asr: float | None, max_tpr: float | None) -> tuple[Limit, ...]:
    """Return the limits of a user's options; UsageError: one cannot be used."""
    return tuple(Limit(spec, most) for spec, most in ((ASR, max_asr), (TPR_1, max_tpr)) if most is not None)


def member_set(kind: str, pair: Any) -> MemberSet:
    """Return inputs and classes of a user's program as a set of examples; UsageError: they are none."""
    right = "give a pair of finite floats [N, *shape] and classes [N], as (x, y)"
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UsageError(f"The {kind} are {shown(pair, 60)}; {right}.")
    x, y = map(to_dense, pair)
    if x is None or y is None or x.dim() < 2 or y.dim() != 1 or len(x) != len(y):
        shapes = " and ".join("no numbers" if part is None else str(tuple(part.shape)) for part in (x, y))
        raise UsageError(f"The {kind} are {shapes}; {right}.")
    if not x.is_floating_point() or y.is_floating_point() or y.is_complex():
        raise UsageError(f"The {kind} are {x.dtype} and {y.dtype}; {right} (of bytes, x.float() / 255).")
    return MemberSet(x.float().cpu(), y.long().cpu(), tuple(f"{kind} {place}" for place in range(len(y))))


def audited(
    model: nn.Module, members: MemberSet, others: MemberSet, names: tuple[str, str, str], order: AuditOrder
) -> AuditedModel:
    """Return the audit of a model, as `audit`; names: of the model and of both sets, for the report."""
    runs = reference_count(order.train, order.references)
    seeds = Seeds(int_between("seed", order.seed, 0, 2**63 - 1))
    count = int_between("candidates", order.candidates, FEWEST, MOST)
    check_device(order.device)
    unseen, duplicates = without_duplicates(members, others)
    network = evaluated_network(model, members, unseen, order.output)
    subject = AttackedModel.of(network, members, unseen, count, runs, seeds, torch.device(order.device))
    subject.check_answers_of(model, order.output)
    trainer = None if order.train is None else Trainer(order.train, subject, runs, order.output, order.say)
    attacks = tuple(attack for attack in membership_attacks(runs > 0) if attack.suits(subject.plan))
    size = len(subject.places.inside)
    order.say(f"{count_of(len(attacks), 'attack')} on {size} members and as many others")
    results = subject.attacked(attacks, subject.view(subject.params), subject.candidates, trainer)
    order.say("controls: planted members, others alone, inputs alone")
    checks, accuracies = controls_of(subject, attacks, trainer), (subject.accuracy(True), subject.accuracy(False))
    sizes = len(members.y), len(others.y), duplicates, size
    about = AuditSubject(*names, *sizes, runs, *accuracies, order.seed)
    result = AuditedModel(about, results, checks, order.limits, (), subject.rows())
    return replace(result, exposed=subject.exposed(result.strongest()))


def reference_count(train: TrainingFunction | None, references: int | None) -> int:
    """Return the number of reference models; UsageError: it cannot be used, or nothing can train them."""
    if train is None:
        if references:
            raise UsageError(
                f"{count_of(references, 'reference')} cannot be trained without a function that does it; give --train "
                "MODULE:FUNCTION, from inputs and classes to a trained network."
            )
        return 0
    if not callable(train):
        raise UsageError(f"train={shown(train, 60)} cannot be used; give a function of inputs and classes.")
    number = int_between("references", REFERENCES if references is None else references, 2, MOST_REFERENCES)
    if number % 2:
        raise UsageError(f"references={number} cannot be used; give an even number: each candidate is in half of them.")
    return number


def without_duplicates(members: MemberSet, others: MemberSet) -> tuple[MemberSet, int]:
    """Return the non-members whose input is not among the members, and how many were dropped; UsageError: too few."""
    if members.x.shape[1:] != others.x.shape[1:]:
        shapes = f"{tuple(members.x.shape[1:])} and {tuple(others.x.shape[1:])}"
        raise UsageError(f"Members and non-members have inputs of shape {shapes}; they must be alike.")
    for kind, own in (("members", members), ("non-members", others)):
        if not bool(own.x.isfinite().all()):
            raise UsageError(f"The {kind} hold a value that is not finite; clean the data first.")
    keep = (~are_among(others.x, members.x)).nonzero()[:, 0]
    dropped = len(others.y) - len(keep)
    if dropped and len(keep) < FEWEST:
        share = "All" if not len(keep) else f"{dropped} of {len(others.y)}"
        raise UsageError(f"{share} of the non-members are among the members; give examples that were not trained on.")
    if min(len(keep), len(members.y)) < FEWEST:
        counts = f"{count_of(len(members.y), 'member')} and {count_of(len(keep), 'non-member')}"
        raise UsageError(f"There are {counts}; an audit needs {FEWEST} of each, and hundreds to say much.")
    return (others.at(keep), dropped) if dropped else (others, 0)


def membership_attacks(referenced: bool) -> tuple[Attack, ...]:
    """Return our attacks on the members of a delivered model, by name; referenced: also those by reference models."""
    needs = {"", "references"} if referenced else {""}
    known = [load_plugin("attacks", name) for name, plugin in plugins("attacks").items() if plugin.ours]
    suited = [one for one in known if one.kind == Membership.name and CURIOUS_CLIENT.among(one.threats)]
    attacks = [make_attack(one.name) for one in suited if one.audit in needs or one.name == STACKED]
    return tuple(attack for attack in attacks if built_for(attack, "none"))
