"""Ranks of planted secrets: by the likelihood of each form under the model (Carlini et al., USENIX Security 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.membership.model_queries import finite_scores, log_likelihood, model_outputs, token_likelihoods
from ppbench.base.errors import UsageError
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.metrics.modality import modality_in


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

    def _likelihood(self, view: View, challenge: Challenge) -> torch.Tensor:
        if challenge.x is None or challenge.labels is None:
            raise UsageError(f"Attack {self.name!r} was given a challenge without forms or targets; it needs both.")
        if view.plan.next_token:
            tokens = token_likelihoods(view, challenge.x)
            return tokens.masked_fill(tokens == torch.inf, 0.0).sum(-1)
        outputs = model_outputs(view, challenge.x)
        return log_likelihood(view.plan, outputs, challenge.labels.double().cpu())
