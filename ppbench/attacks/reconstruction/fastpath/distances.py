"""Simulated against observed gradients, layer by layer: the discrepancy, and its slope by the simulated gradient.

With s and o the two gradients and w the precisions, all parameters together: "squares" is sum w (s - o)^2, "cosine" is
1 - cos = 1/2 sum w (s/|s| - o/|o|)^2 with |s|^2 = sum w s^2. Both slopes are w (p s - q o) with one p and q per victim:
2 and 2, or (1 - D) / |s|^2 and 1 / (|s| |o|).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ppbench.attacks.reconstruction.fastpath.convolution import Convolution
from ppbench.attacks.reconstruction.fastpath.layers import Affine, Direction, Memo, Outer
from ppbench.base.tree import Params, node, tree_map
from ppbench.federation.evidence import SMALLEST_SQUARE, inverse_root, softsign

RANK_ONE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Largest relative distance of an observed gradient from the outer product that it counts as: rounding, not noise."""


@node
class LayerTarget:
    """The observed gradient of one layer, for V victims.

    rows: [V, O, K] observed weight gradient, or `Outer` (R = 1) if it is one up to rounding.  bias: [V, O] or None.
    weight, bias_weight: precisions in the shapes of rows and bias, or [V, 1, 1] and [V, 1] if equal for all entries, or
    None for 1.  size: [V] weighted sum of squares of all observed entries.
    """

    rows: Tensor | Outer
    bias: Tensor | None
    weight: Tensor | None
    bias_weight: Tensor | None
    size: Tensor

    def at(self, index: Tensor) -> LayerTarget:
        """Return the targets of the victims `index` [S]."""
        return tree_map(lambda tensor: tensor[index], self)

    @property
    def about(self) -> str:
        """Which tensors are present."""
        parts = (self.bias, self.weight, self.bias_weight)
        return f"{type(self.rows).__name__} {[part is not None for part in parts]}"

    def bounded(self) -> LayerTarget:
        """Return the target, which must be dense, with its visible entries `bounded`: once, not in each step."""
        assert isinstance(self.rows, Tensor)
        bias = self.bias if self.bias is None else _bounded(self.bias, self.bias_weight)[0]
        return replace(self, rows=_bounded(self.rows, self.weight)[0].view_as(self.rows), bias=bias)


def layer_target(
    layer: Affine, observed: Sequence[Params], weights: Sequence[Params] | None, batch: int, factor: bool = True
) -> LayerTarget:
    """Return the V observed gradients of `layer`, stacked, in the dtype of its weight.

    A linear layer's gradient on one example is an outer product; compared as such (an identity), it costs O + K, not
    O K. That needs `factor`, and precisions (of each entry, or scalars; None for 1) that are equal within a tensor.
    """
    dtype, name = layer.weight.rows.dtype, f"{layer.name}.weight"

    def stack(parts: Sequence[Params], name: str) -> Tensor:
        return torch.stack([part[name] for part in parts]).detach().to(dtype)

    rows = layer.pack(stack(observed, name))
    bias = None if layer.bias is None else stack(observed, f"{layer.name}.bias")
    weight = bias_weight = None
    if weights is not None:
        weight = stack(weights, name)
        weight = weight[:, None, None] if weight.dim() == 1 else layer.pack(weight)
        if bias is not None:
            bias_weight = stack(weights, f"{layer.name}.bias")
            bias_weight = bias_weight[:, None] if bias_weight.dim() == 1 else bias_weight
    size = _squares(rows, weight) + (0 if bias is None else _squares(bias, bias_weight))
    uniform = weight is None or weight[0].numel() == 1
    if factor and batch == 1 and not isinstance(layer, Convolution) and bias is not None and uniform:
        left = bias[:, :, None]
        right = left.transpose(1, 2) @ rows / (bias * bias).sum(1).clamp(min=SMALLEST_SQUARE)[:, None, None]
        if bool(((rows - left @ right).norm(dim=(1, 2)) <= RANK_ONE[dtype] * rows.norm(dim=(1, 2))).all()):
            return LayerTarget(Outer(left, right), bias, weight, bias_weight, size)
    return LayerTarget(rows, bias, weight, bias_weight, size)


@dataclass(frozen=True)
class Combination:
    """One layer's a s - b o, a and b [S]: rows [S, O, K], or `Outer` (R = 2), and bias [S, O] or None."""

    goal: LayerTarget
    rows: Tensor | Outer
    bias: Tensor | None

    def size(self) -> Tensor:
        """Return the weighted sum of squares [S]."""
        goal = self.goal
        if isinstance(self.rows, Outer):
            left, right = self.rows.left, self.rows.right
            total = ((left.transpose(1, 2) @ left) * (right @ right.transpose(1, 2))).sum((1, 2))
            total = total if goal.weight is None else total * goal.weight.flatten()
        else:
            total = _squares(self.rows, goal.weight)
        return total if self.bias is None else total + _squares(self.bias, goal.bias_weight)

    def direction(self, layer: Affine, factor: float = 1.0) -> Direction:
        """Return factor * w (a s - b o)."""
        goal = self.goal
        bias = None if self.bias is None else _times(self.bias, goal.bias_weight, factor)
        if isinstance(self.rows, Outer):
            return Direction(Outer(_times(self.rows.left, goal.weight, factor), self.rows.right), bias)
        return Direction(layer.direction(_times(self.rows, goal.weight, factor)), bias)


@dataclass(frozen=True)
class Gap:
    """One layer's simulated gradient (rows [S, O, K] or None for an `Outer` target, bias [S, O]) beside its target."""

    layer: Affine
    memo: Memo
    goal: LayerTarget
    rows: Tensor | None
    bias: Tensor | None

    def size(self) -> Tensor:
        """Return the weighted sum of squares of the simulated gradient [S]."""
        goal = self.goal
        if self.rows is None:
            total = self.memo.cotangent.square().sum((1, 2)) * self.memo.inputs.square().sum((1, 2))
            total = total if goal.weight is None else total * goal.weight.flatten()
        else:
            total = _squares(self.rows, goal.weight)
        return total if self.bias is None else total + _squares(self.bias, goal.bias_weight)

    def combined(self, a: Tensor | None = None, b: Tensor | None = None) -> Combination:
        """Return a s - b o, for a and b [S]; None for 1.

        An outer product as (a cot - b left) in + b left (in - right): no cancellation at the truth.
        """
        goal, bias = self.goal, None
        if self.bias is not None and goal.bias is not None:
            bias = _minus(self.bias, a, goal.bias, b)
        if not isinstance(goal.rows, Outer):
            assert self.rows is not None
            return Combination(goal, _minus(self.rows, a, goal.rows, b), bias)
        inputs, cotangent = self.memo.inputs, self.memo.cotangent.transpose(1, 2)
        left = goal.rows.left if b is None else b[:, None, None] * goal.rows.left
        cotangent = cotangent if a is None else a[:, None, None] * cotangent
        lefts, rights = torch.cat([cotangent - left, left], 2), torch.cat([inputs, inputs - goal.rows.right], 1)
        return Combination(goal, Outer(lefts, rights), bias)


def gap(layer: Affine, memo: Memo, goal: LayerTarget) -> Gap:
    """Return the simulated gradient of one layer beside its target, after the backward pass."""
    rows = None if isinstance(goal.rows, Outer) else layer.weight_gradient(memo)
    return Gap(layer, memo, goal, rows, None if goal.bias is None else layer.bias_gradient(memo))


def residual(layer: Affine, memo: Memo, goal: LayerTarget) -> tuple[Direction, Tensor]:
    """Return r = 2 w (s - o) of one layer, and its part of the squared distance [S], after the backward pass."""
    difference = gap(layer, memo, goal).combined()
    return difference.direction(layer, 2), difference.size()


def absolute(layer: Affine, memo: Memo, goal: LayerTarget) -> tuple[Direction, Tensor]:
    """Return w sign(s - o) of one layer, and its part of the absolute distance [S]. The target must be dense."""
    difference = gap(layer, memo, goal).combined()
    assert isinstance(difference.rows, Tensor)
    total = _sum(difference.rows.abs(), goal.weight)
    total = total if difference.bias is None else total + _sum(difference.bias.abs(), goal.bias_weight)
    bias = None if difference.bias is None else difference.bias.sign()
    return Combination(goal, difference.rows.sign(), bias).direction(layer), total


def cosine_distance(gaps: Sequence[Gap]) -> tuple[Tensor, list[Direction]]:
    """Return D = 1 - cos over all layers [S], as a sum of squares to keep its digits, and its slope by each layer.

    D is 1 if either gradient is zero, as if they were orthogonal.
    """
    a = inverse_root(torch.stack([gap.size() for gap in gaps]).sum(0))
    b = inverse_root(torch.stack([gap.goal.size for gap in gaps]).sum(0))
    total = 0.5 * torch.stack([gap.combined(a, b).size() for gap in gaps]).sum(0)
    total = torch.where((a == 0) | (b == 0), 1.0, total)
    p, q = (1 - total) * a * a, a * b
    return total, [gap.combined(p, q).direction(gap.layer) for gap in gaps]


def tensor_angles(gaps: Sequence[Gap], power: float, bound: bool, floor: float) -> tuple[Tensor, list[Direction]]:
    """Return the mean over tensors of floor + 1 - cos [S], and its slope by each layer.

    power: of the mean, 0 for the geometric one; bound: whether entries are `bounded` first, the targets' by
    `LayerTarget.bounded`. Tensors without observed entries are ignored. The targets must be dense.
    """
    parts = [[_angle(s, o, w, bound) for s, o, w in _tensors(gap)] for gap in gaps]
    apart = torch.stack([angle.apart for some in parts for angle in some]) + floor
    seen = torch.stack([angle.seen for some in parts for angle in some])
    count = seen.sum(0).clamp(min=1)
    if power == 0:
        total = ((seen * apart.log()).sum(0) / count).exp()
        scales = iter(seen * total / (count * apart))
    else:
        mean = (seen * apart**power).sum(0) / count
        total = mean ** (1 / power)
        scales = iter(seen * total / mean.clamp(min=SMALLEST_SQUARE) * apart ** (power - 1) / count)
    directions = []
    for gap, some in zip(gaps, parts, strict=True):
        rows, *bias = [next(scales).view(-1, *[1] * (angle.slope.dim() - 1)) * angle.slope for angle in some]
        directions.append(Direction(gap.layer.direction(rows), bias[0] if bias else None))
    return total, directions


@dataclass(frozen=True)
class Angle:
    """1 - cosine of one tensor and its target [S], the slope by the tensor, and whether anything was observed [S]."""

    apart: Tensor
    slope: Tensor
    seen: Tensor


def _angle(s: Tensor, o: Tensor, weight: Tensor | None, bound: bool) -> Angle:
    inner = None
    if bound:
        s, inner = (part.view_as(s) for part in _bounded(s, weight))
    a, b = inverse_root(_squares(s, weight)), inverse_root(_squares(o, weight))
    apart = torch.where((a == 0) | (b == 0), 1.0, 0.5 * _squares(_minus(s, a, o, b), weight))
    slope = _times(_minus(s, (1 - apart) * a * a, o, a * b), weight, 1.0)
    return Angle(apart, slope if inner is None else inner * slope, (b != 0).to(s.dtype))


def _bounded(value: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the visible entries of each victim's tensor `bounded`, as rows, and the slope."""
    rows = (value if weight is None else value * (weight > 0)).flatten(1)
    return softsign(rows, typical(rows))


def typical(rows: Tensor) -> Tensor:
    """Return the median size [S, 1] of the nonzero entries of rows [S, n], the lower of two; 1 if all are 0.

    Selection by numpy, on the CPU, takes a fifteenth of the time of torch's (12 rows of 3600 numbers).
    """
    size = torch.where(rows == 0, torch.nan, rows.abs())
    if size.device.type != "cpu":
        return size.nanmedian(1, keepdim=True).values.nan_to_num(1.0)
    places = ((rows != 0).sum(1, keepdim=True) - 1).clamp(min=0) // 2
    ordered = np.partition(size.numpy(), sorted(set(places.flatten().tolist())), axis=1)  # NaN comes last
    return torch.from_numpy(ordered).gather(1, places).nan_to_num(1.0)


def _tensors(gap: Gap) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield a layer's simulated weight and bias gradients with their targets and precisions."""
    goal = gap.goal
    assert gap.rows is not None and isinstance(goal.rows, Tensor)
    yield gap.rows, goal.rows, goal.weight
    if gap.bias is not None and goal.bias is not None:
        yield gap.bias, goal.bias, goal.bias_weight


def _minus(s: Tensor, a: Tensor | None, o: Tensor, b: Tensor | None) -> Tensor:
    """Return a s - b o for a and b [S] or None for 1."""
    wide = (-1, *[1] * (s.dim() - 1))
    s = s if a is None else a.view(wide) * s
    return s - o if b is None else torch.addcmul(s, b.view(wide), o, value=-1)


def _times(value: Tensor, weight: Tensor | None, factor: float) -> Tensor:
    value = value if factor == 1 else factor * value
    return value if weight is None else value * weight


def _sum(value: Tensor, weight: Tensor | None) -> Tensor:
    """Return sum weight * value over all axes but the first."""
    return _times(value, weight, 1.0).flatten(1).sum(1)


def _squares(value: Tensor, weight: Tensor | None) -> Tensor:
    """Return sum weight * value^2 over all axes but the first."""
    uniform = weight is None or weight[0].numel() == 1
    other = value if uniform or weight is None else value * weight
    total: Tensor = torch.linalg.vecdot(other.flatten(1), value.flatten(1))
    return total * weight.flatten() if uniform and weight is not None else total
