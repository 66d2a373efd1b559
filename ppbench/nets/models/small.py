"""Small networks of the papers: an MLP and convolutional networks, a plain one with options."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ppbench.base.errors import shown
from ppbench.nets.models.checks import ACTIVATIONS, DEEPEST, checked_flag, checked_image, checked_int, one_of
from ppbench.nets.models.checks import widths as comma_widths
from ppbench.nets.modes import TrackedNorm
from ppbench.nets.net import Classifier

# -- AlexNet for 32x32 inputs (SPN paper, Table 4: "modified AlexNet") --


def alexnet(shape: tuple[int, ...], classes: int) -> Classifier:
    """Five convolutions (64 and 192 of 5x5; 384, 256, 256 of 3x3) with ReLU, three 2x2 max pools, two linear layers.

    Images of at least 8x8; (3, 32, 32) with 10 classes gives 3,502,666 parameters. 256 features; weights are
    Kaiming-uniform for ReLU, biases 0.
    """
    channels, height, width = checked_image(shape, 8)
    layers: list[nn.Module] = []
    for maps, kernel, pooled in ((64, 5, True), (192, 5, True), (384, 3, False), (256, 3, False), (256, 3, True)):
        layers += [nn.Conv2d(channels, maps, kernel, padding=kernel // 2), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pooled else []
        channels = maps
    flat = channels * (height // 8) * (width // 8)
    model = Classifier(nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 256), nn.ReLU()), nn.Linear(256, classes))
    kaiming_uniform(model)
    return model


def kaiming_uniform(model: nn.Module) -> None:
    """Draw the weights of convolutions and linear layers, in place, from torch's global generator; biases become 0.

    He et al. 2015, for ReLU: U(-b, b) with b = sqrt(6 / fan_in).
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


# -- A plain convolutional network: blocks of convolution, activation and pooling, then linear layers --

_POOLS: dict[str, type[nn.MaxPool2d] | type[nn.AvgPool2d]] = {"max": nn.MaxPool2d, "avg": nn.AvgPool2d}


BATCH_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "bn": partial(nn.BatchNorm2d, track_running_stats=False),
    "tracked": TrackedNorm,
}
"""Batch norms by option: without running statistics, and with such as travel with the weights."""


def _convolution(channels: int, maps: int, bias: bool, norm: str) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, maps, 3, padding=1, bias=checked_flag("bias", bias))
    return [convolution, BATCH_NORMS[norm](maps)] if norm in BATCH_NORMS else [convolution]


def cnn(
    shape: tuple[int, ...],
    classes: int,
    *,
    widths: str | int = "32,32",
    hidden: str | int = "",
    pool: str = "max",
    activation: str = "relu",
    bias: bool = True,
    norm: str = "none",
) -> Classifier:
    """One block a width: 3x3 convolution (padding 1), activation, 2x2 pool; then linear layers, then the head.

    Args:
        shape: at least 2 to the number of blocks high and wide; (3, 32, 32) and 10 classes have 30,634 parameters.
        widths: channels of the blocks, comma-separated, one at least.
        hidden: widths of linear layers between the blocks and the head, with the activation after each; "" for none.
        pool, activation: "max" or "avg"; "relu", "leaky_relu" (slope 0.01) or "tanh".
        bias: of all layers and the head; at first they are 0, weights Kaiming-uniform.
        norm: behind each convolution: "none", or one of `BATCH_NORMS`.
    """
    one_of("pool", pool, _POOLS)
    one_of("activation", activation, ("relu", "leaky_relu", "tanh"))
    one_of("norm", norm, ("none", *BATCH_NORMS))
    blocks = comma_widths("widths", widths)
    if not blocks:
        raise ValueError("widths must name one block at least; without convolutions use the model 'mlp'")
    channels, height, width = checked_image(shape, 2 ** len(blocks))
    layers: list[nn.Module] = []
    for maps in blocks:
        layers += [*_convolution(channels, maps, bias, norm), ACTIVATIONS[activation](), _POOLS[pool](2)]
        channels = maps
    layers.append(nn.Flatten())
    flat = channels * (height >> len(blocks)) * (width >> len(blocks))
    for units in comma_widths("hidden", hidden):
        layers += [nn.Linear(flat, units, bias=bias), ACTIVATIONS[activation]()]
        flat = units
    model = Classifier(nn.Sequential(*layers), nn.Linear(flat, classes, bias=bias))
    kaiming_uniform(model)
    return model


# -- DLNet: the LeNet-like target of gradient-inversion papers (SPN paper, Table 6; Zhu, Liu and Han 2019) --


def dlnet(
    shape: tuple[int, ...],
    classes: int,
    *,
    activation: str = "sigmoid",
    init: str = "uniform",
    scale: float = 0.3,
    nconv: int = 4,
) -> Classifier:
    """Four 5x5 convolutions of 12 channels (strides 2, 2, 1, 1), sigmoid after each, one linear layer.

    Images of any size: 32x32 gives 768 features and, with 3 channels and 10 classes, 19,438 parameters (88,648 with
    100 classes). activation: "sigmoid" or "tanh" (the paper takes tanh for SVHN). init: "uniform" draws weights and
    biases from U(-scale, scale), 0.3 in the SPN paper and 0.5 in the DLG release; "default" keeps torch's law. nconv:
    number of convolutions, 4 in the paper's table; 3 in the DLG release.
    """
    one_of("activation", activation, ("sigmoid", "tanh"))
    one_of("init", init, ("uniform", "default"))
    channels, height, width = checked_image(shape)
    checked_int("nconv", nconv, 2, DEEPEST)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 1e6:
        raise ValueError(f"scale must be > 0, at most 1e6, not {shown(scale)}")
    layers: list[nn.Module] = []
    for index in range(nconv):
        stride = 2 if index < 2 else 1
        layers += [nn.Conv2d(channels, 12, 5, stride=stride, padding=2), ACTIVATIONS[activation]()]
        channels, height, width = 12, -(-height // stride), -(-width // stride)
    model = Classifier(nn.Sequential(*layers, nn.Flatten()), nn.Linear(12 * height * width, classes))
    if init == "uniform":
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -scale, scale)
    return model


# -- LeNet of the DLG release: the network that Zhu, Liu and Han's reference code attacks --


def lenet(shape: tuple[int, ...], classes: int, **options: Any) -> Classifier:
    """Three 5x5 convolutions of 12 channels (strides 2, 2, 1), sigmoid after each, one linear layer.

    This is `dlnet`, with its options, without the last convolution and with weights from U(-0.5, 0.5), as in the DLG
    release. 32x32 gives 768 features and, with 3 channels and 10 classes, 15,826 parameters (85,036 with 100 classes).
    """
    return dlnet(shape, classes, nconv=3, **{"scale": 0.5, **options})


lenet.__signature__ = signature(dlnet)  # type: ignore[attr-defined]  # it passes its options on


# -- The small LeNet that BAFFLE's figures fit: 27,242 parameters on 28x28 grey images --

BAFFLE_ACTIVATIONS: dict[str, type[nn.Module]] = {"hardswish": nn.Hardswish, "relu": nn.ReLU, "selu": nn.SELU}
MAPS, HIDDEN = (6, 16), 60


def lenet_baffle(
    shape: tuple[int, ...], classes: int, *, activation: str = "hardswish", norm: str = "none"
) -> Classifier:
    """Two 5x5 convolutions of 6 and 16 channels with 2x2 average pools, then a linear layer of 60, then the head.

    The paper (Feng et al. 2023) gives a LeNet of 2.7e4 parameters and no more. This one has 27,242 on (1, 28, 28) and
    on (1, 32, 32), 27,542 on (3, 32, 32) with 10 classes and 33,032 there with 100.

    shape: at least 12x12; images of up to 28 rows or columns are padded by 2, to 400 features as those of 32x32.
    activation: "hardswish" (the paper's), "relu" or "selu" (its ablations). norm: "none", or "gn": group normalization
    before both convolutional activations, of two channels a group.
    """
    one_of("activation", activation, BAFFLE_ACTIVATIONS)
    one_of("norm", norm, ("none", "gn"))
    channels, height, width = checked_image(shape, 12)
    padding = 2 if min(height, width) <= 28 else 0
    layers: list[nn.Module] = []
    for maps in MAPS:
        layers += [nn.Conv2d(channels, maps, 5, padding=padding)]
        layers += [nn.GroupNorm(maps // 2, maps)] if norm == "gn" else []
        layers += [BAFFLE_ACTIVATIONS[activation](), nn.AvgPool2d(2)]
        height, width = (height + 2 * padding - 4) // 2, (width + 2 * padding - 4) // 2
        channels, padding = maps, 0
    layers += [nn.Flatten(), nn.Linear(channels * height * width, HIDDEN), BAFFLE_ACTIVATIONS[activation]()]
    return Classifier(nn.Sequential(*layers), nn.Linear(HIDDEN, classes))


# -- VGG16 with group normalization, for 32x32 inputs (SPN paper, Table 5: "modified VGG16") --

_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(shape: tuple[int, ...], classes: int, *, groups: int = 32, late_stride: int = 2) -> Classifier:
    """Thirteen 3x3 convolutions, each with group normalization and ReLU, in five pooled blocks; two linear layers.

    The paper's table prints sizes that contradict each other after the third pool. By default all five pools halve the
    image; `late_stride=1` makes the last two 3x3 pools that keep its size (32x32 ends at 4x4, the size printed last).

    Args:
        shape: (channels, height, width), at least 32x32 (8x8 with late_stride 1); (3, 32, 32) with 10 classes gives
            14,857,034 parameters (16,823,114 with late_stride 1).
        groups: groups of each normalization, a divisor of 64; the paper gives none, 32 is Wu and He's (2018).
        late_stride: stride of pools 4 and 5, 2 or 1.

    256 features; weights are Kaiming-uniform for ReLU, biases 0.
    """
    if isinstance(late_stride, bool) or late_stride not in (1, 2):
        raise ValueError(f"late_stride must be 1 or 2, not {shown(late_stride)}")
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or 64 % groups:
        raise ValueError(f"groups must divide 64, not be {shown(groups)}")
    shrink = 32 if late_stride == 2 else 8
    channels, height, width = checked_image(shape, shrink)
    layers: list[nn.Module] = []
    for block, block_widths in enumerate(_BLOCKS):
        for maps in block_widths:
            layers += [nn.Conv2d(channels, maps, 3, padding=1), nn.GroupNorm(groups, maps), nn.ReLU()]
            channels = maps
        layers.append(nn.MaxPool2d(2) if block < 3 or late_stride == 2 else nn.MaxPool2d(3, stride=1, padding=1))
    flat = channels * (height // shrink) * (width // shrink)
    features = nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 256), nn.ReLU())
    model = Classifier(features, nn.Linear(256, classes))
    kaiming_uniform(model)
    return model


# -- A small DenseNet without normalization (after Huang, Liu, van der Maaten and Weinberger, CVPR 2017) --


class DenseLayer(nn.Module):
    """3x3 convolution and ReLU whose output is appended to the input's channels."""

    def __init__(self, channels: int, growth: int, bias: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, growth, 3, padding=1, bias=bias)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, channels + growth, H, W] for x [B, channels, H, W]."""
        return torch.cat([x, self.relu(self.conv(x))], 1)


def densenet(
    shape: tuple[int, ...], classes: int, *, growth: int = 12, blocks: int = 3, layers: int = 4, bias: bool = True
) -> Classifier:
    """3x3 convolution, dense blocks with 2x2 max pools between them, global average pool, head.

    Unlike the paper's: no batch normalization, hence convolution before ReLU, and transitions without a 1x1
    convolution, so that every layer commutes with positive scales of its channels; positively homogeneous without
    biases.

    Args:
        shape: (channels, height, width), at least 2 to the number of transitions high and wide; (3, 32, 32) with 10
            classes gives 119,146 parameters, 118,968 without biases.
        growth: channels that a layer adds; the first convolution has twice as many.
        blocks, layers: dense blocks, with one transition fewer, and layers in each. bias: of all layers and the head.

    growth * (2 + blocks * layers) features; weights are Kaiming-uniform for ReLU, biases 0.
    """
    checked_flag("bias", bias)
    checked_int("growth", growth, 1)
    checked_int("layers", layers, 1, DEEPEST)
    channels, _, _ = checked_image(shape, 2 ** (checked_int("blocks", blocks, 1, 30) - 1))
    stack: list[nn.Module] = [nn.Conv2d(channels, 2 * growth, 3, padding=1, bias=bias), nn.ReLU()]
    channels = 2 * growth
    for block in range(blocks):
        stack += [nn.MaxPool2d(2)] if block else []
        for _ in range(layers):
            stack.append(DenseLayer(channels, growth, bias))
            channels += growth
    features = nn.Sequential(*stack, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = Classifier(features, nn.Linear(channels, classes, bias=bias))
    kaiming_uniform(model)
    return model


# -- Multi-layer perceptrons, for tables and for flattened images --


def mlp(
    shape: tuple[int, ...],
    classes: int,
    *,
    hidden: str | int = "64",
    activation: str = "relu",
    layers: int = 0,
    bias: bool = True,
) -> Classifier:
    """Flatten, then linear layers of the `hidden` widths with an activation after each, then the head.

    Args:
        hidden: widths, comma-separated, e.g. "128,64" (one width may be a number); "" for none, which is logistic
            regression. The default has 4,810 parameters on (1, 8, 8) with 10 classes, 4,736 without biases.
        activation: "relu", "leaky_relu" (slope 0.01), "hardswish", "sigmoid" or "tanh".
        layers: number of linear layers, the head among them, all hidden ones of the one width in `hidden`
            ("MLP-5" is layers=5: four hidden layers and the head); 0 takes the widths as `hidden` lists them.
        bias: whether the linear layers, the head among them, have biases.
    """
    one_of("activation", activation, ACTIVATIONS)
    checked_flag("bias", bias)
    width = math.prod(shape)
    if not shape or width < 1:
        raise ValueError(f"it takes examples with at least one value, not of shape {tuple(shape)}")
    stack: list[nn.Module] = [nn.Flatten()]
    for next_width in _hidden(hidden, checked_int("layers", layers, 0, DEEPEST)):
        stack += [nn.Linear(width, next_width, bias=bias), ACTIVATIONS[activation]()]
        width = next_width
    return Classifier(nn.Sequential(*stack), nn.Linear(width, classes, bias=bias))


def _hidden(hidden: str | int, layers: int) -> list[int]:
    listed = comma_widths("hidden", hidden)
    if layers and len(listed) != 1:
        raise ValueError(f"hidden must be one width, such as 64, where layers={layers} is given, not {shown(hidden)}")
    return listed * (layers - 1) if layers else listed
