"""Baselines of MP-DP: naive noise on a perturbed model, and central noise (Yang et al. 2024, Eq. 7-8, Section 6)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Tree
from ppbench.defenses.claims import paper
from ppbench.defenses.mpdp.accounting import theta_max
from ppbench.defenses.mpdp.expansion import Expansion, unexpanded
from ppbench.defenses.mpdp.model_perturbation import ModelPerturbation
from ppbench.defenses.pbpfl.round import Perturbation
from ppbench.federation.contract import Claim, Context, Server
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Plan

YANG2024 = paper("yang2024")


@dataclass(frozen=True)
class MPDPNaive(ModelPerturbation):
    """PBPFL's perturbation of the original network, and Gaussian noise on the first surrogate (Eq. 7-8).

    Recovery multiplies the noise by quotients r_i / r_j, and the mean keeps all of it. sigma is that of Eq. [23] for
    one client's gradient; scales are PBPFL's.
    """

    name: ClassVar[str] = "mp_dp_naive"

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no guarantee."""
        return (
            "the recovered noise is no Gaussian, and Psi and Phi travel without any (epsilon "
            f"{self.epsilon:g} a round was aimed at, delta {self.delta:g})"
        )

    def sigma(self) -> float:
        """Return the noise's standard deviation at the perturbed weights, in units of the bound."""
        return 1 / math.sqrt(theta_max(self.epsilon, self.delta))

    def noise_variance(self, plan: Plan, degree: float | None) -> float:
        """Return sigma squared."""
        return self.sigma() ** 2

    def expansion(self, plan: Plan) -> Expansion:
        """Return the original network, not expanded."""
        return unexpanded(plan.spec)

    def scales(self, ctx: Context) -> Tensor:
        """Return PBPFL's scales."""
        return Perturbation.scales(self, ctx)

    def added(self, ctx: Context, me: Tree, words: int) -> Tensor:
        """Return Gaussian noise, float64 [words]."""
        return self.sigma() * torch.randn(words, generator=ctx.generator, dtype=torch.float64)


@dataclass(frozen=True)
class MPCDP(ModelPerturbation):
    """Model perturbation with central noise: the server recovers every gradient and adds noise to their mean.

    sigma is that of Eq. [23] for the mean, to which a client contributes bound / K. Clients clip as in MP-DP. The
    server also clips recovered gradients, unless clip is "none"; it knows the true norm: with "oracle" it alone clips.
    """

    name: ClassVar[str] = "mp_cdp"
    claimed: ClassVar[tuple[Claim, ...]] = YANG2024.claims("mp_cdp")

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no guarantee against the server, and the one against others."""
        return (
            "the server sees every client's exact gradient; noise is added to the mean only (against who sees no more "
            f"than the true model: epsilon {self.epsilon:g} a round, delta {self.delta:g})"
        )

    @property
    def shrinks(self) -> bool:
        """Whether clients clip."""
        return self.clip == "seen"

    def sigma(self, plan: Plan) -> float:
        """Return the standard deviation of the noise on the mean gradient."""
        return self.bound / (plan.clients * math.sqrt(theta_max(self.epsilon, self.delta)))

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Recover every gradient, clip it, average, add noise, step."""
        layout = Layout.of(server.params)
        total = torch.zeros(sum(v.numel() for v in server.params.values()), dtype=torch.float64)
        for client, upload in uploads.items():
            try:
                flat = layout.pack(self.recover(ctx.plan, server, upload)).cpu()
            except (AttributeError, KeyError, IndexError, ValueError, RuntimeError) as cause:
                raise ProtocolError(f"Client {client} sent surrogates that cannot be recovered: {cause}") from cause
            total = total + (flat if self.clip == "none" else flat * (self.bound / flat.norm().clamp(min=self.bound)))
        noise = self.sigma(ctx.plan) * torch.randn(len(total), generator=ctx.generator, dtype=torch.float64)
        mean = (total / len(uploads) + noise).to(next(iter(server.params.values())).device)
        return self.stepped(ctx, server, layout.unpack(mean))
