"""What a View says about one victim's gradient: the observation, and a differentiable simulation of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params, tree_map
from ppbench.federation.plan import Noise, Plan
from ppbench.federation.wire import Slot

Simulate = Callable[..., Params]
Measure = Literal["squares", "absolute", "cosine", "tensors", "poisoned", "bounded", "hinge"]
POWERS: Mapping[str, float] = {"tensors": 0.5, "poisoned": 0.0, "bounded": 0.0}
"""Measures that compare tensor by tensor, and the power of the mean that they take; 0: the geometric one."""
DIRECTIONS = ("cosine", "hinge", *POWERS)
"""Measures that a factor on a whole simulation does not change."""
TINY = 1e-30
FLOOR = 1e-4
"""A tensor counts as explained at this 1 - cosine: one that is fitted much closer does not make up for another one."""


@dataclass(frozen=True, eq=False)
class Mappable:
    """A `simulate` that runs under vmap over victims: it draws nothing and branches on no value.

    params: all tensors that it holds; those of one `family` differ in nothing else.
    alters: whether it does something to the gradient at `Evidence.params`; then no search may take that in its place.
    """

    params: Params
    alters: ClassVar[bool] = False

    def family(self) -> Hashable:
        """Return what makes two such simulations the same but for `params`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Evidence:
    """One observation of `unit`: whose batches are mixed in it, one slot, or a cohort when only a sum is seen.

    Attributes:
        observed: the observed update, oriented as a gradient. channel: which message it comes from.
        simulate: simulate(x [U, B, *shape], y [U, B, C], **nuisance) -> the same keys, in the dtype of x. Evidence
            that may be attacked in one batch shares this very object.
        params: the public weights at which `observed` is EXACTLY the gradient of `plan.objective` on the unit's equally
            weighted examples, as far as the attacker believes; None where it is something else. Where `simulate` has
            an attribute `alters` that is true, what it does to that gradient comes on top.
        weight: precision of each entry (0 hides it), or of a tensor's entries alike (no axes); None for equal.
        noise: the public law of noise on `observed`. nuisance: names and shapes of unknown secrets, a sample.
        measure: how a simulation is compared: "squares" and "absolute" sum weighted differences; "cosine" is 1 - cosine
            over all entries (unknown scale); "tensors" is a mean of `floor` + 1 - cosine of each tensor (unknown
            scales) by the power 1/2, "poisoned" the geometric one (those that can be explained decide; rough to search
            on networks with kinks), "bounded" that of entries brought into -1..1 by `bounded` (some are poisoned, or
            signs alone known); "hinge", where only signs o are observed, the mean over a tensor's entries of
            relu(-s o / mean|s|), averaged over the tensors.
        floor: at which 1 - cosine a tensor counts as explained, where they are compared one by one.
    """

    unit: tuple[Slot, ...]
    observed: Params
    simulate: Simulate
    params: Params | None = None
    weight: Params | None = None
    noise: Noise | None = None
    nuisance: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    channel: str = "update"
    measure: Measure = "squares"
    floor: float = FLOOR

    @property
    def device(self) -> torch.device:
        """Where it lies, and a guess at it: `observed`, `params`, `weight` and what `simulate` holds."""
        return next(iter(self.observed.values())).device

    @property
    def compared(self) -> Evidence:
        """The same, as cheap as its measure allows: of directions, a factor on one slot's whole simulation is left out.

        It is what `simulate` may have as `unscaled`: what a client clips, by whatever norm.
        """
        plain: Simulate | None = getattr(self.simulate, "unscaled", None)
        if plain is None or len(self.unit) > 1 or self.measure not in DIRECTIONS:
            return self
        return replace(self, simulate=plain)

    def discrepancy(self, simulated: Params) -> Tensor:
        """Return how far `simulated` is from `observed` by `measure` (scalar); 0 where it explains it."""
        if self.measure == "cosine":
            return self._cosine(simulated)
        if self.measure in POWERS:
            return self._tensors(simulated)
        if self.measure == "hinge":
            return self._hinge(simulated)
        total = next(iter(simulated.values())).new_zeros(())
        for name, value in simulated.items():
            apart = value - self.observed[name].to(value.dtype)
            part = apart**2 if self.measure == "squares" else apart.abs()
            total = total + (part if self.weight is None else part * self.weight[name].to(value.dtype)).sum()
        return total

    def _cosine(self, simulated: Params) -> Tensor:
        def flat(tree: Params) -> Tensor:
            weight = self.weight
            parts = [v if weight is None else v * weight[n].to(v.dtype).sqrt() for n, v in tree.items()]
            return torch.cat([part.reshape(-1) for part in parts])

        s = flat(simulated)
        o = flat({name: self.observed[name].to(s.dtype) for name in simulated})
        cosine: Tensor = (s @ o) / (s.norm() * o.norm()).clamp(min=TINY)
        return 1 - cosine

    def _tensors(self, simulated: Params) -> Tensor:
        power, total = POWERS[self.measure], next(iter(simulated.values())).new_zeros(())
        count = total
        for name, s in simulated.items():
            o = self.observed[name].to(s.dtype)
            w = torch.ones_like(o) if self.weight is None else self.weight[name].to(s.dtype).expand_as(o)
            if self.measure == "bounded":
                s, o = (bounded((side * (w > 0)).reshape(1, -1))[0].view_as(side) for side in (s, o))
            a, b = inverse_root((w * s * s).sum()), inverse_root((w * o * o).sum())
            seen = (b != 0).to(s.dtype)
            across = (a == 0) | (b == 0)
            apart = torch.where(across, 1.0, 0.5 * (w * (a * s - b * o) ** 2).sum())  # so 1 - cosine keeps its digits
            part = torch.log(self.floor + apart) if power == 0 else (self.floor + apart) ** power
            total, count = total + seen * part, count + seen
        mean = total / count.clamp(min=1)
        return mean.exp() if power == 0 else mean ** (1 / power)

    def _hinge(self, simulated: Params) -> Tensor:
        parts = []
        for name, s in simulated.items():
            against = torch.relu(-s * self.observed[name].to(s.dtype)).mean()
            parts.append(against / s.abs().mean().clamp(min=TINY))
        return torch.stack(parts).mean()

    def scale(self) -> Tensor:
        """Return, on the CPU, the discrepancy of an all-zero simulation, which a relative mismatch is relative to.

        Cosine and hinge are relative by themselves: 1, or 0 where nothing was observed.
        """
        if self.measure in DIRECTIONS:
            return torch.tensor(float(any(bool((o != 0).any()) for o in self.observed.values())), dtype=torch.float64)
        return self.discrepancy({name: torch.zeros_like(value).double() for name, value in self.observed.items()}).cpu()


def inverse_root(size: Tensor) -> Tensor:
    """Return 1 / sqrt(size); 0 for nothing: such a gradient has no direction, and moves nothing."""
    return torch.where(size == 0, 0.0, size.clamp(min=TINY).rsqrt())


def bounded(rows: Tensor, middle: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return v / (|v| + c) of rows [S, n], and its slope; c is the median size of a row's entries that are not 0.

    No entry counts for much more than another then, whatever was put in its place; c is taken for a constant. Hidden
    entries must be 0, or they have a say in c. middle: c [S, 1] where it is known.
    """
    if middle is None:
        size = rows.detach().abs()
        middle = torch.where(size == 0, torch.nan, size).nanmedian(1, keepdim=True).values.nan_to_num(1.0)
    whole = rows.abs() + middle
    return rows / whole, middle / whole.detach().square()


@dataclass(frozen=True, eq=False)
class PlainGradient(Mappable):
    """The undefended client's computation at `params`: the gradient of `plan.objective`."""

    plan: Plan

    def family(self) -> Hashable:
        """Return the plan."""
        return PlainGradient, self.plan

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the gradient of a batch x [U, B, *shape], y [U, B, C], in the dtype of x."""
        images, labels = x.flatten(0, 1), y.flatten(0, 1)
        weights = {name: value.to(x.dtype) for name, value in self.params.items()}
        ones = torch.ones(len(images), dtype=x.dtype, device=x.device)
        return gradient(lambda p: self.plan.objective(p, images, labels, ones), weights)


def simulation(plan: Plan, params: Params) -> PlainGradient:
    """Return the undefended client's computation at `params` as a function of a guessed batch."""
    return PlainGradient(params, plan)


class Shared:
    """Simulations by weights (`make`): victims at equal weights share one object, which attacks take in one batch."""

    def __init__(self, plan: Plan, make: Callable[[Plan, Params], Simulate] = simulation) -> None:
        self.plan, self.make = plan, make
        self.models: list[Params] = []
        self.known: dict[tuple[int, tuple[float, ...]], Simulate] = {}

    def same(self, params: Params) -> Params:
        """Return the first weights that were asked about and equal `params`: one object, which attacks go by."""
        for model in self.models:
            if all(torch.equal(model[name], value) for name, value in params.items()):
                return model
        self.models.append(params)
        return params

    def at(self, params: Params, shares: tuple[float, ...] = ()) -> Simulate:
        """Return the simulation of the gradient at `params`; of the mean over a unit's slots weighted by `shares`."""
        model = self.same(params)
        if (id(model), shares) not in self.known:
            one = self.make(self.plan, model)
            self.known[id(model), shares] = _weighted(one, shares) if shares else one
        return self.known[id(model), shares]


def _weighted(one: Simulate, shares: tuple[float, ...]) -> Simulate:
    def simulate(x: Tensor, y: Tensor) -> Params:
        parts = [one(x[i : i + 1], y[i : i + 1]) for i in range(len(shares))]
        return {n: sum((w * p[n] for w, p in zip(shares, parts, strict=True)), torch.zeros(())) for n in parts[0]}

    return simulate


def as_gradient(plan: Plan, round_: int) -> float:
    """Return what an update of round `round_` is divided by to be taken for one gradient: 1, or rate times epochs."""
    return 1.0 if plan.local.upload == "gradient" else plan.local.opt.rate(round_) * plan.local.epochs


def at_truth(evidence: Evidence, x: Tensor, y: Tensor) -> float:
    """Return the discrepancy at a batch x [U, B, *shape], y [U, B, C] relative to an all-zero simulation's.

    The scorer gives the true batch: about 0 where the evidence is exact; else the noise floor, or the share of an
    unknown mechanism. Attacks, which have no truth, give a guess of their own.
    """
    simulated = tree_map(lambda t: t.detach(), evidence.simulate(x.double(), y.double()))
    return float(evidence.discrepancy(simulated) / evidence.scale().clamp(min=1e-300))
