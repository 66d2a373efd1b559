"""Which canary clients took part in training: by the cosine of the model's change with their directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.membership.base import last_model
from ppbench.base.errors import UsageError
from ppbench.federation.optim import Layout
from ppbench.federation.view import View


@dataclass(frozen=True)
class CanaryClientAudit(Attack):
    """The score of a direction is its cosine with the initial model minus the delivered one, times the root of P.

    P is the number of parameters. Steps are against gradients, so the score is large for a direction that took part;
    for others it is N(0, 1).
    """

    name: ClassVar[str] = "audit_canary_clients"
    kind: ClassVar[Kind] = "client_membership"
    threats: ClassVar[tuple[str, ...]] = ("client/1",)
    standard: ClassVar[bool] = False
    audit: ClassVar = "clients"
    reference: ClassVar[str] = (
        "Andrew et al., One-shot Empirical Privacy Estimation for Federated Learning, ICLR 2024, Algorithm 1"
    )

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return score [Q] float64, 0 where the model did not move; UsageError without directions or a model."""
        message = last_model(view)
        params = getattr(message, "params", None)
        guesses = []
        for challenge in challenges:
            if params is None or not {"directions", "start"} <= set(challenge.extra):
                raise UsageError(f"Attack {self.name!r} needs directions, initial weights and a delivered model.")
            start, directions = challenge.extra["start"].double(), challenge.extra["directions"].double()
            moved = start - Layout.of(params).pack(params).cpu().double()
            cosine = directions @ moved / moved.norm().clamp(min=torch.finfo(torch.float64).tiny)
            guesses.append(Guess(score=len(start) ** 0.5 * cosine))
        return guesses
