"""Inversion of exact evidence that an adaptive attack has made: by algebra where that applies, else by search.

Evidence here is a gradient of some scalar of a perturbed network, or several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.reconstruction.analytic import AnalyticInversion
from ppbench.attacks.reconstruction.dlg import DLG
from ppbench.attacks.reconstruction.rows import first_layer
from ppbench.base.tree import Params
from ppbench.defenses.pbpfl.perturbation import Surrogates, surrogates
from ppbench.federation.evidence import Evidence, Simulate
from ppbench.federation.plan import Batch, Plan
from ppbench.nets.net import Net

CONFIDENT = 1e-3
"""Relative mismatch up to which the algebra's answer for one example is taken without a search."""
RESTARTS = 6
"""Of a search that ends above it: ReLU networks have local minima. On two examples and an MLP 64-64, one start finds
half of the images, seven find seven of eight."""


def invert(
    found: Sequence[Evidence], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator, budget: int
) -> list[Guess]:
    """Return one guess a challenge from evidence about its unit; a start image where there is none.

    By algebra where it applies (`AnalyticInversion`: one example, or a batch and biases), else, or where that fails on
    one example, by a search; both together take `budget` gradient evaluations a victim.
    """
    search, first = DLG(budget=budget, restarts=RESTARTS, hopeless=CONFIDENT), first_layer(plan)
    if first is None:
        return search.answer(found, plan, challenges, generator)
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
