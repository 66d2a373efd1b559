"""Auditing with one training run (Steinke, Nasr and Jagielski, NeurIPS 2023): guesses for a lower bound on epsilon.

Examples are in or out by coin. The auditor calls those with the highest scores in and those with the lowest out, and
abstains on the rest. The scorer, who alone knows which candidates are canaries, guesses on a fixed number of those by
the same scores (`questions/membership.py`); `metrics/audit.py` makes the bound of how many are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.membership.base import AuditAttack, asked_of, logit_gap, model_outputs
from ppbench.attacks.membership.lira import LiRA
from ppbench.attacks.membership.update_cosine import UpdateCosine, rounds_of
from ppbench.federation.bounds import Fraction
from ppbench.federation.view import View


def extremes(scores: Tensor, asked: Tensor, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return (decision [Q] bool, abstain [Q] bool): in for the highest, out for the lowest `share` / 2 of those asked.

    Of finite scores [Q]; on candidates that are not asked [Q] bool no guess is made. round(share * number asked / 2)
    guesses each. Equal scores are ordered by lots, so that each guess is a coin where all are equal.
    """
    lots = torch.rand(len(scores), generator=generator, dtype=torch.float64)
    places = asked.nonzero()[:, 0]
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
    """Guesses on the candidates that it is surest of, by the strongest score that its view allows.

    From a server's view: how much of the uploads each record explains (`mia_update_cosine`). From a client's: LiRA
    where there are reference runs, else the gap between the label's logit and the others. No score uses the known half,
    so all guesses follow from what training made public, as the bound demands. A `share` of the candidates is guessed
    on, half as members.
    """

    name: ClassVar[str] = "audit_one_run"
    threats: ClassVar[tuple[str, ...]] = ("client/1", "server/1")
    audit: ClassVar = "rounds"
    reference: ClassVar[str] = "Steinke, Nasr and Jagielski, Privacy Auditing with One (1) Training Run, NeurIPS 2023"

    share: Fraction = 0.5

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the scores [Q] float64 of the strongest attack that the view allows."""
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        if view.threat.sees_uploads and rounds_of(view):
            return UpdateCosine().signal(view, challenge)
        if challenge.references is not None:
            return LiRA().signal(view, challenge)
        return logit_gap(view.plan, model_outputs(view, challenge.x), challenge.labels.double().cpu())

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return score, decision and abstain [Q], challenge by challenge; no guesses where membership is known."""
        guesses = []
        for guess, challenge in zip(super().run(view, challenges, generator), challenges, strict=True):
            assert guess.score is not None
            told = asked_of(self.name, challenge).told
            decision, abstain = extremes(guess.score, ~told, self.share, generator)
            guesses.append(Guess(score=guess.score, decision=decision, abstain=abstain))
        return guesses
