"""What the parties of MP-DP and its baselines can say about a victim's gradient, to who ignores Psi and Phi."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params
from ppbench.defenses.perturbed_evidence import Shared, exchanges
from ppbench.federation.contract import Server
from ppbench.federation.evidence import Evidence, Simulate
from ppbench.federation.plan import Noise, Plan
from ppbench.federation.view import Exchange, View

if TYPE_CHECKING:
    from ppbench.defenses.mpdp_base import ModelPerturbation


def perturbed_simulation(defense: ModelPerturbation, plan: Plan, params: Params) -> Simulate:
    """Return G / bound at perturbed weights `params` of the expanded network, as a function of a guessed batch.

    By parameter of the original network: transitional layers are constants and have no gradient.
    """
    expansion = defense.expansion(plan)

    def simulate(x: Tensor, y: Tensor) -> Params:
        images, labels = x.flatten(0, 1), y.flatten(0, 1)
        odd, transitional = expansion.split({name: value.to(x.dtype) for name, value in params.items()})

        def loss(p: Params) -> Tensor:
            return plan.example_loss(expansion.net({**p, **transitional}, images), labels).mean()

        return {name: value / defense.bound for name, value in gradient(loss, odd).items()}

    return simulate


class Shelf:
    """Makes evidence about one view; equal weights share one simulation."""

    def __init__(self, view: View, defense: ModelPerturbation) -> None:
        self.view, self.defense = view, defense
        self.true = Shared(view.plan)
        self.perturbed = Shared(view.plan, lambda plan, params: perturbed_simulation(defense, plan, params))

    def recovered(self, unit: list[Exchange], observed: Params, server: Server, variance: float) -> Evidence:
        """Return evidence at the true weights, for the server.

        Args:
            unit: the uploads whose mean was recovered.
            observed: the recovered gradient.
            server: the server's state of that step.
            variance: of the noise on a coordinate before recovery, in units of the bound.
        """
        scale = torch.cat([v.flatten() for v in self.defense.multipliers(self.view.plan, server).values()])
        rms = float(scale.square().mean().sqrt())
        slots, law = tuple(e.slot for e in unit), _law(self.defense.bound * rms * math.sqrt(variance))
        channel = "noisy" if variance else "recovered"
        params = server.params
        return Evidence(slots, observed, self.true.at(params), params, noise=law, channel=channel)

    def overheard(self, unit: list[Exchange], observed: Params, variance: float) -> Evidence:
        """Return evidence at the perturbed weights of the expanded network, for who has no secrets.

        Its `params` is None: it is the gradient of another network than the plan's.
        """
        simulate = self.perturbed.at(unit[0].asked.params)
        law = _law(math.sqrt(variance))
        return Evidence(tuple(e.slot for e in unit), observed, simulate, noise=law, channel="g")


def _law(std: float) -> Noise | None:
    """Return a Gaussian of the noise's standard deviation: a sum of uniforms, times R where it was recovered."""
    return Noise("gaussian", std) if std else None


def client_evidence(view: View, defense: ModelPerturbation) -> list[Evidence]:
    """Return a piece of evidence a client: its recovered gradient (server), its first surrogate (listener).

    The noise's standard deviation is the root mean square over the coordinates, given the R of the round, which the
    server knows. It differs between coordinates in proportion to R (`multipliers`): an adaptive attack weighs by R^-2.
    """
    shelf, found = Shelf(view, defense), []
    for exchange in exchanges(view):
        server, client = view.state_at(exchange), exchange.slot.client
        if server is None:
            variance = defense.noise_variance(view.plan, None)
            found.append(shelf.overheard([exchange], exchange.answer.g, variance))
        else:
            degree = int(server.own.graph[client].sum()) if len(server.own.graph) else 0
            observed = defense.recover(view.plan, server, exchange.answer)
            found.append(shelf.recovered([exchange], observed, server, defense.noise_variance(view.plan, degree)))
    return found


def cohorts(view: View) -> list[list[Exchange]]:
    """Return the uploads of every probe in which all clients took part."""
    by_probe: dict[int, list[Exchange]] = defaultdict(list)
    for exchange in exchanges(view):
        by_probe[exchange.slot.probe].append(exchange)
    return [unit for unit in by_probe.values() if len(unit) == view.plan.clients]


__all__ = ["Shelf", "client_evidence", "cohorts", "perturbed_simulation"]
