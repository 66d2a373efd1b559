"""What a worker of FedPC does beside training: tell its cost, and blur what it sends where it was asked to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.federation.batching import gather
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Batch, Data, Plan


def in_order(data: Data, size: int) -> Batch:
    """Return all of `data` once, in batches of `size`, padded with examples of weight 0."""
    count = len(data.x)
    index = torch.arange(-(-count // size) * size).view(-1, size)
    return gather(data, index % count, (index < count).float())


def mean_loss(plan: Plan, params: Params, batches: Batch) -> Tensor:
    """Return the mean loss of `params` over all batches [T, B], a float32 scalar, summed in float64."""
    total = torch.zeros((), dtype=torch.float64, device=batches.w.device)
    for t in range(batches.x.shape[0]):
        losses = plan.example_loss(plan.net(params, batches.x[t]), batches.y[t])
        total = total + (batches.w[t] * losses).double().sum()
    return (total / batches.w.double().sum()).float()


def randomized(trits: Tensor, flip: float, generator: torch.Generator) -> Tensor:
    """Return int8 [M] with each entry drawn anew, uniformly from -1, 0, 1, with probability `flip`."""
    anew = torch.rand(len(trits), generator=generator) < flip
    drawn = torch.randint(-1, 2, (len(trits),), generator=generator, dtype=torch.int8)
    return torch.where(anew.to(trits.device), drawn.to(trits.device), trits)


def entry_epsilon(flip: float) -> float:
    """Return the local epsilon of one entry of `randomized` (randomized response over three values); M compose."""
    return math.log(3 / flip - 2) if flip else math.inf


def blurred(last: Params, trained: Params, clip: float, sigma: float, generator: torch.Generator) -> Params:
    """Return the model P + clipped (Q - P) + noise: the update scaled to norm `clip`, noise N(0, (sigma clip)^2)."""
    layout = Layout.of(last)
    start = layout.pack(last)
    update = layout.pack(trained) - start
    noise = torch.randn(len(update), generator=generator).to(update)
    update = update * (clip / update.norm().clamp(min=clip)) + sigma * clip * noise
    return layout.unpack(start + update)
