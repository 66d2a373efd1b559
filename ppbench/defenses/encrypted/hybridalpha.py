"""HybridAlpha: shares of noise under multi-input functional encryption (Xu et al. 2019), with keys of an authority.

The authority is honest, not on the wire, and gives one key per round: for equal weights of the whole cohort. With it
the server reads the sum, as with pairwise masks that cancel in it, and colluders reveal the same uploads. So pairwise
keys replace the authority's. One weakness of the paper's scheme is not modelled: its ciphertexts have no labels, so a
key also decrypts sums of uploads from different rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Tree
from ppbench.defenses.claims import paper
from ppbench.defenses.encrypted.ciphertexts import Ciphertext, ciphertext_of, ciphertext_words
from ppbench.defenses.encrypted.noisy import ReducedNoise
from ppbench.federation import secagg
from ppbench.federation.bounds import whole_number
from ppbench.federation.ciphering import Ciphering, functional
from ppbench.federation.contract import Claim, Context, Round, Server, Step
from ppbench.federation.plan import Plan
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import SERVER

YANG2024 = paper("yang2024")
FUNCTIONAL_PADS = "functional"


@dataclass(frozen=True)
class HybridAlpha(ReducedNoise):
    """Clients clip, add shares of the noise and encrypt; a key of a trusted authority lets the server read the sum.

    The server and all clients but one can decrypt that client's upload, which has only its share of the noise; fewer
    colluders read the noisy sum of the others. All clients see each model. least: the least number of clients in a sum
    for which the authority gives a key (its inference-prevention module refuses fewer).
    """

    least: Annotated[int, whole_number(2, 10_000)] = 3

    name: ClassVar[str] = "hybridalpha"
    paper: ClassVar[str] = (
        "Xu et al., HybridAlpha: An Efficient Approach for Privacy-Preserving Federated Learning, AISec@CCS 2019"
    )
    claimed: ClassVar[tuple[Claim, ...]] = YANG2024.claims("hybridalpha")

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse fewer clients than `least`."""
        super().check(plan)
        self.require(self.least <= plan.clients, "least", f"at most the number of clients, {plan.clients}")

    def ciphering(self, plan: Plan) -> Ciphering:
        """Return the encryption of a round; only the server decrypts."""
        return functional("mife", plan.clients, self.values(plan))

    def upload(self, ctx: Context, me: secagg.Keys, result: Tree) -> Ciphertext:
        """Return the encrypted share of the update (Overflow)."""
        own = self.encoded(ctx, me, result)
        return ciphertext_of(own + secagg.zero_sum(me, ctx, FUNCTIONAL_PADS, len(own)), self.ciphering(ctx.plan))

    def key_for(self, clients: Sequence[int]) -> None:
        """As the authority, refuse a key for the sum of too few clients (ProtocolError)."""
        if len(set(clients)) < self.least:
            problem = f"The authority gives no key for a sum of {len(set(clients))} clients"
            raise ProtocolError(f"{problem}; ask for {self.least} at least.")

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Broadcast, collect, and step on the sum that the authority's key decrypts (ProtocolError: it gives none)."""
        server, message = self.broadcast(ctx, server)
        uploads = yield Step(server, dict.fromkeys(cohort, message))
        self.key_for(list(uploads))
        secagg.need_everybody(server, uploads)
        words = [ciphertext_words(client, upload, self.values(ctx.plan)) for client, upload in uploads.items()]
        return self.applied(ctx, server, torch.stack(words).sum(0))

    def total(self, view: View, unit: Sequence[Exchange]) -> Tensor | None:
        """Return the cohort's sum for the server; an eavesdropper has no key."""
        if view.party != SERVER:
            return None
        count = self.values(view.plan)
        return torch.stack([ciphertext_words(e.slot.client, e.answer, count) for e in unit]).sum(0)

    def pad(self, ctx: Context, states: Mapping[int, Tree], words: int) -> Tensor | None:
        """Return the pad of `ctx.party`: its own, or minus the sum of all others' pads; None if one is missing."""
        if ctx.party in states:
            return secagg.zero_sum(states[ctx.party], ctx, FUNCTIONAL_PADS, words)
        others = [client for client in range(ctx.plan.clients) if client != ctx.party]
        if any(other not in states for other in others):
            return None
        total = torch.zeros(words, dtype=torch.int64)
        for other in others:
            there = Context(ctx.plan, ctx.round, ctx.session, other, ctx.generator)
            total = total - secagg.zero_sum(states[other], there, FUNCTIONAL_PADS, words)
        return total
