"""Membership inference by the modified prediction entropy of Song and Mittal (USENIX Security 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.attacks.membership.base import MembershipAttack, log_probabilities
from ppbench.federation.plan import Plan


def log_complement(log_p: Tensor) -> Tensor:
    """Return log(1 - p) for log p [Q, C], precise where p rounds to 1: there it is summed from the other classes."""
    p = log_p.exp()
    rest = log_p.scatter(-1, log_p.argmax(-1, keepdim=True), -torch.inf).logsumexp(-1, keepdim=True)
    return torch.where(p > 0.5, rest, (-p).log1p())


def modified_entropy(log_p: Tensor, labels: Tensor) -> Tensor:
    """Return Mentr = -(1 - p_y) log p_y - sum_{j != y} p_j log(1 - p_j), [Q] float64, in nats, for [Q, C], C > 1.

    0 for a confident right prediction, unbounded for a confident wrong one; the plain entropy is small for both (Song
    and Mittal 2021, Sec. 3.2).
    """
    log_q, label = log_complement(log_p), labels.argmax(-1, keepdim=True)
    own = -(log_q.exp() * log_p).gather(-1, label)[:, 0]
    others = (-log_p.exp() * log_q).scatter(-1, label, 0.0)
    return own + others.sort(-1).values.sum(-1)  # sorted: rounding must not separate labels where all p are equal


@dataclass(frozen=True)
class ModifiedEntropy(MembershipAttack):
    """A record is a member if the modified entropy of its prediction is small.

    A network with one output predicts no distribution: the score is minus the loss, as in `mia_loss`.
    """

    name: ClassVar[str] = "mia_mentr"
    reference: ClassVar[str] = (
        "Song and Mittal, Systematic Evaluation of Privacy Risks of Machine Learning Models, USENIX Security 2021"
    )

    def scores(self, plan: Plan, signal: Tensor, labels: Tensor) -> Tensor:
        """Return minus the modified entropy [Q] of each record; minus its loss if the network has one output."""
        if plan.spec.classes == 1:
            return -plan.example_loss(signal, labels)
        scores = -modified_entropy(log_probabilities(plan, signal), labels)
        return torch.where(signal.isfinite().all(-1), scores, torch.nan)
