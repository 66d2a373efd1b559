"""The two controls: no defense, which must fall, and pure noise, which must not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ppbench.base.tree import Params, Tree
from ppbench.defenses.dp import unit_noise
from ppbench.federation.bounds import Positive
from ppbench.federation.contract import Context, Defense, Job, step_inputs
from ppbench.federation.plan import Plan


@dataclass(frozen=True)
class NoDefense(Defense):
    """Plain federated averaging; the control that every attack must break."""

    name: ClassVar[str] = "none"
    tracks: ClassVar[bool] = True
    paper: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"


@dataclass(frozen=True)
class FullNoise(Defense):
    """Every client uploads Gaussian noise of a small scale sigma instead of its update; nothing leaks."""

    sigma: Positive = 1e-3

    name: ClassVar[str] = "full_noise"
    version: ClassVar[str] = "2"
    tracks: ClassVar[bool] = True
    paper: ClassVar[str] = "control: perfect privacy, no utility"
    epsilon_reason: ClassVar[str] = "uploads do not depend on data (epsilon 0)"

    def guarantee(self, plan: Plan, examples: int, rounds: int) -> tuple[float, float] | None:
        """Return (0, 0): the uploads are independent of the data."""
        return 0.0, 0.0

    def copies(self, plan: Plan, clients: int, examples: int) -> int:
        """Return the noise alone."""
        return clients

    def draw(self, ctx: Context, params: Params, steps: int) -> Tree:
        """Return one standard normal draw of the whole upload."""
        return unit_noise(ctx, params, 1)

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return noise, whatever the batches are."""
        return {name: self.sigma * value for name, value in step_inputs(job, 0)[2].items()}
