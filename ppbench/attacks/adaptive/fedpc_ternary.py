"""What FedPC's ternaries give away: which way each weight went, and whether it went farther than a public bound."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppbench.attacks.adaptive.fedpc_labels import Told
from ppbench.attacks.adaptive.fedpc_pilot import Secret
from ppbench.attacks.reconstruction.local_steps import reach
from ppbench.base.tree import Params
from ppbench.federation.evidence import Evidence, Mappable, simulation
from ppbench.federation.plan import Plan
from ppbench.federation.wire import Slot

BOUND = "bound/"


@dataclass(frozen=True, eq=False)
class Gradients(Mappable):
    """Gradients of one batch at the models of several rounds, and by how much they exceed bounds.

    `params` holds the models, "ROUND/NAME" by name, and the bounds on the steps, "bound/ROUND/NAME"; a gradient is
    multiplied by `gain` to make a step.
    """

    plan: Plan
    rounds: int
    gain: float

    def family(self) -> Hashable:
        """Return what determines the gradients beside the models."""
        return Gradients, self.plan, self.rounds, self.gain, len(self.params)

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return gradients g at all models, and |g| - bound / gain, by the names of `params`; x [U, B, *shape]."""
        found: Params = {}
        for number in range(self.rounds):
            prefix = f"{number}/"
            model = {n[len(prefix) :]: v for n, v in self.params.items() if n.startswith(prefix)}
            found |= _named(prefix, simulation(self.plan, model)(x, y))
        for name, bound in self.params.items():
            if name.startswith(BOUND):
                found[name] = found[name[len(BOUND) :]].abs() - bound / self.gain
        return found


def _named(prefix: str, tree: Params) -> Params:
    return {f"{prefix}{name}": value for name, value in tree.items()}


def ternary_evidence(slot: Slot, rounds: Sequence[Told], plan: Plan, gain: float | None = None) -> Evidence:
    """Return evidence from the signs that a client's ternaries tell in all rounds, and, given `gain`, from the bounds.

    The change of a client is taken for `gain` times the gradient at the broadcast model: so it is after one plain step,
    and nearly after more of them.
    """
    observed: Params = {}
    params: Params = {}
    for number, told in enumerate(rounds):
        prefix = f"{number}/"
        observed |= _named(prefix, told.signs)
        params |= _named(prefix, told.params)
        if gain is not None:
            sides = {n: torch.where(told.signs[n] != 0, 1.0, -1.0) * (b > 0) for n, b in told.bounds.items()}
            observed |= _named(BOUND + prefix, sides)
            params |= _named(BOUND + prefix, told.bounds)
    simulate = Gradients(params, plan, len(rounds), 1.0 if gain is None else gain)
    return Evidence((slot,), observed, simulate, channel="ternary", measure="hinge")


def gain_of(plan: Plan, secret: Secret, count: int) -> float | None:
    """Return what a client with these hyper-parameters multiplies a gradient of `count` images by; None under Adam."""
    if plan.local.opt.name == "adam":
        return None
    steps = secret.epochs * -(-count // secret.batch)
    return secret.rate * reach(plan.local.opt.momentum, steps)
