"""What FedPC's ternaries give away: which way each weight went, so signs of gradients of the client's images."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from ppbench.adversary.evidence import Evidence, simulation
from ppbench.adversary.view import View
from ppbench.attacks.adaptive.fedpc_labels import known_signs
from ppbench.attacks.reconstruction.objectives import Mappable
from ppbench.federation.plan import Plan
from ppbench.federation.tree import Params
from ppbench.federation.wire import Slot


@dataclass(frozen=True, eq=False)
class Gradients(Mappable):
    """Gradients of one batch at the models of several rounds. params: the models, "ROUND/NAME" by name."""

    plan: Plan
    rounds: int

    def family(self) -> Hashable:
        """Return what determines the gradients beside the models."""
        return Gradients, self.plan, self.rounds

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the gradients at all models, "ROUND/NAME" by name, for x [U, B, *shape] and y [U, B, C]."""
        found: Params = {}
        for number in range(self.rounds):
            prefix = f"{number}/"
            model = {n[len(prefix) :]: v for n, v in self.params.items() if n.startswith(prefix)}
            found |= _at(number, simulation(self.plan, model)(x, y))
        return found


def _at(number: int, tree: Params) -> Params:
    return {f"{number}/{name}": value for name, value in tree.items()}


def ternary_evidence(view: View) -> dict[Slot, Evidence]:
    """Return, by slot, the signs that its ternaries tell in all rounds, to compare with gradients at these models.

    After one plain step the signs are those of the gradient; after more of them, nearly.
    """
    found = {}
    for slot, rounds in known_signs(view).items():
        observed: Params = {}
        models: Params = {}
        for number, (known, params) in enumerate(rounds):
            observed |= _at(number, known)
            models |= _at(number, params)
        simulate = Gradients(models, view.plan, len(rounds))
        found[slot] = Evidence((slot,), observed, simulate, channel="ternary", measure="hinge")
    return found
