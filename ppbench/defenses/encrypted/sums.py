"""The common base of TP-SMC, HybridAlpha and PILE: clients encrypt numbers, and the server decrypts only their sum.

A scheme defines the pads and who can remove them; a defense what is encrypted and what a sum means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ppbench.base.tree import Params, Tree
from ppbench.defenses.encrypted.ciphertexts import Ciphertext, ciphertext_words
from ppbench.federation import secagg
from ppbench.federation.bounds import Bits, between
from ppbench.federation.ciphering import Ciphering
from ppbench.federation.cohort import cohorts
from ppbench.federation.contract import Context, Server
from ppbench.federation.evidence import Evidence, Shared, as_gradient
from ppbench.federation.plan import Plan
from ppbench.federation.threats import TARGET
from ppbench.federation.view import Exchange, View


@dataclass(frozen=True)
class EncryptedSums(secagg.PairedDefense):
    """Clients encrypt their share of the mean; the server reads the cohort's sum, but no upload.

    honest: trusted share of the clients, t = ceil(honest N) of them, at least 2. fraction_bits: of fixed-point numbers;
    40 represent values below 4e6 to 5e-13.
    """

    honest: Annotated[float, between(1e-3, 1)] = 0.5
    fraction_bits: Bits = 40

    @property
    def sums(self) -> bool:
        """Return that only sums can be read."""
        return True

    def trusted(self, plan: Plan) -> int:
        """Return t, the least number of honest clients."""
        return max(2, math.ceil(self.honest * plan.clients))

    def values(self, plan: Plan) -> int:
        """Return the count of numbers that a client encrypts. Default: one per parameter."""
        return plan.net.parameter_count

    # -- the scheme ----------------------------------------------------------------------------------------------
    def ciphering(self, plan: Plan) -> Ciphering:
        """Return the encryption of a round."""
        raise NotImplementedError

    def total(self, view: View, unit: Sequence[Exchange]) -> Tensor | None:
        """Return the decrypted sum [values] int64 of a cohort's uploads; None: the adversary cannot decrypt it."""
        raise NotImplementedError

    def pad(self, ctx: Context, states: Mapping[int, Tree], words: int) -> Tensor | None:
        """Return the pad [words] int64 of `ctx.party`'s upload from clients' `states`; None: they do not suffice."""
        raise NotImplementedError

    # -- what is encrypted ---------------------------------------------------------------------------------------
    def encoded(self, ctx: Context, keys: secagg.Keys, result: Tree) -> Tensor:
        """Return what a client encrypts: its share of the mean in fixed point, [values] int64."""
        raise NotImplementedError

    def read(self, plan: Plan, server: Server, words: Tensor, share: float) -> Params:
        """Return the update, float64, from `words` [values] int64 that are `share` times it."""
        raise NotImplementedError

    def applied(self, ctx: Context, server: Server, total: Tensor) -> Server:
        """Return the server's state after a step on the decrypted sum [values] int64."""
        device = next(iter(server.params.values())).device
        mean = self.read(ctx.plan, server, total.to(device), 1.0)
        return self.stepped(ctx, server, mean)

    # -- what a view opens ---------------------------------------------------------------------------------------
    def uploads(self, view: View) -> list[list[Exchange]]:
        """Return the first encrypted uploads of each whole cohort, in the order of clients."""
        first: dict[object, Exchange] = {}
        for exchange in view.exchanges():
            if isinstance(exchange.answer, Ciphertext):
                first.setdefault(exchange.slot, exchange)
        whole = cohorts(first.values(), view.plan.clients)
        return [sorted(unit, key=lambda e: e.slot.client) for unit in whole]

    def evidence(self, view: View) -> list[Evidence]:
        """Return evidence of each whole cohort's mean; for colluders see `opened`."""
        if view.threat.colludes:
            return self.opened(view)
        shared, pieces = Shared(view.plan), []
        for unit in self.uploads(view):
            total = self.total(view, unit)
            piece = None if total is None else self.piece(view, shared, unit, unit, total)
            pieces += [] if piece is None else [piece]
        return pieces

    def opened(self, view: View, members: Sequence[int] | None = None) -> list[Evidence]:
        """Return what the server and `members` (default: all whose states it has) can decrypt of client 0's uploads.

        Enough members decrypt the upload itself. Fewer know the sum of all other clients, client 0 among them: the
        total less their own uploads; then the unit has all of these clients.
        """
        shared, pieces = Shared(view.plan), []
        for unit in self.uploads(view):
            everybody = {e.slot.client: view.state_at(e, e.slot.client) for e in unit}
            states = {c: s for c, s in everybody.items() if s is not None and (members is None or c in members)}
            target, words = unit[TARGET], self._bare(view, unit[TARGET], states)
            summed: Sequence[Exchange] = [target]
            if words is None:
                summed = [e for e in unit if e.slot.client not in states]
                words = self._rest(view, unit, states)
            piece = None if words is None else self.piece(view, shared, unit, summed, words)
            pieces += [] if piece is None else [piece]
        return pieces

    def piece(
        self, view: View, shared: Shared, unit: Sequence[Exchange], summed: Sequence[Exchange], words: Tensor
    ) -> Evidence | None:
        """Return evidence from the words [values] int64 of the sum over `summed`, exchanges of the cohort `unit`."""
        server = view.state_at(unit[0])
        if server is None:
            return None
        all_weights = self.weights(server, [e.slot.client for e in unit])
        weights = [w for e, w in zip(unit, all_weights, strict=True) if e in summed]
        shares = tuple(w / sum(weights) for w in weights)
        equal = max(shares) - min(shares) < 1e-12
        device = next(iter(server.params.values())).device
        scale = sum(weights) * as_gradient(view.plan, unit[0].round)
        observed = self.read(view.plan, server, words.to(device), scale)
        slots = tuple(e.slot for e in summed)
        simulate = shared.at(server.params, () if equal else shares)
        return Evidence(slots, observed, simulate, server.params if equal else None, channel="sum")

    def _bare(self, view: View, exchange: Exchange, states: Mapping[int, Tree]) -> Tensor | None:
        """Return the words [values] int64 of one upload; None: clients with `states` cannot decrypt it."""
        client, words = (
            exchange.slot.client,
            ciphertext_words(exchange.slot.client, exchange.answer, self.values(view.plan)),
        )
        ctx = Context(view.plan, exchange.round, view.session(exchange), client, torch.Generator())
        pad = self.pad(ctx, states, len(words))
        return None if pad is None else words - pad

    def _rest(self, view: View, unit: Sequence[Exchange], states: Mapping[int, Tree]) -> Tensor | None:
        """Return the sum of a cohort less the uploads of clients with `states`, [values] int64."""
        total = self.total(view, unit)
        for exchange in unit:
            if total is not None and exchange.slot.client in states:
                own = self._bare(view, exchange, states)
                total = None if own is None else total - own
        return total
