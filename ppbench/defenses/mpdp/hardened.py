"""MP-DP hardened, a variant of our own: the surrogates that carry no noise are masked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Params, Tree
from ppbench.defenses.mpdp.known_scales import delta_given_R
from ppbench.defenses.mpdp.protocol import MPDP
from ppbench.defenses.pbpfl.evidence import whole_cohorts
from ppbench.defenses.pbpfl.perturbation import Surrogates
from ppbench.federation import secagg
from ppbench.federation.contract import Claim, Context, Server
from ppbench.federation.evidence import Evidence
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Noise, Plan
from ppbench.federation.view import View

NOISELESS = ("sigma", "beta")  # the surrogates that are masked: Psi and Phi


@dataclass(frozen=True)
class MPDPH(MPDP):
    """MP-DP hardened (ours): Psi and Phi are masked, so that only their sums over the cohort can be read.

    Each is multiplied by 1/K, put into fixed point modulo 2^64 and masked by a zero-sum family of its own. r and s
    below `floor` are raised to it, so that no row is under-noised; the recovered noise is then no longer Gaussian. All
    clients take part in every round. Not differentially private either: the sums of Psi and Phi are exact. What is left
    is secure aggregation, and noise on a part of the sum.

    Attributes:
        floor: smallest value of r and s, >= 0.
        fraction_bits: of the fixed-point numbers; 40 hold values below 4e6 to 5e-13, small beside the noise.
    """

    floor: float = 0.5
    fraction_bits: int = 40

    name: ClassVar[str] = "mpdp_h"
    claimed: ClassVar[tuple[Claim, ...]] = ()  # ours, not the paper's

    def check(self, plan: Plan) -> None:
        """As MP-DP; also refuse a negative floor and too few or too many bits."""
        super().check(plan)
        self.require(0 <= self.floor < math.inf, "floor", "a finite number >= 0")
        self.require(16 <= self.fraction_bits <= 56, "fraction_bits", "from 16 to 56")

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no guarantee."""
        return (
            "the sums of Psi and Phi travel without noise, and the noise given the scales is bounded (epsilon "
            f"{self.epsilon:g} a round was aimed at, delta {self.delta:g})"
        )

    def noise(self, plan: Plan) -> Noise | None:
        """Return None: with a floor the noise has no closed law; evidence carries the round's standard deviation."""
        return None

    @property
    def sums(self) -> bool:
        """Return that only sums can be read."""
        return True

    def scales(self, ctx: Context) -> Tensor:
        """Return fresh scales [count], float64, with r and s at least `floor`."""
        return self.expansion(ctx.plan).laws.draw(ctx.generator, self.floor)

    def upload(self, ctx: Context, me: secagg.Keys, result: Surrogates) -> Tree:
        """Return the noisy first surrogate, and 1/K times the others in fixed point, masked; int64.

        Raises:
            Overflow: noise has driven training out of the ring's range.
        """
        noisy: Surrogates = super().upload(ctx, me, result)
        masked = []
        for purpose, part in zip(NOISELESS, (noisy.sigma, noisy.beta), strict=True):
            layout = Layout.of(part)
            flat = layout.pack(part)
            ring = secagg.to_ring(flat.cpu(), self.fraction_bits, 1 / ctx.plan.clients)
            masked.append(layout.unpack((ring + secagg.zero_sum(me, ctx, purpose, len(flat))).to(flat.device)))
        return Surrogates(noisy.g, *masked)

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Refuse a cohort that is not whole, whose masks do not cancel; then as MP-DP."""
        if len(uploads) != len(server.counts):
            raise ProtocolError(
                f"{len(uploads)} of {len(server.counts)} clients sent an upload; masks cancel only in everybody's sum."
            )
        return super().aggregate(ctx, server, uploads)

    def mean(self, uploads: Sequence[Surrogates]) -> Surrogates:
        """Return the mean of the surrogates of all clients, float64: Psi and Phi from the ring, where masks cancel."""

        def total(parts: Sequence[Params]) -> Params:
            return {
                n: secagg.from_ring(torch.stack([p[n] for p in parts]).sum(0), self.fraction_bits) for n in parts[0]
            }

        g = {n: torch.stack([u.g[n].double() for u in uploads]).mean(0) for n in uploads[0].g}
        return Surrogates(g, total([u.sigma for u in uploads]), total([u.beta for u in uploads]))

    def evidence(self, view: View) -> list[Evidence]:
        """Return the mean gradient of every whole cohort: recovered (server), or the mean of G (listener).

        Noise of pairs has cancelled in both; eta is left. Each client's own G also travels, under noise of pairs that
        grows with the number of neighbors; nothing is made of that here.
        """
        shelf, found = self.shelf(view), []
        variance = self.noise_variance(view.plan, 0) / view.plan.clients
        for unit in whole_cohorts(view):
            server, answers = view.state_at(unit[0]), [e.answer for e in unit]
            if server is None:
                found.append(shelf.overheard(unit, self.mean(answers).g, variance))
            else:
                observed = self.recover(view.plan, server, self.mean(answers))
                found.append(shelf.recovered(unit, observed, server, self.multipliers(view.plan, server), variance))
        return [replace(e, channel="sum") for e in found]

    def _delta_single(self, sigma_eta: float, scale: Tensor) -> float:
        """Return the mean over the drawn coordinates: with a floor R has another law."""
        return float(delta_given_R(torch.ones(len(scale), 1), sigma_eta, scale[:, None]).mean())
