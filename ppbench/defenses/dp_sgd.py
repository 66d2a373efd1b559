"""DP-SGD: clipped per-example gradients, Gaussian noise, Poisson sampling, and an honest epsilon."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.linalg import vector_norm

from ppbench.base.errors import UsageError
from ppbench.base.tree import Params, Tree
from ppbench.defenses.dp import law_on_gradients, unit_noise
from ppbench.federation.bounds import LARGEST_NUMBER, Positive, between
from ppbench.federation.contract import Context, Defense
from ppbench.federation.plan import Batch, Data, Noise, Plan, poisson
from ppbench.nets.net import HeldSpec


@dataclass(frozen=True)
class DPSGD(Defense):
    """DP-SGD on each client's own examples (Abadi et al. 2016): gradients clipped to `clip`, noise in units of it."""

    noise_multiplier: Annotated[float, between(1e-12, LARGEST_NUMBER, zero=True)] = 0.5
    clip: Positive = 1.0

    name: ClassVar[str] = "dp_sgd"
    version: ClassVar[str] = "2"
    control: ClassVar[str] = "noise_multiplier"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "quick": (0.01, 0.1, 1.0),
        "paper": (0.001, 0.01, 0.1, 0.5, 1.0, 2.0),
    }
    paper: ClassVar[str] = "Abadi et al., Deep Learning with Differential Privacy, CCS 2016"
    epsilon_reason: ClassVar[str] = "noise_multiplier is 0"

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse a network without per-example gradients."""
        super().check(plan)
        if plan.net.mixes:
            running = "norm.eval()" if isinstance(plan.spec, HeldSpec) else "--set model.norms=running"
            raise UsageError(
                f"Defense {self.name!r} clips each example's gradient, which batch norm in model {plan.spec.model!r} "
                f"makes depend on the others; use group norm, or {running}."
            )

    def noise(self, plan: Plan) -> Noise | None:
        """Return the noise on one uploaded gradient."""
        return law_on_gradients(plan, self.noise_multiplier * self.clip / plan.local.batch)

    def clipping(self, plan: Plan) -> float | None:
        """Return the norm to which each example's gradient is clipped."""
        return self.clip

    def steps(self, plan: Plan, examples: int) -> int:
        """Return the local steps of one round for a client with `examples` examples."""
        if plan.local.upload == "gradient":
            return 1
        return plan.local.epochs * math.ceil(examples / plan.local.batch)

    def batches(self, ctx: Context, data: Data) -> Batch:
        """Return Poisson samples of rate batch size over examples."""
        count = len(data.x)
        rate = min(1.0, ctx.plan.local.batch / count)
        return poisson(data, self.steps(ctx.plan, count), rate, ctx.secret)

    def copies(self, plan: Plan, clients: int, examples: int) -> int:
        """As the base class, plus a step's noise and gradients of half a batch of examples: sample sizes vary."""
        return super().copies(plan, clients, examples) + clients * (1 + min(plan.local.batch, examples) // 2)

    def draw(self, ctx: Context, params: Params, steps: int) -> Tree:
        """Return standard normal noise for every step, float32, by parameter."""
        return unit_noise(ctx, params, steps)

    def clipped_sum(self, plan: Plan, params: Params, batch: Batch) -> Params:
        """Return the sum over the batch of gradients clipped to L2 norm `clip`; examples of weight 0 are left out."""

        def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
            return plan.example_loss(plan.net(p, x[None]), y[None])[0]

        each = vmap(grad(loss), in_dims=(None, 0, 0))(params, batch.x, batch.y)
        by_tensor = torch.stack([vector_norm(value.flatten(1), dim=1) for value in each.values()])
        factor = batch.w * (self.clip / vector_norm(by_tensor, dim=0).clamp(min=1e-12)).clamp(max=1.0)
        return {name: torch.tensordot(factor, value, dims=1) for name, value in each.items()}

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        """Return (clipped sum + noise) / expected batch size."""
        total = self.clipped_sum(plan, params, batch)
        std = self.noise_multiplier * self.clip
        return {name: (value + std * noise[name]) / plan.local.batch for name, value in total.items()}

    def guarantee(self, plan: Plan, examples: int, rounds: int) -> tuple[float, float] | None:
        """Return (epsilon, 1/examples) by the RDP accountant for the Poisson-subsampled Gaussian."""
        if self.noise_multiplier == 0:
            return None
        # Here, because importing it takes a second that most runs do not need.
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        from dp_accounting.rdp import RdpAccountant

        # It warns of every order whose series does not converge, and skips it: the others still bound epsilon.
        logging.getLogger("absl").setLevel(logging.ERROR)
        orders = [1 + x / 4 for x in range(1, 40)] + list(range(11, 65)) + [80, 96, 128, 192, 256, 384, 512]
        accountant = RdpAccountant(orders)
        event = PoissonSampledDpEvent(min(1.0, plan.local.batch / examples), GaussianDpEvent(self.noise_multiplier))
        accountant.compose(event, self.steps(plan, examples) * rounds)
        delta = 1 / examples
        return float(accountant.get_epsilon(delta)), delta
