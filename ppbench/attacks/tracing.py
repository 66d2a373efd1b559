"""Tracing by updates: a record belongs to the client whose uploads its gradient explains best over all rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.membership.updates import RIDGE, update_coefficients
from ppbench.base.errors import UsageError
from ppbench.federation.bounds import Positive
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

# -- Tracing: which client owns an image? The owner of the reconstruction nearest to it (SPN paper, Algorithm 6) --

NOBODY = -1


def nearest(queries: Tensor, reconstructions: Tensor) -> Tensor:
    """Return the index [Q] int64 of the reconstruction nearest to each query by Euclidean distance.

    Takes images [Q, *shape] and [X, *shape]. A reconstruction that is not finite, or whose squared norm overflows
    float64, does not count; without any other the index is -1. Of equally near ones the first is returned.
    """
    q, r = queries.flatten(1).double(), reconstructions.flatten(1).double()
    norms = (r * r).sum(1)
    usable = norms.isfinite()
    if not usable.any():
        return torch.full((len(q),), NOBODY, device=q.device)
    r = torch.where(usable[:, None], r, 0.0)
    # ||q - r||^2 without the term ||q||^2, which does not move the minimum
    distances = torch.where(usable, norms, torch.inf) - 2 * q @ r.T
    return distances.argmin(1)


@dataclass(frozen=True)
class NearestReconstruction(Attack):
    """The owner of an image is the client whose reconstruction lies nearest to it."""

    name: ClassVar[str] = "tracing"
    next_token: ClassVar[bool] = True
    kind: ClassVar[Kind] = "tracing"
    reference: ClassVar[str] = "Fan et al., Rethinking Privacy Preserving Deep Learning, 2020, Algorithm 6"

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return the owners [Q] int64 of the candidate images of each challenge; -1: no finite reconstruction.

        Reconstruction j belongs to client `unit[j // batch].client`. UsageError for a challenge without images, or with
        another number of reconstructions.
        """
        return [Guess(owner=self._owners(challenge)) for challenge in challenges]

    def _owners(self, challenge: Challenge) -> Tensor:
        if challenge.x is None or challenge.reconstructions is None:
            raise UsageError(
                "Attack 'tracing' was given a challenge without images or reconstructions; it must follow a "
                "reconstruction attack on images."
            )
        expected = len(challenge.unit) * challenge.batch
        if len(challenge.reconstructions) != expected:
            raise UsageError(
                f"Attack 'tracing' was given {len(challenge.reconstructions)} reconstructions for "
                f"{len(challenge.unit)} slots of {challenge.batch}; it must get {expected}, in the order of the slots."
            )
        index = nearest(challenge.x, challenge.reconstructions)
        clients = torch.tensor([slot.client for slot in challenge.unit for _ in range(challenge.batch)] + [NOBODY])
        return clients.to(index.device)[index]


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
    next_token: ClassVar[bool] = True
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
