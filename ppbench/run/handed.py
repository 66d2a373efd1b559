"""What people hand over from programs of their own, made what the bench computes with, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.base.errors import UsageError, shown
from ppbench.federation.plan import Data, Plan

Labels = Tensor | Sequence[int]
Examples = tuple[Tensor, Labels]
"""A batch: inputs [N, *shape] and their classes [N]."""


def whole(name: str, value: int, least: int, most: int) -> int:
    """Return a whole number between two ends (UsageError: it is none)."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UsageError(f"{name}={shown(value)} cannot be used; it must be a whole number from {least} to {most:,}.")
    return value


def shape_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one input (UsageError: it is none)."""
    found = tuple(shape) if isinstance(shape, tuple | list) else ()
    if not found or not all(isinstance(side, int) and 0 < side <= 2**20 for side in found):
        raise UsageError(f"shape={shown(shape)} cannot be used; it must be that of one input, as (3, 32, 32).")
    return found


def range_of(data_range: tuple[float, float]) -> tuple[float, float]:
    """Return the least and the greatest value of an input (UsageError: they are none)."""
    try:
        low, high = map(float, data_range)
    except (TypeError, ValueError):
        low = high = 0.0
    if not -1e30 < low < high < 1e30:
        raise UsageError(f"data_range={shown(data_range)} cannot be used; it must be two numbers, the smaller first.")
    return low, high


def one_hot_of(labels: Labels, classes: int) -> Tensor:
    """Return labels [B] as one-hot rows [B, C] float32 on the CPU (UsageError: they are none of so many classes)."""
    try:
        found = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(0)
    counted = found.dim() == 1 and len(found) and not (found.is_floating_point() or found.is_complex())
    if not counted or found.dtype == torch.bool or not 0 <= int(found.min()) <= int(found.max()) < classes:
        raise UsageError(f"labels={shown(labels)} cannot be used; they must be classes from 0 to {classes - 1}.")
    return one_hot(found.long().cpu(), classes).float()


def examples_of(client: int, examples: Examples, shape: Sequence[int], classes: int) -> Data:
    """Return a client's examples, float32, in storage of their own; UsageError: they are none of this network's."""
    try:
        x, labels = examples
    except (TypeError, ValueError):
        x, labels = None, ()
    right = isinstance(x, Tensor) and x.is_floating_point() and tuple(x.shape[1:]) == tuple(shape)
    if x is None or not right or not bool(x.isfinite().all()):
        told = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else shown(x, 60)
        sizes = ", ".join(map(str, shape))
        raise UsageError(f"Client {client} holds inputs {told}; give finite floats [N, {sizes}] and N labels.")
    y = one_hot_of(labels, classes)
    if len(y) != len(x):
        raise UsageError(f"Client {client} holds {len(x)} inputs and {len(y)} labels; give each input its label.")
    return Data(x.detach().clone().float().cpu(), y)


def check_batch(plan: Plan, size: int) -> None:
    """Refuse a batch of which batch norm has no statistics (UsageError)."""
    if size < plan.net.fewest:
        told = f"Model {plan.spec.model!r} has a batch norm that sees one value of an example"
        raise UsageError(f"{told}; give batches of {plan.net.fewest} and more, or put it into eval mode.")
