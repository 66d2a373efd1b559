"""Affine layers as four passes: forward, backward, and the same two differentiated along a weight direction.

V victims share the weights, each with a batch of B examples, N = V * B; a direction has one value a victim. Images are
[N, C, H, W], flat features [V, B, D]. `tangent`: derivative of an activation along the direction; `cotangent`: of the
loss by an activation (the R-operator of Pearlmutter, Neural Computation 6, 1994).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Full:
    """A weight or direction, written out: rows [V, O, K] (V = 1: the network's), columns [V, K, O] as they fold."""

    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Outer:
    """A direction of low rank, left @ right, never written out. left: [V, O, R]; right: [V, R, K]."""

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Direction:
    """A direction in the weight space of one affine layer; bias: [V, O], or None where the layer has none."""

    weight: Full | Outer
    bias: Tensor | None


@dataclass
class Memo:
    """What one layer keeps between passes: set by forward, but cotangent (of the output) and tangent (of the input)."""

    victims: int
    inputs: Tensor = field(init=False)
    output: Tensor = field(init=False)
    slope: Tensor = field(init=False)
    places: Tensor = field(init=False)
    cotangent: Tensor = field(init=False)
    tangent: Tensor = field(init=False)


SLICED = 16_384
"""Numbers in one place of the kernel, over all images, from which `Convolution.fold` sums slices: up to 7 times as fast
as `F.fold` there (3x3 kernels on 32 victims), down to .4 times below."""


COMPACT = 4096
"""Numbers in the matrix that sums patches into an image up to which a `Convolution` multiplies by it: images so small
that a patch is mostly padding. A quarter of the time of `F.fold` at 2x2, whose narrow products are as slow again."""


class Affine:
    """z = W a + b on flat features [V, B, D]: a linear layer, and what a `Convolution` is on patches.

    name: prefix of the parameters, e.g. "features.0".  first: whether nothing before it has parameters, so that no
    cotangent of its input is needed, and its input's tangent is zero.
    """

    def __init__(self, name: str, weight: Tensor, bias: Tensor | None, first: bool) -> None:
        self.name, self.first = name, first
        self.weight, self.bias = self.direction(self.pack(weight[None])), bias

    def pack(self, weight: Tensor) -> Tensor:
        """Return weights [V, *shape] as rows [V, O, K]."""
        return weight

    def direction(self, rows: Tensor) -> Full:
        """Return rows [V, O, K] together with their columns."""
        return Full(rows, rows.transpose(1, 2))

    def lift(self, a: Tensor) -> Tensor:
        """Return the input arranged for the products."""
        return a

    def apply(self, weight: Full | Outer, lifted: Tensor) -> Tensor:
        """Return W a."""
        if isinstance(weight, Outer):
            return lifted @ weight.right.transpose(1, 2) @ weight.left.transpose(1, 2)
        return lifted @ (weight.columns if len(weight.rows) > 1 else weight.columns[0])

    def drop(self, weight: Full | Outer, cotangent: Tensor) -> Tensor:
        """Return W^T cotangent, not yet folded."""
        if isinstance(weight, Outer):
            return cotangent @ weight.left @ weight.right
        return cotangent @ (weight.rows if len(weight.rows) > 1 else weight.rows[0])

    def fold(self, dropped: Tensor) -> Tensor:
        """Return what `drop` gave, or a sum of it, in the shape of the input."""
        return dropped

    def add(self, z: Tensor, bias: Tensor) -> Tensor:
        """Return z plus a bias [V, O] or [1, O]."""
        return z + bias[:, None]

    def weight_gradient(self, memo: Memo) -> Tensor:
        """Return the weight's gradient a victim, as rows [V, O, K]."""
        return memo.cotangent.transpose(1, 2) @ memo.inputs

    def bias_gradient(self, memo: Memo) -> Tensor:
        """Return the bias' gradient a victim [V, O]."""
        return memo.cotangent.sum(1)

    def forward(self, a: Tensor, memo: Memo) -> Tensor:
        """Return z."""
        memo.inputs = self.lift(a)
        z = self.apply(self.weight, memo.inputs)
        return z if self.bias is None else self.add(z, self.bias[None])

    def backward(self, cotangent: Tensor, memo: Memo) -> Tensor | None:
        """Return the input's cotangent, None for the first layer."""
        memo.cotangent = cotangent
        return None if self.first else self.fold(self.drop(self.weight, cotangent))

    def tangent(self, tangent: Tensor | None, memo: Memo, r: Direction) -> Tensor:
        """Return the tangent of z along `r` for the input's tangent (None: zero)."""
        out = self.apply(r.weight, memo.inputs)
        if tangent is not None:
            out = out + self.apply(self.weight, self.lift(tangent))
        return out if r.bias is None else self.add(out, r.bias)

    def backward_tangent(self, change: Tensor, memo: Memo, r: Direction) -> Tensor:
        """Return the tangent of the input's cotangent for `change`, that of the output's cotangent."""
        return self.fold(self.drop(self.weight, change) + self.drop(r.weight, memo.cotangent))


class Convolution(Affine):
    """A convolution (no groups, no dilation, zero padding) of images [N, C, H, W], as products with patches [N, L, K].

    Patches are cut channels-last, where a window's row is one run of memory: several times faster than `F.unfold`.
    The way back is `F.fold`, whose order of K differs: hence rows over (kh, kw, C) and columns over (C, kh, kw). Of
    `COMPACT` images it is a product with a matrix of zeros and ones, `folding` [H W, L kh kw], and needs rows alone.
    """

    def __init__(
        self, module: nn.Conv2d, name: str, weight: Tensor, bias: Tensor | None, first: bool, size: tuple[int, int]
    ) -> None:
        kernel, stride = module.kernel_size, module.stride
        self.kernel, self.stride, self.size = (kernel[0], kernel[1]), (stride[0], stride[1]), size
        self.padding = (int(module.padding[0]), int(module.padding[1]))
        self.out = tuple(
            (n + 2 * p - k) // s + 1 for n, p, k, s in zip(size, self.padding, kernel, stride, strict=True)
        )
        self.channels = module.in_channels
        self.folding = self._folding(weight) if self._patches() * math.prod(size) <= COMPACT else None
        super().__init__(name, weight, bias, first)

    def _patches(self) -> int:
        """Return the places of all patches of one channel, L kh kw."""
        return math.prod(self.out) * math.prod(self.kernel)

    def _folding(self, like: Tensor) -> Tensor:
        """Return the matrix [H W, L kh kw] that sums the patches of one channel where they overlap."""
        each = torch.eye(self._patches(), dtype=like.dtype, device=like.device)
        patches = each.view(len(each), math.prod(self.out), -1).transpose(1, 2)
        return F.fold(patches, self.size, self.kernel, padding=self.padding, stride=self.stride).flatten(1).T

    def pack(self, weight: Tensor) -> Tensor:
        """Return weights [V, O, C, kh, kw] as rows [V, O, kh * kw * C]."""
        return weight.permute(0, 1, 3, 4, 2).flatten(2).contiguous()

    def direction(self, rows: Tensor) -> Full:
        """Return the direction [V, O, K] with its transpose in the order of `F.fold`, where that is used."""
        if self.folding is not None:
            return Full(rows, rows.transpose(1, 2))
        split = rows.unflatten(2, (*self.kernel, self.channels))
        return Full(rows, split.permute(0, 4, 2, 3, 1).flatten(1, 3).contiguous())

    def lift(self, a: Tensor) -> Tensor:
        """Return the patches [N, L, K] of images [N, C, H, W], L output positions."""
        n, channels, h, w = a.shape
        (kh, kw), (sh, sw), (ph, pw) = self.kernel, self.stride, self.padding
        padded = a.new_zeros(n, h + 2 * ph, w + 2 * pw, channels)
        padded[:, ph : ph + h, pw : pw + w] = a.permute(0, 2, 3, 1)
        image, row, pixel, _ = padded.stride()
        windows = padded.as_strided((n, *self.out, kh, kw * channels), (image, sh * row, sw * pixel, row, 1))
        return windows.reshape(n, -1, kh * kw * channels)

    def apply(self, weight: Full | Outer, lifted: Tensor) -> Tensor:
        """Return W a [N, O, H', W'] for patches [N, L, K]; W is written out."""
        assert isinstance(weight, Full)
        rows = spread(weight.rows, len(lifted))
        return torch.bmm(rows, lifted.transpose(1, 2)).view(len(lifted), -1, *self.out)

    def drop(self, weight: Full | Outer, cotangent: Tensor) -> Tensor:
        """Return W^T cotangent as patches [N, K, L], or [N, L, K] for a `folding`; W is written out."""
        assert isinstance(weight, Full)
        if self.folding is not None:
            return torch.bmm(cotangent.flatten(2).transpose(1, 2), spread(weight.rows, len(cotangent)))
        return torch.bmm(spread(weight.columns, len(cotangent)), cotangent.flatten(2))

    def fold(self, dropped: Tensor) -> Tensor:
        """Return the patches of `drop` summed where they overlap: [N, C, H, W]; by slices unless images are small."""
        if self.folding is not None:
            each = dropped.view(len(dropped), -1, self.channels)
            total = torch.bmm(self.folding.expand(len(each), -1, -1), each)
            return total.transpose(1, 2).reshape(len(each), self.channels, *self.size)
        (h, w), (kh, kw), (sh, sw), (ph, pw) = self.size, self.kernel, self.stride, self.padding
        if len(dropped) * self.channels * self.out[0] * self.out[1] < SLICED:
            return F.fold(dropped, self.size, self.kernel, padding=self.padding, stride=self.stride)
        patches = dropped.view(len(dropped), self.channels, kh, kw, *self.out)
        total = dropped.new_zeros(len(dropped), self.channels, h + 2 * ph, w + 2 * pw)
        for i in range(kh):
            for j in range(kw):
                total[..., i : i + sh * self.out[0] : sh, j : j + sw * self.out[1] : sw] += patches[:, :, i, j]
        return total[..., ph : ph + h, pw : pw + w]

    def add(self, z: Tensor, bias: Tensor) -> Tensor:
        """Return z [N, O, H', W'] plus a bias [V, O] or [1, O]."""
        return z + spread(bias, len(z))[:, :, None, None]

    def weight_gradient(self, memo: Memo) -> Tensor:
        """Return the weight's gradient as rows [V, O, K]."""
        return summed(torch.bmm(memo.cotangent.flatten(2), memo.inputs), memo.victims)

    def bias_gradient(self, memo: Memo) -> Tensor:
        """Return the bias' gradient [V, O]."""
        return summed(memo.cotangent.flatten(2).sum(2), memo.victims)


def summed(each: Tensor, victims: int) -> Tensor:
    """Return values of each example [N, ...] as a sum a victim, [V, ...]."""
    return each if len(each) == victims else each.unflatten(0, (victims, -1)).sum(1)


def spread(per_victim: Tensor, examples: int) -> Tensor:
    """Return [V, ...] or [1, ...] as one value an example, [N, ...]."""
    victims = len(per_victim)
    if victims == examples:
        return per_victim
    if victims == 1:
        return per_victim.expand(examples, *per_victim.shape[1:])
    return per_victim.repeat_interleave(examples // victims, 0)
