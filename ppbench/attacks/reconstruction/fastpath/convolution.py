"""A convolution as an affine layer on patches of images."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ppbench.attacks.reconstruction.fastpath.affine import Affine, Full, Memo, Outer, per_example, summed
from ppbench.attacks.reconstruction.fastpath.back import (
    COMPACT,
    Compact,
    ConvolutionForm,
    Gathered,
    Summed,
    WayBack,
    windows,
)


class Convolution(Affine):
    """A convolution of images [N, C, H, W], as products with patches [N, L, K], K over (kh, kw, C)."""

    def __init__(
        self, module: nn.Conv2d, name: str, weight: Tensor, bias: Tensor | None, first: bool, size: tuple[int, int]
    ) -> None:
        self.form = form = ConvolutionForm.of(module, size)
        self.way: WayBack = Summed(form) if form.gathered > form.patch else Gathered(form, weight)
        if form.cells * math.prod(size) <= COMPACT:
            self.way = Compact(form, weight)
        super().__init__(name, weight, bias, first)

    @property
    def about(self) -> str:
        """What the layer does, apart from its weights."""
        return f"{self.form}, {type(self.way).__name__}, first: {self.first}"

    def pack(self, weight: Tensor) -> Tensor:
        """Return weights [V, O, C, kh, kw] as rows [V, O, kh * kw * C]."""
        return weight.permute(0, 1, 3, 4, 2).flatten(2).contiguous()

    def direction(self, rows: Tensor) -> Full:
        """Return the direction [V, O, K] with the columns of the way back."""
        return Full(rows, self.way.columns(rows))

    def lift(self, a: Tensor) -> Tensor:
        """Return the patches [N, L, K] of images [N, C, H, W], L output positions."""
        high, wide = self.form.axes
        at, kernel, stride = (high.padding, wide.padding), (high.kernel, wide.kernel), (high.stride, wide.stride)
        return windows(a, (high.padded, wide.padded), at, kernel, stride, (high.out, wide.out))

    def apply(self, weight: Full | Outer, lifted: Tensor) -> Tensor:
        """Return W a [N, O, H', W'] for patches [N, L, K]; W is dense."""
        assert isinstance(weight, Full)
        rows = per_example(weight.rows, len(lifted))
        z = torch.bmm(rows, lifted.transpose(1, 2))
        return z.view(len(lifted), -1, self.form.high.out, self.form.wide.out)

    def cut(self, cotangent: Tensor) -> Tensor:
        """Return the output's cotangent arranged for the way back."""
        return self.way.cut(cotangent)

    def drop(self, weight: Full | Outer, cut: Tensor) -> Tensor:
        """Return W^T cotangent in the form of the way back, not yet images; W is dense."""
        assert isinstance(weight, Full)
        return self.way.drop(weight, cut)

    def fold(self, dropped: Tensor) -> Tensor:
        """Return the result of `drop`, or a sum of results, as images [N, C, H, W]."""
        return self.way.fold(dropped)

    def add(self, z: Tensor, bias: Tensor) -> Tensor:
        """Return z [N, O, H', W'] plus a bias [V, O] or [1, O]."""
        return z + per_example(bias, len(z))[:, :, None, None]

    def weight_gradient(self, memo: Memo) -> Tensor:
        """Return the weight's gradient as rows [V, O, K]."""
        return summed(torch.bmm(memo.cotangent.flatten(2), memo.inputs), memo.victims)

    def bias_gradient(self, memo: Memo) -> Tensor:
        """Return the bias's gradient [V, O]."""
        return summed(memo.cotangent.flatten(2).sum(2), memo.victims)
