"""Evidence about one victim's gradient in a View: the observation, and a differentiable simulation of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params, tree_map
from ppbench.federation.plan import Noise, Plan
from ppbench.federation.wire import Slot
from ppbench.nets.modes import STATISTICS

Simulate = Callable[..., Params]
Measure = Literal["squares", "absolute", "cosine", "tensors", "poisoned", "bounded", "hinge"]
POWERS: Mapping[str, float] = {"tensors": 0.5, "poisoned": 0.0, "bounded": 0.0}
"""Measures that compare tensor by tensor, with the power of their mean; 0: the geometric mean."""
DIRECTIONS = ("cosine", "hinge", *POWERS)
"""Measures that are invariant to the scale of the whole simulation."""
SMALLEST_SQUARE, TINIEST_SQUARE = 1e-30, 1e-37
EXPLAINED_FLOOR = 1e-4
"""1 - cosine at which a tensor counts as explained: a closer fit does not compensate for another tensor."""


@dataclass(frozen=True, eq=False)
class Mappable:
    """A `simulate` that runs under vmap over victims: it draws nothing and branches on no value.

    params: all its tensors; simulations of one `family` differ in nothing else. Other fields are compared.
    alters: whether it changes the gradient at `Evidence.params`; then no search may use that gradient instead.
    """

    params: Params
    alters: ClassVar[bool] = False

    def family(self) -> Hashable:
        """Return a key that is equal for simulations that differ only in the values of `params`."""
        return type(self), len(self.params), *(getattr(self, f.name) for f in fields(self) if f.name != "params")


@dataclass(frozen=True)
class Evidence:
    """One observation of `unit`, the slots whose batches are mixed in it: one, or a cohort if only a sum is visible.

    Attributes:
        observed: the observed update, oriented as a gradient. channel: the kind of message it comes from.
        simulate: simulate(x [U, B, *shape], y [U, B, C], **nuisance) -> the same keys, in the dtype of x. Evidence
            that may be attacked in one batch shares this very object.
        params: the public weights at which `observed` is EXACTLY the gradient of `plan.objective` on the unit's equally
            weighted examples, as far as the attacker believes; None if it is something else. If `simulate.alters` is
            true, that gradient is also changed by `simulate`.
        weight: precision of each entry (0 hides it), or one number for a tensor (no axes); None for equal weights.
        noise: the public law of noise on `observed`. nuisance: names and shapes of unknown secrets, per sample.
        measure: how a simulation is compared: "squares" and "absolute" sum weighted differences; "cosine" is 1 - cosine
            over all entries (unknown scale); "tensors" is the power mean (1/2) of `floor` + 1 - cosine of each tensor
            (unknown scales), "poisoned" the geometric mean (tensors that can be explained decide; rough to search on
            networks with kinks), "bounded" the same of entries mapped into -1..1 by `softsign` (some are poisoned, or
            only signs known); "hinge", if only signs o are observed, the mean over a tensor's entries of
            relu(-s o / mean|s|), averaged over the tensors.
        floor: 1 - cosine at which a tensor counts as explained, for measures that compare tensor by tensor.
        statistics: by name, [2, C], how the batch statistics among `observed` count (`units_of`). They are compared by
            `_of_statistics`, whatever the measure of the rest, and relative to what an all-zero simulation leaves of
            that.
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
    floor: float = EXPLAINED_FLOOR
    statistics: Params = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of all its tensors and of guesses at it."""
        return next(iter(self.observed.values())).device

    @property
    def compared(self) -> Evidence:
        """Equivalent evidence with a cheaper simulation: scale-invariant measures of one slot omit a common factor.

        `simulate.unscaled`, if there is one, is the simulation without the factor, for instance before clipping.
        """
        plain: Simulate | None = getattr(self.simulate, "unscaled", None)
        if plain is None or len(self.unit) > 1 or self.measure not in DIRECTIONS:
            return self
        return replace(self, simulate=plain)

    def discrepancy(self, simulated: Params) -> Tensor:
        """Return the distance of `simulated` from `observed` by `measure` (scalar); 0 for an exact explanation."""
        if self.statistics and not self.statistics.keys().isdisjoint(simulated):
            rest = {name: value for name, value in simulated.items() if name not in self.statistics}
            return self.discrepancy(rest) + self._rest * self._of_statistics(simulated)
        if self.measure == "cosine":
            return self._cosine(simulated)
        if self.measure in POWERS:
            return self._tensors(simulated)
        if self.measure == "hinge":
            return self._hinge(simulated)
        total = next(iter(simulated.values())).new_zeros(())
        for name, value in simulated.items():
            difference = value - self.observed[name].to(value.dtype)
            part = difference**2 if self.measure == "squares" else difference.abs()
            total = total + (part if self.weight is None else part * self.weight[name].to(value.dtype)).sum()
        return total

    @cached_property
    def _rest(self) -> Tensor:
        """What an all-zero simulation leaves of all but the batch statistics."""
        return self.discrepancy({n: torch.zeros_like(o) for n, o in self.observed.items() if n not in self.statistics})

    def _of_statistics(self, simulated: Params) -> Tensor:
        """Return the weighted sum of squared errors of the batch statistics, see `units_of`.

        Of a variance errors beyond a unit count by their logarithm (asinh): rough images have a hundred times the
        variance of smooth ones in channels that see edges, and by plain squares these channels alone would be searched.
        """
        total = next(iter(simulated.values())).new_zeros(())
        for name, known in self.statistics.items():
            units, weight = known.to(simulated[name].dtype)
            error = units * (simulated[name] - self.observed[name].to(units.dtype))
            total = total + (weight * (error.asinh() if name.endswith(STATISTICS[1]) else error).square()).sum()
        return total

    def _cosine(self, simulated: Params) -> Tensor:
        """Return 1 - cosine of all tensors together; summed tensor by tensor, as a copy of all takes twice the time."""
        across = own = other = next(iter(simulated.values())).new_zeros(())
        for name, s in simulated.items():
            o = self.observed[name].to(s.dtype)
            weighted = s if self.weight is None else s * self.weight[name].to(s.dtype)
            across, own = across + (weighted * o).sum(), own + (weighted * s).sum()
            other = other + (o * o if self.weight is None else o * o * self.weight[name].to(s.dtype)).sum()
        # clamped inside the roots too: a gradient of zeros has the cosine 0, and a slope that is finite
        lengths = [part.clamp(min=TINIEST_SQUARE).sqrt() for part in (own, other)]
        cosine: Tensor = across / (lengths[0] * lengths[1]).clamp(min=SMALLEST_SQUARE)
        return 1 - cosine

    def _tensors(self, simulated: Params) -> Tensor:
        power, total = POWERS[self.measure], next(iter(simulated.values())).new_zeros(())
        count = total
        for name, s in simulated.items():
            o = self.observed[name].to(s.dtype)
            w = torch.ones_like(o) if self.weight is None else self.weight[name].to(s.dtype).expand_as(o)
            if self.measure == "bounded":
                s, o = (softsign((side * (w > 0)).reshape(1, -1))[0].view_as(side) for side in (s, o))
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
            against = torch.threshold(-s * self.observed[name].to(s.dtype), 0.0, 0.0).mean()  # a ReLU never smoothed
            parts.append(against / s.abs().mean().clamp(min=SMALLEST_SQUARE))
        return torch.stack(parts).mean()

    def scale(self) -> Tensor:
        """Return the discrepancy of an all-zero simulation, the unit of relative mismatches; on the CPU.

        Scale-invariant measures are already relative: 1, or 0 if all observed entries are 0.
        """
        if self.measure in DIRECTIONS:
            return torch.tensor(float(any(bool((o != 0).any()) for o in self.observed.values())), dtype=torch.float64)
        rest = {name: torch.zeros_like(o).double() for name, o in self.observed.items() if name not in self.statistics}
        return self.discrepancy(rest).cpu()


# -- Several observations of the same batch, as one --


def numbered(trees: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries of several trees in one, named NUMBER/NAME with numbers from 0."""
    return {f"{number}/{name}": value for number, tree in enumerate(trees) for name, value in tree.items()}


def with_number(tree: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the entries of one of the trees that `numbered` joined, by their own names."""
    prefix = f"{number}/"
    return {name.removeprefix(prefix): value for name, value in tree.items() if name.startswith(prefix)}


@dataclass(frozen=True, eq=False)
class JointSimulation:
    """The simulated updates of one batch in several observations, in one tree (`numbered`)."""

    parts: tuple[Evidence, ...]

    def __call__(self, x: Tensor, y: Tensor, **nuisance: Tensor) -> Params:
        """Return the updates for x [U, B, *shape], y [U, B, C]; each part has its own nuisance unknowns."""
        return numbered([part.simulate(x, y, **with_number(nuisance, i)) for i, part in enumerate(self.parts)])


@dataclass(frozen=True)
class JointEvidence(Evidence):
    """Several observations of the same batch as one, for instance of two rounds in which a client holds it.

    Its discrepancy is the sum of the parts', each relative to the part's `scale`; the fields of the parts count,
    `measure` and `weight` of the whole mean nothing. Searches evaluate each part on its own fast path.
    """

    parts: tuple[Evidence, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Evidence]) -> JointEvidence:
        """Return the evidence of two or more `parts` about one unit."""
        each = tuple(parts)
        return cls(
            each[0].unit,
            numbered([part.observed for part in each]),
            JointSimulation(each),
            nuisance=numbered([part.nuisance for part in each]),
            channel=each[0].channel,
            parts=each,
        )

    @property
    def mean(self) -> Evidence:
        """The first part with the mean update of all parts that have its tensors: in it independent noises average."""
        first = self.parts[0]
        alike = [part.observed for part in self.parts if part.observed.keys() == first.observed.keys()]
        return replace(first, observed={n: torch.stack([one[n] for one in alike]).mean(0) for n in first.observed})

    def discrepancy(self, simulated: Params) -> Tensor:
        """Return the sum of the parts' relative distances (scalar); 0 for an exact explanation of all of them."""
        whole = next(iter(simulated.values())).new_zeros(())
        for number, part in enumerate(self.parts):
            distance = part.discrepancy(with_number(simulated, number))
            whole = whole + distance / part.scale().clamp(min=SMALLEST_SQUARE).to(distance)
        return whole

    def scale(self) -> Tensor:
        """Return the number of parts; 0 if one of them observes nothing."""
        count = len(self.parts) if all(float(part.scale()) > 0 for part in self.parts) else 0
        return torch.tensor(float(count), dtype=torch.float64)


def joint_evidence(observations: Sequence[Sequence[Evidence]]) -> list[Evidence]:
    """Return one `JointEvidence` for each unit that is seen in all of `observations`, lists such as those of rounds.

    Of several pieces about a unit in one list the first counts. Units are in the order of the first list.
    """
    by_unit: list[dict[tuple[Slot, ...], Evidence]] = [{} for _ in observations]
    for known, pieces in zip(by_unit, observations, strict=True):
        for piece in pieces:
            known.setdefault(piece.unit, piece)
    units = [unit for unit in by_unit[0] if all(unit in known for known in by_unit)] if by_unit else []
    return [JointEvidence.of([known[unit] for known in by_unit]) for unit in units]


def inverse_root(size: Tensor) -> Tensor:
    """Return 1 / sqrt(size), but 0 for 0: a zero gradient has no direction.

    Sizes below the clamp lose their direction by and by; of smaller ones the slope, size^-1.5 / 2, overflows.
    """
    least = 1e-25 if size.dtype == torch.float32 else SMALLEST_SQUARE
    return torch.where(size == 0, 0.0, size.clamp(min=least).rsqrt())


def softsign(rows: Tensor, middle: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return v / (|v| + c) of rows [S, n], and its slope; c is the median size of a row's nonzero entries.

    It limits the influence of each entry. c is treated as a constant in the slope. Hidden entries must be 0, or they
    influence c. middle: c [S, 1] if it is already known.
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

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the gradient of a batch x [U, B, *shape], y [U, B, C], in the dtype of x."""
        images, labels = x.flatten(0, 1), y.flatten(0, 1)
        weights = {name: value.to(x.dtype) for name, value in self.params.items()}
        ones = torch.ones(len(images), dtype=x.dtype, device=x.device)
        return gradient(lambda p: self.plan.objective(p, images, labels, ones), weights)


@dataclass(frozen=True, eq=False)
class PartGradient(Mappable):
    """The part `names` of the undefended client's gradient at `params`."""

    plan: Plan
    names: frozenset[str]

    alters: ClassVar[bool] = True

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the gradient of these parameters for a batch x [U, B, *shape], y [U, B, C], in the dtype of x."""
        whole = PlainGradient(self.params, self.plan)(x, y)
        return {name: value for name, value in whole.items() if name in self.names}


def simulation(plan: Plan, params: Params) -> PlainGradient:
    """Return the simulation of an undefended client at `params`."""
    return PlainGradient(params, plan)


class Shared:
    """Simulations by weights, from `make`: victims with equal weights share one object, so attacks can batch them."""

    def __init__(self, plan: Plan, make: Callable[[Plan, Params], Simulate] = simulation) -> None:
        self.plan, self.make = plan, make
        self.models: list[Params] = []
        self.known: dict[tuple[int, tuple[float, ...]], Simulate] = {}

    def same(self, params: Params) -> Params:
        """Return the first weights seen that equal `params`: one object for all victims."""
        for model in self.models:
            if all(torch.equal(model[name], value) for name, value in params.items()):
                return model
        self.models.append(params)
        return params

    def at(self, params: Params, shares: tuple[float, ...] = ()) -> Simulate:
        """Return the simulation of the gradient at `params`; with `shares`, of the weighted mean over slots."""
        model = self.same(params)
        if (id(model), shares) not in self.known:
            simulate = self.make(self.plan, model)
            self.known[id(model), shares] = _weighted_mean(simulate, shares) if shares else simulate
        return self.known[id(model), shares]

    def mean(
        self, unit: tuple[Slot, ...], observed: Params, params: Params, shares: Sequence[float], channel: str
    ) -> Evidence:
        """Return evidence from a mean gradient of `unit` at `params`; shares: of its slots, in order, 1 together.

        The mean of equal batches is the gradient of all of them together; an unequally weighted one is none, nor one of
        a network with tracked norms, each of whose batches has its own statistics.
        """
        equal = max(shares) - min(shares) < 1e-12 and not (self.plan.net.statistics and len(shares) > 1)
        simulate = self.at(params, () if equal else tuple(shares))
        statistics = units_of(self.plan, params, observed)
        return Evidence(unit, observed, simulate, params if equal else None, channel=channel, statistics=statistics)


def _weighted_mean(simulate_slot: Simulate, shares: tuple[float, ...]) -> Simulate:
    def simulate(x: Tensor, y: Tensor) -> Params:
        parts = [simulate_slot(x[i : i + 1], y[i : i + 1]) for i in range(len(shares))]
        return {n: sum((w * p[n] for w, p in zip(shares, parts, strict=True)), torch.zeros(())) for n in parts[0]}

    return simulate


def as_gradient(plan: Plan, round_: int) -> float:
    """Return the divisor that turns an update of round `round_` into a gradient: 1, or rate times epochs."""
    return 1.0 if plan.local.upload == "gradient" else plan.local.opt.rate(round_) * plan.local.epochs


def as_gradients(plan: Plan, round_: int, change: Params, parts: float = 1.0) -> Params:
    """Return one of `parts` of an update of round `round_` as a gradient: divided by `as_gradient`.

    Running statistics by how far they moved: the result is these minus the batch's, as in `Plan.objective`.
    """
    divisor = parts * as_gradient(plan, round_)
    if divisor == 1 and not plan.net.statistics:
        return change
    whole = dict.fromkeys(plan.net.statistics, 1.0)
    shares = whole if plan.local.upload == "gradient" else moved_shares(plan, plan.local.epochs)
    return {n: value / (parts * shares[n] if n in shares else divisor) for n, value in change.items()}


def moved_shares(plan: Plan, steps: int) -> dict[str, float]:
    """Return by name the share of the way to batch statistics, equal ones, that running statistics move in `steps`."""
    return {name: 1 - (1 - share) ** steps for name, share in plan.net.statistics.items()}


LEAST_VARIANCE = 1e-5
"""torch's eps: a channel that hardly varies is not compared more closely than its norm divides by."""

IMPORTANCE = 33.0
"""Weight of the statistics beside the gradient where there are as many as numbers in an input; else it goes with the
root of their ratio. Single photographs of 32x32, `ig`: on two convolutions (44 statistics, random, three images, 200
evaluations) 15 times as much loses 3 dB, an eighth of it 2; on ResNet-18 (9,600, trained, one image, 100 evaluations) a
tenth of it loses 10. Two norms of 24 channels in all and a digit of 8x8, `dlg`: 92 dB, by a seventh of it 13."""
STEPS_APART = 0.1
"""Share of the running variance below which no batch's is taken to be, where several steps, of unknown number, moved
it."""


def units_of(plan: Plan, params: Params, observed: Params) -> Params:
    """Return by name [2, C] how the batch statistics in an observed gradient at `params` count.

    First how many units one is: the unit of a mean is the channel's standard deviation, of a variance itself. Then the
    weight of a squared error in units: all norms weigh alike. Empty for networks without tracked norms.
    """
    least, names = STEPS_APART if plan.local.upload == "delta" else 0.0, [*plan.net.statistics]
    pairs = [pair for pair in zip(names[::2], names[1::2], strict=True) if observed.keys() >= {*pair}]
    ratio = sum(2 * observed[mean].numel() for mean, _ in pairs) / math.prod(plan.spec.shape)
    known = dict[str, Tensor]()
    for mean, spread in pairs:
        variance = torch.maximum(params[spread] - observed[spread], least * params[spread]) + LEAST_VARIANCE
        weight = IMPORTANCE * math.sqrt(ratio) / (2 * len(pairs) * variance.numel())
        for name, units in ((mean, variance.rsqrt()), (spread, variance.reciprocal())):
            known[name] = torch.stack([units, torch.full_like(units, weight)])
    return known


def at_truth(evidence: Evidence, x: Tensor, y: Tensor) -> float:
    """Return the discrepancy at a batch x [U, B, *shape], y [U, B, C] relative to an all-zero simulation's.

    The scorer passes the true batch: the result is about 0 if the evidence is exact, else the share of noise or of an
    unknown mechanism. Attacks, which do not know the truth, pass a guess.
    """
    simulated = tree_map(lambda t: t.detach(), evidence.simulate(x.double(), y.double()))
    return float(evidence.discrepancy(simulated) / evidence.scale().clamp(min=1e-300))


def misfit(evidence: Evidence, x: Tensor, y: Tensor, data_range: tuple[float, float]) -> float:
    """Return how badly a guess x [U, B, *shape], y [U, B, C] explains an exact observation; inf if it is not finite.

    For comparing answers of several attacks without the truth: the squared mean over tensors of the root of 1 - cosine,
    0 to 2, of images clipped to the data range. Each tensor counts alike, or the examples with the largest gradients
    decide; what a search hides outside the range explains nothing.
    """
    low, high = data_range
    value = at_truth(replace(evidence, measure="tensors", floor=0.0), x.clamp(low, high), y)
    return value if math.isfinite(value) else math.inf
