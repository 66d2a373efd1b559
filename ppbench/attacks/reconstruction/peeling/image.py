"""The image that a first block was given: found as an inner input is, but by its spectrum, with a prior on images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ppbench.attacks.reconstruction.peeling.layer import Layer, descended, part_of

TEMPERATURES = (3.0, 1.0, 0.5, 0.25, 0.12, 0.06)
FIRST, LAST = 3.0, 1e-4
"""Weights of the total variation, at first and in the end."""
COLOR = 3.0
"""How much rougher differences of colors count than their mean."""
PALE = 5.0
"""How much smaller their spectrum is."""
EDGE = 1e-4
"""Squared step of a pixel, of the data range, below which variation is no longer told apart from none."""
START = 0.1


@dataclass(frozen=True)
class Spectrum:
    """Images by their Fourier coefficients over 1 / frequency, as natural images have them, on twice the grid.

    So that searches move large shapes and small ones alike; nothing is ruled out. shape: [C, H, W]; middle, width: of
    the data range.
    """

    shape: tuple[int, int, int]
    middle: float
    width: float

    @property
    def start(self) -> tuple[int, int, int]:
        """Shape of the numbers that stand for an image."""
        return self.shape[0], 2 * self.shape[1], 2 * self.shape[2]

    def images(self, z: Tensor) -> Tensor:
        """Return the images [S, *shape] of numbers z [S, *start]."""
        _, high, wide = self.start
        weights = _amplitudes(self.shape[0], high, wide).to(z)
        parts = torch.fft.irfft2(torch.fft.rfft2(z) * weights, s=(high, wide))[..., : self.shape[1], : self.shape[2]]
        mixed = torch.einsum("kc,skij->scij", opponents(self.shape[0]).to(z), parts)
        return self.middle + self.width * mixed


@cache
def _amplitudes(channels: int, high: int, wide: int) -> Tensor:
    rows, columns = torch.fft.fftfreq(high, dtype=torch.float64), torch.fft.rfftfreq(wide, dtype=torch.float64)
    size = max(high, wide)
    one = 4 / size / ((rows[:, None].square() + columns.square()).sqrt() + 1 / size)
    share = torch.tensor([1.0] + [1 / PALE] * (channels - 1), dtype=torch.float64)
    weights: Tensor = share[:, None, None] * one
    return weights


@cache
def opponents(channels: int) -> Tensor:
    """Return the axes [C, C] along which images are told apart: the mean of colors first, then their differences."""
    axes = [[1.0] * channels, *([1.0] * k + [-float(k)] + [0.0] * (channels - k - 1) for k in range(1, channels))]
    found = torch.tensor(axes, dtype=torch.float64)
    unit: Tensor = found / found.norm(dim=1, keepdim=True)
    return unit


def variation(images: Tensor, width: float) -> Tensor:
    """Return the rounded total variation [S] of images [S, C, H, W] along `opponents`, per number."""
    parts = torch.einsum("kc,scij->skij", opponents(images.shape[1]).to(images), images / width)
    down, right = parts[..., 1:, :-1] - parts[..., :-1, :-1], parts[..., :-1, 1:] - parts[..., :-1, :-1]
    rough = (down.square() + right.square() + EDGE).sqrt().mean((2, 3))
    weights = torch.tensor([1.0] + [COLOR] * (images.shape[1] - 1)).to(images)
    return (rough * weights).mean(1)


def images_of(
    layer: Layer, data_range: tuple[float, float], generator: torch.Generator, budget: int
) -> tuple[Tensor, Tensor]:
    """Return the images [V, C, H, W] that the first block was given, and evaluations spent [V]."""
    low, high = data_range
    space = Spectrum(layer.block.inputs, (low + high) / 2, high - low)
    victims = len(layer.known.values)
    z = START * torch.randn(victims, *space.start, generator=generator, dtype=torch.float64).to(layer.weight.device)
    spent = torch.zeros(victims, dtype=torch.int64)
    for step, temperature in enumerate(TEMPERATURES):
        weight = FIRST * (LAST / FIRST) ** (step / (len(TEMPERATURES) - 1))

        def penalized(z: Tensor, index: Tensor, t: float = temperature, weight: float = weight) -> Tensor:
            images = space.images(z)
            outside = torch.relu(low - images).square() + torch.relu(images - high).square()
            beyond = outside.flatten(1).sum(1) / space.width**2
            return layer.mismatch(images, index, t) + beyond + weight * variation(images, space.width)

        z, used = descended(penalized, z, part_of(budget, step, len(TEMPERATURES)))
        spent += used
    return space.images(z).clamp(low, high), spent
