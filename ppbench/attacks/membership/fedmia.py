"""FedMIA (Zhu et al., CVPR 2025): the other clients' updates are the null, round by round; no reference models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.attacks.membership.base import AuditAttack
from ppbench.attacks.membership.update_cosine import RIDGE, update_coefficients
from ppbench.federation.bounds import Positive
from ppbench.federation.view import View

FEWEST_OTHERS = 2
"""Other clients whose updates must be readable: one has no spread."""


SHRINK = 4.0
"""Weight, in clients, of the variance pooled over candidates: two or nine others estimate a record's own badly."""
SMALLEST_SPREAD = 1e-6
"""Spread below which all others count as equal."""


def against_others(statistics: Tensor) -> Tensor:
    """Return Phi((s - mean) / sd) of each client's statistic under the other clients' of its round, [T, N, Q] float64.

    Takes statistics [T, N, Q], NaN for none. NaN where fewer than two others have one, or all others have the same (as
    from a sum over clients).
    """
    known = statistics.isfinite()
    value = torch.where(known, statistics, 0.0)
    n = known.sum(1, keepdim=True) - known.long()
    mean = (value.sum(1, keepdim=True) - value) / n.clamp(min=1)
    total = value.square().sum(1, keepdim=True) - value.square()
    squares, free = (total - n * mean.square()).clamp(min=0), (n - 1).clamp(min=0)
    pooled = torch.where(known, squares, 0.0).sum(2, keepdim=True) / free.where(known, 0).sum(2, keepdim=True).clamp(
        min=1
    )
    spread = ((SHRINK * pooled + squares) / (SHRINK + free)).sqrt()
    valid = known & (n >= FEWEST_OTHERS) & (spread > SMALLEST_SPREAD)
    return torch.where(valid, torch.special.ndtr((statistics - mean) / spread), torch.nan)


@dataclass(frozen=True)
class FedMIA(AuditAttack):
    """A record is a member if its gradient fits one client's updates far better than the other clients'.

    The statistic is how much of an update the candidate's gradient explains. Its probability under a Gaussian fitted to
    the other clients' statistics in that round is averaged over all rounds; the score is the largest over clients,
    since a record's owner is unknown.

    Attributes:
        ridge: strength of the ridge by which all candidates explain an update together, as in `mia_update_cosine`.
        alone: whether the statistic is each record's cosine alone, as published (FedMIA-II).
    """

    name: ClassVar[str] = "mia_fedmia"
    threats: ClassVar[tuple[str, ...]] = ("server/1",)
    audit: ClassVar = "rounds"
    reference: ClassVar[str] = (
        "Zhu et al., FedMIA: An Effective Membership Inference Attack Exploiting 'All for One' Principle in Federated "
        "Learning, CVPR 2025; joint regression: this project"
    )

    ridge: Positive = RIDGE
    alone: bool = False

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the largest mean probability [Q]; NaN where fewer than three clients' uploads can be read singly."""
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        ridge = None if self.alone else self.ridge
        means = against_others(update_coefficients(view, challenge.x, challenge.labels, ridge)).nanmean(0)
        best = means.nan_to_num(nan=-torch.inf).max(0).values
        return torch.where(best.isfinite(), best, torch.nan)
