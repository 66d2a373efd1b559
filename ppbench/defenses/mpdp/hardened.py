"""MP-DP hardened, our own variant: the surrogates without noise are masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ppbench.base.tree import Tree
from ppbench.defenses.mpdp.model_perturbation import average
from ppbench.defenses.mpdp.protocol import MPDP
from ppbench.defenses.pbpfl.perturbation import Surrogates
from ppbench.federation import secagg
from ppbench.federation.bounds import Bits, NonNegative
from ppbench.federation.contract import Claim, Context, Server
from ppbench.federation.plan import Noise, Plan

NOISELESS = ("sigma", "beta")  # the surrogates that are masked: Psi and Phi


@dataclass(frozen=True)
class MPDPH(MPDP):
    """MP-DP hardened (ours): Psi and Phi are masked, so that only their exact sums over the cohort can be read.

    floor: smallest value of r and s, so that no row has too little noise; above 0 recovered noise is not Gaussian.
    fraction_bits: of the fixed-point numbers, 1/K of each; 40 represent values below 4e6 to 5e-13, less than the noise.
    """

    floor: NonNegative = 0.5
    fraction_bits: Bits = 40

    name: ClassVar[str] = "mpdp_h"
    claimed: ClassVar[tuple[Claim, ...]] = ()  # ours, not the paper's

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no guarantee."""
        return (
            "the sums of Psi and Phi travel without noise, and the noise given the scales is bounded (epsilon "
            f"{self.epsilon:g} a round was aimed at, delta {self.delta:g})"
        )

    def noise(self, plan: Plan) -> Noise | None:
        """Return None: with a floor the noise has no closed law; evidence has the round's standard deviation."""
        return None

    @property
    def sums(self) -> bool:
        """Return that only sums can be read."""
        return True

    def scales(self, ctx: Context) -> Tensor:
        """Return fresh scales [count], float64, with r and s at least `floor`."""
        return self.expansion(ctx.plan).laws.draw(ctx.generator, self.floor)

    def upload(self, ctx: Context, me: secagg.Keys, result: Surrogates) -> Tree:
        """Return the noisy first surrogate, and 1/K times the others in fixed point, masked, int64 (Overflow)."""
        noisy, share = super().upload(ctx, me, result), 1 / ctx.plan.clients
        parts = (secagg.hide(me, ctx, p, getattr(noisy, p), self.fraction_bits, share) for p in NOISELESS)
        return Surrogates(noisy.g, *parts)

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """As MP-DP; ProtocolError unless every client sent an upload, because masks would not cancel."""
        secagg.need_everybody(server, uploads)
        return super().aggregate(ctx, server, uploads)

    def mean(self, uploads: Sequence[Surrogates]) -> Surrogates:
        """Return the mean of the surrogates of all clients, float64: Psi and Phi from the ring, where masks cancel."""
        parts = (secagg.sum_of_masked([getattr(u, part) for u in uploads], self.fraction_bits) for part in NOISELESS)
        return Surrogates(average([u.g for u in uploads]), *parts)
