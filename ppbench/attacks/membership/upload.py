"""Members of a batch by its upload: how much of the gradient each candidate explains, all candidates together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess, Kind
from ppbench.attacks.membership.base import MembershipAttack, MembershipQuestion, finite_scores
from ppbench.attacks.membership.update_cosine import RIDGE, Directions, directed
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

RIDGES = (RIDGE, 1e-3, 1e-5, 1e-7, 1e-9)
"""Strengths of the ridge, in units of a candidate's own squared norm. The weakest separates exact gradients that are
almost parallel, as at a sigmoid network's random weights; noise on uploads needs a strong one."""


@dataclass(frozen=True)
class UploadMembers(MembershipAttack):
    """A record was in some batch if its gradient explains some upload beside all other candidates' gradients.

    The statistic is that of `mia_update_cosine` for one upload, in float64; the score is the largest over uploads. The
    strength of the ridge, which should fit the noise, is the one that best separates the known half.
    """

    name: ClassVar[str] = "mia_upload"
    kind: ClassVar[Kind] = "batch_membership"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "client/1", "collusion/1")
    reference: ClassVar[str] = (
        "Li et al., Effective Passive Membership Inference Attacks in Federated Learning, ICLR 2023; "
        "joint regression: this project"
    )

    def suits(self, plan: Plan) -> bool:
        """Return whether records have labels that are a few numbers, not maps."""
        return not plan.net.pixelwise

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the largest coefficient over all uploads by each ridge, [Q, ridges]; NaN where none can be read."""
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        assert view.plan.net  # built here: under vmap its initialization could not draw
        best = torch.full((len(challenge.x), len(RIDGES)), -torch.inf, dtype=torch.float64)
        known: list[Directions] = []
        for evidence, alone in directed(self.evidence(view), challenge.x, challenge.labels, None, torch.float64):
            if not known or known[0].rows is not alone.rows:
                known = [alone.at(ridge) for ridge in RIDGES]
            explained = torch.stack([directions.explain(evidence) for directions in known], 1)
            best = best.maximum(explained.nan_to_num(nan=-torch.inf))
        return torch.where(best.isfinite(), best, torch.nan)

    def answer(self, plan: Plan, signal: Tensor, question: MembershipQuestion, generator: torch.Generator) -> Guess:
        """Return scores [Q] and decisions by the ridge that best separates the known half; of equals the strongest."""
        member = question.members
        if not member.any() or member.all():
            return super().answer(plan, signal[:, 0], question, generator)
        known_scores = [finite_scores(column)[question.is_known].numpy() for column in signal.T]
        areas = [float(roc_auc_score(member.numpy(), scores)) for scores in known_scores]
        return super().answer(plan, signal[:, areas.index(max(areas))], question, generator)
