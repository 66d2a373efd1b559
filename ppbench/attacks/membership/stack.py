"""Stacking: one classifier over the scores of all membership attacks that a view allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.membership.model_queries import (
    AuditAttack,
    MembershipQuestion,
    coins,
    finite_scores,
    log_probabilities,
    logit_gap,
    model_outputs,
)
from ppbench.attacks.membership.outputs import modified_entropy
from ppbench.attacks.membership.references import RMIA, LiRA, OfflineLiRA
from ppbench.attacks.membership.updates import FedMIA, UpdateCosine
from ppbench.federation.bounds import Positive
from ppbench.federation.plan import Plan
from ppbench.federation.view import View


@dataclass(frozen=True)
class Stack(AuditAttack):
    """A regularized logistic regression over other attacks' scores, fitted on the known half, applied to the other.

    Columns: the logit gap (of which the loss is a function) and the modified entropy of the delivered model; LiRA, its
    offline form and RMIA with reference runs; update cosine and FedMIA if uploads are visible. They are standardized
    for the fit. `penalty` is the weight of the squared coefficients beside the summed log loss.
    """

    name: ClassVar[str] = "mia_stack"
    next_token: ClassVar[bool] = True
    threats: ClassVar[tuple[str, ...]] = ("client/1", "server/1")
    audit: ClassVar = "rounds"
    reference: ClassVar[str] = "Wolpert, Stacked Generalization, Neural Networks 1992; scores: see the attacks stacked"

    penalty: Positive = 10.0

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the scores [Q, attacks] float64, NaN where an attack has none."""
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        outputs, labels = model_outputs(view, challenge.x), challenge.labels.double().cpu()
        scores = [logit_gap(view.plan, outputs, labels)]
        if view.plan.spec.classes > 1 and not view.plan.next_token:
            scores.append(-modified_entropy(log_probabilities(view.plan, outputs), labels))
        more: list[AuditAttack] = []
        if challenge.references is not None:
            more += [LiRA(), OfflineLiRA(), RMIA()]
        if view.threat.sees_uploads and view.by_round():
            more += [UpdateCosine(), FedMIA()]
        return torch.stack([*scores, *(attack.signal(view, challenge) for attack in more)], 1)

    def answer(self, plan: Plan, signal: Tensor, question: MembershipQuestion, generator: torch.Generator) -> Guess:
        """Return log odds [Q] and decisions [Q] by the best threshold on the known half; random without any signal."""
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        columns = torch.stack([finite_scores(column) for column in signal.T], 1)
        columns = columns[:, [len(column.unique()) > 1 for column in columns.T]]
        member = question.members.numpy()
        if not columns.shape[1] or member.all() or not member.any():
            return Guess(score=torch.zeros(len(signal)).double(), decision=coins(len(signal), generator))
        scaler = StandardScaler().fit(columns[question.is_known].numpy())
        rows = np.clip(scaler.transform(columns.numpy()), -5, 5)
        model = LogisticRegression(C=1 / self.penalty, max_iter=1000).fit(rows[question.is_known.numpy()], member)
        return super().answer(plan, torch.from_numpy(model.decision_function(rows)).double(), question, generator)
