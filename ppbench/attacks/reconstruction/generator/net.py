"""Decoders of one family: latent -> small map -> maps of twice the size -> image, cut into blocks G_{K-1} o ... o G_0.

    z [L] -> [w0, h, w] -> [w1, 2h, 2w] -> ... -> [C, H, W] in the data's range

G_0 is linear, the others are transposed convolutions (4x4, stride 2); all end in a leaky ReLU but the last, in a
sigmoid over the data's range. What an attack searches at stage k is the input of G_k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn.functional import conv_transpose2d, leaky_relu, linear

from ppbench.base.errors import UsageError
from ppbench.base.tree import Params

SLOPE = 0.2
LATENT, THINNEST, WIDEST = 128, 32, 128
SMALLEST = 4


@dataclass(frozen=True)
class Architecture:
    """Which decoder: of images `shape` (channels, height, width), `latent` numbers, and maps of `widths` channels.

    The smallest map comes first; each other one doubles height and width, and so does the last block.
    """

    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    latent: PositiveInt = LATENT
    widths: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (128, 64, 32)

    @property
    def blocks(self) -> int:
        """Return K, the number of blocks."""
        return len(self.widths) + 1

    @property
    def base(self) -> tuple[int, int]:
        """Return height and width of the smallest map; images that are no multiple of it are cropped."""
        factor = 2 ** len(self.widths)
        return -(-self.shape[1] // factor), -(-self.shape[2] // factor)

    def size(self, stage: int) -> tuple[int, ...]:
        """Return the shape of what enters block `stage`, in 0..K - 1; of the image for K."""
        if stage == 0:
            return (self.latent,)
        if stage == self.blocks:
            return self.shape
        grow = 2 ** (stage - 1)
        return (self.widths[stage - 1], self.base[0] * grow, self.base[1] * grow)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by name."""
        found = {"block0.weight": (math.prod(self.size(1)), self.latent), "block0.bias": (math.prod(self.size(1)),)}
        outs = (*self.widths[1:], self.shape[0])
        for k, (wide, out) in enumerate(zip(self.widths, outs, strict=True), start=1):
            found |= {f"block{k}.weight": (wide, out, 4, 4), f"block{k}.bias": (out,)}
        return found


def architecture(shape: tuple[int, ...], latent: int = 0) -> Architecture:
    """Return the decoder for images of `shape` (channels, height, width): doublings that leave a map of 4x4 or more.

    32x32 gives 4x4x128, 8x8x64, 16x16x32. A latent has 128 numbers, but at most half of an image's, if not `latent`.
    Raises UsageError where the shape is that of no image, or of one below 8x8.
    """
    if len(shape) != 3 or min(shape[1:]) < 2 * SMALLEST:
        raise UsageError(f"A generator makes images of 8x8 pixels or more, not inputs of shape {shape}; use ig or dlg.")
    count = int(math.log2(min(shape[1:]) / SMALLEST))
    widths = tuple(min(WIDEST, THINNEST * 2 ** (count - 1 - i)) for i in range(count))
    return Architecture((shape[0], shape[1], shape[2]), latent or min(LATENT, math.prod(shape) // 2), widths)


def initial(plan: Architecture, generator: torch.Generator) -> Params:
    """Return random weights of variance 2 over the inputs of an output, and biases of 0; float32."""
    params = {}
    for name, shape in plan.shapes().items():
        fan = shape[1] if len(shape) == 2 else shape[0] * 4  # four taps of a 4x4 kernel reach an output
        normal = torch.randn(shape, generator=generator) * math.sqrt(2 / fan)
        params[name] = normal if name.endswith("weight") else torch.zeros(shape)
    return params


@dataclass(frozen=True, eq=False)
class Decoder:
    """A decoder with its weights by name, as `Architecture.shapes` has them; low, high: the data's range."""

    plan: Architecture
    params: Params
    low: float = 0.0
    high: float = 1.0

    def block(self, k: int, h: Tensor, params: Params | None = None) -> Tensor:
        """Return what block k makes of h [S, *size(k)], with other weights where they are given."""
        params = self.params if params is None else params
        weight, bias = params[f"block{k}.weight"], params[f"block{k}.bias"]
        if k == 0:
            return leaky_relu(linear(h, weight, bias), SLOPE).view(-1, *self.plan.size(1))
        h = conv_transpose2d(h, weight, bias, stride=2, padding=1)
        if k < self.plan.blocks - 1:
            return leaky_relu(h, SLOPE)
        _, height, width = self.plan.shape
        return self.low + (self.high - self.low) * torch.sigmoid(h[..., :height, :width])

    def decode(self, h: Tensor, stage: int = 0, params: Params | None = None) -> Tensor:
        """Return the images [S, *shape] of h [S, *size(stage)]."""
        for k in range(stage, self.plan.blocks):
            h = self.block(k, h, params)
        return h
