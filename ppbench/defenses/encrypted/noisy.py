"""Clipping, and Gaussian noise in shares that add up to the budget's, before TP-SMC and HybridAlpha encrypt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.defenses.encrypted.sums import EncryptedSums
from ppbench.defenses.mpdp.accounting import composed_epsilon, theta_max
from ppbench.defenses.mpdp.model_perturbation import MPDP_PAPER_SETTING, MPDP_QUICK_SETTING
from ppbench.federation import secagg
from ppbench.federation.bounds import OpenFraction, between
from ppbench.federation.contract import Context, Server
from ppbench.federation.evidence import Evidence, Shared, as_gradient
from ppbench.federation.optim import Layout
from ppbench.federation.plain import client_observations
from ppbench.federation.plan import Noise, Plan
from ppbench.federation.view import Exchange, View


@dataclass(frozen=True)
class ReducedNoise(EncryptedSums):
    """Clients clip their update and add a share of the noise: t - 1 honest shares suffice for the budget.

    sigma, for a sum in which one client's part has norm at most `bound`, is that of MP-DP's Eq. [23], so that budgets
    are comparable; each client adds N(0, sigma^2 / (t - 1)) (Truex et al. 2019, Section 3.3). Weights are equal, 1/N.

    epsilon, delta: privacy budget of ONE round. bound: L2 norm to which an update is clipped.
    """

    epsilon: Annotated[float, between(1e-6, 1e6)] = 3.0
    delta: OpenFraction = 1e-5
    bound: Annotated[float, between(1e-12, 1e12)] = 1.0

    control: ClassVar[str] = "epsilon"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (3.0, 10.0, 30.0), "paper": (0.5, 1.0, 3.0, 5.0, 10.0)}
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": MPDP_QUICK_SETTING, "paper": MPDP_PAPER_SETTING}

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no general guarantee, and the epsilon that holds while t clients are honest."""
        rounds, honest = max(1, rounds), f"{self.trusted(plan)} of {plan.clients} clients"
        total = composed_epsilon(4 * theta_max(self.epsilon, self.delta), self.delta, rounds)
        return (
            f"only while {honest} are honest is there one (then epsilon {total:.3g} an example over {rounds} rounds, "
            f"delta {self.delta:g}); more colluders know too much of the noise"
        )

    def sigma(self, plan: Plan) -> float:
        """Return the standard deviation of the noise that one client adds to a coordinate of its update."""
        return self.bound / math.sqrt(theta_max(self.epsilon, self.delta) * (self.trusted(plan) - 1))

    def noise(self, plan: Plan) -> Noise | None:
        """Return the law of one client's noise on its gradient; None for local steps."""
        return Noise("gaussian", self.sigma(plan)) if plan.local.upload == "gradient" else None

    def weights(self, server: Server, clients: Sequence[int]) -> list[float]:
        """Return equal weights 1/N, so that a client's part in the sum is bounded."""
        return [1 / len(clients)] * len(clients)

    def encoded(self, ctx: Context, keys: secagg.Keys, result: Params) -> Tensor:
        """Return 1/N times the clipped and noisy update in fixed point, [values] int64 (Overflow)."""
        flat = Layout.of(result).pack(result).double().cpu()
        clipped = flat * (self.bound / flat.norm().clamp(min=1e-300)).clamp(max=1.0)
        noise = torch.randn(len(flat), generator=ctx.generator, dtype=torch.float64)
        noisy = clipped + self.sigma(ctx.plan) * noise
        return secagg.to_ring(noisy, self.fraction_bits, 1 / ctx.plan.clients)

    def read(self, plan: Plan, server: Server, words: Tensor, share: float) -> Params:
        """Return the words as an update, float64."""
        flat = secagg.from_ring(words, self.fraction_bits) / share
        return {n: v.double() for n, v in Layout.of(server.params).unpack(flat).items()}

    def evidence(self, view: View) -> list[Evidence]:
        """Return, to a client, the others' mean from two models in a row less what it sent; as its base to others."""
        if not view.threat.sees_uploads:
            return self._others(view)
        return super().evidence(view)

    def piece(
        self, view: View, shared: Shared, unit: Sequence[Exchange], summed: Sequence[Exchange], words: Tensor
    ) -> Evidence | None:
        """As the base class; an eavesdropper, which can decrypt like the server, gets it at the broadcast's weights."""
        if view.state_at(unit[0]) is not None:
            return super().piece(view, shared, unit, summed, words)
        params = unit[0].request.params
        server = Server(params, (), torch.zeros(0, dtype=torch.int64), ())
        observed = self.read(view.plan, server, words, len(summed) / len(unit) * as_gradient(view.plan, unit[0].round))
        return Evidence(tuple(e.slot for e in summed), observed, shared.at(params), params, channel="sum")

    def _others(self, view: View) -> list[Evidence]:
        """Return the others' mean gradient from two models and the client's own upload, decrypted by its keys."""
        opt, shared, pieces = view.plan.server_opt, Shared(view.plan), []
        if opt.name != "sgd" or opt.momentum:
            return []
        for others, own_uploads, first, second in client_observations(view):
            states = {e.slot.client: view.state_at(e, e.slot.client) for e in own_uploads}
            words = [w for e in own_uploads if (w := self._bare(view, e, states)) is not None]
            if len(words) < len(own_uploads):
                continue
            layout, size = Layout.of(first), view.plan.clients
            own = secagg.from_ring(torch.stack(words).sum(0), self.fraction_bits)
            moved = (layout.pack(first).double() - layout.pack(second).double()) / opt.lr
            mean = (moved - own.to(moved.device)) * size / len(others) / as_gradient(view.plan, own_uploads[0].round)
            observed = layout.unpack(mean)
            pieces.append(Evidence(others, observed, shared.at(first), first, channel="aggregate"))
        return pieces
