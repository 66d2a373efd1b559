"""Membership inference with reference runs: LiRA and RMIA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.attacks.membership.model_queries import (
    AuditAttack,
    log_likelihood,
    logit_gap,
    model_outputs,
    references_of,
    target_outputs,
)
from ppbench.federation.bounds import NonNegative, Positive, UnitInterval
from ppbench.federation.view import View

# -- The likelihood-ratio attack (Carlini et al., S&P 2022), online and offline, with variances shrunk for few
# references --
# A network trained without augmentation hardly remembers augmented copies (digits MLP, 16 references, TPR of
# canaries at 1 % FPR: 0.87 from the record alone, 0.55 from the plain mean over six copies). So copies are weighted
# by their strength in the references, which gives 0.87 again.

MANY_REFERENCES = 64
"""With at least so many reference runs, each example's own variance is used."""
SMALLEST_VARIANCE = 1e-12
"""Smallest variance, for a signal that is equal in all training runs."""


@dataclass(frozen=True)
class ReferenceWorld:
    """Statistics of the references trained on each record, or not: n, mean, ss (sum of squares), [A, Q] float64."""

    n: Tensor
    mean: Tensor
    ss: Tensor

    @staticmethod
    def of(signal: Tensor, chosen: Tensor) -> ReferenceWorld:
        """Return counts, means and squared residuals of finite signals [R, A, Q] over the `chosen` runs [R, Q]."""
        use = chosen[:, None] & signal.isfinite()
        n = use.sum(0).double()
        mean = torch.where(use, signal, 0.0).sum(0) / n.clamp(min=1)
        return ReferenceWorld(n, mean, torch.where(use, signal - mean, 0.0).square().sum(0))

    @property
    def pooled(self) -> Tensor:
        """The variance within an example [A, 1], pooled over examples; NaN if no example has two references."""
        freedom = (self.n - 1).clamp(min=0).sum(1, keepdim=True)
        return torch.where(freedom > 0, self.ss.sum(1, keepdim=True) / freedom.clamp(min=1), torch.nan)

    def variance(self, prior: Tensor, weight: float) -> Tensor:
        """Return (v s0^2 + ss) / (v + n - 1) [A, Q]: shrunk to the prior s0^2 [A, 1] by v runs; at least 1e-12."""
        freedom = (self.n - 1).clamp(min=0)
        raw = (weight * prior + self.ss) / (weight + freedom).clamp(min=SMALLEST_VARIANCE)
        return torch.where(weight + freedom > 0, raw, prior).clamp(min=SMALLEST_VARIANCE)


def prior_variances(inside: ReferenceWorld, outside: ReferenceWorld) -> tuple[Tensor, Tensor]:
    """Return the variances [A, 1] to which the two worlds' are shrunk: pooled, or the other world's, or 1."""
    a, b = inside.pooled, outside.pooled
    a, b = torch.where(a.isnan(), b, a), torch.where(b.isnan(), a, b)
    return torch.where(a.isnan(), 1.0, a), torch.where(b.isnan(), 1.0, b)


def log_normal(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return log N(x; mean, variance) up to a common constant."""
    return -((x - mean).square() / variance + variance.log()) / 2


def strengths(signal: Tensor, keep: Tensor) -> Tensor:
    """Return the weight of each augmentation [A], summing to 1: the squared d'^2 of its signal in the references.

    Takes the references' signals [R, A, Q] and keep [R, Q] bool. d'^2 is the mean over examples of (mu_in - mu_out)^2
    over the two pooled variances, less what the means' own errors add. Equal weights if it cannot be measured.
    """
    inside, outside = ReferenceWorld.of(signal, keep), ReferenceWorld.of(signal, ~keep)
    both = (inside.n > 0) & (outside.n > 0)
    a, b = prior_variances(inside, outside)
    noise = a / inside.n.clamp(min=1) + b / outside.n.clamp(min=1)
    effect = ((inside.mean - outside.mean).square() - noise) / (a + b).clamp(min=SMALLEST_VARIANCE)
    effect = torch.where(both, effect, 0.0).sum(1) / both.sum(1).clamp(min=1)
    weight = effect.clamp(min=1e-3 * max(float(effect.max()), SMALLEST_VARIANCE)).square()
    weight = torch.where(weight.isfinite(), weight, 0.0)
    return weight / weight.sum() if float(weight.sum()) > 0 else torch.full_like(weight, 1 / len(weight))


def weighted_mean(score: Tensor, weight: Tensor) -> Tensor:
    """Return the mean [Q] of scores [A, Q] over augmentations by weight [A]; NaN scores do not count."""
    share = torch.where(score.isfinite(), weight[:, None], 0.0)
    return torch.where(share > 0, score * share, 0.0).sum(0) / share.sum(0)


def likelihood_ratio(target: Tensor, signal: Tensor, keep: Tensor, weight: float) -> Tensor:
    """Return the online score [Q]: weighted mean over augmentations of log N(phi; in) - log N(phi; out).

    Takes the target's signals [A, Q], the references' [R, A, Q], `keep` [R, Q] (trained on it) and the weight v, in
    runs, of the pooled variance. Signals that are not finite do not count; NaN if the target or a world has no other.
    """
    inside, outside = ReferenceWorld.of(signal, keep), ReferenceWorld.of(signal, ~keep)
    prior_in, prior_out = prior_variances(inside, outside)
    score = log_normal(target, inside.mean, inside.variance(prior_in, weight)) - log_normal(
        target, outside.mean, outside.variance(prior_out, weight)
    )
    valid = (inside.n > 0) & (outside.n > 0)
    return weighted_mean(torch.where(valid, score, torch.nan), strengths(signal, keep))


def one_sided(target: Tensor, signal: Tensor, keep: Tensor, weight: float) -> Tensor:
    """Return the offline score [Q]: weighted mean of log Phi((phi - mu_out) / s_out); arguments as above.

    One-sided: only a signal above those of models without the record indicates membership. Where Phi rounds to 1, 1e-9
    of the distance breaks ties. Runs with a record give the strength of augmentations only, which the attacker could
    also measure on its own records.
    """
    outside = ReferenceWorld.of(signal, ~keep)
    _, prior = prior_variances(outside, outside)
    z = (target - outside.mean) / outside.variance(prior, weight).sqrt()
    score = torch.special.log_ndtr(z) + 1e-9 * z
    return weighted_mean(torch.where(outside.n > 0, score, torch.nan), strengths(signal, keep))


@dataclass(frozen=True)
class LiRA(AuditAttack):
    """Likelihood ratio of a record's signal under Gaussians fitted to reference runs with and without it.

    Attributes:
        online: whether runs trained on the record are used; else only those without it, one-sided.
        shrink: weight v, in runs, of the variance pooled over examples, with fewer than 64 references; 0 uses each
            example's own variance, which with 4 runs has an error of half its size.
    """

    name: ClassVar[str] = "mia_lira"
    next_token: ClassVar[bool] = True
    threats: ClassVar[tuple[str, ...]] = ("client/1",)
    audit: ClassVar = "references"
    adaptive: ClassVar[bool] = True  # its references are trained under the defense
    reference: ClassVar[str] = "Carlini et al., Membership Inference Attacks From First Principles, S&P 2022"

    online: bool = True
    shrink: NonNegative = 4.0

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the log likelihood ratio [Q], or the one-sided log probability [Q]."""
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        references, labels = references_of(self.name, challenge), challenge.labels.double().cpu()
        outputs = references.outputs.double().cpu()
        signal = logit_gap(view.plan, outputs, labels)
        target = logit_gap(view.plan, target_outputs(view, challenge.x, outputs.shape[1]), labels)
        target = torch.where(target.isfinite(), target, torch.nan)
        score = likelihood_ratio if self.online else one_sided
        return score(target, signal, references.keep.cpu(), self.shrink if len(signal) < MANY_REFERENCES else 0.0)


@dataclass(frozen=True)
class OfflineLiRA(LiRA):
    """LiRA by reference runs without the record only, for an attacker that learns of it after training them."""

    name: ClassVar[str] = "mia_lira_offline"

    online: bool = False


# -- Membership inference of RMIA (Zarifzadeh, Liu and Shokri, ICML 2024): a record against a population --

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
    next_token: ClassVar[bool] = True
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
