"""Evidence of what filters leave visible of a gradient: variables left out, entries left out, entries truncated.

It uses what is known of the mechanism. A truncated entry is known to lie beyond the bound; one that was left out
because it is small, below the smallest sent entry: for both, a guess's distance from the known interval is simulated.
An entry that was left out by chance has no weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.federation.contract import plain_evidence
from ppbench.federation.evidence import Evidence, Mappable, PlainGradient
from ppbench.federation.plan import Plan
from ppbench.federation.view import Exchange, View
from ppbench.nets.classifier import HEAD_NAMES

BOUND_WEIGHT = 0.1
"""Weight of entries of which only a bound is known; a known value has weight 1.

Searches match bounds exactly, at any weight; closed forms take the observed number for the value. They divide by a
bias's gradient, so a truncated entry of it has no weight.
"""
SIGNS_ONLY = 0.9
"""Share of truncated entries above which, under noise, only signs are used."""
BOUND_TOLERANCE = 1e-4
"""Relative distance from the bound at which an entry counts as truncated: float32 changes of float32 weights."""


@dataclass(frozen=True, eq=False)
class TruncatedGradient(Mappable):
    """The gradient of the variables `names`, entries truncated at `bound` (inf: not at all). params: the weights."""

    plan: Plan
    names: tuple[str, ...]
    bound: float

    alters: ClassVar[bool] = True

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the visible gradient of a batch x [U, B, *shape], y [U, B, C], in the dtype of x."""
        whole = PlainGradient(self.params, self.plan)(x, y)
        return {n: whole[n].clamp(-self.bound, self.bound) for n in self.names}


@dataclass(frozen=True, eq=False)
class DistanceToBounds(Mappable):
    """The observation plus the gradient's distance from its known interval.

    params: of the variables `names` "NAME", the weights; "at/NAME", the observation; "low/NAME" and "high/NAME", the
    interval's ends.
    """

    plan: Plan
    names: tuple[str, ...]

    alters: ClassVar[bool] = True

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the observation that a batch x [U, B, *shape], y [U, B, C] explains best, in the dtype of x."""
        tensors = {n: v.to(x.dtype) for n, v in self.params.items()}
        whole = PlainGradient({n: v for n, v in tensors.items() if "/" not in n}, self.plan)(x, y)
        return {
            n: tensors[f"at/{n}"] + whole[n] - whole[n].clamp(tensors[f"low/{n}"], tensors[f"high/{n}"])
            for n in self.names
        }


@dataclass(frozen=True)
class Truncation:
    """How a filter truncates the entries of a gradient; public.

    bound: the largest size of an entry.  then: which entries are sent. "largest": the largest; "noised": a random
    selection, with noise added after the truncation; "noisy": a random selection, with noise added before it.
    """

    bound: float
    then: Literal["largest", "noised", "noisy"]


def visible_evidence(view: View, sent: Callable[[Exchange], Params | None], cut: Truncation | None) -> list[Evidence]:
    """Return the plain evidence of `view`, in which entries that were not sent have no weight, or their bound's.

    sent: returns the variables in a message, None if it has none.  cut: what is known of the filter.
    """
    answers = {slot: sent(exchange) for slot, exchange in view.first_uploads().items()}
    pieces = []
    for piece in plain_evidence(view):
        variables = answers.get(piece.unit[0])
        if not view.threat.sees_uploads or variables is None or piece.params is None:
            pieces.append(piece)
        else:
            pieces.append(_weighted(view.plan, piece, piece.params, variables, cut))
    return pieces


def _weighted(plan: Plan, piece: Evidence, params: Params, variables: Params, cut: Truncation | None) -> Evidence:
    """Return evidence with the entries' weights, whose simulation does what the filter does."""
    missing = {n: torch.zeros_like(v) for n, v in piece.observed.items() if n not in variables}
    sent = {n: missing.get(n, torch.ones_like(v) if cut is None else (v != 0).to(v)) for n, v in piece.observed.items()}
    names = _reliable(sent)
    piece = replace(piece, observed={n: piece.observed[n] for n in names})
    if cut is not None and cut.then == "noisy" and _beyond(piece.observed, cut.bound) > SIGNS_ONLY:
        untruncated = TruncatedGradient(params, plan, names, math.inf)
        return replace(piece, simulate=untruncated, measure="hinge")  # entries that were not sent: 0, without weight
    if cut is not None and cut.then in ("largest", "noisy"):
        return _bounded(plan, piece, params, cut.bound, chance=cut.then == "noisy")
    whole = all(bool((sent[n] == 1).all()) for n in names)
    piece = replace(piece, weight=None if whole else {n: sent[n] for n in names})
    if cut is None and len(names) == len(sent):
        return piece
    return replace(piece, simulate=TruncatedGradient(params, plan, names, math.inf if cut is None else cut.bound))


def _beyond(observed: Params, bound: float) -> float:
    """Return the share of truncated entries among those sent."""
    sent = torch.cat([v[v != 0].abs() for v in observed.values()])
    return float((sent >= bound * (1 - BOUND_TOLERANCE)).double().mean()) if len(sent) else 0.0


def _bounded(plan: Plan, piece: Evidence, params: Params, bound: float, chance: bool) -> Evidence:
    """Return evidence whose entries are known, or beyond `bound`, or smaller than the smallest entry that was sent.

    chance: whether entries were left out at random, whatever their size.
    """
    names = tuple(piece.observed)
    least = min((float(v[v != 0].abs().min()) for v in piece.observed.values() if bool((v != 0).any())), default=bound)
    known, weight = dict(params), {}
    for n, at in piece.observed.items():
        beyond, unsent = at.abs() >= bound * (1 - BOUND_TOLERANCE), at == 0
        reach = torch.where(unsent, least, 0.0).to(at)
        known |= {f"at/{n}": at, f"low/{n}": at - reach, f"high/{n}": at + reach}
        known[f"low/{n}"] = torch.where(beyond & (at < 0), -math.inf, known[f"low/{n}"])
        known[f"high/{n}"] = torch.where(beyond & (at > 0), math.inf, known[f"high/{n}"])
        weight[n] = torch.where(beyond, BOUND_WEIGHT * (at.dim() > 1), torch.where(unsent, BOUND_WEIGHT, 1.0)).to(at)
        if chance or least >= bound * (1 - BOUND_TOLERANCE):  # what was left out may be as large
            weight[n] = torch.where(unsent, 0.0, weight[n])
    return replace(piece, weight=weight, simulate=DistanceToBounds(known, plan, names))


def _reliable(weight: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the variables to use as evidence: all except those of the head that would mislead.

    Attacks read labels off the gradient of the head's bias, else off the rows of its weight. So a bias that was sent in
    part is left out if rows are visible, and a head of which nothing was sent is left out as a whole. Signs of
    truncated entries still reveal labels.
    """
    dark = {name for name in HEAD_NAMES if name in weight and not bool(weight[name].any())}
    excluded = dark if len(dark) == sum(name in weight for name in HEAD_NAMES) else dark & {HEAD_NAMES[1]}
    bias = weight.get(HEAD_NAMES[1])
    if bias is not None and HEAD_NAMES[0] not in dark and not bool(bias.all()):
        excluded = excluded | {HEAD_NAMES[1]}
    return tuple(name for name in weight if name not in excluded)
