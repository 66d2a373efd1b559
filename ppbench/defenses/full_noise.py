"""Uploads that carry no data at all: the control that no attack may break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ppbench.base.tree import Params, Tree
from ppbench.federation.bounds import Positive
from ppbench.federation.contract import Context, Defense, Job
from ppbench.federation.plan import Plan


@dataclass(frozen=True)
class FullNoise(Defense):
    """Every client uploads Gaussian noise of a small scale sigma instead of its update; nothing leaks."""

    sigma: Positive = 1e-3

    name: ClassVar[str] = "full_noise"
    paper: ClassVar[str] = "control: perfect privacy, no utility"
    epsilon_reason: ClassVar[str] = "uploads do not depend on data (epsilon 0)"

    def guarantee(self, plan: Plan, examples: int, rounds: int) -> tuple[float, float] | None:
        """Return (0, 0): the uploads are independent of the data."""
        return 0.0, 0.0

    def draw(self, ctx: Context, params: Params, steps: int) -> Tree:
        """Return one standard normal draw of the whole upload."""
        return {n: torch.randn(1, *p.shape, generator=ctx.generator) for n, p in params.items()}

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return noise; the batches are not looked at."""
        return {name: self.sigma * value[0] for name, value in job.noise.items()}
