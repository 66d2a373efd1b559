"""What TP-SMC, HybridAlpha and PILE share: clients encrypt numbers, and their sum is all that the server decrypts.

A scheme says how a number is padded and who can take the pad off; a defense what is encrypted and what a sum means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ppbench.base.tree import Params, Tree
from ppbench.defenses.encrypted.ciphertexts import Ciphertext, words_of
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
    """Clients encrypt their share of the mean, and the server reads the sum of the cohort and no upload.

    honest: share of the clients that the scheme trusts in, t = ceil(honest N) of them, at least 2. fraction_bits: of
    fixed-point numbers; 40 hold values below 4e6 to 5e-13.
    """

    honest: Annotated[float, between(1e-3, 1)] = 0.5
    fraction_bits: Bits = 40

    @property
    def sums(self) -> bool:
        """Return that only sums can be read."""
        return True

    def trusted(self, plan: Plan) -> int:
        """Return t, how many clients at least are honest."""
        return max(2, math.ceil(self.honest * plan.clients))

    def values(self, plan: Plan) -> int:
        """Return how many numbers a client encrypts. Default: one a parameter."""
        return plan.net.parameter_count

    # -- the scheme ----------------------------------------------------------------------------------------------
    def ciphering(self, plan: Plan) -> Ciphering:
        """Return what is encrypted in a round, and how many must decrypt."""
        raise NotImplementedError

    def total(self, view: View, unit: Sequence[Exchange]) -> Tensor | None:
        """Return the sum [values] int64 of a cohort's uploads as who has `view` decrypts it; None: he cannot."""
        raise NotImplementedError

    def pad(self, ctx: Context, states: Mapping[int, Tree], words: int) -> Tensor | None:
        """Return what hides the upload of `ctx.party`, [words] int64, from clients with `states`; None: they cannot."""
        raise NotImplementedError

    # -- what is encrypted ---------------------------------------------------------------------------------------
    def encoded(self, ctx: Context, keys: secagg.Keys, result: Tree) -> Tensor:
        """Return what a client encrypts of what it computed: its share of the mean in fixed point, [values] int64."""
        raise NotImplementedError

    def read(self, plan: Plan, server: Server, words: Tensor, share: float) -> Params:
        """Return the update, float64, that `words` [values] int64 are `share` times, as the server makes it."""
        raise NotImplementedError

    def applied(self, ctx: Context, server: Server, total: Tensor) -> Server:
        """Return the server's state after a step on the decrypted sum [values] int64."""
        device = next(iter(server.params.values())).device
        mean = self.read(ctx.plan, server, total.to(device), 1.0)
        return self.stepped(ctx, server, mean)

    # -- what a view opens ---------------------------------------------------------------------------------------
    def uploads(self, view: View) -> list[list[Exchange]]:
        """Return the encrypted uploads of each whole cohort, of several rounds the first, in the order of clients."""
        first: dict[object, Exchange] = {}
        for exchange in view.exchanges():
            if isinstance(exchange.answer, Ciphertext):
                first.setdefault(exchange.slot, exchange)
        whole = cohorts(first.values(), view.plan.clients)
        return [sorted(unit, key=lambda e: e.slot.client) for unit in whole]

    def evidence(self, view: View) -> list[Evidence]:
        """Return the mean of each whole cohort, to colluders what they open, to a client nothing of its own making."""
        if view.threat.colludes:
            return self.opened(view)
        shared, found = Shared(view.plan), []
        for unit in self.uploads(view):
            total = self.total(view, unit)
            one = None if total is None else self.piece(view, shared, unit, unit, total)
            found += [] if one is None else [one]
        return found

    def opened(self, view: View, members: Sequence[int] | None = None) -> list[Evidence]:
        """Return what the server and `members` (default: all whose states it has) decrypt of client 0's uploads.

        As many as the scheme needs open the upload itself. Fewer know the sum of the others, who are in it with client
        0, as the sum less what they sent themselves; then the unit has all of these.
        """
        shared, found = Shared(view.plan), []
        for unit in self.uploads(view):
            everybody = {e.slot.client: view.state_at(e, e.slot.client) for e in unit}
            inside = {c: s for c, s in everybody.items() if s is not None and (members is None or c in members)}
            target, words = unit[TARGET], self._bare(view, unit[TARGET], inside)
            seen: Sequence[Exchange] = [target]
            if words is None:
                seen = [e for e in unit if e.slot.client not in inside]
                words = self._rest(view, unit, inside)
            one = None if words is None else self.piece(view, shared, unit, seen, words)
            found += [] if one is None else [one]
        return found

    def piece(
        self, view: View, shared: Shared, unit: Sequence[Exchange], seen: Sequence[Exchange], words: Tensor
    ) -> Evidence | None:
        """Return evidence of the summed words [values] int64 of `seen`, exchanges of the cohort `unit`."""
        server = view.state_at(unit[0])
        if server is None:
            return None
        every = self.weights(server, [e.slot.client for e in unit])
        mine = [w for e, w in zip(unit, every, strict=True) if e in seen]
        shares = tuple(w / sum(mine) for w in mine)
        equal = max(shares) - min(shares) < 1e-12
        device = next(iter(server.params.values())).device
        scale = sum(mine) * as_gradient(view.plan, unit[0].round)
        observed = self.read(view.plan, server, words.to(device), scale)
        slots = tuple(e.slot for e in seen)
        simulate = shared.at(server.params, () if equal else shares)
        return Evidence(slots, observed, simulate, server.params if equal else None, channel="sum")

    def _bare(self, view: View, exchange: Exchange, states: Mapping[int, Tree]) -> Tensor | None:
        """Return the words [values] int64 of one upload, or None: it is hidden from those with `states`."""
        client, words = exchange.slot.client, words_of(exchange.slot.client, exchange.answer, self.values(view.plan))
        ctx = Context(view.plan, exchange.round, view.session(exchange), client, torch.Generator())
        pad = self.pad(ctx, states, len(words))
        return None if pad is None else words - pad

    def _rest(self, view: View, unit: Sequence[Exchange], states: Mapping[int, Tree]) -> Tensor | None:
        """Return the sum of a cohort less what those with `states` sent, [values] int64."""
        total = self.total(view, unit)
        for exchange in unit:
            if total is not None and exchange.slot.client in states:
                own = self._bare(view, exchange, states)
                total = None if own is None else total - own
        return total
