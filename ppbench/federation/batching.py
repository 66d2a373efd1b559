"""How a client's examples become the batches of a round. Padded places carry weight 0."""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.federation.plan import Batch, Data, Local


def all_at_once(data: Data) -> Batch:
    """Return all of `data` as one batch."""
    return Batch(data.x[None], data.y[None], torch.ones(1, len(data.x), dtype=data.x.dtype, device=data.x.device))


def gather(data: Data, index: Tensor, weight: Tensor) -> Batch:
    """Return the batches that `index` [T, B] selects, with weights [T, B]; channels-last images stay so."""
    device = data.x.device
    index, weight = index.to(device), weight.to(device, data.x.dtype)
    if data.x.dim() == 4 and data.x.is_contiguous(memory_format=torch.channels_last):
        x = data.x.permute(0, 2, 3, 1)[index].permute(0, 1, 4, 2, 3)
    else:
        x = data.x[index]
    return Batch(x, data.y[index], weight)


def shuffled(data: Data, local: Local, generator: torch.Generator) -> Batch:
    """Return the batches of `local.epochs` shuffled epochs; in gradient mode one random batch.

    The last batch of an epoch is padded with examples of weight 0, so that all batches have one shape.
    """
    count, size = len(data.x), min(local.batch, len(data.x))
    if local.upload == "gradient":
        return gather(data, torch.randperm(count, generator=generator)[None, :size], torch.ones(1, size))
    steps = -(-count // size)
    weight = (torch.arange(steps * size) < count).float().view(steps, size)
    orders = [torch.randperm(count, generator=generator) for _ in range(local.epochs)]
    index = torch.stack([torch.cat([o, o[: steps * size - count]]).view(steps, size) for o in orders]).flatten(0, 1)
    return gather(data, index, weight.repeat(local.epochs, 1))


def poisson(data: Data, steps: int, rate: float, generator: torch.Generator) -> Batch:
    """Return `steps` Poisson samples, each example in with probability `rate`, as 0/1 weights over padded batches."""
    count = len(data.x)
    chosen = torch.rand(steps, count, generator=generator) < rate
    size = max(1, int(chosen.sum(1).max()))
    index = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :size]
    return gather(data, index, chosen.gather(1, index).float())
