"""The privacy cost of a client's training by the engine's own accountant, of the steps taken, not by a formula."""

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
"""An accountant's history: (noise multiplier, sample rate, steps)."""
LARGEST_NUMERICAL_EPSILON = 50.0
"""The largest epsilon for which a numerical accountant is used: its memory grows with epsilon."""


RELEASE = tuple(int(part) for part in metadata.version("opacus").split(".")[:2])
"""Opacus's release: major, minor."""
ADJUSTS = RELEASE >= (1, 6)
"""Whether an adaptive optimizer's multiplier covers gradient and count together, as the accountant assumes."""


@dataclass(frozen=True)
class RoundCost:
    """The privacy cost of one round of a client. why_not: a clause, why there is no epsilon; "" if there is one."""

    history: tuple[tuple[float, float, int], ...]
    why_not: str


def history_tensor(history: History) -> Tensor:
    """Return a history as float64 [K, 3]."""
    return torch.tensor([tuple(map(float, entry)) for entry in history], dtype=torch.float64).view(-1, 3)


def joined_history(before: Tensor, more: Tensor) -> Tensor:
    """Return the history `before` followed by `more`; consecutive equal entries are merged."""
    rows: list[list[float]] = []
    for noise, rate, steps in torch.cat([before, more]).tolist():
        if rows and rows[-1][:2] == [noise, rate]:
            rows[-1][2] += steps
        else:
            rows.append([noise, rate, steps])
    return torch.tensor(rows, dtype=torch.float64).view(-1, 3)


def round_cost(private: Private, epochs: int) -> RoundCost:
    """Return the cost of `epochs` over the loader: the optimizer steps on zero gradients while the engine counts."""
    rate = sample_rate(private.loader)
    with watched() as steps:
        for _ in range(epochs):
            for _ in private.loader:
                private.optimizer.zero_grad()
                for parameter in private.optimizer.params:
                    parameter.grad_sample = torch.zeros(1, *parameter.shape)
                private.optimizer.step()
    if isinstance(private.optimizer, AdaClipDPOptimizer) and not ADJUSTS:
        return RoundCost((), "its accountant, before Opacus 1.6, does not count what the clipping norm is moved by")
    history = tuple((float(n), float(q), int(s)) for n, q, s in private.engine.accountant.history)
    return RoundCost(history, _why_not(history, len(steps.kinds), rate))


def _why_not(history: tuple[tuple[float, float, int], ...], steps: int, rate: float | None) -> str:
    counted = sum(count for _, _, count in history)
    if counted != steps:
        return f"its engine's accountant counts {counted} of the {steps} steps of a round"
    if any(noise == 0 for noise, _, _ in history):
        return "its noise multiplier is 0"
    if rate is None:
        return "its batches are no Poisson samples, of which alone the accountant's epsilon is"
    if any(rate > sampled * (1 + 1e-9) for _, sampled, _ in history):
        return f"examples are sampled at rate {rate:g}, and its accountant counts {min(q for _, q, _ in history):g}"
    return ""


def noise_of(optimizer: Any) -> float:
    """Return the standard deviation of the noise on a sum of clipped gradients; 0 without noise."""
    multiplier = float(optimizer.noise_multiplier)
    if multiplier and ADJUSTS and isinstance(optimizer, AdaClipDPOptimizer):  # the rest is on the count
        multiplier = (multiplier**-2 - (2 * optimizer.unclipped_num_std) ** -2) ** -0.5
    return multiplier * float(optimizer.max_grad_norm)


def sample_rate(loader: Any) -> float | None:
    """Return the rate of a loader's Poisson sampling, None if it samples otherwise."""
    sampler = loader.batch_sampler
    while isinstance(sampler, BatchSplittingSampler):
        sampler = sampler.sampler
    return float(sampler.sample_rate) if isinstance(sampler, UniformWithReplacementSampler) else None


def epsilon(engine: Any, cost: RoundCost, rounds: int, delta: float) -> float | None:
    """Return the epsilon of `rounds` rounds by the engine's own accountant; None if it is not finite.

    From `LARGEST_NUMERICAL_EPSILON` on, the RDP bound is returned: the numerical accountant would take gigabytes, or
    overflow.
    """
    bounding = RDPAccountant()  # type: ignore[no-untyped-call]  # Opacus's
    for accountant in (bounding, engine.accountant):
        accountant.history = [(noise, rate, steps * rounds) for noise, rate, steps in cost.history]
    if delta >= 1:
        return 0.0
    bound = float(bounding.get_epsilon(delta))
    value = bound if bound >= LARGEST_NUMERICAL_EPSILON else float(engine.get_epsilon(delta))
    return value if math.isfinite(value) else None
