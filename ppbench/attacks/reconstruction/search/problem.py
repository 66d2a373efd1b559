"""The minimized function: the distance of a guess's simulated update from the observed one, and its gradient.

A `Space` maps a row of numbers to images, a `Problem` rows to values; `lbfgs.minimize` and `descent.descend` minimize
it. Slopes come from a fast chain of layers, vmap over victims, or autograd one by one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ppbench.attacks.reconstruction.fastpath.chain import ChainObjective, compile_chain
from ppbench.attacks.reconstruction.fastpath.soft_kinks import SoftKinks
from ppbench.attacks.reconstruction.search.priors import Penalty
from ppbench.attacks.reconstruction.search.starts import LOGIT, Starts
from ppbench.base.tree import Params
from ppbench.federation.evidence import SMALLEST_SQUARE, Evidence, JointEvidence, Mappable
from ppbench.federation.plan import Plan

Pull = Callable[[Tensor], Tensor]
"""Maps slopes by images [S, N, *shape] to slopes by the searched numbers [S, n]."""


class Space(Protocol):
    """The space that is searched: rows of n numbers, and the images that they encode."""

    @property
    def size(self) -> int:
        """Return n."""

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the images [S, N, *shape] of rows z [S, n] of starts `index` [S], and the pull-back of slopes to z."""

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return z [S, n] projected to the feasible rows."""


@dataclass(frozen=True)
class Pixels:
    """The images themselves, `shape` (N, *shape) per row, within the data's range."""

    shape: tuple[int, ...]
    low: float
    high: float

    @property
    def size(self) -> int:
        """Return the number of pixels."""
        return math.prod(self.shape)

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the rows in the shape of images, and the flattening of slopes."""
        return z.view(-1, *self.shape), lambda slope: slope.flatten(1)

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return the rows clipped to the range."""
        return z.clamp(self.low, self.high)


class Objective(Protocol):
    """D [S] for S guesses x [S, N, *shape], y [S, N, C], nuisance [S, E], and its gradient by each."""

    def __call__(self, x: Tensor, y: Tensor, nuisance: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """Return D, dD/dx, dD/dy and dD/dnuisance."""

    def softened(self, width: float) -> Objective:
        """Return the same with ReLUs smoothed by `width`, see `soft_kinks`."""


class RowValue(NamedTuple):
    """The values of S rows: the minimized function [S], priors included, and its gradient [S, n].

    score [S]: the mismatch alone, by which iterates, restarts and hypotheses are chosen; never the truth.
    """

    loss: Tensor
    gradient: Tensor
    score: Tensor


@dataclass(frozen=True)
class Problem:
    """The evidence that S = V * tries rows over a space must explain: D / unit [V] is the score, plus penalty the loss.

    Attributes:
        matching: D of the V victims' evidence.
        starts: first images, labels and nuisance unknowns of the S rows; a victim's rows are adjacent.
        penalty: on the images, or None; multiplied by the present score, taken as a constant, if it is `fading`.
        strength: [S] factor on each row's penalty, see `balanced`; None for 1.
    """

    space: Space
    matching: Objective
    unit: Tensor
    starts: Starts
    tries: int = 1
    penalty: Penalty | None = None
    fading: bool = False
    strength: Tensor | None = None

    def __call__(self, z: Tensor, index: Tensor) -> RowValue:
        """Return the value of whole rows z [S', n + E + ...] of the starts `index` [S']."""
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
        return RowValue(loss, self.starts.joined(pull(gx), gn, gy), score)

    def softened(self, width: float) -> Problem:
        """Return the problem with ReLUs smoothed by `width`, see `soft_kinks`."""
        return replace(self, matching=self.matching.softened(width))

    @property
    def start(self) -> Tensor:
        """The first rows, if the space is that of images."""
        return self.starts.rows(self.starts.x.flatten(1))

    def balanced(self, share: float) -> Problem:
        """Return the problem with a penalty that pulls, at the starts, `share` times as hard as the observation.

        Its slope is then `share` times as long (summed |slope| over pixels) as that of the mismatch's logarithm, to
        which a `fading` penalty is relative. A weight that suits 8x8 digits is a thirtieth of what 32x32 photographs
        need, but this share suits all. Costs one evaluation per row; the space must be that of images.
        """
        if self.penalty is None:
            return self
        index = torch.arange(len(self.start), device=self.start.device)
        value = replace(self, penalty=None)(self.start, index)
        target = value.gradient[:, : self.space.size].abs().sum(1) / value.score
        pulling = self.penalty(self.starts.x, index)[1].abs().flatten(1).sum(1)
        return replace(self, strength=torch.where((pulling > 0) & target.isfinite(), share * target / pulling, 0.0))

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return whole rows z of the starts `index` with their image part projected to the feasible rows."""
        return torch.cat([self.space.project(z[:, : self.space.size], index), z[:, self.space.size :]], 1)

    def at(self, z: Tensor) -> Starts:
        """Return the images, labels and nuisance unknowns of whole rows z, one for each start."""
        index = torch.arange(len(z), device=z.device)
        x = self.space.images(z[:, : self.space.size], index)[0].detach()
        return self.starts.moved(x, z[:, self.space.size :], index)


def _wide(unit: Tensor, like: Tensor) -> Tensor:
    return unit.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True)
class SoftenedObjective:
    """D of a network whose ReLUs are smoothed by a `width`, see `soft_kinks`."""

    hard: SimulatedObjective | MappedObjective
    width: float

    def __call__(self, x: Tensor, y: Tensor, nuisance: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """Return D [S], dD/dx, dD/dy and dD/dnuisance."""
        with SoftKinks(self.width):
            return self.hard(x, y, nuisance, index)

    def softened(self, width: float) -> SoftenedObjective:
        """Return the same with another width."""
        return replace(self, width=width)


class SimulatedObjective:
    """D through `Evidence.simulate` and `Evidence.discrepancy`, differentiated twice by autograd: for any network."""

    def __init__(self, evidences: Sequence[Evidence]) -> None:
        self.evidences = evidences

    def __call__(self, x: Tensor, y: Tensor, nuisance: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """Return D [S], dD/dx, dD/dy and dD/dnuisance."""
        parts = [self._one(self.evidences[v], *row) for v, *row in zip(index.tolist(), x, y, nuisance, strict=True)]
        return tuple(torch.stack(column) for column in zip(*parts, strict=True))

    def softened(self, width: float) -> SoftenedObjective:
        """Return the same with ReLUs smoothed by `width`."""
        return SoftenedObjective(self, width)

    @staticmethod
    def _one(evidence: Evidence, x: Tensor, y: Tensor, nuisance: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            unknowns = [part.detach().clone().requires_grad_() for part in (x, y, nuisance)]
            loss = discrepancy(evidence, *unknowns)
            gradients = torch.autograd.grad(loss, unknowns, allow_unused=True, materialize_grads=True)
        return loss.detach(), *gradients


class MappedObjective:
    """D as in `SimulatedObjective`, for all victims at once by vmap: 1 to 2 times as fast (eight victims of 32x32).

    Takes evidence whose `Mappable` simulations are of one family; params that all share are not mapped. What is
    observed is kept in the dtype of the computation, and for the victims of the last call: a search seldom drops one.
    """

    def __init__(self, evidences: Sequence[Evidence], dtype: torch.dtype) -> None:
        self.first = evidences[0]
        simulations: list[object] = [e.simulate for e in evidences]
        params = [s.params for s in simulations if isinstance(s, Mappable)]
        shared = all(p is params[0] for p in params)
        self._all = (
            {n: v.to(dtype) for n, v in _stacked([e.observed for e in evidences]).items()},
            _stacked(evidence_weights(evidences) or []),
            {} if shared else _stacked(params),
            _stacked([e.statistics for e in evidences]),
        )
        self._chosen: tuple[Tensor, tuple[Params, ...]]
        self._chosen = torch.arange(len(evidences), device=self.first.device), self._all

    def _of(self, index: Tensor) -> tuple[Params, ...]:
        """Return what belongs to some victims: observed, weight, params and statistics."""
        if not torch.equal(index, self._chosen[0]):
            self._chosen = index, tuple({n: v[index] for n, v in tree.items()} for tree in self._all)
        return self._chosen[1]

    def __call__(self, x: Tensor, y: Tensor, nuisance: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """Return D [S], dD/dx, dD/dy and dD/dnuisance."""

        def one(
            unknowns: tuple[Tensor, ...], observed: Params, weight: Params, params: Params, statistics: Params
        ) -> Tensor:
            simulate = self.first.simulate
            if params and isinstance(simulate, Mappable):
                simulate = replace(simulate, params=params)
            changed = replace(self.first, observed=observed, weight=weight or None, simulate=simulate)
            return discrepancy(replace(changed, statistics=statistics), *unknowns)

        slopes, loss = vmap(grad_and_value(one))((x, y, nuisance), *self._of(index))
        return loss, *slopes

    def softened(self, width: float) -> SoftenedObjective:
        """Return the same with ReLUs smoothed by `width`."""
        return SoftenedObjective(self, width)


class JointObjective:
    """D of `JointEvidence`: the sum over its parts of their D / scale, each part by the objective that suits it."""

    def __init__(self, evidences: Sequence[JointEvidence], plan: Plan, batch: int, dtype: torch.dtype) -> None:
        numbers = zip(*(e.parts for e in evidences), strict=True)
        self.parts = [objective(part, plan, batch, dtype) for part in numbers]
        scales = [[p.scale().clamp(min=SMALLEST_SQUARE) for p in e.parts] for e in evidences]
        self.scales = torch.tensor(scales, dtype=dtype, device=evidences[0].device).unbind(1)
        shapes = [part.nuisance.values() for part in evidences[0].parts]
        self.unknowns = [sum(map(math.prod, each)) for each in shapes]

    def __call__(self, x: Tensor, y: Tensor, nuisance: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """Return D [S], dD/dx, dD/dy and dD/dnuisance."""
        sums, by_nuisance = [x.new_zeros(len(x)), torch.zeros_like(x), torch.zeros_like(y)], []
        for part, scales, own in zip(self.parts, self.scales, nuisance.split(self.unknowns, 1), strict=True):
            *slopes, last = part(x, y, own, index)
            unit = scales[index]
            sums = [old + slope / _wide(unit, slope) for old, slope in zip(sums, slopes, strict=True)]
            by_nuisance.append(last / unit[:, None])
        return *sums, torch.cat(by_nuisance, 1)

    def softened(self, width: float) -> JointObjective:
        """Return the same with ReLUs smoothed by `width`."""
        other = copy.copy(self)
        other.parts = [part.softened(width) for part in self.parts]
        return other


def simulated(evidence: Evidence, x: Tensor, y: Tensor, nuisance: Tensor) -> Params:
    """Return the simulated update for a guess x [N, *shape], y [N, C] with flat nuisance unknowns [E]."""
    units, named, offset = len(evidence.unit), {}, 0
    for name, shape in evidence.nuisance.items():
        named[name] = nuisance[offset : offset + math.prod(shape)].view(shape)
        offset += math.prod(shape)
    return evidence.simulate(x.unflatten(0, (units, -1)), y.unflatten(0, (units, -1)), **named)


def discrepancy(evidence: Evidence, x: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
    """Return the discrepancy of a guess, see `simulated`."""
    return evidence.discrepancy(simulated(evidence, x, y, nuisance))


def evidence_weights(evidences: Sequence[Evidence]) -> list[Params] | None:
    """Return the weights of all evidence in one form, even if some are one number per tensor; None if none has any."""
    if all(e.weight is None for e in evidences):
        return None
    ones = {name: torch.ones((), device=value.device) for name, value in evidences[0].observed.items()}
    weights = [ones if e.weight is None else e.weight for e in evidences]
    for name, observed in evidences[0].observed.items():
        if len({weight[name].shape for weight in weights}) > 1:
            weights = [{**weight, name: weight[name].to(observed).expand_as(observed)} for weight in weights]
    return weights


def _stacked(trees: Sequence[Params]) -> Params:
    """Return the victims' tensors stacked by name [V, ...]; empty for no trees."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]} if trees else {}


def objective(evidences: Sequence[Evidence], plan: Plan, batch: int, dtype: torch.dtype) -> Objective:
    """Return D for V victims that share `simulate` and `params`: by a chain of layers, by vmap, or one by one.

    Evidence of several parts, of all V or of none, is evaluated part by part.

    batch: examples N of each, over all slots of its unit.  dtype: of the computation.
    """
    if joint := [e for e in evidences if isinstance(e, JointEvidence)]:
        return JointObjective(joint, plan, batch, dtype)
    evidences = [e.compared for e in evidences]
    first, measure = evidences[0], evidences[0].measure
    mappable, altered = isinstance(first.simulate, Mappable), getattr(first.simulate, "alters", False)
    whole = not altered and not first.nuisance and first.params and set(first.observed) == set(first.params)
    if measure != "hinge" and whole and first.params:
        steps = compile_chain(plan, first.params, dtype)
        if steps is not None:
            observed = [e.observed for e in evidences]
            return ChainObjective(
                steps, plan.loss_name, observed, evidence_weights(evidences), batch, measure, first.floor
            )
    _ = plan.net  # built here, since nothing can be drawn under vmap
    return MappedObjective(evidences, dtype) if mappable and len(evidences) > 1 else SimulatedObjective(evidences)
