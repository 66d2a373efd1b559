"""How well predicted masks fit the true ones: Dice coefficient and pixel accuracy, with intervals over images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppbench.metrics.intervals import Estimate, bootstrap


@dataclass(frozen=True)
class Overlap:
    """Figures of N images, float64 [N] each: dice = 2 |A and B| / (|A| + |B|) of predicted and true ones (Dice 1945), 1
    where neither mask has any, and accuracy, the share of pixels that are predicted rightly.
    """

    dice: Tensor
    accuracy: Tensor


def overlap(logits: Tensor, masks: Tensor) -> Overlap:
    """Return how masks by the sign of finite `logits` fit 0/1 `masks`, both [N, 1, H, W] (ValueError otherwise)."""
    if logits.shape != masks.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} for masks of {tuple(masks.shape)}")
    found, true = ((logits > 0) & logits.isfinite()).flatten(1), (masks > 0.5).flatten(1)
    both, total = (found & true).sum(1).double(), (found.sum(1) + true.sum(1)).double()
    return Overlap(torch.where(total > 0, 2 * both / total.clamp(min=1), 1.0), (found == true).double().mean(1))


def joined(parts: list[Overlap]) -> Overlap:
    """Return the figures of all images of `parts`, at least one, in order."""
    return Overlap(torch.cat([p.dice for p in parts]), torch.cat([p.accuracy for p in parts]))


def averaged(models: list[Overlap]) -> Overlap:
    """Return the mean figures of each image over several models' masks of the same images, at least one model."""
    dice, accuracy = (torch.stack([getattr(m, name) for m in models]).mean(0) for name in ("dice", "accuracy"))
    return Overlap(dice, accuracy)


def over_images(figures: Tensor, seed: int) -> Estimate:
    """Return the mean of `figures` [N] with its bootstrap interval: images are independent, pixels of one are not."""
    return bootstrap([value.reshape(1).numpy() for value in figures], "mean", seed)
