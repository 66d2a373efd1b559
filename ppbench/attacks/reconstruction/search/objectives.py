"""The discrepancy of guesses and its slope: along a fast chain of layers, by vmap over victims, or one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from ppbench.attacks.reconstruction.fastpath.chain import ChainObjective, compile_chain
from ppbench.base.tree import Params
from ppbench.federation.evidence import Evidence
from ppbench.federation.evidence import Mappable as Mappable
from ppbench.federation.plan import Plan


class Objective(Protocol):
    """D [S] of S guesses x [S, N, *shape], y [S, N, C], nuisance [S, E], and its gradient by each."""

    def __call__(self, x: Tensor, y: Tensor, nuisance: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """Return D, dD/dx, dD/dy and dD/dnuisance."""


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
    """D as `SimulatedObjective` has it, of all victims at once by vmap: up to six times as fast on small networks.

    Plain gradients of eight victims (32x32, one thread) run 1.0 (114k ConvNet) to 1.9 times (LeNet) as fast as in a
    loop, 1.1 to 1.4 times for ResNet-20, DenseNet and WRN-10-2.

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


def discrepancy(evidence: Evidence, x: Tensor, y: Tensor, nuisance: Tensor) -> Tensor:
    """Return the discrepancy of a guess x [N, *shape], y [N, C] with flat nuisance unknowns [E]."""
    units, named, offset = len(evidence.unit), {}, 0
    for name, shape in evidence.nuisance.items():
        named[name] = nuisance[offset : offset + math.prod(shape)].view(shape)
        offset += math.prod(shape)
    return evidence.discrepancy(evidence.simulate(x.unflatten(0, (units, -1)), y.unflatten(0, (units, -1)), **named))


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


class FastObjective:
    """D through a chain of layers; its evidence has no nuisance unknowns."""

    def __init__(self, chain: ChainObjective) -> None:
        self.chain = chain

    def __call__(self, x: Tensor, y: Tensor, nuisance: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """Return D [S], dD/dx, dD/dy and an empty dD/dnuisance [S, 0]."""
        return *self.chain(x, y, index), nuisance


def objective(evidences: Sequence[Evidence], plan: Plan, batch: int, dtype: torch.dtype) -> Objective:
    """Return D of victims whose evidence shares one `simulate`: by a chain where possible, else by autograd.

    Args:
        evidences: V pieces of evidence with the same `simulate` and `params`.
        plan: the public plan.
        batch: examples N of each, over all slots of its unit.
        dtype: of the computation.
    """
    first = evidences[0]
    steps = None
    measured = first.measure if first.measure != "hinge" and not first.nuisance else None
    if first.params is not None and measured is not None and set(first.observed) == set(first.params):
        steps = compile_chain(plan, first.params, dtype)
    if steps is None or measured is None:
        mapped = len(evidences) > 1 and isinstance(first.simulate, Mappable)
        return (MappedObjective if mapped else SimulatedObjective)(evidences)
    observed, weights = [e.observed for e in evidences], precisions(evidences)
    return FastObjective(ChainObjective(steps, plan.loss, observed, weights, batch, measured))
