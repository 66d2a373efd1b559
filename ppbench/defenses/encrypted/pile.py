"""PILE: a perturbed model, and uploads under threshold Paillier (Tang et al. 2023), as the MP-DP paper has it.

The MP-DP paper says of it: clients train on a perturbed model, the server recovers the exact aggregate, homomorphic
encryption hides the uploads, there is no noise (its accuracy is FedAvg's), and it is slow, mostly in decryption. So it
is PBPFL whose three surrogates are encrypted, like those of extended PBPFL but by another scheme. Its zero-knowledge
proofs, by which a server rejects wrong gradients, change no view of honest parties and are neither run nor timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.defenses.claims import paper
from ppbench.defenses.encrypted.threshold import ThresholdDefense
from ppbench.defenses.mpdp.model_perturbation import PAPER, QUICK
from ppbench.defenses.pbpfl.extended import ORDERS, family_bits
from ppbench.defenses.pbpfl.perturbation import HEAD_WEIGHT, Surrogates
from ppbench.defenses.pbpfl.protocol import PBPFL
from ppbench.federation import secagg
from ppbench.federation.bounds import Bits
from ppbench.federation.contract import Claim, Context, Server
from ppbench.federation.evidence import Evidence, Shared
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Plan
from ppbench.federation.view import Exchange, View

YANG2024 = paper("yang2024")


@dataclass(frozen=True)
class PILE(ThresholdDefense, PBPFL):
    """PBPFL whose clients encrypt the surrogates under threshold Paillier: the server reads the exact sum alone.

    N - t + 1 colluding clients, t being trusted in, open every upload; the server then recovers that client's exact
    gradient. Clients see a perturbed model. fraction_bits: as `pbpfl_ext` has them.
    """

    fraction_bits: Bits = 48

    name: ClassVar[str] = "pile"
    paper: ClassVar[str] = (
        "Tang et al., PILE: Robust Privacy-Preserving Federated Learning via Verifiable Perturbations, TDSC 2023"
    )
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (1.0, 10.0, 100.0), "paper": (10.0,)}
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": QUICK, "paper": PAPER}
    claimed: ClassVar[tuple[Claim, ...]] = YANG2024.claims("pile")
    epsilon_reason: ClassVar[str] = "there is no noise; the server recovers the exact mean gradient of the cohort"

    def values(self, plan: Plan) -> int:
        """Return how many numbers a client encrypts: three surrogates."""
        return len(ORDERS) * plan.net.parameter_count

    def bits(self, family: str, width: int) -> int:
        """Return the fractional bits of a family's numbers, public; see `PBPFLExt.bits`."""
        return family_bits(self.fraction_bits, self.kappa, family, width)

    def encoded(self, ctx: Context, keys: secagg.Keys, result: Surrogates) -> Tensor:
        """Return N_k / N times the surrogates in fixed point, one after another, [3 P] int64 (Overflow)."""
        share, width = int(keys.counts[ctx.party]) / int(keys.counts.sum()), result.g[HEAD_WEIGHT].shape[1]
        parts = []
        for family in ORDERS:
            tree = getattr(result, family)
            parts.append(secagg.to_ring(Layout.of(tree).pack(tree).cpu(), self.bits(family, width), share))
        return torch.cat(parts)

    def surrogates(self, words: Tensor, share: float, like: Params) -> Surrogates:
        """Return what words [3 P] int64 are `share` times, float64."""
        layout, width, found = Layout.of(like), like[HEAD_WEIGHT].shape[1], []
        for family, part in zip(ORDERS, words.chunk(len(ORDERS)), strict=True):
            tree = layout.unpack(secagg.from_ring(part, self.bits(family, width)) / share)
            found.append({n: v[None] for n, v in tree.items()} if family == "sigma" else tree)
        return Surrogates(*found)

    def read(self, plan: Plan, server: Server, words: Tensor, share: float) -> Params:
        """Return the exact gradient at the true weights that the surrogates' words are `share` times, float64."""
        return self.recover(plan, server, self.surrogates(words, share, server.params))

    def piece(
        self, view: View, shared: Shared, unit: Sequence[Exchange], seen: Sequence[Exchange], words: Tensor
    ) -> Evidence | None:
        """As its base; to a listener, who decrypts the sum as well, the mean of the first surrogates where they are."""
        if view.state_at(unit[0]) is not None:
            return super().piece(view, shared, unit, seen, words)
        params = unit[0].asked.params
        observed = self.surrogates(words.to(params[HEAD_WEIGHT].device), 1.0, params).g
        return Evidence(tuple(e.slot for e in seen), observed, shared.at(params), params, channel="g")
