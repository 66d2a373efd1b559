"""Priors on images: penalties with their slopes, for rows of images at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppbench.metrics.modality import modality_from

COLORS = 3


class Penalty(Protocol):
    """A function of images that is added to the minimized function."""

    def __call__(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the penalties [S] of images x [S, N, *shape] of the starts `index` [S], and their slopes by x."""


@dataclass(frozen=True)
class TotalVariation:
    """Weight times the mean of |dx| + |dy| over the pixels (Geiping et al. 2020); 0 for inputs without a grid.

    For three channels also that of their differences, as edges of all colors mostly coincide ("double opponents":
    Astrom and Schnorr 2016, as in the release of Geiping et al.); these vanish for grey images.
    """

    weight: float

    def __call__(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return penalties [S] and slopes [S, N, channels, height, width]."""
        if not modality_from(x.shape[2:]).smooth:
            return x.new_zeros(len(x)), torch.zeros_like(x)
        value, slope = variation(x)
        if x.shape[2] == COLORS:
            more, steeper = variation(x - x.roll(-1, 2))
            value, slope = value + more, slope + steeper - steeper.roll(1, 2)
        return self.weight * value, self.weight * slope


def variation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of |dx| + |dy| [S] over the pixels of x [S, N, channels, height, width], and its slopes."""
    down, right = x.diff(dim=-2), x.diff(dim=-1)
    tall, wide = (max(1, part[0].numel()) for part in (down, right))
    value = down.abs().flatten(1).sum(1) / tall + right.abs().flatten(1).sum(1) / wide
    down, right = down.sign() / tall, right.sign() / wide
    slope = pad(down, (0, 0, 1, 0)) - pad(down, (0, 0, 0, 1)) + pad(right, (1, 0)) - pad(right, (0, 1))
    return value, slope


@dataclass(frozen=True)
class GreyNorm:
    """Weight times the mean squared distance of pixels to `middle`, the middle of the data range."""

    weight: float
    middle: float = 0.0

    def __call__(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return penalties [S] and slopes [S, N, *shape]."""
        away = x - self.middle
        return self.weight * away.square().flatten(1).mean(1), (2 * self.weight / away[0].numel()) * away


@dataclass(frozen=True)
class Sum:
    """Several penalties together."""

    parts: Sequence[Penalty]

    def __call__(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return penalties [S] and slopes [S, N, *shape]."""
        value, slope = x.new_zeros(len(x)), torch.zeros_like(x)
        for part in self.parts:
            more, steeper = part(x, index)
            value, slope = value + more, slope + steeper
        return value, slope


@dataclass(frozen=True)
class ImagePrior:
    """Smoothed total variation and a soft box, for images [S, N, channels, height, width].

    tv: weight of the mean over pixels of sqrt(dx^2 + dy^2 + eps^2), summed over a victim's batch.
    box: weight of the mean squared distance of pixels to [low, high].
    """

    tv: float = 0.0
    box: float = 0.0
    eps: float = 1e-2
    low: float = 0.0
    high: float = 1.0

    def __call__(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return penalties [S] and slopes [S, N, channels, height, width]."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = self.value(leaf)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach(), slope

    def value(self, x: Tensor) -> Tensor:
        """Return the penalties [S], differentiable in x."""
        total = x.new_zeros(len(x))
        if self.tv:
            down, right = x[..., 1:, :-1] - x[..., :-1, :-1], x[..., :-1, 1:] - x[..., :-1, :-1]
            rough = (down**2 + right**2 + self.eps**2).sqrt()
            total = total + self.tv * rough.flatten(2).mean(2).sum(1)
        if self.box:
            outside = torch.relu(x - self.high) + torch.relu(self.low - x)
            total = total + self.box * (outside**2).flatten(2).mean(2).sum(1)
        return total
