"""Affine layers as four passes: forward, backward, and the same two differentiated along a weight direction.

V victims share the weights, each with a batch of B examples, N = V * B; a direction has one value per victim. Images
are [N, C, H, W], flat features [V, B, D]. `tangent`: derivative of an activation along the direction; `cotangent`: of
the loss by an activation (the R-operator of Pearlmutter, Neural Computation 6, 1994).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

TensorMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Full:
    """A dense weight or direction: rows [V, O, K] (V = 1: the network's), columns [V, K, O] as `fold` needs them."""

    rows: Tensor
    columns: Tensor

    def mapped(self, change: TensorMap) -> Full:
        """Return a copy with `change` applied to each tensor."""
        return Full(change(self.rows), change(self.columns))


@dataclass(frozen=True)
class Outer:
    """A direction of low rank, left @ right, never made dense. left: [V, O, R]; right: [V, R, K]."""

    left: Tensor
    right: Tensor

    def mapped(self, change: TensorMap) -> Outer:
        """Return a copy with `change` applied to each tensor."""
        return Outer(change(self.left), change(self.right))


@dataclass(frozen=True)
class Direction:
    """A direction in the weight space of one affine layer; bias: [V, O], or None if the layer has none."""

    weight: Full | Outer
    bias: Tensor | None


@dataclass
class Memo:
    """One layer's values between passes: set by forward, except cotangent (of the output) and tangent (of the input).

    cut: the cotangent as `drop` takes it.
    """

    victims: int
    inputs: Tensor = field(init=False)
    output: Tensor = field(init=False)
    slope: Tensor = field(init=False)
    places: Tensor = field(init=False)
    cotangent: Tensor = field(init=False)
    cut: Tensor = field(init=False)
    tangent: Tensor = field(init=False)


class Affine:
    """z = W a + b on flat features [V, B, D]: a linear layer, or a `Convolution` on patches.

    name: prefix of the parameters, e.g. "features.0".  first: whether no layer before it has parameters, so that the
    cotangent of its input is not needed, and its input's tangent is zero.
    """

    def __init__(self, name: str, weight: Tensor, bias: Tensor | None, first: bool) -> None:
        self.name, self.first = name, first
        self.weight, self.bias = self.direction(self.pack(weight[None])), bias

    @property
    def about(self) -> str:
        """What the layer does, apart from its weights and their shapes."""
        return f"affine, first: {self.first}"

    def mapped(self, change: TensorMap) -> Affine:
        """Return a copy with `change` applied to each tensor."""
        copied = copy.copy(self)
        copied.weight, copied.bias = self.weight.mapped(change), None if self.bias is None else change(self.bias)
        return copied

    def pack(self, weight: Tensor) -> Tensor:
        """Return weights [V, *shape] as rows [V, O, K]."""
        return weight

    def direction(self, rows: Tensor) -> Full:
        """Return rows [V, O, K] with their columns."""
        return Full(rows, rows.transpose(1, 2))

    def lift(self, a: Tensor) -> Tensor:
        """Return the input arranged for the products."""
        return a

    def apply(self, weight: Full | Outer, lifted: Tensor) -> Tensor:
        """Return W a."""
        if isinstance(weight, Outer):
            return lifted @ weight.right.transpose(1, 2) @ weight.left.transpose(1, 2)
        return lifted @ (weight.columns if len(weight.rows) > 1 else weight.columns[0])

    def cut(self, cotangent: Tensor) -> Tensor:
        """Return the output's cotangent arranged for the products of `drop`."""
        return cotangent

    def drop(self, weight: Full | Outer, cut: Tensor) -> Tensor:
        """Return W^T cotangent, not yet folded."""
        if isinstance(weight, Outer):
            return cut @ weight.left @ weight.right
        return cut @ (weight.rows if len(weight.rows) > 1 else weight.rows[0])

    def fold(self, dropped: Tensor) -> Tensor:
        """Return the result of `drop`, or a sum of results, in the shape of the input."""
        return dropped

    def add(self, z: Tensor, bias: Tensor) -> Tensor:
        """Return z plus a bias [V, O] or [1, O]."""
        return z + bias[:, None]

    def weight_gradient(self, memo: Memo) -> Tensor:
        """Return the weight's gradient of each victim, as rows [V, O, K]."""
        return memo.cotangent.transpose(1, 2) @ memo.inputs

    def bias_gradient(self, memo: Memo) -> Tensor:
        """Return the bias's gradient of each victim [V, O]."""
        return memo.cotangent.sum(1)

    def forward(self, a: Tensor, memo: Memo) -> Tensor:
        """Return z."""
        memo.inputs = self.lift(a)
        z = self.apply(self.weight, memo.inputs)
        return z if self.bias is None else self.add(z, self.bias[None])

    def backward(self, cotangent: Tensor, memo: Memo) -> Tensor | None:
        """Return the input's cotangent; None for the first layer."""
        memo.cotangent, memo.cut = cotangent, self.cut(cotangent)
        return None if self.first else self.fold(self.drop(self.weight, memo.cut))

    def tangent(self, tangent: Tensor | None, memo: Memo, r: Direction) -> Tensor:
        """Return the tangent of z along `r` for the input's tangent (None: zero)."""
        out = self.apply(r.weight, memo.inputs)
        if tangent is not None:
            out = out + self.apply(self.weight, self.lift(tangent))
        return out if r.bias is None else self.add(out, r.bias)

    def backward_tangent(self, change: Tensor, memo: Memo, r: Direction) -> Tensor:
        """Return the tangent of the input's cotangent for `change`, that of the output's cotangent."""
        return self.fold(self.drop(self.weight, self.cut(change)) + self.drop(r.weight, memo.cut))


def summed(each: Tensor, victims: int) -> Tensor:
    """Return values of each example [N, ...] summed over each victim, [V, ...]."""
    return each if len(each) == victims else each.unflatten(0, (victims, -1)).sum(1)


def per_example(per_victim: Tensor, examples: int) -> Tensor:
    """Return [V, ...] or [1, ...] repeated for each example, [N, ...]."""
    victims = len(per_victim)
    if victims == examples:
        return per_victim
    if victims == 1:
        return per_victim.expand(examples, *per_victim.shape[1:])
    return per_victim.repeat_interleave(examples // victims, 0)
