"""Evidence of whole cohorts, of which the server reads only a sum; several protocols use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ppbench.base.tree import Params
from ppbench.federation.contract import Server
from ppbench.federation.evidence import Evidence, Shared
from ppbench.federation.view import Exchange


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
