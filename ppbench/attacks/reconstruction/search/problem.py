"""What is minimized: how far the simulated update of a guess is from the observed one, and which way it improves.

A `Space` says what images a row of numbers stands for, a `Problem` what rows are worth; `lbfgs.minimize` and
`descent.descend` minimize it. Slopes come from a fast chain of layers, vmap over victims, or autograd one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ppbench.attacks.reconstruction.fastpath.chain import ChainObjective, compile_chain
from ppbench.attacks.reconstruction.search.priors import Penalty
from ppbench.attacks.reconstruction.search.starts import LOGIT, Starts
from ppbench.base.tree import Params
from ppbench.federation.evidence import Evidence, Mappable
from ppbench.federation.plan import Plan

Pull = Callable[[Tensor], Tensor]
"""Slopes by images [S, N, *shape] to slopes by what is searched [S, n]."""


class Space(Protocol):
    """What is searched instead of images: rows of n numbers, and the images that they stand for."""

    @property
    def size(self) -> int:
        """Return n."""

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the images [S, N, *shape] of rows z [S, n] of starts `index` [S], and how slopes come back to z."""

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return z [S, n] put back to where rows may be."""


@dataclass(frozen=True)
class Pixels:
    """The images themselves, `shape` (N, *shape) of a row, kept in the data's range."""

    shape: tuple[int, ...]
    low: float
    high: float

    @property
    def size(self) -> int:
        """Return the number of pixels."""
        return math.prod(self.shape)

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the rows in the shape of images; slopes come back as they are."""
        return z.view(-1, *self.shape), lambda slope: slope.flatten(1)

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return the rows clipped to the range."""
        return z.clamp(self.low, self.high)


class Objective(Protocol):
    """D [S] of S guesses x [S, N, *shape], y [S, N, C], nuisance [S, E], and its gradient by each."""

    def __call__(self, x: Tensor, y: Tensor, nuisance: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """Return D, dD/dx, dD/dy and dD/dnuisance."""


class Value(NamedTuple):
    """What S rows are worth: the minimized function [S], priors included, and its gradient [S, n].

    score [S]: what iterates, restarts and hypotheses are chosen by: the mismatch alone, never the truth.
    """

    loss: Tensor
    gradient: Tensor
    score: Tensor


@dataclass(frozen=True)
class Problem:
    """What S = V * tries rows over a space have to explain: D / unit [V] is the score, with the penalty the loss.

    Attributes:
        matching: D of the V victims' evidence.
        starts: first images, labels and nuisance unknowns of the S rows: a victim's rows follow one another.
        penalty: on the images, or None; multiplied by the present score, taken as a constant, if it is `fading`.
        strength: [S] what each row's penalty is multiplied by, see `balanced`; None for 1.
    """

    space: Space
    matching: Objective
    unit: Tensor
    starts: Starts
    tries: int = 1
    penalty: Penalty | None = None
    fading: bool = False
    strength: Tensor | None = None

    def __call__(self, z: Tensor, index: Tensor) -> Value:
        """Return what whole rows z [S', n + E + ...] of the starts `index` [S'] are worth."""
        x, pull = self.space.images(z[:, : self.space.size], index)
        point, victim = self.starts.moved(x, z[:, self.space.size :], index), index // self.tries
        unit, y = self.unit[victim], point.labels
        score, gx, gy, gn = self.matching(x, y, point.extra, victim)
        if self.starts.joint:  # through the softmax; a single output's target is a number
            gy = LOGIT * (y * (gy - (y * gy).sum(-1, keepdim=True)) if y.shape[-1] > 1 else gy)
        score, gx, gy, gn = score / unit, gx / _wide(unit, gx), gy / _wide(unit, gy), gn / unit[:, None]
        loss = score
        if self.penalty is not None:
            more, slope = self.penalty(x, index)
            if self.strength is not None:
                own = self.strength[index]
                more, slope = own * more, _wide(own, slope) * slope
            if self.fading:
                more, slope = score * more, _wide(score, slope) * slope
            loss, gx = score + more, gx + slope
        return Value(loss, self.starts.joined(pull(gx), gn, gy), score)

    @property
    def start(self) -> Tensor:
        """The rows to begin with, where the space is that of images."""
        return self.starts.rows(self.starts.x.flatten(1))

    def balanced(self, share: float) -> Problem:
        """Return the problem with a penalty that pulls, at the starts, `share` times as hard as what was observed.

        Its slope is then `share` times as long (summed |slope| over pixels) as that of the mismatch's logarithm, which
        a `fading` penalty is weighed against. A weight that suits 8x8 digits is a thirtieth of what 32x32 photographs
        need, but this share is alike for all. Costs one evaluation a row; the space must be that of images.
        """
        if self.penalty is None:
            return self
        index = torch.arange(len(self.start), device=self.start.device)
        value = replace(self, penalty=None)(self.start, index)
        wanted = value.gradient[:, : self.space.size].abs().sum(1) / value.score
        pulling = self.penalty(self.starts.x, index)[1].abs().flatten(1).sum(1)
        return replace(self, strength=torch.where((pulling > 0) & wanted.isfinite(), share * wanted / pulling, 0.0))

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return whole rows z of the starts `index` put back to where they may be: only the part that is an image."""
        return torch.cat([self.space.project(z[:, : self.space.size], index), z[:, self.space.size :]], 1)

    def at(self, z: Tensor) -> Starts:
        """Return the images, labels and nuisance unknowns of whole rows z, one for each start."""
        index = torch.arange(len(z), device=z.device)
        x = self.space.images(z[:, : self.space.size], index)[0].detach()
        return self.starts.moved(x, z[:, self.space.size :], index)


def _wide(unit: Tensor, like: Tensor) -> Tensor:
    return unit.view(-1, *[1] * (like.dim() - 1))


class SimulatedObjective:
    """D through `Evidence.simulate` and `Evidence.discrepancy`, differentiated twice by autograd: for any network."""

    def __init__(self, evidences: Sequence[Evidence]) -> None:
        self.evidences = evidences

    def __call__(self, x: Tensor, y: Tensor, nuisance: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """Return D [S], dD/dx, dD/dy and dD/dnuisance."""
        parts = [self._one(self.evidences[v], *row) for v, *row in zip(index.tolist(), x, y, nuisance, strict=True)]
        return tuple(torch.stack(column) for column in zip(*parts, strict=True))

    @staticmethod
    def _one(evidence: Evidence, x: Tensor, y: Tensor, nuisance: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            unknowns = [part.detach().clone().requires_grad_() for part in (x, y, nuisance)]
            loss = discrepancy(evidence, *unknowns)
            gradients = torch.autograd.grad(loss, unknowns, allow_unused=True, materialize_grads=True)
        return loss.detach(), *gradients


class MappedObjective:
    """D as `SimulatedObjective` has it, of all victims at once by vmap: 1 to 2 times as fast (eight victims of 32x32).

    Takes evidence whose `Mappable` simulations are of one family; where they share their params, these are not mapped.
    """

    def __init__(self, evidences: Sequence[Evidence]) -> None:
        self.first = evidences[0]
        self.observed = _stacked([e.observed for e in evidences])
        self.weight = _stacked(precisions(evidences) or [])
        simulations: list[object] = [e.simulate for e in evidences]
        params = [s.params for s in simulations if isinstance(s, Mappable)]
        self.params = {} if all(p is params[0] for p in params) else _stacked(params)

    def __call__(self, x: Tensor, y: Tensor, nuisance: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """Return D [S], dD/dx, dD/dy and dD/dnuisance."""
        trees = [{n: v[index] for n, v in tree.items()} for tree in (self.observed, self.weight, self.params)]

        def one(unknowns: tuple[Tensor, ...], observed: Params, weight: Params, params: Params) -> Tensor:
            simulate = self.first.simulate
            if params and isinstance(simulate, Mappable):
                simulate = replace(simulate, params=params)
            return discrepancy(
                replace(self.first, observed=observed, weight=weight or None, simulate=simulate), *unknowns
            )

        slopes, loss = vmap(grad_and_value(one))((x, y, nuisance), *trees)
        return loss, *slopes


def simulated(evidence: Evidence, x: Tensor, y: Tensor, nuisance: Tensor) -> Params:
    """Return the update simulated of a guess x [N, *shape], y [N, C] with flat nuisance unknowns [E]."""
    units, named, offset = len(evidence.unit), {}, 0
    for name, shape in evidence.nuisance.items():
        named[name] = nuisance[offset : offset + math.prod(shape)].view(shape)
        offset += math.prod(shape)
    return evidence.simulate(x.unflatten(0, (units, -1)), y.unflatten(0, (units, -1)), **named)


def discrepancy(evidence: Evidence, x: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
    """Return the discrepancy of a guess, see `simulated`."""
    return evidence.discrepancy(simulated(evidence, x, y, nuisance))


def precisions(evidences: Sequence[Evidence]) -> list[Params] | None:
    """Return the evidences' weights, None where none has any; in one form where some are a number a tensor only."""
    if all(e.weight is None for e in evidences):
        return None
    ones = {name: torch.ones((), device=value.device) for name, value in evidences[0].observed.items()}
    found = [ones if e.weight is None else e.weight for e in evidences]
    for name, observed in evidences[0].observed.items():
        if len({weight[name].shape for weight in found}) > 1:
            found = [{**weight, name: weight[name].to(observed).expand_as(observed)} for weight in found]
    return found


def _stacked(trees: Sequence[Params]) -> Params:
    """Return the victims' tensors as one tensor [V, ...] a name; nothing for no trees."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]} if trees else {}


def objective(evidences: Sequence[Evidence], plan: Plan, batch: int, dtype: torch.dtype) -> Objective:
    """Return D of V victims that share `simulate` and `params`: by a chain of layers, by vmap, or one by one.

    batch: examples N of each, over all slots of its unit.  dtype: of the computation.
    """
    evidences = [e.compared for e in evidences]
    first, measure = evidences[0], evidences[0].measure
    mappable, altered = isinstance(first.simulate, Mappable), getattr(first.simulate, "alters", False)
    whole = not altered and not first.nuisance and first.params and set(first.observed) == set(first.params)
    if measure != "hinge" and whole and first.params:
        steps = compile_chain(plan, first.params, dtype)
        if steps is not None:
            observed = [e.observed for e in evidences]
            return ChainObjective(steps, plan.loss, observed, precisions(evidences), batch, measure, first.floor)
    return (MappedObjective if mappable and len(evidences) > 1 else SimulatedObjective)(evidences)
