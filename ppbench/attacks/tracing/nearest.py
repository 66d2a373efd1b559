"""Tracing: which client owns an image? The owner of the reconstruction nearest to it (SPN paper, Algorithm 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.base.errors import UsageError
from ppbench.federation.view import View

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
