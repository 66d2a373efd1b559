"""Extended PBPFL: the server learns only the cohort's weighted sum of gradients (Feng et al. 2020, Appendix C)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ppbench.base.tree import Params, Tree
from ppbench.defenses.claims import paper
from ppbench.defenses.pbpfl.perturbation import HEAD_WEIGHT, Surrogates, whole_cohorts
from ppbench.defenses.pbpfl.protocol import PBPFL
from ppbench.federation import secagg
from ppbench.federation.bounds import Bits
from ppbench.federation.cohort import cohort_evidence
from ppbench.federation.contract import Claim, Context, Server
from ppbench.federation.evidence import Evidence, Shared
from ppbench.federation.view import View

FENG2020 = paper("feng2020")

ORDERS = {"g": (2, 0), "sigma": (1, 1), "beta": (0, 2)}  # powers of kappa and width with which the families grow
SMALL_KAPPA, SMALL_WIDTH = 10.0, 64  # up to these, all values measured (CIFAR-10, at initialization) are below 3000


def family_bits(bits: int, kappa: float, family: str, width: int) -> int:
    """Return the fractional bits of a family's numbers: `bits`, less those for large kappa and head width."""
    by_kappa, by_width = ORDERS[family]
    kappas, widths = max(0.0, math.log2(kappa / SMALL_KAPPA)), max(0.0, math.log2(width / SMALL_WIDTH))
    return max(0, bits - math.ceil(by_kappa * kappas + by_width * widths))


@dataclass(frozen=True)
class PBPFLExt(PBPFL):
    """PBPFL whose clients mask their uploads, so that only sums over the whole cohort can be read.

    Clients send N_k / N times each surrogate as fixed-point numbers modulo 2^64 plus masks that cancel in the cohort's
    sum (Eq. 23-30). families: "independent" masks the three surrogates separately; "shared" uses one mask for all, as a
    literal reading of Eq. 23-25 allows: it reveals differences of surrogates. fraction_bits: 48 represent values below
    16384 to 2e-15.
    """

    families: Literal["independent", "shared"] = "independent"
    fraction_bits: Bits = 48

    name: ClassVar[str] = "pbpfl_ext"
    claimed: ClassVar[tuple[Claim, ...]] = FENG2020.claims("pbpfl_ext")
    epsilon_reason: ClassVar[str] = "there is no noise; the server recovers the exact mean gradient of the cohort"

    @property
    def sums(self) -> bool:
        """Return that only sums can be read."""
        return True

    def bits(self, family: str, width: int) -> int:
        """Return the fractional bits of a family's numbers; public, as kappa and the head's `width` D are.

        beta grows as D^2, sigma as kappa D and g as kappa^2 (`ORDERS`): each doubling of kappa beyond 10, or of D
        beyond 64, costs one bit for each power of it; not with a "shared" mask, which needs one unit for all families.
        """
        if self.families == "shared":
            return self.fraction_bits
        return family_bits(self.fraction_bits, self.kappa, family, width)

    def upload(self, ctx: Context, me: secagg.Keys, result: Surrogates) -> Tree:
        """Return N_k / N times the surrogates in fixed point, masked; int64."""
        share, width = int(me.counts[ctx.party]) / int(me.counts.sum()), result.g[HEAD_WEIGHT].shape[1]

        def hidden(family: str) -> Params:
            purpose = family if self.families == "independent" else "all"
            return secagg.hide(me, ctx, purpose, getattr(result, family), self.bits(family, width), share)

        return Surrogates(*map(hidden, ORDERS))

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Sum in the ring, where the masks cancel, then recover the mean gradient and step."""
        secagg.need_everybody(server, uploads)
        return self.stepped(ctx, server, self.recover(ctx.plan, server, self.total(list(uploads.values()))))

    def total(self, uploads: Sequence[Surrogates]) -> Surrogates:
        """Return the N_k-weighted mean of the surrogates, float64, from all masked uploads."""
        width = uploads[0].g[HEAD_WEIGHT].shape[1]
        return Surrogates(
            *(secagg.sum_of_masked([getattr(u, f) for u in uploads], self.bits(f, width)) for f in ORDERS)
        )

    def evidence(self, view: View) -> list[Evidence]:
        """Return evidence of every whole cohort's mean gradient (server); an eavesdropper gets none."""
        shared, pieces = Shared(view.plan), []
        for unit in whole_cohorts(view):
            server = view.state_at(unit[0])
            if server is not None:
                mean = self.recover(view.plan, server, self.total([e.answer for e in unit]))
                pieces.append(cohort_evidence(shared, mean, unit, server))
        return pieces
