"""The likelihood-ratio attack (Carlini et al., S&P 2022), online and offline, with variances shrunk for few references.

A net trained without augmentation hardly remembers augmented copies (digits MLP, 16 references, TPR of canaries at 1 %
FPR: .87 from the record alone, .55 from the plain mean over six copies); so copies are weighted by what the references
show of them, which gives .87 again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.attacks.membership.base import AuditAttack, logit_gap, references_of, target_outputs
from ppbench.federation.bounds import NonNegative
from ppbench.federation.view import View

MANY = 64
"""Reference runs from which each example's own variance is trusted."""
TINY = 1e-12
"""Smallest variance: that of a signal that no training run moved."""


@dataclass(frozen=True)
class World:
    """What references of one kind (trained on a record, or not) say: n, mean, ss [A, Q] float64; ss: sum of squares."""

    n: Tensor
    mean: Tensor
    ss: Tensor

    @staticmethod
    def of(signal: Tensor, chosen: Tensor) -> World:
        """Return counts, means and squared residuals of the finite signals [R, A, Q] of the `chosen` runs [R, Q]."""
        use = chosen[:, None] & signal.isfinite()
        n = use.sum(0).double()
        mean = torch.where(use, signal, 0.0).sum(0) / n.clamp(min=1)
        return World(n, mean, torch.where(use, signal - mean, 0.0).square().sum(0))

    @property
    def pooled(self) -> Tensor:
        """The variance within an example [A, 1], pooled over examples; NaN where no example has two references."""
        freedom = (self.n - 1).clamp(min=0).sum(1, keepdim=True)
        return torch.where(freedom > 0, self.ss.sum(1, keepdim=True) / freedom.clamp(min=1), torch.nan)

    def variance(self, prior: Tensor, weight: float) -> Tensor:
        """Return (v s0^2 + ss) / (v + n - 1) [A, Q], at least `TINY`: shrunk to the prior [A, 1] as if by v runs."""
        freedom = (self.n - 1).clamp(min=0)
        raw = (weight * prior + self.ss) / (weight + freedom).clamp(min=TINY)
        return torch.where(weight + freedom > 0, raw, prior).clamp(min=TINY)


def priors(inside: World, outside: World) -> tuple[Tensor, Tensor]:
    """Return the variances [A, 1] that those of the two worlds are shrunk to: pooled, or the other world's, or 1."""
    a, b = inside.pooled, outside.pooled
    a, b = torch.where(a.isnan(), b, a), torch.where(b.isnan(), a, b)
    return torch.where(a.isnan(), 1.0, a), torch.where(b.isnan(), 1.0, b)


def log_normal(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return log N(x; mean, variance) up to the constant that all share."""
    return -((x - mean).square() / variance + variance.log()) / 2


def strengths(signal: Tensor, keep: Tensor) -> Tensor:
    """Return the weight of each augmentation [A], summing to 1: the squared d'^2 of its signal in the references.

    d'^2 is the mean over examples of (mu_in - mu_out)^2 over the two pooled variances, less what the means' own errors
    add. Equal weights where nothing can be measured. Of the references' signals [R, A, Q] and keep [R, Q] bool.
    """
    inside, outside = World.of(signal, keep), World.of(signal, ~keep)
    both = (inside.n > 0) & (outside.n > 0)
    a, b = priors(inside, outside)
    noise = a / inside.n.clamp(min=1) + b / outside.n.clamp(min=1)
    effect = ((inside.mean - outside.mean).square() - noise) / (a + b).clamp(min=TINY)
    effect = torch.where(both, effect, 0.0).sum(1) / both.sum(1).clamp(min=1)
    weight = effect.clamp(min=1e-3 * max(float(effect.max()), TINY)).square()
    weight = torch.where(weight.isfinite(), weight, 0.0)
    return weight / weight.sum() if float(weight.sum()) > 0 else torch.full_like(weight, 1 / len(weight))


def averaged(score: Tensor, weight: Tensor) -> Tensor:
    """Return the mean [Q] of scores [A, Q] over augmentations by weight [A]; NaN scores do not count."""
    share = torch.where(score.isfinite(), weight[:, None], 0.0)
    return torch.where(share > 0, score * share, 0.0).sum(0) / share.sum(0)


def likelihood_ratio(target: Tensor, signal: Tensor, keep: Tensor, weight: float) -> Tensor:
    """Return the online score [Q]: weighted mean over augmentations of log N(phi; in) - log N(phi; out).

    Of the target's signals [A, Q], the references' [R, A, Q], `keep` [R, Q] (trained on it) and the weight v, in runs,
    of the pooled variance. What is not finite does not count; NaN where nothing is left of the target or of a world.
    """
    inside, outside = World.of(signal, keep), World.of(signal, ~keep)
    prior_in, prior_out = priors(inside, outside)
    score = log_normal(target, inside.mean, inside.variance(prior_in, weight)) - log_normal(
        target, outside.mean, outside.variance(prior_out, weight)
    )
    told = (inside.n > 0) & (outside.n > 0)
    return averaged(torch.where(told, score, torch.nan), strengths(signal, keep))


def one_sided(target: Tensor, signal: Tensor, keep: Tensor, weight: float) -> Tensor:
    """Return the offline score [Q]: weighted mean of log Phi((phi - mu_out) / s_out); arguments as above.

    One-sided: only a signal above those of models without the record speaks for membership. Where Phi rounds to 1 the
    distance itself breaks ties, 1e-9 of it. Of runs with a record only the strength of augmentations is taken, which
    the adversary can as well measure on records of its own.
    """
    outside = World.of(signal, ~keep)
    _, prior = priors(outside, outside)
    z = (target - outside.mean) / outside.variance(prior, weight).sqrt()
    score = torch.special.log_ndtr(z) + 1e-9 * z
    return averaged(torch.where(outside.n > 0, score, torch.nan), strengths(signal, keep))


@dataclass(frozen=True)
class LiRA(AuditAttack):
    """Likelihood ratio of a record's signal under Gaussians fitted to reference runs with and without it.

    Attributes:
        online: whether runs trained on the record are used; else only those without it, one-sided.
        shrink: weight v, in runs, of the variance pooled over examples, with fewer than 64 references; 0 trusts each
            example's own variance, which with 4 runs is off by half of itself.
    """

    name: ClassVar[str] = "mia_lira"
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
        return score(target, signal, references.keep.cpu(), self.shrink if len(signal) < MANY else 0.0)


@dataclass(frozen=True)
class OfflineLiRA(LiRA):
    """LiRA by reference runs without the record only: what an adversary has who learns of it after training them."""

    name: ClassVar[str] = "mia_lira_offline"

    online: bool = False
