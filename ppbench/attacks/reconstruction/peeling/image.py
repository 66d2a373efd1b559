"""The image that enters the first block: searched like an inner input, but by its spectrum, with a prior on images."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ppbench.attacks.reconstruction.peeling.layer import PeeledLayer, minimized, part_of

IMAGE_TEMPERATURES = (3.0, 1.0, 0.5, 0.25, 0.12, 0.06)
FIRST, LAST = 3.0, 1e-4
"""Weights of the total variation, at first and at last."""
COLOR = 3.0
"""Weight of the variation of color differences, relative to that of their mean."""
PALE = 5.0
"""Factor by which their spectrum is smaller."""
SMOOTHED_STEP = 1e-4
"""Squared step of a pixel, relative to the data range, below which variation is smoothed."""
START_SIZE = 0.1


@dataclass(frozen=True)
class Spectrum:
    """Images by their Fourier coefficients in units of 1 / frequency, as in natural images, on twice the grid.

    So searches move large and small shapes alike; any image is possible. shape: [C, H, W]; middle, width: of the data
    range.
    """

    shape: tuple[int, int, int]
    middle: float
    width: float

    @property
    def start(self) -> tuple[int, int, int]:
        """Shape of the numbers that encode an image."""
        return self.shape[0], 2 * self.shape[1], 2 * self.shape[2]

    def images(self, z: Tensor) -> Tensor:
        """Return the images [S, *shape] for numbers z [S, *start]."""
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
    """Return the orthonormal color axes [C, C]: the mean of colors first, then their differences."""
    axes = [[1.0] * channels, *([1.0] * k + [-float(k)] + [0.0] * (channels - k - 1) for k in range(1, channels))]
    matrix = torch.tensor(axes, dtype=torch.float64)
    unit: Tensor = matrix / matrix.norm(dim=1, keepdim=True)
    return unit


def opponent_variation(images: Tensor, width: float) -> Tensor:
    """Return the smoothed total variation [S] of images [S, C, H, W] along `opponents`, per number."""
    parts = torch.einsum("kc,scij->skij", opponents(images.shape[1]).to(images), images / width)
    down, right = parts[..., 1:, :-1] - parts[..., :-1, :-1], parts[..., :-1, 1:] - parts[..., :-1, :-1]
    rough = (down.square() + right.square() + SMOOTHED_STEP).sqrt().mean((2, 3))
    weights = torch.tensor([1.0] + [COLOR] * (images.shape[1] - 1)).to(images)
    return (rough * weights).mean(1)


def first_images(
    layer: PeeledLayer, data_range: tuple[float, float], generator: torch.Generator, budget: int
) -> tuple[Tensor, Tensor]:
    """Return the images [V, C, H, W] that enter the first block, and evaluations spent [V]."""
    low, high = data_range
    space = Spectrum(layer.block.inputs, (low + high) / 2, high - low)
    victims = len(layer.known.values)
    draws = torch.randn(victims, *space.start, generator=generator, dtype=torch.float64)
    z = START_SIZE * draws.to(layer.weight.device)
    spent = torch.zeros(victims, dtype=torch.int64)
    for step, temperature in enumerate(IMAGE_TEMPERATURES):
        weight = FIRST * (LAST / FIRST) ** (step / (len(IMAGE_TEMPERATURES) - 1))

        def penalized(z: Tensor, index: Tensor, t: float = temperature, weight: float = weight) -> Tensor:
            images = space.images(z)
            outside = torch.relu(low - images).square() + torch.relu(images - high).square()
            beyond = outside.flatten(1).sum(1) / space.width**2
            return layer.mismatch(images, index, t) + beyond + weight * opponent_variation(images, space.width)

        z, used = minimized(penalized, z, part_of(budget, step, len(IMAGE_TEMPERATURES)))
        spent += used
    return space.images(z).clamp(low, high), spent
