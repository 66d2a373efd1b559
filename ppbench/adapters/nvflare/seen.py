"""What filters leave visible of a gradient, as evidence: variables left out, entries left out, entries cut off.

What is known of the mechanism is used: an entry that was left out has no weight; one that was cut off at a bound is
known to lie beyond it. Where few are cut off, these are left out as well, and the rest is a gradient's, exactly; where
most are, the cut is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from ppbench.base.tree import Params
from ppbench.federation.evidence import Evidence, Mappable, PlainGradient
from ppbench.federation.plain import plain_evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import Exchange, View

HEAD = ("head.weight", "head.bias")
FEW = 0.5
"""Share of the sent entries that may be cut off for these to be left out."""
ROUNDING = 1e-4
"""Relative distance from the bound at which an entry counts as cut off: float32 changes of float32 weights."""


@dataclass(frozen=True, eq=False)
class Altered(Mappable):
    """The gradient at `params` of the variables `names` alone, each entry cut off at `bound` (None: not)."""

    plan: Plan
    names: tuple[str, ...]
    bound: float | None

    alters: ClassVar[bool] = True

    def family(self) -> Hashable:
        """Return all but the weights."""
        return Altered, self.plan, self.names, self.bound

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> Params:
        """Return what is seen of the gradient of a batch x [U, B, *shape], y [U, B, C], in the dtype of x."""
        whole, bound = PlainGradient(self.params, self.plan)(x, y), self.bound
        return {n: whole[n] if bound is None else whole[n].clamp(-bound, bound) for n in self.names}


@dataclass(frozen=True)
class Cut:
    """What a filter does to the entries of a gradient that it lets out, public.

    bound: at which they are cut off.  then: "sent": as they are; "noised": under noise; "signed": told by their sign
    alone, nearly all.
    """

    bound: float
    then: Literal["sent", "noised", "signed"] = "sent"


def seen(view: View, sent: Callable[[Exchange], Params | None], *, sparse: bool, cut: Cut | None) -> list[Evidence]:
    """Return the plain evidence of `view`, in which what was not sent has no weight.

    sent: a message's variables, those that were let out; None of another message.  sparse: whether entries that are
    exactly 0 were left out.
    """
    answers = {e.slot: sent(e) for e in reversed(list(view.exchanges()))}
    found = []
    for e in plain_evidence(view):
        told = answers.get(e.unit[0])
        if view.threat.startswith("client/") or told is None:
            found.append(e)
        else:
            found.append(_read(view.plan, e, _visible(e.observed, told, sparse), cut))
    return found


def _visible(observed: Params, sent: Params, sparse: bool) -> Params:
    """Return 1.0 for what was sent of each variable, and 0.0 elsewhere."""
    nothing = {n: torch.zeros_like(v) for n, v in observed.items() if n not in sent}
    return {n: nothing.get(n, (v != 0).to(v) if sparse else torch.ones_like(v)) for n, v in observed.items()}


def _read(plan: Plan, e: Evidence, weight: Params, cut: Cut | None) -> Evidence:
    """Return evidence whose entries have a weight, and whose simulation does what the filter does."""
    names = _told(weight)
    if cut is not None and cut.then == "sent":
        near = {n: (v.abs() >= cut.bound * (1 - ROUNDING)).to(v) for n, v in e.observed.items()}
        share, all_ = (sum(float((w * part[n]).sum()) for n, w in weight.items()) for part in (near, weight))
        if share <= FEW * all_:
            weight, cut = {n: w * (1 - near[n]) for n, w in weight.items()}, None
    observed = {n: e.observed[n] for n in names}
    if cut is not None and cut.then == "signed":  # what was not sent is 0, and counts nothing
        return replace(e, observed=observed, simulate=_altered(e, plan, names, None), measure="hinge")
    whole = all(bool((weight[n] == 1).all()) for n in names)
    e = replace(e, observed=observed, weight=None if whole else {n: weight[n] for n in names})
    if cut is None and len(names) == len(weight):
        return e
    return replace(e, simulate=_altered(e, plan, names, None if cut is None else cut.bound))


def _altered(e: Evidence, plan: Plan, names: tuple[str, ...], bound: float | None) -> Altered:
    assert e.params is not None  # asked by who checked it
    return Altered(e.params, plan, names, bound)


def _told(weight: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
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
