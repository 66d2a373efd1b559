"""Tracing by updates: a record belongs to the client whose uploads its gradient explains best over all rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.membership.update_cosine import RIDGE, update_coefficients
from ppbench.attacks.tracing.nearest import NOBODY
from ppbench.base.errors import UsageError
from ppbench.federation.bounds import Positive
from ppbench.federation.plan import Plan
from ppbench.federation.view import View


def likeliest_owners(means: Tensor, generator: torch.Generator) -> Tensor:
    """Return the client [Q] int64 with the largest of means [N, Q], at random among equals; -1 if all are NaN."""
    known = means.nan_to_num(nan=-torch.inf)
    best = known.max(0).values
    lots = torch.rand(known.shape, generator=generator, dtype=torch.float64)
    winner = torch.where(known == best, lots, -1.0).argmax(0)
    return torch.where(best > -torch.inf, winner, NOBODY)


@dataclass(frozen=True)
class TracingCosine(Attack):
    """The owner of a record is the client that it fits best by the statistic of `mia_update_cosine`."""

    name: ClassVar[str] = "tracing_cosine"
    kind: ClassVar[Kind] = "tracing"
    threats: ClassVar[tuple[str, ...]] = ("server/1",)
    standard: ClassVar[bool] = False
    audit: ClassVar = "rounds"
    reference: ClassVar[str] = (
        "question: Fan et al., Rethinking Privacy Preserving Deep Learning, 2020; cosine: Li et al., ICLR 2023; "
        "joint regression: this project"
    )

    ridge: Positive = RIDGE
    alone: bool = False

    def suits(self, plan: Plan) -> bool:
        """Return whether records have labels that are a few numbers, not maps."""
        return not plan.net.pixelwise

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return the owners [Q] int64 of the candidates of each challenge; UsageError for one without labels."""
        guesses = []
        for challenge in challenges:
            if challenge.x is None or challenge.labels is None:
                raise UsageError(
                    f"Attack {self.name!r} was given a challenge without records or their labels; it must run in an "
                    "audit on labeled records."
                )
            ridge = None if self.alone else self.ridge
            means = update_coefficients(view, challenge.x, challenge.labels, ridge).nanmean(0)
            guesses.append(Guess(owner=likeliest_owners(means, generator)))
        return guesses
