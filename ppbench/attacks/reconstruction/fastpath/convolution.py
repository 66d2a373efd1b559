"""A convolution as an affine layer on patches of images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppbench.attacks.reconstruction.fastpath.layers import Affine, Full, Memo, Outer, per_example, summed

# -- Patches of images, and three ways back: from the cotangent of a convolution's output to that of its input --
# Patches are cut channels-last, where a window's row is contiguous in memory: several times faster than `F.unfold`.

SLICED = 16_384
"""With at least so many numbers per place of the kernel, over all images, `Summed` adds slices: up to 7 times as fast
as `F.fold` (3x3 kernels on 32 victims); with fewer, down to 0.4 times as fast."""


COMPACT = 4096
"""Largest matrix of `Compact`, in numbers, for which it is used: for images so small that a patch is mostly padding. It
takes a quarter of the time of `F.fold` at 2x2."""


@dataclass(frozen=True)
class Axis:
    """A convolution along one axis, and the outputs from which the input's cotangent is gathered.

    Place i of the input is q = (i + padding) // stride of phase (i + padding) % stride; it meets the kernel's place
    phase + stride * t in the output at q - t, for t < `taps`.
    """

    kernel: int
    stride: int
    padding: int
    size: int
    out: int

    @property
    def taps(self) -> int:
        """Largest number of outputs that depend on one place of the input."""
        return -(-self.kernel // self.stride)

    @property
    def length(self) -> int:
        """Values that q takes over the input."""
        return (self.size - 1 + self.padding) // self.stride - self.padding // self.stride + 1

    @property
    def first(self) -> int:
        """The output that the first place's last tap needs, which may not exist."""
        return self.padding // self.stride - self.taps + 1

    @property
    def span(self) -> int:
        """Number of outputs that are needed, including those that do not exist."""
        return self.length + self.taps - 1

    @property
    def padded(self) -> int:
        """Number of places of the padded input."""
        return self.size + 2 * self.padding

    @property
    def inner(self) -> slice:
        """The places of the padded input that belong to the input."""
        return slice(self.padding, self.padding + self.size)

    @property
    def shown(self) -> slice:
        """The places among all phases of all q that belong to the input."""
        return slice(self.padding % self.stride, self.padding % self.stride + self.size)

    def met(self, place: int) -> slice:
        """Return the places of the padded input that a place of the kernel meets."""
        return slice(place, place + self.stride * self.out, self.stride)

    @property
    def part(self) -> slice:
        """The outputs that are needed and exist."""
        return slice(max(self.first, 0), self.first + self.span)

    def kernel_places(self) -> Tensor:
        """Return the kernel's place [stride, taps] of each phase and tap in order of outputs; `kernel` for none."""
        taps = self.stride * torch.arange(self.taps - 1, -1, -1)
        return (torch.arange(self.stride)[:, None] + taps).clamp(max=self.kernel)


@dataclass(frozen=True)
class ConvolutionForm:
    """The form of a convolution (no groups, no dilation, zero padding) of `channels` on images of one size."""

    high: Axis
    wide: Axis
    channels: int
    outputs: int

    @classmethod
    def of(cls, module: nn.Conv2d, size: tuple[int, int]) -> ConvolutionForm:
        """Return the form of a module on images of a size."""

        def axis(i: int) -> Axis:
            kernel, stride, padding = module.kernel_size[i], module.stride[i], int(module.padding[i])
            return Axis(kernel, stride, padding, size[i], (size[i] + 2 * padding - kernel) // stride + 1)

        return cls(axis(0), axis(1), module.in_channels, module.out_channels)

    @property
    def axes(self) -> tuple[Axis, Axis]:
        """Both axes."""
        return self.high, self.wide

    @property
    def patch(self) -> int:
        """Numbers in a patch of the input, K = kh kw C."""
        return self.high.kernel * self.wide.kernel * self.channels

    @property
    def cells(self) -> int:
        """Numbers in all patches of one channel, L kh kw."""
        return math.prod(axis.out * axis.kernel for axis in self.axes)

    @property
    def gathered(self) -> float:
        """Numbers in a patch of the output's cotangent, times the squared ratio of gathered to kernel places.

        Up to K, `Gathered` is faster (twice for 5x5 kernels, 12 channels to 12, on eight images), above it slower.
        """
        lacking = math.prod((axis.taps * axis.stride / axis.kernel) ** 2 for axis in self.axes)
        return math.prod(axis.taps for axis in self.axes) * self.outputs * lacking


def fold_patches(patches: Tensor, form: ConvolutionForm) -> Tensor:
    """Return patches [N, K, L], K over (C, kh, kw), summed where they overlap, by torch."""
    (high, wide), size = form.axes, (form.high.size, form.wide.size)
    padding, stride = (high.padding, wide.padding), (high.stride, wide.stride)
    return F.fold(patches, size, (high.kernel, wide.kernel), padding=padding, stride=stride)


def windows(
    a: Tensor,
    size: tuple[int, int],
    at: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    out: tuple[int, ...],
) -> Tensor:
    """Return patches [N, L, kh kw C] of images [N, C, h, w] placed `at` an offset in zeros of `size`."""
    n, channels, h, w = a.shape
    padded = a.new_zeros(n, *size, channels)
    padded[:, at[0] : at[0] + h, at[1] : at[1] + w] = a.permute(0, 2, 3, 1)
    image, row, pixel, _ = padded.stride()
    steps = (image, stride[0] * row, stride[1] * pixel, row, 1)
    return padded.as_strided((n, *out, kernel[0], kernel[1] * channels), steps).reshape(n, math.prod(out), -1)


class Convolution(Affine):
    """A convolution of images [N, C, H, W], as products with patches [N, L, K], K over (kh, kw, C).

    A subclass is one way back from the output's cotangent [N, O, H', W'] to the input's: `cut`, `drop` and `fold`.
    """

    def __init__(self, form: ConvolutionForm, name: str, weight: Tensor, bias: Tensor | None, first: bool) -> None:
        self.form = form
        super().__init__(name, weight, bias, first)

    @property
    def about(self) -> str:
        """What the layer does, apart from its weights."""
        return f"{self.form}, {type(self).__name__}, first: {self.first}"

    def pack(self, weight: Tensor) -> Tensor:
        """Return weights [V, O, C, kh, kw] as rows [V, O, kh * kw * C]."""
        return weight.permute(0, 1, 3, 4, 2).flatten(2).contiguous()

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

    def drop(self, weight: Full | Outer, cut: Tensor) -> Tensor:
        """Return W^T cotangent, to be folded into images; W is dense."""
        assert isinstance(weight, Full)
        return torch.bmm(per_example(weight.columns, len(cut)), cut)

    def add(self, z: Tensor, bias: Tensor) -> Tensor:
        """Return z [N, O, H', W'] plus a bias [V, O] or [1, O]."""
        return z + per_example(bias, len(z))[:, :, None, None]

    def weight_gradient(self, memo: Memo) -> Tensor:
        """Return the weight's gradient as rows [V, O, K]."""
        return summed(torch.bmm(memo.cotangent.flatten(2), memo.inputs), memo.victims)

    def bias_gradient(self, memo: Memo) -> Tensor:
        """Return the bias's gradient [V, O]."""
        return summed(memo.cotangent.flatten(2).sum(2), memo.victims)


class Compact(Convolution):
    """For small images: patches [N, L, K] are summed by a product with zeros and ones, `folding` [H W, L kh kw]."""

    def __init__(self, form: ConvolutionForm, name: str, weight: Tensor, bias: Tensor | None, first: bool) -> None:
        high, wide = form.axes
        each = torch.eye(form.cells, dtype=weight.dtype, device=weight.device)
        patches = each.view(len(each), high.out * wide.out, -1).transpose(1, 2)
        self.folding = fold_patches(patches, form).flatten(1).T
        super().__init__(form, name, weight, bias, first)

    def cut(self, cotangent: Tensor) -> Tensor:
        """Return [N, L, O]."""
        return cotangent.flatten(2).transpose(1, 2)

    def drop(self, weight: Full | Outer, cut: Tensor) -> Tensor:
        """Return patches [N, L, K]."""
        assert isinstance(weight, Full)
        return torch.bmm(cut, per_example(weight.rows, len(cut)))

    def fold(self, dropped: Tensor) -> Tensor:
        """Return the patches summed where they overlap."""
        each = dropped.view(len(dropped), -1, self.form.channels)
        total = torch.bmm(self.folding.expand(len(each), -1, -1), each)
        return total.transpose(1, 2).reshape(len(each), self.form.channels, self.form.high.size, self.form.wide.size)


class Summed(Convolution):
    """Patches [N, K, L] are summed by `F.fold`, or slice by slice; K is over (C, kh, kw), as there."""

    def direction(self, rows: Tensor) -> Full:
        """Return rows [V, O, K] with their columns [V, K, O] in the order of `F.fold`."""
        high, wide = self.form.axes
        split = rows.unflatten(2, (high.kernel, wide.kernel, self.form.channels))
        return Full(rows, split.permute(0, 4, 2, 3, 1).flatten(1, 3).contiguous())

    def cut(self, cotangent: Tensor) -> Tensor:
        """Return [N, O, L]."""
        return cotangent.flatten(2)

    def fold(self, dropped: Tensor) -> Tensor:
        """Return the patches summed where they overlap; by slices unless images are small."""
        channels, (high, wide) = self.form.channels, self.form.axes
        if len(dropped) * channels * high.out * wide.out < SLICED:
            return fold_patches(dropped, self.form)
        patches = dropped.view(len(dropped), channels, high.kernel, wide.kernel, high.out, wide.out)
        total = dropped.new_zeros(len(dropped), channels, high.padded, wide.padded)
        for i in range(high.kernel):
            for j in range(wide.kernel):
                total[..., high.met(i), wide.met(j)] += patches[:, :, i, j]
        return total[..., high.inner, wide.inner]


class Gathered(Convolution):
    """Nothing overlaps: patches of the output's cotangent meet the kernel's places of each phase of the stride.

    index: places of the columns, [C phases, taps O], in a direction's flat rows [O K].
    """

    def __init__(self, form: ConvolutionForm, name: str, weight: Tensor, bias: Tensor | None, first: bool) -> None:
        high, wide = form.axes
        tall, broad = high.kernel_places()[:, None, :, None], wide.kernel_places()[None, :, None, :]
        outer = form.patch * torch.arange(form.outputs)
        inner = torch.arange(form.channels)[:, None, None, None, None, None]
        index = (tall * wide.kernel + broad)[..., None] * form.channels + outer + inner  # [C, sh, sw, th, tw, O]
        none = ((tall == high.kernel) | (broad == wide.kernel))[..., None]
        self.index = index.masked_fill(none, form.patch * form.outputs).flatten(3).flatten(0, 2).to(weight.device)
        super().__init__(form, name, weight, bias, first)

    def direction(self, rows: Tensor) -> Full:
        """Return rows [V, O, K] with the weights that a place of the input meets, [V, C phases, taps O], 0 for none."""
        flat = F.pad(rows.flatten(1), (0, 1)).index_select(1, self.index.flatten())
        return Full(rows, flat.view(len(rows), *self.index.shape))

    def cut(self, cotangent: Tensor) -> Tensor:
        """Return the output cotangents that depend on each place of the input, [N, taps O, Q]."""
        high, wide = self.form.axes
        part = cotangent[:, :, high.part, wide.part]
        size, at = (high.span, wide.span), (max(-high.first, 0), max(-wide.first, 0))
        return windows(part, size, at, (high.taps, wide.taps), (1, 1), (high.length, wide.length)).transpose(1, 2)

    def fold(self, dropped: Tensor) -> Tensor:
        """Return phases [N, C phases, Q] in their places in images."""
        channels, (high, wide) = self.form.channels, self.form.axes
        phases = dropped.view(len(dropped), channels, high.stride, wide.stride, high.length, wide.length)
        total = phases.permute(0, 1, 4, 2, 5, 3)
        total = total.reshape(len(dropped), channels, high.length * high.stride, wide.length * wide.stride)
        return total[..., high.shown, wide.shown]


def convolution(
    module: nn.Conv2d, name: str, weight: Tensor, bias: Tensor | None, first: bool, size: tuple[int, int]
) -> Convolution:
    """Return the convolution of a module on images of a size, by the fastest way back."""
    form = ConvolutionForm.of(module, size)
    way: type[Convolution] = Summed if form.gathered > form.patch else Gathered
    if form.cells * math.prod(size) <= COMPACT:
        way = Compact
    return way(form, name, weight, bias, first)
