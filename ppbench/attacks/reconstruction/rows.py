"""The rows of a first linear layer's gradient, and the images in them, by algebra without simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from scipy import stats
from scipy.optimize import nnls
from torch import Tensor, nn

from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan

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
    needed = 0.0 if units == 1 else float(stats.f.isf(NOISE_CHANCE, pixels, (units - 1) * pixels))
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
        _, distance = nnls(columns[:, others], columns[:, i])
        if distance > 10 * slack * math.sqrt(images.shape[1]):
            kept.append(item)
    return kept
