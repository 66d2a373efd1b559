"""Inversion of exact evidence that an adaptive attack has made: by algebra where that applies, else by search.

Evidence here is a gradient of some scalar of a perturbed network, or several of them. Which search gets further is the
network's matter and not the defense's (`searched`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.reconstruction.analytic import AnalyticInversion
from ppbench.attacks.reconstruction.dlg import DLG
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.rows import first_layer
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.defenses.pbpfl.perturbation import Surrogates, surrogates
from ppbench.federation.evidence import Evidence, Simulate, at_truth
from ppbench.federation.plan import Batch, Plan
from ppbench.nets.net import Net
from ppbench.nets.walk import traced_features

CONFIDENT = 1e-3
"""Relative mismatch up to which the algebra's answer for one example is taken without a search."""
RESTARTS = 6
"""Of a search that ends above it: ReLU networks have local minima. On two examples and an MLP 64-64, one start finds
half of the images, seven find seven of eight."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
KINKED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Hardtanh, nn.Threshold)
"""Activations whose slope jumps, and with it the gradient that L-BFGS takes for smooth."""
KINKS = {F.relu, F.relu_, F.relu6, F.leaky_relu, F.hardtanh, F.threshold, torch.relu, torch.relu_, "relu", "relu_"}
"""The same as functions, and by their names as methods of a tensor."""
SHARE = 12
"""Of a budget the part that each search gets which is tried out: 150 of 1,800, where L-BFGS stalls after some 200."""
PRIORS = (1.0, 0.1)
"""Weights of `ig`'s prior that are tried out on small images: those of 8 x 8 pixels need none."""
SMOOTH = 16
"""Pixels a side from which on images are smooth enough for `ig`'s usual prior, and the angle misleads: there what is
tried out won by noise that points nearer. On 28 and 32 pixels a side no other way got images further that came out at
all (docs/benchmarks.md)."""
EXPLAINED = 1e-6
"""1 - cosine up to which an answer needs no further search."""


def searched(
    search: DLG, found: Sequence[Evidence], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator
) -> list[Guess]:
    """Return the guesses of `search`, but on convolutions with kinked activations, where it stalls, of the fittest.

    That is `ig` for images of `SMOOTH` pixels a side or more. For smaller ones a twelfth of the budget goes to one
    start of `search`, and to `ig` with each of two weights of its prior, and the rest to that of the three whose
    answer's gradient has the smallest angle to what was observed; of all answers that of the smallest angle counts.
    Perceptrons with kinks are left to the restarts of `search`, which does better there. The confidence is 1 - cosine.
    """
    share = search.budget // SHARE
    if plan.spec.classes == 1 or share < 2 or not _kinked(plan.net):
        return search.answer(found, plan, challenges, generator)
    ways: list[DLG | IG] = [search, *(IG(start=search.start, tv=tv) for tv in PRIORS)]
    seeds = torch.randint(2**62, (2 * len(ways),), generator=generator).tolist()
    told = partial(_by_angle, found=found, plan=plan, challenges=challenges)
    every = range(len(challenges))
    if min(plan.spec.shape[-2:]) >= SMOOTH:
        return told(IG(start=search.start, budget=search.budget - 1), every, seeds[0])
    short = [replace(search, restarts=0), *ways[1:]]
    tried = [told(replace(way, budget=share - 1), every, seeds[place]) for place, way in enumerate(short)]
    answers = [[*some] for some in zip(*tried, strict=True)]
    best = [min(range(len(ways)), key=lambda place: _confidence(some[place])) for some in answers]
    open_ = [i for i in every if EXPLAINED < _confidence(answers[i][best[i]]) < math.inf]
    for place, way in enumerate(ways):
        if rows := [i for i in open_ if best[i] == place]:
            last = told(replace(way, budget=search.budget - len(ways) * share - 1), rows, seeds[len(ways) + place])
            for i in rows:
                answers[i].append(last[i])
    return [replace(min(some, key=_confidence), evaluations=sum(g.evaluations for g in some)) for some in answers]


def _by_angle(
    way: DLG | IG,
    rows: Sequence[int],
    seed: int,
    *,
    found: Sequence[Evidence],
    plan: Plan,
    challenges: Sequence[Challenge],
) -> list[Guess]:
    """Return a search's answers to all challenges, evidence on `rows` alone, as sure as the angle between gradients.

    Draws are its own: nobody's depend on another's.
    """
    units, known = {frozenset(challenges[i].unit) for i in rows}, {frozenset(e.unit): e for e in reversed(found)}
    mine = [e for e in found if frozenset(e.unit) in units]
    answers = way.answer(mine, plan, challenges, torch.Generator().manual_seed(seed))
    angles = [_angle(known.get(frozenset(c.unit)), a, plan) for c, a in zip(challenges, answers, strict=True)]
    return [
        Guess(a.x, a.y, confidence=angle, evaluations=a.evaluations + 1)
        for a, angle in zip(answers, angles, strict=True)
    ]


def _kinked(net: Net) -> bool:
    """Return whether a network convolves and has kinked activations, as layers or as functions that fx can see."""
    layers = list(net.module.modules())
    if not any(isinstance(layer, CONVOLUTIONS) for layer in layers):
        return False
    if any(isinstance(layer, KINKED) for layer in layers):
        return True
    try:
        graph = traced_features(net).graph
    except UsageError:  # it cannot be told
        return False
    return any(node.op in ("call_function", "call_method") and node.target in KINKS for node in graph.nodes)


def _angle(evidence: Evidence | None, guess: Guess, plan: Plan) -> float | None:
    """Return how far a guess's gradient points from what was observed, 1 - cos; of signs, how far it misses them."""
    if evidence is None or guess.x is None or guess.y is None:
        return None
    asked = evidence if evidence.measure == "hinge" else replace(evidence, measure="cosine")
    x, y = (part.to(evidence.device).unflatten(0, (len(evidence.unit), -1)) for part in (guess.x, guess.y))
    found = at_truth(asked, x, one_hot(y, plan.spec.classes))
    return found if math.isfinite(found) else None


def invert(
    found: Sequence[Evidence], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator, budget: int
) -> list[Guess]:
    """Return one guess a challenge from evidence about its unit; a start image where there is none.

    By algebra where it applies (`AnalyticInversion`: one example, or a batch and biases), else, or where that fails on
    one example, by a search; both together take `budget` gradient evaluations a victim.
    """
    search, first = DLG(budget=budget, restarts=RESTARTS, hopeless=CONFIDENT), first_layer(plan)
    if first is None:
        return searched(search, found, plan, challenges, generator)
    guesses = AnalyticInversion(budget=budget).answer(found, plan, challenges, generator)
    known, biased, short = {e.unit for e in found}, first.bias is not None, []
    for i, (asked, guess) in enumerate(zip(challenges, guesses, strict=True)):
        several = len(asked.unit) * asked.batch > 1
        if asked.unit in known and (not biased if several else _confidence(guess) > CONFIDENT):
            short.append(i)
    left = max(1, min((budget - guesses[i].evaluations for i in short), default=1))
    others = replace(search, budget=left).answer(found, plan, [challenges[i] for i in short], generator)
    for i, other in zip(short, others, strict=True):
        one = guesses[i]
        best = other if _confidence(other) < _confidence(one) else one
        guesses[i] = Guess(best.x, best.y, confidence=best.confidence, evaluations=one.evaluations + other.evaluations)
    return guesses


def _confidence(guess: Guess) -> float:
    return float("inf") if guess.confidence is None else guess.confidence


def surrogate_simulation(
    net: Net,
    params: Params,
    directions: Tensor,
    masked_bias: bool,
    make: Callable[[Surrogates], Params],
    constants: Params | None = None,
) -> Simulate:
    """Return what clients upload at perturbed weights `params`, or `make` of it, as a function of a guessed batch.

    Of a unit of several clients, with batches of one size, the mean of what is made of each. directions: [m, C] of
    sigma; masked_bias: whether the head's bias carries the mask; constants: transitional layers.
    """

    def simulate(x: Tensor, y: Tensor) -> Params:
        weights, fixed = ({n: v.to(x) for n, v in tree.items()} for tree in (params, constants or {}))

        def one(images: Tensor, labels: Tensor) -> Params:
            batch = Batch(images, labels, torch.ones(len(images), dtype=x.dtype, device=x.device))
            return make(surrogates(net, weights, batch, directions.to(x.dtype), masked_bias, fixed))

        parts = [one(*slot) for slot in zip(x, y, strict=True)]
        return parts[0] if len(parts) == 1 else {n: torch.stack([p[n] for p in parts]).mean(0) for n in parts[0]}

    return simulate
