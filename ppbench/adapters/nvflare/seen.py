"""What filters leave visible of a gradient, as evidence: variables left out, entries left out, entries cut off.

What is known of the mechanism is used. An entry that was cut off is known to lie beyond the bound; one that was left
out because it is small, below the least that was sent: what is simulated of it is how far a guess lies outside of that.
One that was left out by chance has no weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.federation.evidence import Evidence, Mappable, PlainGradient
from ppbench.federation.plain import plain_evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import Exchange, View

HEAD = ("head.weight", "head.bias")
BOUNDED = 0.1
"""Weight of entries of which a bound is known alone, where 1 is that of a known value.

Searches match bounds exactly, at any weight; closed forms take what is observed for a value. They divide by a bias's:
one that was cut off has no weight.
"""
SIGNS = 0.9
"""Share of the noisy entries that are cut off, from which their signs are all that is told."""
ROUNDING = 1e-4
"""Relative distance from the bound at which an entry counts as cut off: float32 changes of float32 weights."""


@dataclass(frozen=True, eq=False)
class Cutting(Mappable):
    """The gradient of the variables `names` alone, each entry cut off at `bound` (inf: not). params: the weights."""

    plan: Plan
    names: tuple[str, ...]
    bound: float

    alters: ClassVar[bool] = True

    def family(self) -> Hashable:
        """Return all but the weights."""
        return Cutting, self.plan, self.names, self.bound

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return what is seen of the gradient of a batch x [U, B, *shape], y [U, B, C], in the dtype of x."""
        whole = PlainGradient(self.params, self.plan)(x, y)
        return {n: whole[n].clamp(-self.bound, self.bound) for n in self.names}


@dataclass(frozen=True, eq=False)
class Bounding(Mappable):
    """What is observed, plus how far the gradient lies outside of what is known of it.

    params: "NAME" the weights; "at/NAME", "low/NAME" and "high/NAME" what is observed and the least and the most that
    it may be, of the variables `names`.
    """

    plan: Plan
    names: tuple[str, ...]

    alters: ClassVar[bool] = True

    def family(self) -> Hashable:
        """Return all but the tensors."""
        return Bounding, self.plan, self.names

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the observation that a batch x [U, B, *shape], y [U, B, C] explains best, in the dtype of x."""
        known = {n: v.to(x.dtype) for n, v in self.params.items()}
        whole = PlainGradient({n: v for n, v in known.items() if "/" not in n}, self.plan)(x, y)
        return {
            n: known[f"at/{n}"] + whole[n] - whole[n].clamp(known[f"low/{n}"], known[f"high/{n}"]) for n in self.names
        }


@dataclass(frozen=True)
class Cut:
    """What a filter does to the entries of a gradient, public.

    bound: at which they are cut off.  then: "largest": the largest are sent; "noised": some, by chance, under noise;
    "noisy": some, by chance, under noise that they had before.
    """

    bound: float
    then: Literal["largest", "noised", "noisy"]


def seen(view: View, sent: Callable[[Exchange], Params | None], cut: Cut | None) -> list[Evidence]:
    """Return the plain evidence of `view`, in which what was not sent has no weight, or that of its bound.

    sent: a message's variables, those that were let out; None of another message.  cut: what is known of the filter.
    """
    answers = {e.slot: sent(e) for e in reversed(list(view.exchanges()))}
    found = []
    for e in plain_evidence(view):
        told = answers.get(e.unit[0])
        if not view.threat.sees_uploads or told is None or e.params is None:
            found.append(e)
        else:
            found.append(_read(view.plan, e, e.params, told, cut))
    return found


def _read(plan: Plan, e: Evidence, params: Params, told: Params, cut: Cut | None) -> Evidence:
    """Return evidence whose entries have a weight, and whose simulation does what the filter does."""
    dark = {n: torch.zeros_like(v) for n, v in e.observed.items() if n not in told}
    left = {n: dark.get(n, torch.ones_like(v) if cut is None else (v != 0).to(v)) for n, v in e.observed.items()}
    names = _told(left)
    e = replace(e, observed={n: e.observed[n] for n in names})
    if cut is not None and cut.then == "noisy" and _beyond(e.observed, cut.bound) > SIGNS:
        return replace(e, simulate=Cutting(params, plan, names, math.inf), measure="hinge")  # not sent: 0, of no weight
    if cut is not None and cut.then in ("largest", "noisy"):
        return _bounded(plan, e, params, cut.bound, chance=cut.then == "noisy")
    whole = all(bool((left[n] == 1).all()) for n in names)
    e = replace(e, weight=None if whole else {n: left[n] for n in names})
    if cut is None and len(names) == len(left):
        return e
    return replace(e, simulate=Cutting(params, plan, names, math.inf if cut is None else cut.bound))


def _beyond(observed: Params, bound: float) -> float:
    """Return which share of the sent entries was cut off."""
    sent = torch.cat([v[v != 0].abs() for v in observed.values()])
    return float((sent >= bound * (1 - ROUNDING)).double().mean()) if len(sent) else 0.0


def _bounded(plan: Plan, e: Evidence, params: Params, bound: float, chance: bool) -> Evidence:
    """Return evidence of which entries are known, or beyond `bound`, or smaller than the least that was sent.

    chance: whether those that were not sent were left out by chance, whatever their size.
    """
    names = tuple(e.observed)
    least = min((float(v[v != 0].abs().min()) for v in e.observed.values() if bool((v != 0).any())), default=bound)
    known, weight = dict(params), {}
    for n, at in e.observed.items():
        beyond, out = at.abs() >= bound * (1 - ROUNDING), at == 0
        reach = torch.where(out, least, 0.0).to(at)
        known |= {f"at/{n}": at, f"low/{n}": at - reach, f"high/{n}": at + reach}
        known[f"low/{n}"] = torch.where(beyond & (at < 0), -math.inf, known[f"low/{n}"])
        known[f"high/{n}"] = torch.where(beyond & (at > 0), math.inf, known[f"high/{n}"])
        weight[n] = torch.where(beyond, BOUNDED * (at.dim() > 1), torch.where(out, BOUNDED, 1.0)).to(at)
        if chance or least >= bound * (1 - ROUNDING):  # what was left out may be as large
            weight[n] = torch.where(out, 0.0, weight[n])
    return replace(e, weight=weight, simulate=Bounding(known, plan, names))


def _told(weight: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the variables that evidence is made of: all, but for those of the head that would mislead.

    Labels are read off the head's gradient: its bias's, else its weight's rows. So a bias of which not all entries were
    sent is left out, as long as rows are seen; and where nothing is seen of the head, nothing is said of it. Entries
    that were cut off tell labels by their signs.
    """
    dark = {name for name in HEAD if name in weight and not bool(weight[name].any())}
    left = dark if len(dark) == sum(name in weight for name in HEAD) else dark & {HEAD[1]}
    bias = weight.get(HEAD[1])
    if bias is not None and HEAD[0] not in dark and not bool(bias.all()):
        left = left | {HEAD[1]}
    return tuple(name for name in weight if name not in left)
