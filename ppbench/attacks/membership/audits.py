"""Attacks of audits: guesses from one training run, and canary clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.membership.model_queries import (
    AuditAttack,
    finite_scores,
    last_model,
    log_likelihood,
    logit_gap,
    membership_question,
    model_outputs,
    token_likelihoods,
)
from ppbench.attacks.membership.references import LiRA
from ppbench.attacks.membership.updates import UpdateCosine
from ppbench.base.errors import UsageError
from ppbench.federation.bounds import Fraction
from ppbench.federation.plan import Layout, Plan
from ppbench.federation.view import View
from ppbench.metrics.modality import modality_in

# -- Auditing with one training run (Steinke, Nasr and Jagielski, NeurIPS 2023): guesses for a lower bound on epsilon
# --
# Examples are in or out at random. The auditor guesses "in" for the highest scores and "out" for the lowest, and
# abstains on the rest. The scorer, which alone knows the canaries among the candidates, guesses on a fixed number of
# those by the same scores (`questions/membership.py`); `metrics/epsilon.py` computes the bound from the number of
# right guesses.


def extremes(scores: Tensor, unknown: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (decision [Q] bool, abstain [Q] bool): in for the highest, out for the lowest scores.

    Takes finite scores [Q]; guesses only on `unknown` candidates [Q] bool, round(share * number unknown / 2) each.
    Equal scores are ordered at random, so that each guess is random if all are equal.
    """
    lots = torch.rand(len(scores), generator=generator, dtype=torch.float64)
    places = unknown.nonzero()[:, 0]
    places = places[lots[places].argsort()]
    order = places[scores[places].sort(stable=True).indices]
    each = min(round(share * len(order) / 2), len(order) // 2)
    decision, abstain = torch.zeros(len(scores), dtype=torch.bool), torch.ones(len(scores), dtype=torch.bool)
    decision[order[len(order) - each :]] = True
    abstain[order[:each]] = False
    abstain[order[len(order) - each :]] = False
    return decision, abstain


@dataclass(frozen=True)
class OneRunAudit(AuditAttack):
    """Guesses on the candidates with the most extreme scores, by the strongest score that its view allows.

    From a server's view: how much of the uploads each record explains (`mia_update_cosine`). From a client's: LiRA with
    reference runs, else the gap between the label's logit and the others. No score uses the known half, so all guesses
    follow from what training made public, as the bound demands. A `share` of the candidates gets a guess, half of them
    as members.
    """

    name: ClassVar[str] = "audit_one_run"
    next_token: ClassVar[bool] = True
    threats: ClassVar[tuple[str, ...]] = ("client/1", "server/1")
    audit: ClassVar = "rounds"
    reference: ClassVar[str] = "Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023"

    share: Fraction = 0.5

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the scores [Q] float64 of the strongest attack that the view allows."""
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        if view.threat.sees_uploads and view.by_round():
            return UpdateCosine().signal(view, challenge)
        if challenge.references is not None:
            return LiRA().signal(view, challenge)
        return logit_gap(view.plan, model_outputs(view, challenge.x), challenge.labels.double().cpu())

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return score, decision and abstain [Q] per challenge; no guesses on known members."""
        guesses = []
        for guess, challenge in zip(super().run(view, challenges, generator), challenges, strict=True):
            assert guess.score is not None
            is_known = membership_question(self.name, challenge).is_known
            decision, abstain = extremes(guess.score, ~is_known, self.share, generator)
            guesses.append(Guess(score=guess.score, decision=decision, abstain=abstain))
        return guesses


# -- Which canary clients took part in training: by the cosine of the model's change with their directions --


@dataclass(frozen=True)
class CanaryClientAudit(Attack):
    """The score of a direction is its cosine with the initial model minus the delivered one, times the root of P.

    P is the number of parameters. Steps are against gradients, so the score is large for a direction that took part;
    for others it is N(0, 1).
    """

    name: ClassVar[str] = "audit_canary_clients"
    next_token: ClassVar[bool] = True
    kind: ClassVar[Kind] = "client_membership"
    threats: ClassVar[tuple[str, ...]] = ("client/1",)
    standard: ClassVar[bool] = False
    audit: ClassVar = "clients"
    reference: ClassVar[str] = (
        "Andrew et al., One-shot Empirical Privacy Estimation for Federated Learning, ICLR 2024, Algorithm 1"
    )

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return score [Q] float64, 0 where the model did not move; UsageError without directions or a model."""
        message = last_model(view)
        params = getattr(message, "params", None)
        guesses = []
        for challenge in challenges:
            if params is None or not {"directions", "start"} <= set(challenge.extra):
                raise UsageError(f"Attack {self.name!r} needs directions, initial weights and a delivered model.")
            start, directions = challenge.extra["start"].double(), challenge.extra["directions"].double()
            moved = start - Layout.of(params).pack(params).cpu().double()
            cosine = directions @ moved / moved.norm().clamp(min=torch.finfo(torch.float64).tiny)
            guesses.append(Guess(score=len(start) ** 0.5 * cosine))
        return guesses


# -- Which form of a planted text was trained on: by the likelihood of each (Carlini et al., USENIX Security 2019) --


@dataclass(frozen=True)
class SecretRanking(Attack):
    """The likelier a form of a canary is under the last model received, the more likely it was planted.

    Of texts that are their own targets it is the likelihood of all tokens, which ranks as the paper's log-perplexity;
    else that of the canary's target.
    """

    name: ClassVar[str] = "exposure"
    next_token: ClassVar[bool] = True
    kind: ClassVar[Kind] = "exposure"
    threats: ClassVar[tuple[str, ...]] = ("client/1",)
    standard: ClassVar[bool] = False
    audit: ClassVar = "secrets"
    reference: ClassVar[str] = "Carlini et al., The Secret Sharer, USENIX Security 2019, exposure by sampling"

    def suits(self, plan: Plan) -> bool:
        """Return whether canaries of the plan's kind of data hold secrets."""
        return bool(modality_in(plan).secret_family) and plan.vocabulary is not None

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return the score [V] float64 of each form; UsageError for a challenge without forms or targets."""
        return [Guess(score=finite_scores(self._likelihood(view, challenge))) for challenge in challenges]

    def _likelihood(self, view: View, challenge: Challenge) -> Tensor:
        if challenge.x is None or challenge.labels is None:
            raise UsageError(f"Attack {self.name!r} was given a challenge without forms or targets; it needs both.")
        if view.plan.next_token:
            tokens = token_likelihoods(view, challenge.x)
            return tokens.masked_fill(tokens == torch.inf, 0.0).sum(-1)
        outputs = model_outputs(view, challenge.x)
        return log_likelihood(view.plan, outputs, challenge.labels.double().cpu())
