"""What attacks on records must keep (membership, extraction): their planted leak, their null, bad models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median_low

import torch
from scipy import stats
from sklearn.metrics import roc_auc_score

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.adversary.victims import Candidates, beside, choose_candidates
from ppbench.base.autodiff import gradient
from ppbench.base.registry import load
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.federation.engine import Federation
from ppbench.federation.optim import Layout, Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import View
from ppbench.nets.net import initial, net_spec
from ppbench.questions.extraction import score_outputs
from ppbench.questions.membership import MemberScore, score_members
from ppbench.testing.findings import NotAsked
from ppbench.testing.scene import CLASSES, SHAPE, digits
from ppbench.testing.worlds import (
    LEVEL,
    POISONS,
    TWO_GUESSES,
    Duel,
    Witness,
    World,
    content,
    mute,
    seeded,
    within_chance,
    written,
)

COUNT = 60
TANH = Plan(net_spec("dlnet", SHAPE, CLASSES, {"activation": "tanh"}), 2)
ABSENT = "absent"
"""Beside the poisons: a view without any mail."""


@dataclass(frozen=True)
class Pool:
    """Records drawn alike, with wrong labels, so that only memory helps: of two clients, and those of nobody."""

    shards: Mapping[int, Data]
    test: Data


@lru_cache
def pool() -> Pool:
    """Return two clients of `COUNT` digits and as many for the test."""
    order, data = torch.randperm(3 * COUNT, generator=seeded(1)), digits()
    y = torch.nn.functional.one_hot(torch.randint(0, CLASSES, (3 * COUNT,), generator=seeded(2)), CLASSES).float()
    parts = [Data(data.x[order[i::3]].clone(), y[i::3].clone()) for i in range(3)]
    return Pool({0: parts[0], 1: parts[1]}, parts[2])


def trained(plan: Plan, data: Data, lr: float, steps: int) -> Params:
    """Return weights after full-batch Adam on `data`."""
    params, opt = initial(plan.spec, 0), Opt("adam", lr=lr)
    layout, w = Layout.of(params), torch.ones(len(data.x))
    flat = layout.pack(params)
    state = opt.init(flat)
    for _ in range(steps):
        g = gradient(lambda p: plan.objective(p, data.x, data.y, w), layout.unpack(flat))
        flat, state = opt.step(flat, layout.pack(g), state, torch.tensor(opt.lr))
    return layout.unpack(flat)


@lru_cache
def overfit() -> Params:
    """Return weights that know client 1's records by heart."""
    return trained(TANH, pool().shards[1], 0.01, 150)


@lru_cache
def memorized(plan: Plan) -> Params:
    """Return weights that know both clients' records by heart; trained once a plan."""
    both = [pool().shards[c] for c in (0, 1)]
    return trained(plan, Data(torch.cat([d.x for d in both]), torch.cat([d.y for d in both])), 0.005, 400)


def masked_plan(duel: Duel) -> Plan:
    """Return the plan of the defense with one batch a client and round."""
    plan = duel.plan_on(replace(TANH, local=Local(batch=COUNT)))
    return replace(plan, local=replace(plan.local, batch=COUNT))


def handed(params: Params, threat: str) -> View:
    """Return what the adversary holds when an undefended federation releases the model `params`."""
    run = Federation(load("defenses", "none")(), TANH, pool().shards, Seeds(0))
    run.start(params)
    return run.release().view(threat, own=((-1, pool().shards[0]),))


def observed(duel: Duel, plan: Plan, params: Params, threat: str, seed: int = 0) -> View:
    """Return what the adversary holds of the round that follows `params` under the defense."""
    run = Federation(duel.defense, plan, pool().shards, Seeds(seed))
    run.start(params)
    return run.observe().view(threat, own=((-1, pool().shards[0]),))


@dataclass(frozen=True)
class Found:
    """What a membership attack gave. area: AUC; right: decisions; wrong: sentences about the form of its guesses."""

    area: float
    right: int
    guesses: list[Guess]
    wrong: tuple[str, ...]


def members(attack: Attack, view: View, candidates: Candidates, seed: int = 0) -> Found:
    """Return what a membership attack makes of a view, by the scorer; scores are not read where the form is wrong."""
    guesses = attack.run(view, [candidates.challenge(half) for half in (0, 1)], seeded(seed))
    wrong, shape = [], (len(candidates.x),)
    if len(guesses) != 2:
        wrong.append(f"{len(guesses)} guesses for 2 challenges; give one a challenge")
    for guess in guesses:
        if guess.score is None or tuple(guess.score.shape) != shape or not guess.score.is_floating_point():
            wrong.append(f"the guess must have a float score of shape {shape}")
        if guess.decision is None or tuple(guess.decision.shape) != shape or guess.decision.dtype != torch.bool:
            wrong.append(f"the guess must have a bool decision of shape {shape}")
    if wrong:
        return Found(0.5, COUNT, guesses, tuple(wrong))
    scores = score_members(candidates, guesses).victims
    area = roc_auc_score([score.member for score in scores], [score.score for score in scores])
    return Found(float(area), sum(score.decision == score.member for score in scores), guesses, ())


def _shown(duel: Duel, threat: str, learned: bool, seed: int = 0) -> View:
    """Return the view of a model, undefended or behind the defense's mask, that learned its records or nothing."""
    if duel.undefended:
        return handed(overfit() if learned else initial(TANH.spec, seed), threat)
    plan = masked_plan(duel)
    return observed(duel, plan, memorized(plan) if learned else initial(plan.spec, 3), threat)


def finds_members(duel: Duel) -> Iterator[str]:
    """Ask whether members of a model that knows them by heart are found, undefended or behind the defense's mask."""
    candidates = choose_candidates(pool().shards, pool().test, COUNT, Seeds(0))
    for threat in duel.attack.threats:
        found = members(duel.attack, _shown(duel, threat, True), candidates)
        yield from found.wrong
        if not (found.area > 0.9 and found.right > 0.8 * 2 * COUNT):
            yield (
                f"under {threat}, of a model that knows its records by heart, the AUC is {found.area:.2f} with "
                f"{found.right} of {2 * COUNT} decisions right; above .90 and {1.6 * COUNT:.0f} is right"
            )


def knows_no_member_of(duel: Duel, seed: int = 0) -> Iterator[str]:
    """Ask whether the members of an untrained model are found by chance only.

    Members and others are drawn alike: the area's variance is Mann and Whitney's (m + n + 1) / (12 m n); hits of
    decisions are hypergeometric, no wider than the binomial.
    """
    candidates = choose_candidates(pool().shards, pool().test, COUNT, Seeds(seed if duel.undefended else 0))
    deviation = ((2 * COUNT + 1) / (12 * COUNT**2)) ** 0.5
    width = float(stats.norm.isf((1 - LEVEL) / 2)) * deviation
    for threat in duel.attack.threats[:1] if duel.undefended else duel.attack.threats:
        found = members(duel.attack, _shown(duel, threat, False, seed), candidates)
        yield from found.wrong
        if abs(found.area - 0.5) > width:
            yield f"of an untrained model the AUC is {found.area:.2f}; within {width:.2f} of .50 is chance"
        if not within_chance(found.right, 2 * COUNT, 0.5):
            yield f"of an untrained model {found.right} of {2 * COUNT} decisions are right, more or less than coins are"


def tosses_coins_without_a_model(duel: Duel, poison: str) -> Iterator[str]:
    """Ask whether a model of bad numbers, or none, gives coins from the generator, and leaves all as it was."""
    attack = duel.attack
    candidates = choose_candidates(pool().shards, pool().test, COUNT, Seeds(0))
    view = _spoilt(handed(initial(TANH.spec, 0), attack.threats[0]), poison)
    witness = Witness(view, (), candidates.x, candidates.labels, candidates.member)
    first, again, other = (members(attack, view, candidates, seed) for seed in (1, 1, 2))
    yield from first.wrong
    if not within_chance(first.right, 2 * COUNT, 0.5):
        yield f"{first.right} of {2 * COUNT} decisions are right on a model that says nothing; coins are right there"
    told = [[content(g) for g in found.guesses] for found in (first, again, other)]
    if told[0] != told[1]:
        yield TWO_GUESSES
    if poison != "huge" and told[0] == told[2]:  # a huge model may still tell losses apart
        yield "two seeds give one guess about a model that says nothing; draw it from the generator"
    yield from witness.violations()


def _spoilt(view: View, poison: str) -> View:
    if poison == ABSENT:
        return replace(view, mail=())
    return written(view, POISONS[poison], by_server=True)


# -- extraction ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Answered:
    """What an extraction attack gave. share: of equal decisions; error: the median relative error."""

    share: float
    error: float


def answered(attack: Attack, view: View, plan: Plan, params: Params) -> Answered:
    """Return how near an extraction attack comes to the true model's outputs on the test records, by the scorer."""
    x = pool().test.x
    true = plan.net(params, x).detach().double()
    (guess,) = attack.run(view, [Challenge((), 1, x=x.clone())], seeded())
    scores = score_outputs(true, guess).victims
    return Answered(sum(s.agree for s in scores) / len(scores), median_low([s.error for s in scores]))


def reads_the_model(duel: Duel) -> Iterator[str]:
    """Ask whether a model in the clear is answered exactly, a masked one mostly by who knows the mask."""
    if duel.undefended:
        run = Federation(duel.defense, TANH, pool().shards, Seeds(0))
        run.start(overfit())
        for threat in duel.attack.threats:
            for transcript in (run.observe(), run.release()):
                view = transcript.view(threat, own=((-1, pool().shards[0]),))
                found = answered(duel.attack, view, TANH, overfit())
                if found != Answered(1.0, 0.0):
                    yield f"a model in the clear is answered with error {found.error:.2g}; it can be read exactly"
        return
    if not duel.attack.adaptive:
        raise NotAsked("it does not know the mask")
    plan = masked_plan(duel)
    for threat in duel.attack.threats:
        view = observed(duel, plan, memorized(plan), threat)
        found = answered(duel.attack, view, plan, memorized(plan))
        if not (found.share > 0.8 and found.error < 0.5):
            yield (
                f"under {threat} {found.share:.0%} of the masked model's decisions are told, with error "
                f"{found.error:.2g}; more than 80 % and less than .5 is right for who knows the mask"
            )


def answers_without_a_model(duel: Duel, poison: str) -> Iterator[str]:
    """Ask whether a model of bad numbers, or none, gives a finite answer, the same each time, and leaves all as is."""
    plan = masked_plan(duel)
    for threat in duel.attack.threats:
        view = _spoilt(observed(duel, plan, initial(plan.spec, 0), threat), poison)
        asked = [Challenge((), 1, x=pool().test.x[:20].clone())]
        witness = Witness(view, asked)
        first, again = (duel.attack.run(view, asked, seeded(0))[0] for _ in range(2))
        outputs = first.outputs
        if outputs is None or tuple(outputs.shape) != (20, CLASSES) or not bool(outputs.isfinite().all()):
            yield f"under {threat} 20 queries are not answered by finite outputs of shape (20, {CLASSES})"
        elif outputs.requires_grad:
            yield "the outputs drag their autograd history along; detach them"
        if content(first) != content(again):
            yield TWO_GUESSES
        yield from witness.violations()


def _batch_scores(duel: Duel, world: World) -> list[MemberScore]:
    """Return what becomes of the candidates for members of the victims' batches."""
    candidates = beside(world.victims, digits(), Seeds(0))
    scores: list[MemberScore] = score_members(candidates, world.answers(duel.attack)).victims
    return scores


def finds_batch_members(duel: Duel) -> Iterator[str]:
    """Ask whether undefended uploads tell who was in a batch, alone or among four."""
    for batch in (1, 4):
        scores = _batch_scores(duel, duel.probe(16, batch))
        area = float(roc_auc_score([s.member for s in scores], [s.score for s in scores]))
        if area < 0.9:
            yield f"of undefended batches of {batch} it tells members with an AUC of {area:.2f}; more than .9 is right"


def noise_gives_batch_members_by_chance(duel: Duel) -> Iterator[str]:
    """Ask whether uploads that do not depend on the data tell nothing."""
    scores = _batch_scores(duel, mute(duel, 40))
    right = sum(s.decision == s.member for s in scores)
    if not within_chance(right, len(scores), 0.5):
        yield f"from uploads of pure noise {right} of {len(scores)} members are told right; nothing tells them"
