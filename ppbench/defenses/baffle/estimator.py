"""Stein's estimate of a gradient from loss differences: the computations of BAFFLE's clients and server.

Directions are drawn one after another on the CPU, however many are stacked, so that all parties have the same bits.
None is stored: memory stays proportional to the model. Losses of examples have the model's precision, their mean and
differences float64: at sigma = 1e-4 a difference is a ten-thousandth of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Batch, Plan
from ppbench.nets.net import build

Scheme = Literal["central", "twice"]
STACK, STACK_BYTES, SLICE_EXAMPLES, SMALL_BATCH = 64, 2**20, 8, 2048
"""Most models in a stack, and bytes of their weights; examples per slice; most entries of a small batch.

On images stacks of models save no time on a CPU, and slices of 8 examples keep a client's peak memory at 0.04
(WRN-10-2) to 0.08 (LeNet) of backpropagation's at batches of 128, for 1.25 and 1.5 times the time; whole batches take
0.35 and 0.58.
"""
OTHER_DEVICE_ENTRIES = 2**22
"""Most entries of all models' batches in a stack on another device, which 8 images would leave idle (not measured)."""


def stein_directions(seed: int, entries: int, count: int) -> Iterator[Tensor]:
    """Yield z_1, ..., z_count, each [entries] float32, standard normal; the first ones do not depend on `count`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(entries, generator=generator)


def chunks(seed: int, entries: int, count: int, size: int) -> Iterator[Tensor]:
    """Yield the same directions stacked, [size, entries] float32 at a time; the last stack may be smaller."""
    stream = stein_directions(seed, entries, count)
    while chunk := list(islice(stream, size)):
        yield torch.stack(chunk)


def step_seeds(seed: int, steps: int) -> Tensor:
    """Return the seeds [steps] int64 of a round's local steps, all from its public `seed`, which is the first."""
    later = (Seeds(seed).seed("baffle", step) >> 32 for step in range(1, steps))
    return torch.tensor([seed, *later], dtype=torch.int64)


def mean_loss(plan: Plan, params: Params, batch: Batch, examples: int = 0) -> Tensor:
    """Return the weighted mean loss of a batch (without axis T), a float64 scalar; `examples` at a time, 0 for all."""
    parts = zip(*(part.split(examples or len(batch.x)) for part in (batch.x, batch.y)), strict=True)
    losses = torch.cat([plan.example_loss(plan.net(params, x), y) for x, y in parts]).double()
    weights = batch.w.double()
    return (weights * losses).sum() / weights.sum().clamp(min=1e-12)


def stack_size(chunk: int, batch: Batch, entries: int) -> int:
    """Return the number of perturbed models evaluated at once: `chunk`; if 0, by memory, and 1 for images on a CPU."""
    if chunk:
        return chunk
    on_cpu, fitting = batch.x.device.type == "cpu", min(STACK, STACK_BYTES // (4 * entries))
    if on_cpu and batch.x.numel() > SMALL_BATCH:
        return 1
    return max(1, fitting if on_cpu else min(fitting, OTHER_DEVICE_ENTRIES // batch.x.numel()))


def slice_size(examples: int, batch: Batch) -> int:
    """Return the examples per forward pass: `examples`; if 0, `SLICE_EXAMPLES` for images on a CPU, else all."""
    return examples or (
        SLICE_EXAMPLES if batch.x.device.type == "cpu" and batch.x.numel() > SMALL_BATCH else len(batch.x)
    )


def loss_differences(
    plan: Plan,
    params: Params,
    batch: Batch,
    seed: int,
    count: int,
    sigma: float,
    scheme: Scheme,
    chunk: int = 0,
    examples: int = 0,
) -> Tensor:
    """Return the loss differences [count] float64 of a batch (no axis T) along the seed's directions z_k (Eq. 1 and 2).

    "central": L(W + sigma z_k) - L(W - sigma z_k), two forward passes each. "twice": forward differences L(W + sigma
    z_k) - L(W), twice as many for the same cost. chunk: perturbed models evaluated at once; 1 for a loop. examples: per
    forward pass. 0 chooses by memory, see `stack_size` and `slice_size`.
    """
    build(plan.spec)  # here, because a constructor draws, which vmap forbids
    layout = Layout.of(params)
    flat = layout.pack(params)
    size, slices = stack_size(chunk, batch, len(flat)), slice_size(examples, batch)
    if size > 1:  # under vmap, group normalization takes no channels-last images
        batch = Batch(batch.x.contiguous(), batch.y, batch.w)

    def loss(weights: Tensor) -> Tensor:
        return mean_loss(plan, layout.unpack(weights), batch, slices)

    base = loss(flat) if scheme == "twice" else None
    parts = []
    for stack in chunks(seed, len(flat), count, size):
        step = stack.to(flat.device, flat.dtype).mul_(sigma)
        plus = _losses(loss, flat + step)
        parts.append(plus - (_losses(loss, flat - step) if base is None else base))
    return torch.cat(parts)


def _losses(loss: Callable[[Tensor], Tensor], weights: Tensor) -> Tensor:
    return loss(weights[0])[None] if len(weights) == 1 else vmap(loss)(weights)


def slope(difference: Tensor, sigma: float, scheme: Scheme) -> Tensor:
    """Return s_k = z_k . gradient, up to O(sigma^2) ("central") or O(sigma) ("twice"), from differences [count]."""
    return difference.double() / (2 * sigma if scheme == "central" else sigma)


def stein(seed: int, slopes: Tensor, entries: int) -> Tensor:
    """Return the unbiased estimate (1 / count) sum_k z_k s_k of a gradient [entries], float64 (Eq. 6)."""
    total = torch.zeros(entries, dtype=torch.float64, device=slopes.device)
    for z, s in zip(stein_directions(seed, entries, len(slopes)), slopes.tolist(), strict=True):
        total.add_(z.to(total.device), alpha=s)
    return total / len(slopes)
