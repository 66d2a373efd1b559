"""DP as in the SPN paper: noise on the batch gradient, without clipping.

The three functions below define sigma, here and in PPDL: the scale of the noise on each entry of ONE batch gradient, at
every local step and in an attacked gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ppbench.base.secret_draws import Law, noise
from ppbench.base.tree import Params, Tree
from ppbench.federation.bounds import NonNegative
from ppbench.federation.contract import Context, Defense
from ppbench.federation.plan import Batch, Noise, Plan


def unit_noise(ctx: Context, params: Params, steps: int, law: Law = "gaussian") -> dict[str, Tree]:
    """Return noise of scale 1 for every local step, float32, by parameter; see `draws.noise`."""
    return {name: noise(ctx.secret, steps, value.shape, law) for name, value in params.items()}


def with_noise(clean: Params, sigma: float, noise: Params) -> Params:
    """Return one batch gradient plus `sigma` times its step's noise of scale 1, by parameter."""
    return {name: value + sigma * noise[name] for name, value in clean.items()}


def law_on_gradients(plan: Plan, sigma: float, law: Law = "gaussian") -> Noise | None:
    """Return the law of noise of scale `sigma` on an uploaded gradient; None without noise, or for local steps."""
    if sigma == 0 or plan.local.upload != "gradient":
        return None
    return Noise(law, sigma * (math.sqrt(2) if law == "laplace" else 1))


@dataclass(frozen=True)
class DP(Defense):
    """Gaussian or Laplace noise of scale sigma on every batch gradient; no clipping, so no epsilon."""

    sigma: NonNegative = 0.01
    law: Law = "gaussian"

    name: ClassVar[str] = "dp"
    version: ClassVar[str] = "2"
    control: ClassVar[str] = "sigma"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "quick": (1e-4, 0.01, 0.1),
        "paper": (1e-4, 1e-3, 0.01, 0.1, 0.5),
    }
    tracks: ClassVar[bool] = True
    paper: ClassVar[str] = "Fan et al., Rethinking Privacy Preserving Deep Learning, 2020 (arXiv 2006.11601)"
    epsilon_reason: ClassVar[str] = "gradients are not clipped, so their sensitivity has no bound"

    def noise(self, plan: Plan) -> Noise | None:
        """Return the law of the noise on one gradient; None for local steps."""
        return law_on_gradients(plan, self.sigma, self.law)

    def copies(self, plan: Plan, clients: int, examples: int) -> int:
        """As the base class, and the noise of a step."""
        return super().copies(plan, clients, examples) + clients

    def draw(self, ctx: Context, params: Params, steps: int) -> Tree:
        """Return noise of scale 1 for every local step, float32, by parameter."""
        return unit_noise(ctx, params, steps, self.law)

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        """Return the batch gradient plus sigma times noise."""
        return with_noise(super().local_gradient(plan, params, batch, own, ()), self.sigma, noise)
