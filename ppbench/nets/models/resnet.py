"""Residual networks for small images (He, Zhang, Ren and Sun, CVPR 2016, Section 4.2), with and without norms.

6n + 2 layers: a 3x3 convolution, three stages of n blocks of two 3x3 convolutions with 16, 32 and 64 channels, global
average pool, head. The first block of stages two and three halves the image. Convolutions have no biases.

    norm: "none"; "bn", batch normalization by the statistics of the batch at hand (nothing is tracked); "gn", group
        normalization; "fixup" (Zhang, Dauphin and Ma, ICLR 2019): no norm but a bias before and after each convolution
        (one a channel, where the paper's are scalars, so that it can be scaled) and a multiplier a block.
    shortcut: where a block changes shape, "A" takes every second pixel and pads with zero channels (no parameters),
        "B" is a 1x1 convolution, normalized as the others are.
    groups: of the group normalization, a divisor of 16; Wu and He's (2018) 32 do not divide 16 channels.

Convolutions are Kaiming-uniform for ReLU. "none": the second one of every branch is then divided by the root of the
number of blocks L, so that activations and gradients stay within a constant factor at any depth (Hayou et al., AISTATS
2021; Hanin and Rolnick, NeurIPS 2018). "fixup": the first one is, the second one and the head are zero: AT
INITIALIZATION no image can be rebuilt from the gradient, which is no merit of a defense.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppbench.base.errors import shown
from ppbench.nets.models import checks
from ppbench.nets.models.alexnet import kaiming_uniform
from ppbench.nets.net import Classifier

RESNET_NORMS = ("none", "bn", "gn", "fixup")
SHORTCUTS = ("A", "B")
STAGE_WIDTHS = (16, 32, 64)
NormFactory = Callable[[int], nn.Module]


class Shift(nn.Module):
    """Adds one learnable number a channel, 0 at first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return x [B, C, H, W] + bias [C, 1, 1]."""
        return x + self.bias


class PaddedShortcut(nn.Module):
    """Shortcut "A": every `stride`-th row and column, and `extra` zero channels, half of them before the others."""

    def __init__(self, stride: int, extra: int) -> None:
        super().__init__()
        self.stride, self.before, self.after = stride, extra // 2, extra - extra // 2

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, C + extra, ceil(H / stride), ceil(W / stride)]: the size of a padded 3x3 convolution's output."""
        kept = x[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, self.before, self.after))


class ResidualBlock(nn.Module):
    """Convolution, norm, ReLU, convolution, norm, plus the shortcut, ReLU."""

    def __init__(self, inside: int, outside: int, stride: int, norm: NormFactory, shortcut: nn.Module) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv3x3(inside, outside, stride), norm(outside)
        self.conv2, self.norm2 = conv3x3(outside, outside), norm(outside)
        self.shortcut = shortcut
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, outside, H', W'] for x [B, inside, H, W]."""
        branch = self.relu1(self.norm1(self.conv1(x)))
        total: Tensor = self.norm2(self.conv2(branch)) + self.shortcut(x)
        return self.relu2(total)  # type: ignore[no-any-return]


class FixupBlock(nn.Module):
    """A block with biases around its convolutions and one multiplier (Zhang, Dauphin and Ma 2019, Figure 1, right)."""

    def __init__(self, inside: int, outside: int, stride: int, shortcut: nn.Module) -> None:
        super().__init__()
        self.before1, self.conv1, self.after1 = Shift(inside), conv3x3(inside, outside, stride), Shift(outside)
        self.before2, self.conv2, self.after2 = Shift(outside), conv3x3(outside, outside), Shift(outside)
        self.scale = nn.Parameter(torch.ones(1))
        self.shortcut = shortcut
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, outside, H', W'] for x [B, inside, H, W]."""
        branch = self.relu1(self.after1(self.conv1(self.before1(x))))
        branch = self.conv2(self.before2(branch)) * self.scale
        total: Tensor = self.after2(branch) + self.shortcut(x)
        return self.relu2(total)  # type: ignore[no-any-return]


def conv3x3(inside: int, outside: int, stride: int = 1) -> nn.Conv2d:
    """Return a 3x3 convolution, zero-padded, without bias."""
    return nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False)


def resnet20(shape: tuple[int, ...], classes: int, **options: Any) -> Classifier:
    """ResNet of 20 layers for small images, norm-free unless asked; 268,346 parameters for CIFAR-10."""
    return resnet(3, shape, classes, **options)


def resnet32(shape: tuple[int, ...], classes: int, **options: Any) -> Classifier:
    """ResNet of 32 layers for small images, norm-free unless asked; 461,882 parameters for CIFAR-10."""
    return resnet(5, shape, classes, **options)


def resnet56(shape: tuple[int, ...], classes: int, **options: Any) -> Classifier:
    """ResNet of 56 layers for small images, norm-free unless asked; 848,954 parameters for CIFAR-10."""
    return resnet(9, shape, classes, **options)


def resnet(
    n: int,
    shape: tuple[int, ...],
    classes: int,
    *,
    norm: str = "none",
    shortcut: str = "A",
    head_bias: bool = True,
    groups: int = 8,
) -> Classifier:
    """Return the network of 6n + 2 layers; options and initial laws: see the module."""
    checks.one_of("norm", norm, RESNET_NORMS)
    checks.one_of("shortcut", shortcut, SHORTCUTS)
    checks.checked_flag("head_bias", head_bias)
    if checks.checked_int("groups", groups, 1) > STAGE_WIDTHS[0] or STAGE_WIDTHS[0] % groups:
        raise ValueError(f"groups must divide {STAGE_WIDTHS[0]}, not be {shown(groups)}")
    channels, _, _ = checks.checked_image(shape)
    make = partial(_norm, norm, groups)
    fixup = norm == "fixup"
    layers: list[nn.Module] = [
        conv3x3(channels, STAGE_WIDTHS[0]),
        Shift(STAGE_WIDTHS[0]) if fixup else make(STAGE_WIDTHS[0]),
        nn.ReLU(),
    ]
    inside = STAGE_WIDTHS[0]
    for outside in STAGE_WIDTHS:
        for index in range(n):
            stride = 2 if index == 0 and outside != STAGE_WIDTHS[0] else 1
            way = _shortcut(inside, outside, stride, shortcut, Shift(inside) if fixup else None, make)
            block = (
                FixupBlock(inside, outside, stride, way) if fixup else ResidualBlock(inside, outside, stride, make, way)
            )
            layers.append(block)
            inside = outside
    layers += [nn.AdaptiveAvgPool2d(1), *([Shift(inside)] if fixup else []), nn.Flatten()]
    model = Classifier(nn.Sequential(*layers), nn.Linear(inside, classes, bias=head_bias))
    _initialize(model, norm)
    return model


def _norm(kind: str, groups: int, channels: int) -> nn.Module:
    if kind == "bn":
        return nn.BatchNorm2d(channels, track_running_stats=False)
    return nn.GroupNorm(groups, channels) if kind == "gn" else nn.Identity()


def _shortcut(inside: int, outside: int, stride: int, kind: str, shift: Shift | None, norm: NormFactory) -> nn.Module:
    """Return the way around a block's branch; `shift` is fixup's bias before a convolution, None for other norms."""
    if stride == 1 and inside == outside:
        return nn.Identity()
    if kind == "A":
        return PaddedShortcut(stride, outside - inside)
    projection = nn.Conv2d(inside, outside, 1, stride=stride, bias=False)
    return nn.Sequential(projection, norm(outside)) if shift is None else nn.Sequential(shift, projection)


def _initialize(model: Classifier, norm: str) -> None:
    kaiming_uniform(model)
    blocks = [layer for layer in model.modules() if isinstance(layer, ResidualBlock | FixupBlock)]
    with torch.no_grad():
        for block in blocks:
            if norm == "none":
                block.conv2.weight.mul_(len(blocks) ** -0.5)
            elif norm == "fixup":
                block.conv1.weight.mul_(len(blocks) ** -0.5)
                block.conv2.weight.zero_()
        if norm == "fixup":
            model.head.weight.zero_()


resnet20.options_of = resnet  # type: ignore[attr-defined]
resnet32.options_of = resnet  # type: ignore[attr-defined]
resnet56.options_of = resnet  # type: ignore[attr-defined]
