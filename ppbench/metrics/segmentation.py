"""Dice coefficient and pixel accuracy of predicted masks, with intervals over images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppbench.metrics.intervals import Estimate, bootstrap


@dataclass(frozen=True)
class Overlap:
    """Figures of N images, float64 [N] each: dice = 2 |A and B| / (|A| + |B|) of predicted and true ones (Dice 1945), 1
    if neither mask has any, and accuracy, the share of pixels with the right prediction.
    """

    dice: Tensor
    accuracy: Tensor


def mask_overlap(logits: Tensor, masks: Tensor) -> Overlap:
    """Return the figures of masks predicted by positive, finite `logits` for 0/1 `masks`.

    Both are [N, 1, H, W]; ValueError if the shapes differ.
    """
    if logits.shape != masks.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} for masks of {tuple(masks.shape)}")
    predicted, true = ((logits > 0) & logits.isfinite()).flatten(1), (masks > 0.5).flatten(1)
    both, total = (predicted & true).sum(1).double(), (predicted.sum(1) + true.sum(1)).double()
    return Overlap(torch.where(total > 0, 2 * both / total.clamp(min=1), 1.0), (predicted == true).double().mean(1))


def joined_overlap(parts: list[Overlap]) -> Overlap:
    """Return the figures of all images of `parts`, at least one, in order."""
    return Overlap(torch.cat([p.dice for p in parts]), torch.cat([p.accuracy for p in parts]))


def mean_overlap(models: list[Overlap]) -> Overlap:
    """Return the mean figures of each image over several models' masks of the same images, at least one model."""
    dice, accuracy = (torch.stack([getattr(m, name) for m in models]).mean(0) for name in ("dice", "accuracy"))
    return Overlap(dice, accuracy)


def over_images(figures: Tensor, seed: int) -> Estimate:
    """Return the mean of `figures` [N] with its bootstrap interval over images."""
    return bootstrap([value.reshape(1).numpy() for value in figures], "mean", seed)
