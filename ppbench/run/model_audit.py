"""`ppbench.audit`: who was among the training data of a finished model, by the bench's own membership attacks.

The model is put into the view of a curious client of an undefended federation, who was sent it; attacks answer the same
question as in the bench, with the same draws. Equal weights, records and seed give the figures of the bench's cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from ppbench.adversary.attack import Attack
from ppbench.adversary.victims import Candidates, are_among
from ppbench.base.device import check_device, computing
from ppbench.base.errors import UsageError, count_of, shown
from ppbench.base.fence import built
from ppbench.base.registry import ADDRESS, load_plugin, plugins
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, finite
from ppbench.federation.threats import CURIOUS_CLIENT
from ppbench.metrics.intervals import Estimate, Floats, Interval, clopper_pearson
from ppbench.metrics.membership import Half, auc
from ppbench.nets.classifier import OutputName
from ppbench.nets.model_object import module_with_weights
from ppbench.questions.membership import ASR, AUC, TPR_1, Membership
from ppbench.records.figure import record_metric
from ppbench.report.controls import exceeds_chance, widened
from ppbench.report.page.finished_model import (
    AttackResult,
    AuditCheck,
    AuditedModel,
    AuditSubject,
    Limit,
    interval_words,
    of_hundred,
)
from ppbench.run.audit.population import random_half
from ppbench.run.experiment import built_for, make_attack
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


# -- The controls of an audit: what must be found, what must not, and whether the two sets can be compared --

SELDOM = 5
"""So much stricter than 95 % are the tests of what must not be found: a control fails by chance once in 200 audits."""
PLANTED = 100
"""Members that are planted, and as many others, at most."""
PLANTING_RATES = (3e-3, 3e-4)
"""Learning rates of Adam by which a model is made to remember, one after another."""
EPOCHS, BATCH = 300, 50
REMEMBERED = 0.1
"""Mean loss, in nats, of examples that are remembered."""
COMPONENTS = 50
"""Principal components of the inputs for the classifier that knows inputs alone."""


def controls_of(subject: AttackedModel, attacks: Sequence[Attack], trainer: Trainer | None) -> tuple[AuditCheck, ...]:
    """Return all controls of an audit."""
    null = (
        _blind_by_halves(subject, attacks, trainer)
        if trainer is None
        else _blind_by_training(subject, attacks, trainer)
    )
    return (
        check_learned(subject),
        _planted(subject, attacks, trainer),
        null,
        check_inputs(subject.candidates, subject.seeds.master),
    )


# -- the model knows its task: else inputs are not prepared as in its training -----------------------------------------
def check_learned(subject: AttackedModel) -> AuditCheck:
    """Return whether the model has more members right than an answer that is always the same."""
    labels = subject.candidates.labels.argmax(1)[subject.candidates.member]
    n, share = len(labels), float(labels.bincount().max()) / len(labels)
    right = subject.accuracy(True)
    low = clopper_pearson(round(right * n), n).low or 0.0
    aim = "The model must know its task: else its inputs are not prepared as in its training."
    both = f"{of_hundred(right)} of the members right and {of_hundred(subject.accuracy(False))} of the others"
    words = f"The model has {both}"
    if low > share:
        return AuditCheck("learned", True, aim, f"{words}.")
    same = f"always the same answer has {of_hundred(share)}"
    return AuditCheck(
        "learned", False, aim, f"{words}, and {same}: inputs, labels or weights are not those of its training."
    )


# -- a planted model that remembers must fall --------------------------------------------------------------------------
def _planted(subject: AttackedModel, attacks: Sequence[Attack], trainer: Trainer | None) -> AuditCheck:
    """Return whether the attacks find what a copy of the model remembers.

    With their own labels easy examples are answered alike whether they were trained on or not (digits: a right decision
    in 55 % at a loss of 1e-4), which says nothing about attacks. So all planted ones have wrong labels, as the canaries
    of a defense's audit: only memory explains that the copy gives them.
    """
    aim = "The same attacks on a copy of the model that was made to remember records with wrong labels must find these."
    places, inside = _halves_of_others(subject, 2 * PLANTED)
    classes, own = subject.plan.spec.classes, subject.candidates.labels.argmax(1)[places]
    step = torch.randint(1, classes, own.shape, generator=subject.seeds.generator("planted labels"))
    labels, x = (own + step) % classes, subject.candidates.x[places]
    params = remembering(subject, x[inside], labels[inside])
    if params is None:
        return AuditCheck("planted", False, aim, "A copy of the model could not be made to remember planted members.")
    results = _attacked_at(subject, attacks, trainer, params, places, inside, labels)
    top = max(results, key=lambda result: result.metric(ASR.name).value or 0.0)
    shown = f"{int(inside.sum())} planted members: {top.name} is right in {interval_words(top.metric(ASR.name))}"
    if exceeds_chance(top.metric(ASR.name), SELDOM * len(results)):
        return AuditCheck("planted", True, aim, f"{shown}.")
    return AuditCheck(
        "planted", False, aim, f"The attacks cannot see membership here ({shown}, no better than guessing)."
    )


def remembering(subject: AttackedModel, x: Tensor, labels: Tensor) -> Params | None:
    """Return the weights of a copy that was trained on x and labels until it remembers them; None if it does not."""
    for rate in PLANTING_RATES:
        weights = {name: value.clone().requires_grad_() for name, value in subject.params.items()}
        optimizer = torch.optim.Adam(weights.values(), lr=rate)
        generator = subject.seeds.generator("planted", str(rate))
        for _ in range(EPOCHS):
            if _epoch(subject, weights, optimizer, x, labels, generator) <= REMEMBERED:
                kept = {name: value.detach() for name, value in weights.items()}
                if float(cross_entropy(subject.answers(kept, x), labels)) <= REMEMBERED:
                    return kept
            if not finite(weights):
                break
    return None


def _epoch(
    subject: AttackedModel,
    weights: Params,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    labels: Tensor,
    generator: torch.Generator,
) -> float:
    """Train on all examples once, and return the mean of the batches' losses."""
    losses = []
    for batch in torch.randperm(len(x), generator=generator).split(BATCH):
        with torch.enable_grad():
            logits = subject.plan.net(weights, x[batch].to(subject.device))
            loss = cross_entropy(logits, labels[batch].to(subject.device))
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return float(np.mean(losses))


# -- what is no member must not be found -------------------------------------------------------------------------------
def _blind_by_halves(subject: AttackedModel, attacks: Sequence[Attack], trainer: Trainer | None) -> AuditCheck:
    aim = "The attacks must not tell two random halves of the non-members apart, of which the model saw neither."
    places, inside = _halves_of_others(subject, len(subject.candidates.x))
    results = _attacked_at(subject, attacks, trainer, subject.params, places, inside)
    return _blind(aim, "two halves of the non-members", results)


def _blind_by_training(subject: AttackedModel, attacks: Sequence[Attack], trainer: Trainer) -> AuditCheck:
    """Return whether members are recognized in a model trained on other examples: half of the non-members."""
    aim = "The attacks must not find the members in a model that was trained without them, on half of the non-members."
    known, trained = _halves_of_others(subject, len(subject.candidates.x))
    labels = subject.candidates.labels.argmax(1)
    spec, params = trainer.trained(subject.candidates.x[known[trained]], labels[known[trained]], -1)
    unseen = known[~trained]
    own = subject.candidates.member.nonzero()[:, 0]
    own = own[torch.randperm(len(own), generator=subject.seeds.generator("blind"))[: len(unseen)]]
    places = torch.cat([own, unseen[: len(own)]])
    inside = torch.arange(len(places)) < len(own)
    other = replace(subject, plan=replace(subject.plan, spec=spec))
    return _blind(
        aim, "members and other unseen examples", _attacked_at(other, attacks, trainer, params, places, inside)
    )


def _blind(aim: str, what: str, results: Sequence[AttackResult]) -> AuditCheck:
    top = max(results, key=lambda result: result.metric(ASR.name).value or 0.0)
    metric, tests = top.metric(ASR.name), SELDOM * len(results)
    low, high = widened(metric, tests) or (0.0, 1.0)
    shown = f"{top.name} is right in {of_hundred(metric.value)} [{100 * low:.1f}, {100 * high:.1f}]"
    if exceeds_chance(metric, tests):
        sentence = f"Of {what}, {shown} though the model saw neither: the attacks use something else than membership."
        return AuditCheck("blind", False, aim, sentence)
    return AuditCheck("blind", True, aim, f"Of {what}, {shown}, no better than guessing.")


def _halves_of_others(subject: AttackedModel, most: int) -> tuple[Tensor, Tensor]:
    """Return the places of up to `most` non-members among the candidates, and a random half of these [n] bool."""
    places = (~subject.candidates.member).nonzero()[:, 0]
    order = torch.randperm(len(places), generator=subject.seeds.generator("planted places"))
    places = places[order[: min(most, len(places)) // 4 * 4 or len(places)]]
    return places, random_half(torch.zeros(len(places), dtype=torch.int64), subject.seeds.generator("planted half"))


def _attacked_at(
    subject: AttackedModel,
    attacks: Sequence[Attack],
    trainer: Trainer | None,
    params: Params,
    places: Tensor,
    inside: Tensor,
    labels: Tensor | None = None,
) -> tuple[AttackResult, ...]:
    """Return the attacks' results on a model about the candidates at `places`, of which those `inside` are members.

    labels: int64 [n], in the place of their own.
    """
    half = random_half(inside.long(), subject.seeds.generator("asked halves")).long()
    hot = subject.candidates.labels[places]
    hot = hot if labels is None else one_hot(labels, hot.shape[1]).to(hot)
    own = Candidates(subject.candidates.x[places], hot, inside, half)
    return subject.attacked(attacks, subject.view(params), own, trainer, places)


# -- members and non-members must be alike: a classifier that never asks the model -------------------------------------
def check_inputs(candidates: Candidates, seed: int) -> AuditCheck:
    """Return whether inputs and labels alone tell members from non-members: then nothing is learned from the model.

    Logistic regression and boosted trees on principal components, simple statistics and labels, fitted on one half of
    the candidates and tried on the other, both ways.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    aim = "A classifier that sees inputs and labels, but not the model, must not tell members from non-members."
    features, member, half = blind_features(candidates, seed), candidates.member.numpy(), candidates.half.numpy()
    models = (
        make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500)),
        HistGradientBoostingClassifier(max_iter=40, max_leaf_nodes=8, random_state=seed % 2**32),
    )
    areas = []
    for model in models:
        scores = np.zeros(len(member))
        for tried in (half == 0, half == 1):
            scores[tried] = model.fit(features[~tried], member[~tried]).predict_proba(features[tried])[:, 1]
        areas.append(_area(scores, member, half, seed))
    top = max(areas, key=lambda area: area.value or 0.0)
    metric, tests = record_metric(AUC, top), SELDOM * len(models)
    low, high = widened(metric, tests) or (0.0, 1.0)
    ends = f"AUC {top.value:.3f} [{low:.3f}, {high:.3f}]"
    if exceeds_chance(metric, tests):
        sentence = (
            f"Members and non-members differ by themselves: inputs and labels alone tell them apart ({ends}, guessing "
            "0.5), so that no figure is about the model. Take non-members from the same source as the members."
        )
        return AuditCheck("inputs", False, aim, sentence)
    return AuditCheck("inputs", True, aim, f"Inputs and labels alone do not tell them apart ({ends}, guessing 0.5).")


def _area(scores: Floats, member: NDArray[np.bool_], half: NDArray[np.int64], seed: int) -> Estimate:
    """Return the mean AUC over both halves.

    Classifiers that are fitted on each other's test half err alike: a difference of the halves' means by chance raises
    both AUCs, for linear ones equally. So the interval is that of one half, the root of 2 wider than of both.
    """
    halves = [Half(member[half == k], scores[half == k], scores[half == k] >= 0.5) for k in (0, 1)]
    both = auc(halves, seed)
    value, low, high = both.value or 0.0, both.interval.low or 0.0, both.interval.high or 1.0
    low, high = value - (value - low) * 2**0.5, value + (high - value) * 2**0.5
    return replace(both, interval=Interval(low, high, f"{both.interval.method}, of one half"))


def blind_features(candidates: Candidates, seed: int) -> NDArray[np.float64]:
    """Return features [Q, F] of inputs and labels alone: principal components, statistics of each input, its class."""
    from sklearn.decomposition import PCA

    rows = candidates.x.flatten(1).double()
    steps = candidates.x.double().diff(dim=-1).abs().flatten(1).mean(1) if candidates.x.shape[-1] > 1 else rows[:, 0]
    simple = torch.stack([rows.mean(1), rows.std(1), rows.amin(1), rows.amax(1), steps], 1)
    count = min(COMPONENTS, rows.shape[1], len(rows) - 1)
    flat = rows.float().numpy()
    main = PCA(count, svd_solver="randomized", random_state=seed % 2**32).fit_transform(flat) if count > 1 else flat
    return np.concatenate([main, simple.numpy(), candidates.labels.double().numpy()], 1).astype(np.float64)
