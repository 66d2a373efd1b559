"""Augmented copies of records: a fixed list, the same for target and reference models of LiRA (2022)."""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.base.errors import UsageError
from ppbench.metrics.modalities import modality_from

SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
"""Shifts in rows down and columns to the right; each with and without mirroring."""
MOST_AUGMENTATIONS = 2 * len(SHIFTS)
"""Number of augmentations of an image, the image itself included."""


def augmentations(x: Tensor, count: int) -> Tensor:
    """Return up to `count` >= 1 augmentations [A, Q, *shape] of records x [Q, *shape], the records themselves first.

    Images [Q, C, H, W]: the image and its shifts by `SHIFTS`, each followed by its mirror image; the border is
    repeated. Other records are not augmented: A = 1. Raises UsageError for a count below 1.
    """
    if count < 1:
        raise UsageError(f"{count} augmentations were requested; expected 1 (the record itself) or more.")
    if not modality_from(x.shape[1:]).smooth:
        return x[None].clone()
    copies = []
    for down, right in SHIFTS[: (count + 1) // 2]:
        moved = shifted(x, down, right)
        copies += [moved, moved.flip(-1)]
    return torch.stack(copies[:count])


def shifted(x: Tensor, down: int, right: int) -> Tensor:
    """Return images x [..., H, W] moved by whole pixels, with the border repeated."""
    height, width = x.shape[-2:]
    rows = (torch.arange(height, device=x.device) - down).clamp(0, height - 1)
    columns = (torch.arange(width, device=x.device) - right).clamp(0, width - 1)
    return x[..., rows, :][..., columns]
