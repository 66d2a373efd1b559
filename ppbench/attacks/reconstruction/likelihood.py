"""The likelihood of the observation under the public noise law (Balunovic, Dimitrov, Staab and Vechev, ICLR 2022).

Minimize -log p(observed | simulated) - log p(x) by Adam: sum (o - g)^2 / 2 s^2 under Gaussian noise of deviation s,
sum sqrt(2) |o - g| / s under Laplace noise, and a Laplace prior on the image's gradient. Entries that a message visibly
lacks have weight 0. Without a noise law it is plain gradient matching. Clipped gradients, whose scale is unknown, are
compared by the cosine: the likelihood at the best scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Guess
from ppbench.attacks.reconstruction.ig import tried_labels
from ppbench.attacks.reconstruction.search.descent import Inversion, SearchHistory, descent_of, evidence_of
from ppbench.attacks.reconstruction.search.starts import PosedVictim
from ppbench.base.tree import Params, Tree
from ppbench.federation.bounds import NonNegative, Positive, PositiveInt
from ppbench.federation.evidence import Evidence, as_gradient
from ppbench.federation.plan import Noise
from ppbench.federation.view import View

NOISELESS_SHARE = 1e-3
"""Deviation assumed for tensors without noise, relative to the root mean square of their observed entries."""


@runtime_checkable
class Supports(Protocol):
    """A defense whose messages show which entries they hold."""

    def support(self, upload: Tree, like: Params) -> Params:
        """Return 1.0 for entries that were sent and 0.0 for others."""
        ...


@dataclass(frozen=True)
class Likelihood(Inversion):
    """Maximum a-posteriori images under the public noise law and a prior on their gradients.

    The negative log-likelihood is relative to what it is at the truth, and multiplies the prior (`fading`). With P
    parameters and n pixels, tv expects a mean |dx| + |dy| of 2 n / (P tv), the scale of the prior's Laplace law.
    """

    name: ClassVar[str] = "likelihood"
    version: ClassVar[str] = "3"
    standard: ClassVar[bool] = False
    reference: ClassVar[str] = "Balunovic et al., Bayesian Framework for Gradient Leakage, ICLR 2022"

    budget: PositiveInt = 600
    lr: Positive = 0.05
    tv: NonNegative = 0.1
    fading: bool = True

    def variants(self) -> Sequence[Attack]:
        """Return this attack with several weights of the prior, its own first."""
        return [self, *(replace(self, tv=factor * self.tv) for factor in (0.3, 3.0, 10.0))]

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence with its noise law (1 / sqrt(U) of it for a mean of U), weighted by support."""
        law, weighted = view.defense.noise(view.plan), []
        divisor = as_gradient(view.plan, min((e.round for e in view.exchanges()), default=1))
        sent = {e.slot: e.answer for e in view.exchanges()} if isinstance(view.defense, Supports) else {}
        for e in view.defense.evidence(view):
            noise = e.noise or (None if law is None else scaled_law(law, 1 / (divisor * math.sqrt(len(e.unit)))))
            if isinstance(view.defense, Supports) and len(e.unit) == 1 and e.unit[0] in sent and e.weight is None:
                e = replace(e, weight=view.defense.support(sent[e.unit[0]], e.observed))
            clipped = view.defense.clipping(view.plan) is not None and e.measure == "squares"
            weighted.append(replace(e, noise=noise, measure="cosine" if clipped else e.measure))
        return weighted

    def matched(self, evidence: Evidence) -> Evidence:
        """Return `evidence` compared by its negative log-likelihood, at the best scale if it has none."""
        noise, scaled = evidence.noise, evidence.measure == "squares"
        if noise is None or not (scaled or evidence.measure == "cosine"):
            return evidence
        absolute = noise.law == "laplace" and scaled
        weight = {}
        for name, std in deviations(evidence, noise).items():
            own = torch.ones((), device=evidence.device) if evidence.weight is None else evidence.weight[name]
            weight[name] = own * (math.sqrt(2) / std if absolute else 0.5 / std**2)
        return replace(evidence, weight=weight, measure="absolute" if absolute else evidence.measure)

    def unit(self, evidences: Sequence[Evidence]) -> Tensor:
        """Return the expected negative log-likelihood at the truth [V], up to constants; see `Inversion.unit`."""
        if evidences[0].noise is None or evidences[0].measure != "squares":
            return super().unit(evidences)
        share = 1.0 if evidences[0].noise.law == "laplace" else 0.5
        return share * torch.tensor([visible_entries(e) for e in evidences], device=evidences[0].device)

    def attack(self, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses for victims from one of `blocks`; under noise all labels are tried."""
        evidences, labels, spent = [evidence_of(v) for v in victims], None, 0
        if evidences[0].noise is not None and self.budget > victims[0].plan.spec.classes:
            labels, spent = tried_labels(victims, [self.matched(e) for e in evidences], self.start)
        left = self.budget - spent
        tries = min(self.tries, left)
        problem = self.problem(victims, evidences, tries, labels)
        schedule = self.schedule(left // tries, victims[0].plan)
        return SearchHistory(tries, spent).add(problem, descent_of(problem, problem.start, schedule)).guesses()


def scaled_law(law: Noise, factor: float) -> Noise:
    """Return the law of `factor` times the noise."""
    return replace(law, std=factor * law.std, tensors=tuple((name, factor * std) for name, std in law.tensors))


def visible_entries(evidence: Evidence) -> float:
    """Return the number of visible entries, at least 1."""
    if evidence.weight is None:
        return float(sum(value.numel() for value in evidence.observed.values()))
    visible = (float((evidence.weight[n] * torch.ones_like(v) > 0).sum()) for n, v in evidence.observed.items())
    return max(1.0, sum(visible))


def deviations(evidence: Evidence, noise: Noise) -> dict[str, float]:
    """Return the noise's standard deviation in each tensor; without noise, a small share of its size."""
    stds = {name: noise.of(name) for name in evidence.observed}
    exact = [value.double().flatten() for name, value in evidence.observed.items() if stds[name] <= 0]
    least = NOISELESS_SHARE * float(torch.cat(exact).square().mean().sqrt()) if exact else 0.0
    return {name: max(std, least, 1e-20) for name, std in stds.items()}
