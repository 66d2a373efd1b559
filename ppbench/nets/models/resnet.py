"""Residual networks for small images (He, Zhang, Ren and Sun, CVPR 2016, Section 4.2), with and without norms.

6n + 2 layers: a 3x3 convolution, three stages of n blocks of two 3x3 convolutions with 16, 32 and 64 channels, global
average pool, head. The first block of stages two and three halves the image. Convolutions have no biases.

    norm: "none"; "bn", batch normalization by the statistics of the batch at hand (nothing is tracked); "tracked", the
        same with running statistics that travel with the weights and are used in the end; "gn", group normalization;
        "fixup" (Zhang, Dauphin and Ma, ICLR 2019): no norm but a bias before and after each convolution (one a channel,
        where the paper's are scalars, so that it can be scaled) and a multiplier a block.
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
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppbench.base.errors import shown
from ppbench.nets.models import checks
from ppbench.nets.models.small import BAFFLE_ACTIVATIONS, BATCH_NORMS, kaiming_uniform
from ppbench.nets.net import Classifier

RESNET_NORMS = ("none", "bn", "gn", "fixup", "tracked")
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


def conv1x1(inside: int, outside: int, stride: int = 1) -> nn.Conv2d:
    """Return a 1x1 convolution without bias."""
    return nn.Conv2d(inside, outside, 1, stride=stride, bias=False)


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
    model.mixes = norm in ("bn", "tracked")
    return model


def _norm(kind: str, groups: int, channels: int) -> nn.Module:
    if kind in BATCH_NORMS:
        return BATCH_NORMS[kind](channels)
    return nn.GroupNorm(groups, channels) if kind == "gn" else nn.Identity()


def _shortcut(inside: int, outside: int, stride: int, kind: str, shift: Shift | None, norm: NormFactory) -> nn.Module:
    """Return the way around a block's branch; `shift` is fixup's bias before a convolution, None for other norms."""
    if stride == 1 and inside == outside:
        return nn.Identity()
    if kind == "A":
        return PaddedShortcut(stride, outside - inside)
    projection = conv1x1(inside, outside, stride)
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


for _network in (resnet20, resnet32, resnet56):  # they pass their options on
    _network.__signature__ = signature(partial(resnet, 3))  # type: ignore[attr-defined]


# -- ResNet-50 for small images without normalization (Zhang, Dauphin and Ma, Fixup Initialization, ICLR 2019) --
# FedPC trains it because statistics of batch normalization would leak. Bottlenecks, a 3x3 stem without pooling.

EXPANSION = 4
"""Output channels of a bottleneck for one of its inner channels."""
STAGE_COUNT = 4


class FixupBottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution, a scalar bias before each and each ReLU, one multiplier; plus the shortcut, ReLU.

    Where the shape changes the shortcut is a 1x1 convolution of the input, which has had the branch's first bias.
    """

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = EXPANSION * width
        self.before1, self.conv1, self.after1 = Shift(1), conv1x1(inside, width), Shift(1)
        self.before2, self.conv2, self.after2 = Shift(1), conv3x3(width, width, stride), Shift(1)
        self.before3, self.conv3, self.after3 = Shift(1), conv1x1(width, outside), Shift(1)
        self.scale = nn.Parameter(torch.ones(1))
        changes = stride != 1 or inside != outside
        self.shortcut = conv1x1(inside, outside, stride) if changes else nn.Identity()
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, 4 width, H', W'] for x [B, inside, H, W]."""
        shifted = self.before1(x)
        branch = self.relu1(self.after1(self.conv1(shifted)))
        branch = self.relu2(self.after2(self.conv2(self.before2(branch))))
        branch = self.after3(self.conv3(self.before3(branch)) * self.scale)
        around = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(shifted)
        return self.relu3(branch + around)  # type: ignore[no-any-return]


def resnet50_fixup(
    shape: tuple[int, ...], classes: int, *, width: int = 64, blocks: str | int = "3,4,6,3"
) -> Classifier:
    """ResNet of 50 layers for small images under Fixup: scalar biases and multipliers instead of norms.

    Initial law (the paper's Section 3.2 with m = 3 convolutions a branch): Kaiming-uniform for ReLU; the first two
    convolutions of each of the L branches times L^(-1/4), the third one and the head zero; biases 0, multipliers 1: AT
    INITIALIZATION no image can be rebuilt from the gradient, which is no merit of a defense.

    Args:
        shape: (channels, height, width) of any size; the first block of stages two to four halves it.
        width: inner channels of the first stage, doubled at each of the next three. (3, 32, 32) with 10 classes has
            23,467,836 parameters; width 40, 9,172,404 (35.0 MiB in float32).
        blocks: bottlenecks of the four stages, comma-separated; L is their sum, 16.
    """
    channels, _, _ = checks.checked_image(shape)
    inside, counts = checks.checked_int("width", width, 1), checks.widths("blocks", blocks)
    if len(counts) != STAGE_COUNT:
        raise ValueError(
            f"blocks must name the bottlenecks of {STAGE_COUNT} stages, such as '3,4,6,3', not {shown(blocks)}"
        )
    layers: list[nn.Module] = [conv3x3(channels, inside), Shift(1), nn.ReLU()]
    for stage, count in enumerate(counts):
        for index in range(count):
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(FixupBottleneck(inside, width * 2**stage, stride))
            inside = EXPANSION * width * 2**stage
    layers += [nn.AdaptiveAvgPool2d(1), Shift(1), nn.Flatten()]
    model = Classifier(nn.Sequential(*layers), nn.Linear(inside, classes))
    _initialize_fixup(model, sum(counts))
    return model


def _initialize_fixup(model: Classifier, branches: int) -> None:
    kaiming_uniform(model)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, FixupBottleneck):
                layer.conv1.weight.mul_(branches**-0.25)
                layer.conv2.weight.mul_(branches**-0.25)
                layer.conv3.weight.zero_()
        model.head.weight.zero_()


# -- WRN-10-2: a wide residual network of ten layers (Zagoruyko and Komodakis, BMVC 2016) as BAFFLE uses it --
# Batch normalization ties a loss to the statistics of its batch, which finite differences of single batches cannot
# track; BAFFLE's guidelines take group normalization and Hardswish instead (Feng et al. 2023, Section 3.3).

STEM, WRN_WIDTHS, GROUPS = 16, (32, 64, 128), 8


class PreActivated(nn.Module):
    """Norm, activation, convolution, twice; the shortcut is a 1x1 convolution of the first activation's output."""

    def __init__(self, inside: int, outside: int, stride: int, activation: type[nn.Module], norm: str) -> None:
        super().__init__()
        self.norm1, self.act1, self.conv1 = _norm(norm, GROUPS, inside), activation(), conv3x3(inside, outside, stride)
        self.norm2, self.act2, self.conv2 = _norm(norm, GROUPS, outside), activation(), conv3x3(outside, outside)
        self.shortcut = conv1x1(inside, outside, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, outside, H', W'] for x [B, inside, H, W]."""
        active = self.act1(self.norm1(x))
        branch: Tensor = self.conv2(self.act2(self.norm2(self.conv1(active))))
        return branch + self.shortcut(active)  # type: ignore[no-any-return]


def wrn_10_2(shape: tuple[int, ...], classes: int, *, activation: str = "hardswish", norm: str = "gn") -> Classifier:
    """A 3x3 convolution of 16 channels, one pre-activation block each of 32, 64 and 128, global average pool, head.

    The last two blocks halve the image, of any size. 128 features, and 303,706 parameters for (3, 32, 32) and 10
    classes, 315,316 for 100; initialized as torch does. activation: "hardswish" (the paper's), "relu" or "selu" (its
    ablations). norm: "gn", group normalization of 8 groups with affine part before each activation, or "none".
    """
    checks.one_of("activation", activation, BAFFLE_ACTIVATIONS)
    checks.one_of("norm", norm, ("gn", "none"))
    channels, _, _ = checks.checked_image(shape)
    layers: list[nn.Module] = [conv3x3(channels, STEM)]
    inside = STEM
    for outside in WRN_WIDTHS:
        stride = 1 if inside == STEM else 2
        layers.append(PreActivated(inside, outside, stride, BAFFLE_ACTIVATIONS[activation], norm))
        inside = outside
    layers += [_norm(norm, GROUPS, inside), BAFFLE_ACTIVATIONS[activation](), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Classifier(nn.Sequential(*layers), nn.Linear(inside, classes))
