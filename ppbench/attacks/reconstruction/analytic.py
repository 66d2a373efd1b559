"""Inputs read off the gradient of a first linear layer z = W x + b, by algebra instead of search.

For ANY scalar s of the network ds/dW = sum_n d_n x_n^T and ds/db = sum_n d_n with d_n = ds/dz_n. One example: row i of
ds/dW is x times entry i of ds/db (Phong et al. 2018, Sec. III). More: the row of a ReLU unit that only one example
fires holds that example alone (Boenisch et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import scipy
import torch
from torch import Tensor, nn

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.labels import read_labels
from ppbench.attacks.reconstruction.search.starts import PosedVictim, posed
from ppbench.base.tree import Params
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

# -- The rows of a first linear layer's gradient, and the images in them, by algebra without simulation --

COPY = 1e-4
"""Rows count as copies of one example within this distance: root mean square over the pixels, of the data range."""
DEAD_BIAS = 1e-12
"""Bias gradients below this share of the largest one are rounding."""
NOISE_CHANCE = 1e-9
"""Chance that rows of noise pass for rows of an image."""
NOISE_EDGE = 1.2
"""Least energy of a direction that shows an image, relative to the largest of noise alone (Marchenko and Pastur)."""


@dataclass(frozen=True)
class LayerRows:
    """A layer's gradients [H, D] and [H], 0 without bias, and their precisions: float64 on CPU, 0 if hidden."""

    weight: Tensor
    bias: Tensor
    seen: Tensor
    seen_bias: Tensor

    @property
    def alive(self) -> Tensor:
        """[H] bool: units whose bias gradient is observed and larger than rounding."""
        size = self.bias.abs()
        return (self.seen_bias > 0) & (size > DEAD_BIAS * size.max())

    def without(self, members: Tensor) -> LayerRows:
        """Return the rows with the units `members` [H] bool hidden."""
        hide = ~members
        return LayerRows(self.weight, self.bias, self.seen * hide[:, None], self.seen_bias * hide)


@dataclass(frozen=True)
class FirstLayer:
    """Names of a first linear layer's trained parameters; bias None if it has none, or a frozen one."""

    weight: str
    bias: str | None

    def rows(self, evidence: Evidence) -> LayerRows | None:
        """Return the layer's rows in `evidence`, or None if they are not observed or all 0."""
        if self.weight not in evidence.observed:
            return None
        weight, seen = _part(evidence, self.weight)
        bias, seen_bias = torch.zeros(len(weight), dtype=torch.float64), torch.zeros(len(weight), dtype=torch.float64)
        if self.bias is not None and self.bias in evidence.observed:
            bias, seen_bias = _part(evidence, self.bias)
        return LayerRows(weight, bias, seen, seen_bias) if bool((weight != 0).any()) else None


def _part(evidence: Evidence, name: str) -> tuple[Tensor, Tensor]:
    """Return one observed tensor and its precisions, float64 on CPU, both 0 for entries not finite or not sent."""
    value = evidence.observed[name].detach().double().cpu()
    seen = torch.ones_like(value) if evidence.weight is None else evidence.weight[name].detach().double().cpu()
    seen = seen * value.isfinite()
    return torch.where(seen > 0, value, 0.0), seen


def first_layer(plan: Plan) -> FirstLayer | None:
    """Return the linear layer that the flattened input enters; None if there is none, or if it is frozen."""
    module = plan.net.module
    for layer in [*_in_order(module.layers if module.layers is not None else module.features), module.head]:
        if isinstance(layer, nn.Flatten | nn.Identity):
            continue
        if not isinstance(layer, nn.Linear) or layer.in_features != math.prod(plan.spec.shape):
            return None
        return trained_layer(plan, layer)
    return None


def _in_order(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that a module calls in sequence, or itself if it is no plain `nn.Sequential`."""
    if type(module).forward is not nn.Sequential.forward:
        yield module
    else:
        for part in module.children():
            yield from _in_order(part)


def trained_layer(plan: Plan, layer: nn.Linear) -> FirstLayer | None:
    """Return the names of a linear layer's parameters; None if its weight is frozen, or computed from others."""
    names = {id(value): name for name, value in plan.net.module.named_parameters() if value.requires_grad}
    weight = names.get(id(layer.weight))
    return None if weight is None else FirstLayer(weight, names.get(id(layer.bias)))


def mean_image(rows: LayerRows) -> Tensor | None:
    """Return x [D] minimizing sum_ij seen_ij (dW_ij - db_i x_j)^2; None if the rows are noise by an F-test."""
    seen = rows.seen * rows.alive[:, None]
    if not bool((seen > 0).any()):
        return None
    weight, bias = rows.weight / rows.weight.abs().max(), rows.bias[:, None] / rows.bias.abs().max()
    power = (seen * bias**2).sum(0)
    known = power > 0
    slope = torch.where(known, (seen * bias * weight).sum(0) / power.clamp(min=1e-300), 0.0)
    left, whole = float((seen * (weight - bias * slope) ** 2).sum()), float((seen * weight**2).sum())
    units, pixels = int((seen > 0).any(1).sum()), int(known.sum())
    needed = 0.0 if units == 1 else float(scipy.stats.f.isf(NOISE_CHANCE, pixels, (units - 1) * pixels))
    if whole == 0 or (whole - left) * (units - 1) < needed * left:
        return None
    x = slope * (rows.weight.abs().max() / rows.bias.abs().max())
    return torch.where(known, x, x[known].mean())


def leading_direction(rows: LayerRows) -> Tensor | None:
    """Return the leading right singular vector [D] of dW by weighted least squares, up to sign; None for noise."""
    weight, seen = rows.weight / rows.weight.abs().max(), rows.seen
    x = weight[weight.norm(dim=1).argmax()]
    left = x.new_zeros(len(weight))
    for _ in range(100):
        before, x = x, x / x.norm().clamp(min=1e-300)
        left = (seen * weight * x).sum(1) / (seen * x**2).sum(1).clamp(min=1e-300)
        x = (seen * weight * left[:, None]).sum(0) / (seen * left[:, None] ** 2).sum(0).clamp(min=1e-300)
        if torch.allclose(x, before, rtol=1e-12, atol=0.0):
            break
    rest = float((seen * (weight - left[:, None] * x) ** 2).sum())
    energy = float((seen * weight**2).sum()) - rest
    units, pixels = int((seen > 0).any(1).sum()), int((seen > 0).any(0).sum())
    noise = rest / float((seen > 0).sum()) * (math.sqrt(units) + math.sqrt(pixels)) ** 2
    if min(units, pixels) > 1 and energy <= NOISE_EDGE * noise:
        return None
    unit: Tensor = x / x.norm()
    return unit


@dataclass(frozen=True)
class Recurring:
    """Examples that a batch's rows show exactly: images [E, D] float64, and members [H] bool, their rows."""

    images: Tensor
    members: Tensor


def recurring_rows(rows: LayerRows, count: int, data_range: tuple[float, float]) -> Recurring:
    """Return at most `count` images in the data range that recur among the rows dW_i / db_i, most frequent first.

    An image between others is dropped: with one output, units that the same examples fire show one mixture of them.
    """
    low, high = data_range
    slack = COPY * (high - low)
    members = torch.zeros(len(rows.bias), dtype=torch.bool)
    whole = rows.alive & (rows.seen > 0).all(1)
    ratios = rows.weight / torch.where(whole, rows.bias, 1.0)[:, None]
    index = (whole & (ratios >= low - slack).all(1) & (ratios <= high + slack).all(1)).nonzero()[:, 0]
    near = torch.cdist(ratios[index], ratios[index]) <= slack * math.sqrt(ratios.shape[1])
    recurring: list[tuple[Tensor, Tensor]] = []
    free = torch.ones(len(index), dtype=torch.bool)
    for i in near.sum(1).argsort(descending=True, stable=True).tolist():
        copies = near[i] & free
        if not free[i] or int(copies.sum()) < 2:
            continue
        free = free & ~copies
        power = rows.bias[index[copies]] ** 2
        recurring.append(((power[:, None] * ratios[index[copies]]).sum(0) / power.sum(), index[copies]))
    chosen = _corners(recurring[: 4 * count], slack)[:count]
    for _, places in chosen:
        members[places] = True
    images = [image for image, _ in chosen]
    return Recurring(torch.stack(images) if images else rows.weight.new_zeros(0, rows.weight.shape[1]), members)


def _corners(recurring: list[tuple[Tensor, Tensor]], slack: float) -> list[tuple[Tensor, Tensor]]:
    """Return those (image, rows) whose image is no convex combination of the others' images."""
    if len(recurring) < 3:
        return recurring
    images = torch.stack([image for image, _ in recurring])
    heavy = 1e3 * float(images.abs().max().clamp(min=1e-12)) * torch.ones(1, len(recurring), dtype=images.dtype)
    columns = torch.cat([images.T, heavy]).numpy()  # the last row makes weights sum to 1
    kept = []
    for i, item in enumerate(recurring):
        others = [j for j in range(len(recurring)) if j != i]
        _, distance = scipy.optimize.nnls(columns[:, others], columns[:, i])
        if distance > 10 * slack * math.sqrt(images.shape[1]):
            kept.append(item)
    return kept


EXPLAINED_MISMATCH = 1e-6
"""Relative mismatch below which a guess explains the observation: no other label is tried."""
ROUNDED_MISMATCH = 1e-12
"""Relative mismatch that the rounding of a float32 observation leaves: smaller ones count as 0."""
GRID_SCALES = 16
"""Scales evaluated before the search between two of them."""
SCALE_STEPS = 60
"""Evaluations of that search, at most."""


@dataclass(frozen=True)
class Match:
    """A guess of one example: image [D] float64, label, and its relative mismatch (inf if it is not finite)."""

    image: Tensor
    label: int
    mismatch: float


class Mismatch:
    """The discrepancy of one example, relative to that of an all-zero simulation, with a limit on evaluations."""

    def __init__(self, evidence: Evidence, plan: Plan, budget: int) -> None:
        self.evidence = evidence
        self.plan = plan
        self.budget = budget
        self.spent = 0
        self.price = 2 if plan.spec.classes == 1 else 1
        self.scale = float(evidence.scale())
        self.nuisance = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in evidence.nuisance.items()}

    @property
    def left(self) -> int:
        """Evaluations that may still be spent."""
        return self.budget - self.spent

    def __call__(self, image: Tensor, label: int) -> float:
        """Return the mismatch of image [D] with a label, or with the best target; inf: not finite, or no budget."""
        classes = self.plan.spec.classes
        if self.left < self.price:
            return math.inf
        if classes > 1:
            target = torch.nn.functional.one_hot(torch.tensor([label]), classes).double()
            value = self._relative(self._simulated(image, target))
        else:
            at0, at1 = (
                self._simulated(image, torch.full((1, 1), target, dtype=torch.float64)) for target in (0.0, 1.0)
            )
            value = self._relative(self._best_target(at0, at1))
        return value if math.isfinite(value) else math.inf

    def _simulated(self, image: Tensor, y: Tensor) -> Params:
        self.spent += 1
        x = image.double().view(1, 1, *self.plan.spec.shape)
        with torch.no_grad():
            return self.evidence.simulate(x, y[None], **self.nuisance)

    def _relative(self, simulated: Params) -> float:
        return float(self.evidence.discrepancy(simulated)) / self.scale if self.scale > 0 else math.inf

    def _best_target(self, at0: Params, at1: Params) -> Params:
        """Return at0 + t (at1 - at0) for the t that is nearest to the observation."""
        over = under = torch.zeros((), dtype=torch.float64)
        for name, value in at0.items():
            step = at1[name] - value
            weighted = step if self.evidence.weight is None else step * self.evidence.weight[name].double()
            over = over + (weighted * (self.evidence.observed[name].double() - value)).sum()
            under = under + (weighted * step).sum()
        t = over / under.clamp(min=1e-300)
        return {name: value + t * (at1[name] - value) for name, value in at0.items()}


def best_label(mismatch: Mismatch, image: Tensor, label: int, granted: bool) -> Match:
    """Return the match of a known image with `label`, or with the class that explains best if that is not `granted`."""
    best = Match(image, label, mismatch(image, label))
    if granted or best.mismatch <= EXPLAINED_MISMATCH:
        return best
    others = [Match(image, c, mismatch(image, c)) for c in range(mismatch.plan.spec.classes) if c != label]
    return min([best, *others], key=lambda match: match.mismatch)


def best_scale(mismatch: Mismatch, image: Tensor, labels: Sequence[int]) -> Match:
    """Return the match with the least mismatch over multiples of `image` [D] and labels: by a grid, then a search."""
    low, high = mismatch.plan.data_range
    unit = image / image.abs().max()
    end = max(abs(low), abs(high)) or 1.0
    best, step = Match(unit * 0, labels[0], math.inf), end / GRID_SCALES
    place = 0.0
    for label in labels:
        for sign in _signs(unit, low, high):
            for k in range(GRID_SCALES, 0, -1):
                value = mismatch(sign * k * step * unit, label)
                if value < best.mismatch and best.mismatch > ROUNDED_MISMATCH:
                    place, best = sign * k * step, Match(sign * k * step * unit, label, value)
    if not ROUNDED_MISMATCH < best.mismatch < math.inf or mismatch.left < mismatch.price:
        return best
    result = scipy.optimize.minimize_scalar(
        lambda scale: min(mismatch(scale * unit, best.label), 1e300),  # beyond the budget: a large finite value
        bounds=(place - step, place + step),
        method="bounded",
        options={"xatol": 1e-12 * end, "maxiter": min(SCALE_STEPS, mismatch.left // mismatch.price)},
    )
    if result.fun < best.mismatch:
        return Match(float(result.x) * unit, best.label, float(result.fun))
    return best


def _signs(unit: Tensor, low: float, high: float) -> tuple[float, ...]:
    """Return the signs that a direction may have: one if all data are on one side of 0."""
    up = 1.0 if float(unit.sum()) >= 0 else -1.0
    if low >= 0:
        return (up,)
    return (-up,) if high <= 0 else (up, -up)


@dataclass(frozen=True)
class AnalyticInversion(Attack):
    """Analytic inversion of a first `nn.Linear` on the flattened input.

    From an observation that is the gradient of some scalar of the network it recovers:
    - one example, layer with biases: x by weighted least squares over all units, exact up to rounding; hidden entries
      (`Evidence.weight` 0) and those not finite are ignored.
    - one example, no biases: x up to its scale is the leading right singular vector; the sign comes from the data
      range, scale and label from a search for the smallest mismatch; `budget` limits these evaluations.
    - a batch, biases and ReLU: exactly each example that fires at least two units alone (their rows over the bias
      gradient are copies); the rest of the batch gets the mean of the remaining rows.
    Otherwise, or if rows agree on an image no better than noise would, the answer is a start image.
    """

    name: ClassVar[str] = "analytic"
    kind: ClassVar[Kind] = "reconstruction"
    reference: ClassVar[str] = (
        "Phong et al., Privacy-Preserving Deep Learning via Additively Homomorphic Encryption, IEEE TIFS 2018; "
        "Boenisch et al., When the Curious Abandon Honesty: Federated Learning Is Not Private, EuroS&P 2023"
    )

    budget: PositiveInt = 2000

    def suits(self, plan: Plan) -> bool:
        """Return whether the network of `plan` begins with a linear layer on the flattened input."""
        return first_layer(plan) is not None

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge; a grey start image and confidence None if the evidence shows no image."""
        return self.answer(self.evidence(view), view.plan, challenges, generator)

    def answer(
        self, evidence: Sequence[Evidence], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator
    ) -> list[Guess]:
        """Return the guesses of `run` from given evidence, for instance that of another attack."""
        self.check()
        layer = first_layer(plan)
        return [self._answer(victim, layer) for victim in posed(evidence, plan, challenges, generator)]

    def _answer(self, victim: PosedVictim, layer: FirstLayer | None) -> Guess:
        start, labels = victim.image("grey"), guessed_labels(victim)
        rows = None if layer is None or victim.evidence is None else layer.rows(victim.evidence)
        if rows is None or victim.evidence is None:
            return Guess(x=start, y=labels, evaluations=1)
        if victim.size[0] > 1:
            exact = recurring_rows(rows, victim.size[0], victim.plan.data_range)
            rest = mean_image(rows.without(exact.members))
            images = start.flatten(1).double() if rest is None else rest.expand(len(start), -1)
            images = torch.cat([exact.images, images[len(exact.images) :]])
            return Guess(x=images.view(victim.size).float(), y=labels, evaluations=1)
        mismatch = Mismatch(victim.evidence, victim.plan, self.budget)
        image = mean_image(rows)
        match: Match | None
        if image is not None:
            match = best_label(mismatch, image, int(labels), victim.challenge.y is not None)
        else:
            match = self._scaled(victim, mismatch, leading_direction(rows), int(labels))
        spent = max(1, mismatch.spent)  # reading the gradient counts as one
        if match is None:
            return Guess(x=start, y=labels, evaluations=spent)
        confidence = match.mismatch if math.isfinite(match.mismatch) else None
        x, y = match.image.view(victim.size).float(), torch.tensor([match.label])
        return Guess(x=x, y=y, confidence=confidence, evaluations=spent)

    def _scaled(self, victim: PosedVictim, mismatch: Mismatch, image: Tensor | None, label: int) -> Match | None:
        """Return the best multiple of a direction: with the guessed label, or with others if that explains little."""
        if image is None:
            return None
        best = best_scale(mismatch, image, [label])
        if victim.challenge.y is None and best.mismatch > EXPLAINED_MISMATCH and victim.plan.spec.classes > 1:
            others = [c for c in range(victim.plan.spec.classes) if c != label]
            best = min(best, best_scale(mismatch, image, others), key=lambda match: match.mismatch)
        return best if math.isfinite(best.mismatch) else None


def guessed_labels(victim: PosedVictim) -> Tensor:
    """Return labels [N] int64: granted, or read off the head's gradient, or drawn if there is none."""
    if victim.challenge.y is not None:
        return victim.challenge.y.flatten(0, 1).argmax(-1)
    return read_labels(victim.evidence, victim.plan, victim.size[0], victim.generator)
