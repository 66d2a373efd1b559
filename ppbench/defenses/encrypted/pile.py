"""PILE: a perturbed model, and uploads under threshold Paillier (Tang et al. 2023), as in the MP-DP paper.

According to the MP-DP paper, clients train on a perturbed model, the server recovers the exact aggregate, homomorphic
encryption hides the uploads, there is no noise (its accuracy is FedAvg's), and it is slow, mostly in decryption. So it
is PBPFL with encrypted surrogates, like extended PBPFL but by another scheme. Its zero-knowledge proofs, by which a
server rejects wrong gradients, change no view of honest parties and are neither run nor timed.
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
from ppbench.defenses.mpdp.model_perturbation import MPDP_PAPER_SETTING, MPDP_QUICK_SETTING
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
    """PBPFL whose clients encrypt the surrogates under threshold Paillier: the server reads only the exact sum.

    N - t + 1 colluding clients (t are trusted) can decrypt every upload; the server then recovers that client's exact
    gradient. Clients see a perturbed model. fraction_bits: as in `pbpfl_ext`.
    """

    fraction_bits: Bits = 48

    name: ClassVar[str] = "pile"
    paper: ClassVar[str] = (
        "Tang et al., PILE: Robust Privacy-Preserving Federated Learning via Verifiable Perturbations, TDSC 2023"
    )
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (1.0, 10.0, 100.0), "paper": (10.0,)}
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": MPDP_QUICK_SETTING, "paper": MPDP_PAPER_SETTING}
    claimed: ClassVar[tuple[Claim, ...]] = YANG2024.claims("pile")
    epsilon_reason: ClassVar[str] = "there is no noise; the server recovers the exact mean gradient of the cohort"

    def values(self, plan: Plan) -> int:
        """Return the count of numbers that a client encrypts: three surrogates."""
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
        """Return the surrogates, float64, of words [3 P] int64 that are `share` times them."""
        layout, width, trees = Layout.of(like), like[HEAD_WEIGHT].shape[1], []
        for family, part in zip(ORDERS, words.chunk(len(ORDERS)), strict=True):
            tree = layout.unpack(secagg.from_ring(part, self.bits(family, width)) / share)
            trees.append({n: v[None] for n, v in tree.items()} if family == "sigma" else tree)
        return Surrogates(*trees)

    def read(self, plan: Plan, server: Server, words: Tensor, share: float) -> Params:
        """Return the exact gradient at the true weights, float64, from words that are `share` times the surrogates."""
        return self.recover(plan, server, self.surrogates(words, share, server.params))

    def piece(
        self, view: View, shared: Shared, unit: Sequence[Exchange], summed: Sequence[Exchange], words: Tensor
    ) -> Evidence | None:
        """As the base class; an eavesdropper, which can decrypt the sum, gets the mean first surrogate."""
        if view.state_at(unit[0]) is not None:
            return super().piece(view, shared, unit, summed, words)
        params = unit[0].request.params
        observed = self.surrogates(words.to(params[HEAD_WEIGHT].device), 1.0, params).g
        return Evidence(tuple(e.slot for e in summed), observed, shared.at(params), params, channel="g")
