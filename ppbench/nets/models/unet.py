"""U-Net (Ronneberger, Fischer and Brox, MICCAI 2015) with padded convolutions: a mask of the image's own size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ppbench.nets.models import checks
from ppbench.nets.models.small import kaiming_uniform
from ppbench.nets.net import Classifier

DEPTH = 4
"""Times that the image is halved."""


def double_conv(inside: int, outside: int) -> nn.Sequential:
    """Return two 3x3 convolutions, zero-padded, with a ReLU after each."""
    first, second = nn.Conv2d(inside, outside, 3, padding=1), nn.Conv2d(outside, outside, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


class UNetFeatures(nn.Module):
    """All of a U-Net but its last 1x1 convolution."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(DEPTH + 1)]
        self.down = nn.ModuleList(double_conv(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(double_conv(2 * w, w) for w in reversed(widths[:-1]))
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, width, H, W] for x [B, channels, H, W]."""
        left: list[Tensor] = []
        for level, convs in enumerate(self.down):
            x = convs(x if level == 0 else self.pool(x))
            left.append(x)
        for across, up, merge in zip(reversed(left[:-1]), self.up, self.merge, strict=True):
            x = merge(torch.cat([across, up(x)], 1))
        return x


def unet(shape: tuple[int, ...], classes: int, *, width: int = 64) -> Classifier:
    """U-Net for masks: four halvings with two 3x3 convolutions each, as many doublings with what was kept beside.

    Outputs are maps [B, classes, H, W] of logits; weights are Kaiming-uniform for ReLU, biases 0.

    shape: (channels, height, width), height and width multiples of 16. classes: number of maps, 1 for a mask: (3, 256,
    256) has 31,031,745 parameters then. width: channels at full size, doubled at each halving; the original's 64 ends
    at 1024.
    """
    side = 2**DEPTH
    channels, high, wide = checks.checked_image(shape, side)
    if high % side or wide % side:
        raise ValueError(f"it takes images whose height and width are multiples of {side}, not {high}x{wide}")
    checks.checked_int("width", width, 1)
    model = Classifier(UNetFeatures(channels, width), nn.Conv2d(width, classes, 1))
    kaiming_uniform(model)
    return model
