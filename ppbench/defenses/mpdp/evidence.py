"""What the parties of MP-DP and its baselines can say about a victim's gradient, to who ignores Psi and Phi."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params
from ppbench.defenses.evidence import Shared
from ppbench.defenses.mpdp.expansion import Expansion
from ppbench.federation.contract import Server
from ppbench.federation.evidence import Evidence, Simulate
from ppbench.federation.plan import Noise, Plan
from ppbench.federation.view import Exchange


def perturbed_simulation(expansion: Expansion, bound: float, plan: Plan, params: Params) -> Simulate:
    """Return G / bound at perturbed weights `params` of the expanded network, as a function of a guessed batch.

    By parameter of the original network: transitional layers are constants and have no gradient.
    """

    def simulate(x: Tensor, y: Tensor) -> Params:
        images, labels = x.flatten(0, 1), y.flatten(0, 1)
        odd, transitional = expansion.split({name: value.to(x.dtype) for name, value in params.items()})

        def loss(p: Params) -> Tensor:
            return plan.example_loss(expansion.net({**p, **transitional}, images), labels).mean()

        return {name: value / bound for name, value in gradient(loss, odd).items()}

    return simulate


class Shelf:
    """Makes evidence about one view; equal weights share one simulation.

    Args:
        plan: of the view.
        expansion: the expanded network.
        bound: what clients divide by.
    """

    def __init__(self, plan: Plan, expansion: Expansion, bound: float) -> None:
        self.bound, self.true = bound, Shared(plan)
        self.perturbed = Shared(plan, lambda plan, params: perturbed_simulation(expansion, bound, plan, params))

    def recovered(
        self, unit: list[Exchange], observed: Params, server: Server, multipliers: Params, variance: float
    ) -> Evidence:
        """Return evidence at the true weights, for the server.

        The noise's standard deviation is the root mean square over the coordinates, given the R of the round, which the
        server knows. It differs between coordinates in proportion to R: an adaptive attack weighs by R^-2.

        Args:
            unit: the uploads whose mean was recovered.
            observed: the recovered gradient.
            server: the server's state of that step.
            multipliers: R by parameter.
            variance: of the noise on a coordinate before recovery, in units of the bound.
        """
        rms = float(torch.cat([v.flatten() for v in multipliers.values()]).square().mean().sqrt())
        slots, law = tuple(e.slot for e in unit), _law(self.bound * rms * math.sqrt(variance))
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
