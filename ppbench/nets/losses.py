"""Per-example losses with soft targets. One object for client and attacker: two losses would silently differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LossName = Literal["cross_entropy", "squared", "bce"]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy [B] of logits [B, C] against soft targets y [B, C]."""
    return -(y * torch.log_softmax(logits, dim=-1)).sum(-1)


def squared(output: Tensor, y: Tensor) -> Tensor:
    """Return half the squared distance [B] of output [B, C] and targets y [B, C]."""
    return 0.5 * ((output - y) ** 2).sum(-1)


def bce(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean over pixels [B] of the binary cross-entropy of logits [B, C, H, W] and masks y [B, C, H, W]."""
    return -(y * logsigmoid(logits) + (1 - y) * logsigmoid(-logits)).flatten(1).mean(1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "squared": squared,
    "bce": bce,
}
