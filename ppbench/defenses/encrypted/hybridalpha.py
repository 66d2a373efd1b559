"""HybridAlpha: parts of noise under multi-input functional encryption (Xu et al. 2019), whose keys an authority gives.

The authority is honest, no party on the wire, and gives one key a round: for equal weights of the whole cohort. What
the server reads by it is the sum, as from masks of pairs that cancel in it; colluders bare what they do there. So keys
of pairs stand for the authority's. One difference is to the server's favor in the paper's scheme, and not modelled: its
ciphertexts carry no labels, so that a key also decrypts sums of several rounds' uploads mixed.
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
from ppbench.defenses.encrypted.ciphertexts import Ciphertext, sealed, words_of
from ppbench.defenses.encrypted.noisy import ReducedNoise
from ppbench.federation import secagg
from ppbench.federation.bounds import whole
from ppbench.federation.ciphering import Ciphering, functional
from ppbench.federation.contract import Claim, Context, Round, Server, Step
from ppbench.federation.plan import Plan
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import SERVER

YANG2024 = paper("yang2024")
PURPOSE = "functional"


@dataclass(frozen=True)
class HybridAlpha(ReducedNoise):
    """Clients clip, add parts of the noise and encrypt; a key of a trusted authority lets the server read the sum.

    All clients but one, with the server, bare that one's upload, with its part of the noise alone; fewer read the noisy
    sum of the others. All clients see each model. least: clients in a sum that the authority gives a key for (its
    inference-prevention module refuses fewer).
    """

    least: Annotated[int, whole(2, 10_000)] = 3

    name: ClassVar[str] = "hybridalpha"
    paper: ClassVar[str] = (
        "Xu et al., HybridAlpha: An Efficient Approach for Privacy-Preserving Federated Learning, AISec@CCS 2019"
    )
    claimed: ClassVar[tuple[Claim, ...]] = YANG2024.claims("hybridalpha")

    def check(self, plan: Plan) -> None:
        """As its base; also refuse a federation of fewer clients than the authority gives a key for."""
        super().check(plan)
        self.require(self.least <= plan.clients, "least", f"at most the number of clients, {plan.clients}")

    def ciphering(self, plan: Plan) -> Ciphering:
        """Return what is encrypted in a round; nobody but the server decrypts."""
        return functional("mife", plan.clients, self.values(plan))

    def upload(self, ctx: Context, me: secagg.Keys, result: Tree) -> Ciphertext:
        """Return the encrypted share of the update (Overflow)."""
        own = self.encoded(ctx, me, result)
        return sealed(own + secagg.zero_sum(me, ctx, PURPOSE, len(own)), self.ciphering(ctx.plan))

    def key_for(self, clients: Sequence[int]) -> None:
        """Refuse, as the authority, a key for the sum of these clients (ProtocolError: they are too few)."""
        if len(set(clients)) < self.least:
            asked = f"The authority gives no key for a sum of {len(set(clients))} clients"
            raise ProtocolError(f"{asked}; ask for {self.least} at least.")

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Broadcast, collect, and step on the sum that the authority's key decrypts (ProtocolError: it gives none)."""
        server, message = self.broadcast(ctx, server)
        uploads = yield Step(server, dict.fromkeys(cohort, message))
        self.key_for(list(uploads))
        secagg.need_everybody(server, uploads)
        words = [words_of(client, upload, self.values(ctx.plan)) for client, upload in uploads.items()]
        return self.applied(ctx, server, torch.stack(words).sum(0))

    def total(self, view: View, unit: Sequence[Exchange]) -> Tensor | None:
        """Return the cohort's sum to the server; a listener has no key."""
        if view.party != SERVER:
            return None
        count = self.values(view.plan)
        return torch.stack([words_of(e.slot.client, e.answer, count) for e in unit]).sum(0)

    def pad(self, ctx: Context, states: Mapping[int, Tree], words: int) -> Tensor | None:
        """Return a member's own pad, or, to all the others together, what theirs leave of zero."""
        if ctx.party in states:
            return secagg.zero_sum(states[ctx.party], ctx, PURPOSE, words)
        others = [client for client in range(ctx.plan.clients) if client != ctx.party]
        if any(other not in states for other in others):
            return None
        total = torch.zeros(words, dtype=torch.int64)
        for other in others:
            there = Context(ctx.plan, ctx.round, ctx.session, other, ctx.generator)
            total = total - secagg.zero_sum(states[other], there, PURPOSE, words)
        return total
