"""GradInversion (Yin, Mallya, Vahdat, Alvarez, Kautz and Molchanov, CVPR 2021).

Minimize ||grad - g*||^2 + TV + norm + group consistency over several seeds of a victim by Adam. Each seed is drawn to
their mean after registration: small shifts that align them. Statistics of norms are a term of every search where they
are sent (`Evidence.statistics`): the batch's own, not the running ones, which the paper takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack
from ppbench.attacks.reconstruction.search.descent import Inversion
from ppbench.attacks.reconstruction.search.priors import GreyNorm, Penalty, Sum, TotalVariation
from ppbench.federation.bounds import InMemoryCount, NonNegative, Positive, PositiveInt
from ppbench.federation.plan import Plan
from ppbench.metrics.modality import modality_from, modality_in

LARGEST_SHIFT = 2
"""Pixels that seeds are shifted by, at most."""


@dataclass(frozen=True)
class Consistency:
    """Weight times the mean squared distance of a victim's `tries` seeds to their registered mean, taken as fixed."""

    weight: float
    tries: int

    def __call__(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return penalties [S] and slopes [S, N, *shape]; 0 for a seed whose others have stopped."""
        away = torch.zeros_like(x)
        for victim in (index // self.tries).unique().tolist():
            rows = index // self.tries == victim
            if int(rows.sum()) > 1:
                away[rows] = x[rows] - registered_mean(x[rows])
        return self.weight * away.square().flatten(1).mean(1), (2 * self.weight / away[0].numel()) * away


def registered_mean(seeds: Tensor) -> Tensor:
    """Return the mean [N, *shape] of images [R, N, *shape], each first shifted by whole pixels onto the plain mean."""
    mean = seeds.mean(0)
    if not modality_from(seeds.shape[2:]).smooth:
        return mean
    centered = mean - mean.mean((-2, -1), keepdim=True)
    steps = range(-LARGEST_SHIFT, LARGEST_SHIFT + 1)
    shifts = [(a, b) for a in steps for b in steps]
    shifts.sort(key=lambda s: abs(s[0]) + abs(s[1]))  # of equals the smallest
    spectrum = torch.fft.rfft2(centered) * torch.fft.rfft2(seeds).conj()
    match = torch.fft.irfft2(spectrum.sum(2), s=seeds.shape[-2:])  # [R, N, H, W]: shift a seed by so much
    values = torch.stack([match[..., a % match.shape[-2], b % match.shape[-1]] for a, b in shifts], -1)
    best = values.argmax(-1)
    moved = torch.empty_like(seeds)
    for r in range(len(seeds)):
        for n in range(seeds.shape[1]):
            moved[r, n] = seeds[r, n].roll(shifts[int(best[r, n])], (-2, -1))
    return moved.mean(0)


@dataclass(frozen=True)
class GradInversion(Inversion):
    """Squared distance of gradients, total variation, norm and consistency of several seeds, by Adam.

    norm: weight of the mean squared distance of pixels to grey, in units of the data's range; group: weight of that of
    a victim's seeds to their registered mean.
    """

    name: ClassVar[str] = "gradinversion"
    version: ClassVar[str] = "2"
    standard: ClassVar[bool] = False
    reference: ClassVar[str] = "Yin et al., See through Gradients: Image Batch Recovery via GradInversion, CVPR 2021"

    budget: PositiveInt = 1200
    tries: InMemoryCount = 4
    lr: Positive = 0.05
    tv: NonNegative = 1.0
    fading: bool = True
    norm: NonNegative = 0.01
    group: NonNegative = 0.1

    def penalty(self, plan: Plan) -> Penalty | None:
        """Return all priors together."""
        (low, high), width = plan.data_range, plan.data_range[1] - plan.data_range[0]
        middle = GreyNorm(self.norm / width**2, (low + high) / 2)
        smooth = TotalVariation(self.tv / width if modality_in(plan).smooth else 0.0)
        return Sum([smooth, middle, Consistency(self.group / width**2, self.share)])

    def variants(self) -> Sequence[Attack]:
        """Return this attack, and with a tenth of the total variation."""
        return [self, replace(self, tv=0.1 * self.tv)]
