"""Evidence of whole cohorts, of which the server reads only a sum; several protocols use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ppbench.base.tree import Params, Tree
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Server
from ppbench.federation.evidence import Evidence, Shared
from ppbench.federation.view import Exchange, View


def cohorts(exchanges: Iterable[Exchange], clients: int) -> list[list[Exchange]]:
    """Return the exchanges of every probe in which each of `clients` clients sent one upload."""
    by_probe: dict[int, list[Exchange]] = defaultdict(list)
    for exchange in exchanges:
        by_probe[exchange.slot.probe].append(exchange)
    return [unit for unit in by_probe.values() if len(unit) == clients]


def cohort_evidence(shared: Shared, mean: Params, unit: Sequence[Exchange], server: Server) -> Evidence:
    """Return evidence about a cohort (one upload per client) from the N_k-weighted `mean` of its gradients."""
    counts = server.counts[[e.slot.client for e in unit]].double()
    shares = tuple((counts / counts.sum()).tolist())
    equal = max(shares) - min(shares) < 1e-12
    params = server.params if equal else None  # the mean of equal batches is the gradient of all of them together
    slots = tuple(e.slot for e in unit)
    return Evidence(slots, mean, shared.at(server.params, () if equal else shares), params, channel="sum")


# -- Colluders' unmasking of uploads, for the evidence of several defenses --


def others_masks(
    view: View, exchange: Exchange, among: Sequence[int], keys_of: Callable[[Tree], Tree], purpose: str, words: int
) -> Tensor | None:
    """Return the sum [words] int64 of the other clients' masks; added to a client's masked upload it unmasks it.

    None if `view` lacks the keys (`keys_of` a client's state) of one of `among`, the clients whose masks cancel.
    """
    victim, session = exchange.slot.client, view.session(exchange)
    others, total = [client for client in among if client != victim], torch.zeros(words, dtype=torch.int64)
    for other in others:
        state = view.state_at(exchange, other)
        if state is None:
            return None
        keys = keys_of(state)
        if victim in keys.neighbors(other):  # the others' masks among themselves cancel
            ctx = Context(view.plan, exchange.round, session, other, torch.Generator())
            secagg.add_signed(other, [(victim, secagg.stream(keys, ctx, victim, purpose, words))], total)
    return total if others else None
