"""Membership inference of RMIA (Zarifzadeh, Liu and Shokri, ICML 2024): a record against a population."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.attacks.membership.base import (
    AuditAttack,
    log_likelihood,
    logit_gap,
    model_outputs,
    references_of,
    target_outputs,
)
from ppbench.attacks.membership.lira import strengths, weighted_mean
from ppbench.federation.bounds import Positive, UnitInterval
from ppbench.federation.view import View

TIE = 1e-9
"""Weight of the log-ratio itself: among records that beat equally many z, a larger ratio makes a likelier member."""


def log_mean(log_p: Tensor, use: Tensor) -> Tensor:
    """Return the log of the mean of p over the leading axis of log_p [R, ...] where `use`; NaN where none is used."""
    n = use.sum(0).double()
    total = torch.where(use, log_p, -torch.inf).logsumexp(0)
    return torch.where(n > 0, total - n.clamp(min=1).log(), torch.nan)


def log_prior(log_p: Tensor, keep: Tensor, a: float, online: bool) -> Tensor:
    """Return log p(x) [A, Q]: the likelihood of a record under the average model, if half of all trained on it.

    Takes the references' log-likelihoods [R, A, Q], of which NaN and inf do not count, and keep [R, Q] bool. Offline:
    1/2 ((1 + a) mean_out p + 1 - a), where a smaller `a` assumes a record to be likelier under models that trained on
    it (1: equally likely). Online: the mean of mean_in p and mean_out p; the offline value if no finite reference
    trained on the record.
    """
    usable = ~log_p.isnan() & (log_p < torch.inf)
    outside = log_mean(log_p, usable & ~keep[:, None])
    offline = torch.logaddexp(outside + math.log1p(a), outside.new_tensor(1 - a).log()) - math.log(2)
    if not online:
        return offline
    inside = log_mean(log_p, usable & keep[:, None])
    return torch.where(inside.isnan(), offline, torch.logaddexp(inside, outside) - math.log(2))


def beaten(ratio: Tensor, population: Tensor, gamma: float) -> Tensor:
    """Return the share of finite log-ratios [Z] that ratios [...] exceed by log gamma or more; NaN stays NaN."""
    known = population[population.isfinite()].sort().values
    if not len(known):
        return torch.where(ratio.isnan(), torch.nan, 0.0)
    below = torch.searchsorted(known, (ratio - math.log(gamma)).nan_to_num(nan=0.0).contiguous(), right=True)
    return torch.where(ratio.isnan(), torch.nan, below.double() / len(known))


@dataclass(frozen=True)
class RMIA(AuditAttack):
    """The share of population records z with [p(x | model) / p(x)] / [p(z | model) / p(z)] >= gamma.

    Several augmentations: the mean of their scores, weighted as in LiRA. Works from 2 reference runs on.

    Attributes:
        gamma: how much likelier x must have become than z; 1 or 2 in the paper.
        a: offline correction of p(x), see `log_prior`.
        online: whether p(x) also uses runs that trained on the record.
    """

    name: ClassVar[str] = "mia_rmia"
    threats: ClassVar[tuple[str, ...]] = ("client/1",)
    audit: ClassVar = "references"
    adaptive: ClassVar[bool] = True  # its references are trained under the defense
    reference: ClassVar[str] = "Zarifzadeh et al., Low-Cost High-Power Membership Inference Attacks, ICML 2024"

    gamma: Positive = 1.0
    a: UnitInterval = 0.3
    online: bool = True

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the share [Q] of the population that each candidate beats, plus 1e-9 of its log-ratio."""
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        references, labels = references_of(self.name, challenge), challenge.labels.double().cpu()
        outputs = references.outputs.double().cpu()
        log_p = log_likelihood(view.plan, outputs, labels)
        target = log_likelihood(view.plan, target_outputs(view, challenge.x, outputs.shape[1]), labels)
        ratio = target - log_prior(log_p, references.keep.cpu(), self.a, self.online)
        ratio = torch.where(ratio.isfinite(), ratio, torch.nan)
        share = beaten(ratio, self._population(view, challenge), self.gamma)
        weight = strengths(logit_gap(view.plan, outputs, labels), references.keep.cpu())
        return weighted_mean(share + TIE * ratio, weight)

    def _population(self, view: View, challenge: Challenge) -> Tensor:
        """Return the log-ratios [Z] of the population; NaN if the attacker received no model."""
        references = references_of(self.name, challenge)
        labels = references.labels.double().cpu()
        log_p = log_likelihood(view.plan, references.population.double().cpu(), labels)
        usable = ~log_p.isnan() & (log_p < torch.inf)
        return log_likelihood(view.plan, model_outputs(view, references.x), labels) - log_mean(log_p, usable)


@dataclass(frozen=True)
class OfflineRMIA(RMIA):
    """RMIA by reference runs without the record only."""

    name: ClassVar[str] = "mia_rmia_offline"

    online: bool = False
