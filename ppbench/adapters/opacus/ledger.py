"""What a client's training spends, by the engine's own accountant: of the steps that are taken, not of a formula."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from opacus.accountants import RDPAccountant
from opacus.optimizers import AdaClipDPOptimizer
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor

from ppbench.adapters.opacus.private import Private
from ppbench.adapters.steps import watched

History = list[tuple[float, float, int]]
"""An accountant's: noise multiplier, sample rate, steps."""
MOST = 50.0
"""The epsilon up to which a numerical accountant is asked: it promises nothing, and takes memory in proportion."""


RELEASE = tuple(int(part) for part in metadata.version("opacus").split(".")[:2])
"""Opacus's."""
ADJUSTS = RELEASE >= (1, 6)
"""Whether an adaptive optimizer's multiplier is that of gradient and count together, as it is accounted for."""


@dataclass(frozen=True)
class Spent:
    """What one round of a client spends. why_not: why its epsilon is none, a clause; "" where it is one."""

    history: tuple[tuple[float, float, int], ...]
    why_not: str


def kept(history: History) -> Tensor:
    """Return a history as float64 [K, 3]."""
    return torch.tensor([tuple(map(float, one)) for one in history], dtype=torch.float64).view(-1, 3)


def joined(before: Tensor, more: Tensor) -> Tensor:
    """Return one history after the other; steps of one kind in a row are counted together."""
    rows: list[list[float]] = []
    for noise, rate, steps in torch.cat([before, more]).tolist():
        if rows and rows[-1][:2] == [noise, rate]:
            rows[-1][2] += steps
        else:
            rows.append([noise, rate, steps])
    return torch.tensor(rows, dtype=torch.float64).view(-1, 3)


def counted(made: Private, epochs: int) -> Spent:
    """Return what `epochs` over its loader spend: its optimizer steps, on gradients of zeros, and its engine counts."""
    rate = sample_rate(made.loader)
    with watched() as seen:
        for _ in range(epochs):
            for _ in made.loader:
                made.optimizer.zero_grad()
                for parameter in made.optimizer.params:
                    parameter.grad_sample = torch.zeros(1, *parameter.shape)
                made.optimizer.step()
    if isinstance(made.optimizer, AdaClipDPOptimizer) and not ADJUSTS:
        return Spent((), "its accountant, before Opacus 1.6, does not count what the clipping norm is moved by")
    history = tuple((float(n), float(q), int(s)) for n, q, s in made.engine.accountant.history)
    return Spent(history, _why_not(history, len(seen.kinds), rate))


def _why_not(history: tuple[tuple[float, float, int], ...], steps: int, rate: float | None) -> str:
    known = sum(count for _, _, count in history)
    if known != steps:
        return f"its engine's accountant counts {known} of the {steps} steps of a round"
    if any(noise == 0 for noise, _, _ in history):
        return "its noise multiplier is 0"
    if rate is None:
        return "its batches are no Poisson samples, of which alone the accountant's epsilon is"
    if any(rate > one * (1 + 1e-9) for _, one, _ in history):
        return f"examples are sampled at rate {rate:g}, and its accountant counts {min(q for _, q, _ in history):g}"
    return ""


def noise_of(optimizer: Any) -> float:
    """Return the standard deviation of the noise on a sum of clipped gradients; 0 without noise."""
    multiplier = float(optimizer.noise_multiplier)
    if multiplier and ADJUSTS and isinstance(optimizer, AdaClipDPOptimizer):  # the rest is on the count
        multiplier = (multiplier**-2 - (2 * optimizer.unclipped_num_std) ** -2) ** -0.5
    return multiplier * float(optimizer.max_grad_norm)


def sample_rate(loader: Any) -> float | None:
    """Return the rate of a loader's Poisson samples, None where it takes others."""
    sampler = loader.batch_sampler
    while isinstance(sampler, BatchSplittingSampler):
        sampler = sampler.sampler
    return float(sampler.sample_rate) if isinstance(sampler, UniformWithReplacementSampler) else None


def epsilon(engine: Any, spent: Spent, rounds: int, delta: float) -> float | None:
    """Return the epsilon of so many rounds by the engine's own accountant; None where it finds no finite one.

    Where RDP bounds it by no less than `MOST`, that bound is told: the numerical accountant would take gigabytes, or
    overflow.
    """
    bounding = RDPAccountant()  # type: ignore[no-untyped-call]  # Opacus's
    for accountant in (bounding, engine.accountant):
        accountant.history = [(noise, rate, steps * rounds) for noise, rate, steps in spent.history]
    if delta >= 1:
        return 0.0
    bound = float(bounding.get_epsilon(delta))
    found = bound if bound >= MOST else float(engine.get_epsilon(delta))
    return found if math.isfinite(found) else None
