"""Inversion of exact evidence that an adaptive attack has made: by algebra where that applies, else by search.

Evidence here is a gradient of some scalar of a perturbed network, or several of them. Linear systems are asked first
(`exact_first`). Which search works better depends on the network, not on the defense (`fittest_guesses`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.reconstruction.analytic import AnalyticInversion, first_layer
from ppbench.attacks.reconstruction.closed_form import SMALL, ClosedForm
from ppbench.attacks.reconstruction.dlg import DLG
from ppbench.attacks.reconstruction.ig import IG
from ppbench.base.tree import Params
from ppbench.defenses.pbpfl.perturbation import Surrogates, surrogates
from ppbench.federation.evidence import Evidence, Simulate, at_truth
from ppbench.federation.plan import Batch, Plan
from ppbench.nets.channels import has_kinks
from ppbench.nets.net import Net

CONFIDENT = 1e-3
"""Relative mismatch up to which the algebra's answer for one example is taken without a search."""
RESTARTS = 6
"""Restarts of a search that ends above `CONFIDENT`: ReLU networks have local minima. On two examples and an MLP 64-64,
one start recovers half of the images, seven starts seven of eight."""

TRIAL_DIVISOR = 12
"""The budget of each trial search is 1 / `TRIAL_DIVISOR` of the whole: 150 of 1,800; L-BFGS stalls after some 200."""
PRIORS = (1.0, 0.1)
"""Weights of `ig`'s prior in trials on small images: those of 8 x 8 pixels need none."""
SMOOTH_PIXELS = 16
"""Images of at least as many pixels a side are smooth enough for `ig`'s usual prior. The angle misleads there: noise
with a smaller angle won the trials. On 28 and 32 pixels a side no other search improved any recognizable image
(docs/benchmarks.md)."""
EXPLAINED_ANGLE = 1e-6
"""An answer with 1 - cosine up to this needs no further search."""


def fittest_guesses(
    search: DLG, evidence: Sequence[Evidence], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator
) -> list[Guess]:
    """Return the guesses of `search`, but of the fittest search on convolutions with kinked activations.

    `search` stalls there. The fittest is `ig` for images of at least `SMOOTH_PIXELS` a side. For smaller ones, one
    start of `search` and `ig` with each of two weights of its prior get a twelfth of the budget. The rest goes to the
    one of the three whose answer's gradient has the smallest angle to the observed one. The answer with the smallest
    angle is returned; its confidence is 1 - cosine. Perceptrons with kinks are left to the restarts of `search`, which
    does better there.
    """
    share = search.budget // TRIAL_DIVISOR
    if plan.spec.classes == 1 or share < 2 or not has_kinks(plan.net):
        return search.answer(evidence, plan, challenges, generator)
    candidates: list[DLG | IG] = [search, *(IG(start=search.start, tv=tv) for tv in PRIORS)]
    seeds = torch.randint(2**62, (2 * len(candidates),), generator=generator).tolist()
    attempt = partial(_by_angle, evidence=evidence, plan=plan, challenges=challenges)
    every = range(len(challenges))
    if min(plan.spec.shape[-2:]) >= SMOOTH_PIXELS:
        return attempt(IG(start=search.start, budget=search.budget - 1), every, seeds[0])
    short = [replace(search, restarts=0), *candidates[1:]]
    trials = [
        attempt(replace(candidate, budget=share - 1), every, seeds[place]) for place, candidate in enumerate(short)
    ]
    answers = [[*guesses] for guesses in zip(*trials, strict=True)]
    best = [min(range(len(candidates)), key=lambda place: mismatch_of(guesses[place])) for guesses in answers]
    unexplained = [i for i in every if EXPLAINED_ANGLE < mismatch_of(answers[i][best[i]]) < math.inf]
    rest = search.budget - len(candidates) * share - 1
    for place, candidate in enumerate(candidates):
        if rows := [i for i in unexplained if best[i] == place]:
            last = attempt(replace(candidate, budget=rest), rows, seeds[len(candidates) + place])
            for i in rows:
                answers[i].append(last[i])
    return [
        replace(min(guesses, key=mismatch_of), evaluations=sum(g.evaluations for g in guesses)) for guesses in answers
    ]


def is_affordable(guess: Guess, budget: int) -> bool:
    """Return whether a guess of `closed_form` is exact, and that of a batch within `budget` gradient evaluations."""
    return guess.is_exact and ((guess.x is not None and len(guess.x) == 1) or guess.evaluations <= budget)


def exact_first(
    evidence: Sequence[Evidence],
    plan: Plan,
    challenges: Sequence[Challenge],
    search: Callable[[Sequence[Evidence]], list[Guess]],
    budget: int,
) -> list[Guess]:
    """Return the guesses of `closed_form` where they are exact, else those of `search` from the other evidence.

    Nothing explains an observation better than an exact guess. `search` answers all challenges, so that its draws for
    one do not depend on another. budget: gradient evaluations that an exact guess of a batch may cost.
    """
    attack, exact = ClosedForm(largest_batch=SMALL), dict[int, Guess]()
    if attack.suits(plan):
        answers = attack.answer(evidence, plan, challenges, torch.Generator().manual_seed(0))
        exact = {i: guess for i, guess in enumerate(answers) if is_affordable(guess, budget)}
    if len(exact) == len(challenges):
        return [exact[i] for i in range(len(challenges))]
    solved = {frozenset(challenges[i].unit) for i in exact}
    guesses = search([one for one in evidence if frozenset(one.unit) not in solved])
    return [exact.get(i) or guess for i, guess in enumerate(guesses)]


def _by_angle(
    search: DLG | IG,
    rows: Sequence[int],
    seed: int,
    *,
    evidence: Sequence[Evidence],
    plan: Plan,
    challenges: Sequence[Challenge],
) -> list[Guess]:
    """Return the answers of `search` to all challenges; only those of `rows` get their evidence.

    The confidence is the angle between gradients. Draws depend on `seed` alone.
    """
    units, known = {frozenset(challenges[i].unit) for i in rows}, {frozenset(e.unit): e for e in reversed(evidence)}
    selected = [e for e in evidence if frozenset(e.unit) in units]
    answers = search.answer(selected, plan, challenges, torch.Generator().manual_seed(seed))
    angles = [_angle(known.get(frozenset(c.unit)), a, plan) for c, a in zip(challenges, answers, strict=True)]
    return [
        Guess(a.x, a.y, confidence=angle, evaluations=a.evaluations + 1)
        for a, angle in zip(answers, angles, strict=True)
    ]


def _angle(evidence: Evidence | None, guess: Guess, plan: Plan) -> float | None:
    """Return 1 - cosine between a guess's gradient and the observed one; for signs, the mismatch with them."""
    if evidence is None or guess.x is None or guess.y is None:
        return None
    measured = evidence if evidence.measure == "hinge" else replace(evidence, measure="cosine")
    x, y = (part.to(evidence.device).unflatten(0, (len(evidence.unit), -1)) for part in (guess.x, guess.y))
    distance = at_truth(measured, x, one_hot(y, plan.spec.classes))
    return distance if math.isfinite(distance) else None


def invert_evidence(
    evidence: Sequence[Evidence], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator, budget: int
) -> list[Guess]:
    """Return one guess per challenge from evidence about its unit; a start image where there is none.

    By algebra where it applies (`AnalyticInversion`: one example, or a batch and biases). Otherwise, or where that
    fails on one example, by a search. Both together take `budget` gradient evaluations per victim.
    """
    search, first = DLG(budget=budget, restarts=RESTARTS, hopeless=CONFIDENT), first_layer(plan)
    if first is None:
        return exact_first(
            evidence, plan, challenges, lambda left: fittest_guesses(search, left, plan, challenges, generator), budget
        )
    guesses = AnalyticInversion(budget=budget).answer(evidence, plan, challenges, generator)
    known, biased, short = {e.unit for e in evidence}, first.bias is not None, []
    for i, (challenge, guess) in enumerate(zip(challenges, guesses, strict=True)):
        several = len(challenge.unit) * challenge.batch > 1
        if challenge.unit in known and (not biased if several else mismatch_of(guess) > CONFIDENT):
            short.append(i)
    left = max(1, min((budget - guesses[i].evaluations for i in short), default=1))
    others = replace(search, budget=left).answer(evidence, plan, [challenges[i] for i in short], generator)
    for i, other in zip(short, others, strict=True):
        one = guesses[i]
        best = other if mismatch_of(other) < mismatch_of(one) else one
        guesses[i] = Guess(best.x, best.y, confidence=best.confidence, evaluations=one.evaluations + other.evaluations)
    return guesses


def mismatch_of(guess: Guess) -> float:
    """Return the mismatch that a guess reports as its confidence; inf for none."""
    return math.inf if guess.confidence is None else guess.confidence


def surrogate_simulation(
    net: Net,
    params: Params,
    directions: Tensor,
    masked_bias: bool,
    make: Callable[[Surrogates], Params],
    constants: Params | None = None,
) -> Simulate:
    """Return the function from a guessed batch to `make` of the client's upload at perturbed weights `params`.

    For a unit of several clients with batches of one size, the mean over clients. directions: [m, C] of sigma;
    masked_bias: whether the head's bias carries the mask; constants: transitional layers.
    """

    def simulate(x: Tensor, y: Tensor) -> Params:
        weights, fixed = ({n: v.to(x) for n, v in tree.items()} for tree in (params, constants or {}))

        def one(images: Tensor, labels: Tensor) -> Params:
            batch = Batch(images, labels, torch.ones(len(images), dtype=x.dtype, device=x.device))
            return make(surrogates(net, weights, batch, directions.to(x.dtype), masked_bias, fixed))

        parts = [one(*slot) for slot in zip(x, y, strict=True)]
        return parts[0] if len(parts) == 1 else {n: torch.stack([p[n] for p in parts]).mean(0) for n in parts[0]}

    return simulate
