"""A small DenseNet without normalization (after Huang, Liu, van der Maaten and Weinberger, CVPR 2017)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ppbench.nets.models.alexnet import kaiming_uniform
from ppbench.nets.models.checks import DEEPEST, checked_flag, checked_image, checked_int
from ppbench.nets.net import Classifier


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
