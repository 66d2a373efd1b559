"""What several defenses make evidence of: simulations by weights, whole cohorts, masks that colluders take off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Server
from ppbench.federation.evidence import Evidence, Simulate, simulation
from ppbench.federation.plan import Plan
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import session_of


class Shared:
    """Simulations by weights: victims at equal weights share one object, so that attacks take them in one batch.

    Args:
        plan: the public plan.
        make: what makes a simulation at given weights; default: the undefended client's gradient.
    """

    def __init__(self, plan: Plan, make: Callable[[Plan, Params], Simulate] = simulation) -> None:
        self.plan, self.make = plan, make
        self.known: list[tuple[Params, tuple[float, ...], Simulate]] = []

    def at(self, params: Params, shares: tuple[float, ...] = ()) -> Simulate:
        """Return the simulation of the gradient at `params`; of the mean over a unit's slots weighted by `shares`."""
        for weights, same, simulate in self.known:
            if same == shares and all(torch.equal(weights[n], v) for n, v in params.items()):
                return simulate
        one = self.make(self.plan, params)
        self.known.append((params, shares, _weighted(one, shares) if shares else one))
        return self.known[-1][2]


def _weighted(one: Simulate, shares: tuple[float, ...]) -> Simulate:
    def simulate(x: Tensor, y: Tensor) -> Params:
        parts = [one(x[i : i + 1], y[i : i + 1]) for i in range(len(shares))]
        return {n: sum((w * p[n] for w, p in zip(shares, parts, strict=True)), torch.zeros(())) for n in parts[0]}

    return simulate


def cohorts(exchanges: Iterable[Exchange], clients: int) -> list[list[Exchange]]:
    """Return the exchanges of every probe in which each of `clients` clients sent one upload."""
    by_probe: dict[int, list[Exchange]] = defaultdict(list)
    for exchange in exchanges:
        by_probe[exchange.slot.probe].append(exchange)
    return [unit for unit in by_probe.values() if len(unit) == clients]


def cohort_evidence(shared: Shared, mean: Params, unit: Sequence[Exchange], server: Server) -> Evidence:
    """Return evidence about a whole cohort from the mean of its gradients, weighted by numbers of examples.

    Args:
        shared: the simulations so far; equal weights of two cohorts share one.
        mean: the recovered mean gradient.
        unit: one upload a client.
        server: the server's state of that step.
    """
    counts = server.counts[[e.slot.client for e in unit]].double()
    shares = tuple((counts / counts.sum()).tolist())
    equal = max(shares) - min(shares) < 1e-12
    params = server.params if equal else None  # the mean of equal batches is the gradient of all of them together
    slots = tuple(e.slot for e in unit)
    return Evidence(slots, mean, shared.at(server.params, () if equal else shares), params, channel="sum")


def others_masks(view: View, exchange: Exchange, keys: Mapping[int, secagg.Keys], purpose: str, words: int) -> Tensor:
    """Return the sum [words] int64 of the colluders' masks: what a client's masked upload lacks to be bare.

    Args:
        view: of the colluding parties.
        exchange: the client's upload, and when.
        keys: those of ALL others whose masks cancel with the client's, by client.
        purpose: of the masks' derivation.
        words: numbers in the upload.
    """
    total, session = torch.zeros(words, dtype=torch.int64), session_of(exchange.slot.probe)
    for other, known in keys.items():
        ctx = Context(view.plan, exchange.round, session, other, torch.Generator())
        total = total + secagg.zero_sum(known, ctx, purpose, words)
    return total
