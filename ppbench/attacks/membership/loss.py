"""Membership inference by the loss: a record the model was trained on has a smaller one (Yeom et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ppbench.attacks.membership.base import MembershipAttack
from ppbench.federation.plan import Plan


@dataclass(frozen=True)
class LossThreshold(MembershipAttack):
    """A record is a member if its loss under the last model received is small."""

    name: ClassVar[str] = "mia_loss"
    reference: ClassVar[str] = "Yeom et al., Privacy Risk in Machine Learning, CSF 2018"

    def scores(self, plan: Plan, signal: Tensor, labels: Tensor) -> Tensor:
        """Return minus the plan's loss [Q] of each record."""
        return -plan.example_loss(signal, labels)
