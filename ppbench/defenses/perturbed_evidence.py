"""What the parties of PBPFL can say about a victim's gradient: the server exactly, and a listener exactly too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.defenses.perturbation import Perturbed, Surrogates
from ppbench.federation.contract import Server
from ppbench.federation.evidence import Evidence, Simulate, simulation
from ppbench.federation.plan import Plan
from ppbench.federation.view import Exchange, View

Recover = Callable[[Plan, Server, Surrogates], Params]


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


def exchanges(view: View) -> list[Exchange]:
    """Return the view's uploads of surrogates, or none for a client: it sees its own only."""
    if view.threat.startswith("client/"):
        return []
    return [e for e in view.exchanges() if isinstance(e.asked, Perturbed) and isinstance(e.answer, Surrogates)]


def gradient_evidence(view: View, recover: Recover) -> list[Evidence]:
    """Return one exact piece of evidence a victim: the recovered gradient at the true weights for the server.

    Who has no secrets takes the first surrogate, which is the plain gradient of the squared loss at the perturbed
    weights: a perturbed network is a network.
    """
    shared, found = Shared(view.plan), []
    for exchange in exchanges(view):
        server = view.state_at(exchange)
        if server is None:
            params, observed, channel = exchange.asked.params, exchange.answer.g, "g"
        else:
            params, observed, channel = server.params, recover(view.plan, server, exchange.answer), "recovered"
        found.append(Evidence((exchange.slot,), observed, shared.at(params), params, channel=channel))
    return found


def cohort_evidence(
    shared: Shared, mean: Params, unit: Sequence[Exchange], weights: Tensor, server: Server
) -> Evidence:
    """Return evidence about a whole cohort from the weighted mean of its gradients.

    Args:
        shared: the simulations so far; equal weights of two cohorts share one.
        mean: the recovered mean gradient.
        unit: one upload a client.
        weights: [U] aggregation weights in the order of `unit`.
        server: the server's state of that step.
    """
    shares = tuple(weights.tolist())
    equal = max(shares) - min(shares) < 1e-12
    params = server.params if equal else None  # the mean of equal batches is the gradient of all of them together
    slots = tuple(e.slot for e in unit)
    return Evidence(slots, mean, shared.at(server.params, () if equal else shares), params, channel="sum")
