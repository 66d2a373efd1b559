"""Properties of attacks on records (membership, extraction): their planted leak, their null, bad models."""

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
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Layout, Local, Opt, Plan
from ppbench.federation.view import View
from ppbench.nets.net import initial, net_spec
from ppbench.questions.extraction import score_outputs
from ppbench.questions.membership import MemberScore, score_members
from ppbench.testing.small_federation import (
    CHANCE_LEVEL,
    CLASSES,
    POISONS,
    SHAPE,
    TWO_GUESSES,
    Duel,
    NotAsked,
    Witness,
    World,
    all_digits,
    guess_content,
    noise_world,
    seeded,
    with_changed_mail,
    within_chance,
)

RECORDS = 60
TANH = Plan(net_spec("dlnet", SHAPE, CLASSES, {"activation": "tanh"}), 2)
ABSENT = "absent"
"""Beside the poisons: a view without any mail."""


@dataclass(frozen=True)
class RecordPool:
    """Records with random labels, so that only memorization helps: of two clients, and as many non-members."""

    shards: Mapping[int, Data]
    test: Data


@lru_cache
def pool() -> RecordPool:
    """Return two clients of `RECORDS` digits and as many for the test."""
    order, data = torch.randperm(3 * RECORDS, generator=seeded(1)), all_digits()
    y = torch.nn.functional.one_hot(torch.randint(0, CLASSES, (3 * RECORDS,), generator=seeded(2)), CLASSES).float()
    parts = [Data(data.x[order[i::3]].clone(), y[i::3].clone()) for i in range(3)]
    return RecordPool({0: parts[0], 1: parts[1]}, parts[2])


def fitted_weights(plan: Plan, data: Data, lr: float, steps: int) -> Params:
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
    return fitted_weights(TANH, pool().shards[1], 0.01, 150)


@lru_cache
def memorized(plan: Plan) -> Params:
    """Return weights that know both clients' records by heart; trained once per plan."""
    both = [pool().shards[c] for c in (0, 1)]
    return fitted_weights(plan, Data(torch.cat([d.x for d in both]), torch.cat([d.y for d in both])), 0.005, 400)


def masked_plan(duel: Duel) -> Plan:
    """Return the plan of the defense with one batch per client and round."""
    plan = duel.plan_on(replace(TANH, local=Local(batch=RECORDS)))
    return replace(plan, local=replace(plan.local, batch=RECORDS))


def released_view(params: Params, threat: str) -> View:
    """Return the adversary's view when an undefended federation releases the model `params`."""
    run = Federation(load_plugin("defenses", "none")(), TANH, pool().shards, Seeds(0))
    run.start(params)
    return run.release().view(threat, own=((-1, pool().shards[0]),))


def observed_view(duel: Duel, plan: Plan, params: Params, threat: str, seed: int = 0) -> View:
    """Return the adversary's view of the round that follows `params` under the defense."""
    run = Federation(duel.defense, plan, pool().shards, Seeds(seed))
    run.start(params)
    return run.observe().view(threat, own=((-1, pool().shards[0]),))


@dataclass(frozen=True)
class MembershipResult:
    """The result of a membership attack. area: AUC; right: number of right decisions; wrong: faults of its guesses."""

    area: float
    right: int
    guesses: list[Guess]
    wrong: tuple[str, ...]


def members(attack: Attack, view: View, candidates: Candidates, seed: int = 0) -> MembershipResult:
    """Return the scored result of a membership attack on a view; malformed guesses are not scored."""
    guesses = attack.run(view, [candidates.challenge(half) for half in (0, 1)], seeded(seed))
    wrong, shape = [], (len(candidates.x),)
    if len(guesses) != 2:
        wrong.append(f"{len(guesses)} guesses for 2 challenges; give one per challenge")
    for guess in guesses:
        if guess.score is None or tuple(guess.score.shape) != shape or not guess.score.is_floating_point():
            wrong.append(f"the guess must have a float score of shape {shape}")
        if guess.decision is None or tuple(guess.decision.shape) != shape or guess.decision.dtype != torch.bool:
            wrong.append(f"the guess must have a bool decision of shape {shape}")
    if wrong:
        return MembershipResult(0.5, RECORDS, guesses, tuple(wrong))
    scores = score_members(candidates, guesses).victims
    area = roc_auc_score([score.member for score in scores], [score.score for score in scores])
    return MembershipResult(float(area), sum(score.decision == score.member for score in scores), guesses, ())


def _shown(duel: Duel, threat: str, learned: bool, seed: int = 0) -> View:
    """Return the view of a model, undefended or masked, that memorized its records or is untrained."""
    if duel.undefended:
        return released_view(overfit() if learned else initial(TANH.spec, seed), threat)
    plan = masked_plan(duel)
    return observed_view(duel, plan, memorized(plan) if learned else initial(plan.spec, 3), threat)


def finds_members(duel: Duel) -> Iterator[str]:
    """Check that members of a model that knows them by heart are found, undefended or behind the defense's mask."""
    candidates = choose_candidates(pool().shards, pool().test, RECORDS, Seeds(0))
    for threat in duel.attack.threats:
        result = members(duel.attack, _shown(duel, threat, True), candidates)
        yield from result.wrong
        if not (result.area > 0.9 and result.right > 0.8 * 2 * RECORDS):
            yield (
                f"under {threat}, of a model that knows its records by heart, the AUC is {result.area:.2f} with "
                f"{result.right} of {2 * RECORDS} decisions right; above 0.90 and {1.6 * RECORDS:.0f} is right"
            )


def knows_no_member_of(duel: Duel, seed: int = 0) -> Iterator[str]:
    """Check that the members of an untrained model are found by chance only.

    Members and non-members are drawn alike: the area's variance is Mann and Whitney's (m + n + 1) / (12 m n); right
    decisions are hypergeometric, with no more variance than the binomial.
    """
    candidates = choose_candidates(pool().shards, pool().test, RECORDS, Seeds(seed if duel.undefended else 0))
    deviation = ((2 * RECORDS + 1) / (12 * RECORDS**2)) ** 0.5
    width = float(stats.norm.isf((1 - CHANCE_LEVEL) / 2)) * deviation
    for threat in duel.attack.threats[:1] if duel.undefended else duel.attack.threats:
        result = members(duel.attack, _shown(duel, threat, False, seed), candidates)
        yield from result.wrong
        if abs(result.area - 0.5) > width:
            yield f"of an untrained model the AUC is {result.area:.2f}; within {width:.2f} of 0.50 is chance"
        if not within_chance(result.right, 2 * RECORDS, 0.5):
            right = f"{result.right} of {2 * RECORDS} decisions are right"
            yield f"of an untrained model {right}, more or less than chance"


def tosses_coins_without_a_model(duel: Duel, poison: str) -> Iterator[str]:
    """Check that a model of bad numbers, or none, gives random guesses from the generator and no side effects."""
    attack = duel.attack
    candidates = choose_candidates(pool().shards, pool().test, RECORDS, Seeds(0))
    view = _spoilt(released_view(initial(TANH.spec, 0), attack.threats[0]), poison)
    witness = Witness(view, (), candidates.x, candidates.labels, candidates.member)
    first, again, other = (members(attack, view, candidates, seed) for seed in (1, 1, 2))
    yield from first.wrong
    if not within_chance(first.right, 2 * RECORDS, 0.5):
        yield f"{first.right} of {2 * RECORDS} decisions are right on an empty model; chance is right there"
    contents = [[guess_content(g) for g in result.guesses] for result in (first, again, other)]
    if contents[0] != contents[1]:
        yield TWO_GUESSES
    if poison != "huge" and contents[0] == contents[2]:  # a huge model may still tell losses apart
        yield "two seeds give one guess about an empty model; draw it from the generator"
    yield from witness.violations()


def _spoilt(view: View, poison: str) -> View:
    if poison == ABSENT:
        return replace(view, mail=())
    return with_changed_mail(view, POISONS[poison], by_server=True)


# -- extraction ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ExtractionResult:
    """The result of an extraction attack. share: of right decisions; error: the median relative error."""

    share: float
    error: float


def extraction_result(attack: Attack, view: View, plan: Plan, params: Params) -> ExtractionResult:
    """Return the scored result of an extraction attack on the test records."""
    x = pool().test.x
    true = plan.net(params, x).detach().double()
    (guess,) = attack.run(view, [Challenge((), 1, x=x.clone())], seeded())
    scores = score_outputs(true, guess).victims
    return ExtractionResult(sum(s.agree for s in scores) / len(scores), median_low([s.error for s in scores]))


def reads_the_model(duel: Duel) -> Iterator[str]:
    """Check that a model in the clear is read exactly, and a masked one mostly, by attacks that know the mask."""
    if duel.undefended:
        run = Federation(duel.defense, TANH, pool().shards, Seeds(0))
        run.start(overfit())
        for threat in duel.attack.threats:
            for transcript in (run.observe(), run.release()):
                view = transcript.view(threat, own=((-1, pool().shards[0]),))
                result = extraction_result(duel.attack, view, TANH, overfit())
                if result != ExtractionResult(1.0, 0.0):
                    yield f"a model in the clear is answered with error {result.error:.2g}; it can be read exactly"
        return
    if not duel.attack.adaptive:
        raise NotAsked("it does not know the mask")
    plan = masked_plan(duel)
    for threat in duel.attack.threats:
        view = observed_view(duel, plan, memorized(plan), threat)
        result = extraction_result(duel.attack, view, plan, memorized(plan))
        if not (result.share > 0.8 and result.error < 0.5):
            yield (
                f"under {threat} {result.share:.0%} of the masked model's decisions are read, with error "
                f"{result.error:.2g}; more than 80 % and less than 0.5 is right for an attack that knows the mask"
            )


def answers_without_a_model(duel: Duel, poison: str) -> Iterator[str]:
    """Check that a model of bad numbers, or none, gives the same finite answer each time, without side effects."""
    plan = masked_plan(duel)
    for threat in duel.attack.threats:
        view = _spoilt(observed_view(duel, plan, initial(plan.spec, 0), threat), poison)
        challenges = [Challenge((), 1, x=pool().test.x[:20].clone())]
        witness = Witness(view, challenges)
        first, again = (duel.attack.run(view, challenges, seeded(0))[0] for _ in range(2))
        outputs = first.outputs
        if outputs is None or tuple(outputs.shape) != (20, CLASSES) or not bool(outputs.isfinite().all()):
            yield f"under {threat} 20 queries are not answered by finite outputs of shape (20, {CLASSES})"
        elif outputs.requires_grad:
            yield "the outputs drag their autograd history along; detach them"
        if guess_content(first) != guess_content(again):
            yield TWO_GUESSES
        yield from witness.violations()


def _batch_scores(duel: Duel, world: World) -> list[MemberScore]:
    """Return the scores of the candidates for members of the victims' batches."""
    candidates = beside(world.victims, all_digits(), Seeds(0))
    scores: list[MemberScore] = score_members(candidates, world.answers(duel.attack)).victims
    return scores


def finds_batch_members(duel: Duel) -> Iterator[str]:
    """Check that undefended uploads reveal the members of batches of 1 and of 4."""
    for batch in (1, 4):
        scores = _batch_scores(duel, duel.probe(16, batch))
        area = float(roc_auc_score([s.member for s in scores], [s.score for s in scores]))
        if area < 0.9:
            yield f"of undefended batches of {batch} it finds members with an AUC of {area:.2f}; more than 0.9 is right"


def noise_gives_batch_members_by_chance(duel: Duel) -> Iterator[str]:
    """Check that uploads independent of the data give decisions by chance."""
    scores = _batch_scores(duel, noise_world(duel, 40))
    right = sum(s.decision == s.member for s in scores)
    if not within_chance(right, len(scores), 0.5):
        yield f"from uploads of pure noise {right} of {len(scores)} members are decided right; nothing reveals them"
