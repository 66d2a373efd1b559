"""Inversion of evidence that an adaptive attack has found: by algebra where that applies, else by search.

Evidence here is a gradient of some scalar of a perturbed network, or several of them; what the plain attacks make of
gradients they make of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.attacks.reconstruction.analytic import AnalyticInversion
from ppbench.attacks.reconstruction.dlg import DLG
from ppbench.attacks.reconstruction.rows import first_layer
from ppbench.base.tree import Params
from ppbench.defenses.pbpfl.perturbation import Surrogates, surrogates
from ppbench.federation.evidence import Evidence, Simulate
from ppbench.federation.plan import Batch
from ppbench.federation.view import View
from ppbench.nets.net import Net

CONFIDENT = 1e-3
"""Relative mismatch up to which the algebra's answer for one example is taken without a search."""


@dataclass(frozen=True)
class Search(DLG):
    """Gradient matching on given evidence, which is exact: a search that ends short of it began badly.

    ReLU networks have local minima: on two examples and an MLP 64-64, one start finds half of the images, seven find
    seven of eight.
    """

    restarts: int = 6
    hopeless: float = CONFIDENT
    found: tuple[Evidence, ...] = ()

    def evidence(self, view: View) -> list[Evidence]:
        """Return the given evidence."""
        return list(self.found)


@dataclass(frozen=True)
class Algebra(AnalyticInversion):
    """Analytic inversion of given evidence."""

    found: tuple[Evidence, ...] = ()

    def evidence(self, view: View) -> list[Evidence]:
        """Return the given evidence."""
        return list(self.found)


def invert(
    found: Sequence[Evidence],
    view: View,
    challenges: Sequence[Challenge],
    generator: torch.Generator,
    budget: int,
) -> list[Guess]:
    """Return one guess a challenge from evidence about its unit; a start image where there is none.

    A network that begins with a linear layer is inverted analytically: one example always, a batch where that layer has
    biases (see `AnalyticInversion`). Where that fails on one example, and for all other networks, batches are matched.

    Args:
        found: evidence about the challenges' units.
        view: gives the plan.
        challenges: what is asked.
        generator: source of starts.
        budget: gradient evaluations a victim, for both together.
    """
    analytic: Attack = Algebra(budget=budget, found=tuple(found))
    first = first_layer(view.plan)
    if first is None:
        return Search(budget=budget, found=tuple(found)).run(view, challenges, generator)
    guesses = analytic.run(view, challenges, generator)
    known = {e.unit for e in found}
    short = [
        i for i, (c, g) in enumerate(zip(challenges, guesses, strict=True)) if _short(c, g, first.bias is not None)
    ]
    short = [i for i in short if challenges[i].unit in known]
    left = max(1, min((budget - guesses[i].evaluations for i in short), default=1))
    others = Search(budget=left, found=tuple(found)).run(view, [challenges[i] for i in short], generator)
    for i, other in zip(short, others, strict=True):
        guesses[i] = _better(guesses[i], other)
    return guesses


def _short(challenge: Challenge, guess: Guess, biases: bool) -> bool:
    if len(challenge.unit) * challenge.batch > 1:
        return not biases
    return guess.confidence is None or guess.confidence > CONFIDENT


def _better(one: Guess, other: Guess) -> Guess:
    """Return the surer guess, with the evaluations of both."""
    first, second = (g.confidence if g.confidence is not None else float("inf") for g in (one, other))
    best = other if second < first else one
    return Guess(x=best.x, y=best.y, confidence=best.confidence, evaluations=one.evaluations + other.evaluations)


def surrogate_simulation(
    net: Net,
    params: Params,
    directions: Tensor,
    masked_bias: bool,
    make: Callable[[Surrogates], Params],
    constants: Params | None = None,
) -> Simulate:
    """Return what clients upload at perturbed weights, or `make` of it, as a function of a guessed batch.

    Args:
        net: the (expanded) network.
        params: perturbed weights whose gradients are uploaded.
        directions: [m, C] of sigma.
        masked_bias: whether the head's bias carries the mask.
        make: what is made of the surrogates.
        constants: transitional layers.
    """

    def simulate(x: Tensor, y: Tensor) -> Params:
        images, labels = x.flatten(0, 1), y.flatten(0, 1)
        batch = Batch(images, labels, torch.ones(len(images), dtype=x.dtype, device=x.device))
        weights, fixed = _cast(params, x), _cast(constants or {}, x)
        return make(surrogates(net, weights, batch, directions.to(x.dtype), masked_bias, fixed))

    return simulate


def _cast(tree: Mapping[str, Tensor], like: Tensor) -> Params:
    return {name: value.to(like) for name, value in tree.items()}
