"""White-box membership inference (Nasr, Shokri and Houmansadr, S&P 2019): a classifier of gradients over rounds.

The server has the model of every round. For each candidate it computes what a training step would: the norm of each
layer's gradient, the last layer's gradient, the loss and the outputs; and how well the candidate's gradient explains
the uploads. A small network learns from candidates of known membership to recognize members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.membership.base import PROBABILITY_FLOOR, AuditAttack, MembershipQuestion
from ppbench.attacks.membership.network import NetworkSeeds, OutputClassifier, signals
from ppbench.attacks.membership.update_cosine import RIDGE, example_gradients, rounds_of, update_coefficients
from ppbench.base.tree import Params
from ppbench.federation.bounds import InMemoryCount, NonNegative, PositiveInt
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View


def evenly_spaced(items: Sequence[View], count: int) -> list[View]:
    """Return `count` of `items`, evenly spaced, the last one included; all if there are no more."""
    if len(items) <= count:
        return list(items)
    return [items[round((k + 1) * len(items) / count) - 1] for k in range(count)]


def gradient_signals(gradients: Params, labels: Tensor) -> Tensor:
    """Return the log gradient norms of each tensor and of the last matrix's rows, [q, tensors + rows] float32.

    Takes leaves [q, *parameter] and labels [q, C]. The last matrix is the last with one row per class. The label's row
    comes first, then the others in ascending order: the class itself is no sign of membership.
    """
    norms = [value.flatten(1).norm(dim=1, keepdim=True) for value in gradients.values()]
    matrices = [value for value in gradients.values() if value.dim() > 2 and value.shape[1] == labels.shape[1]]
    if matrices:
        rows, label = matrices[-1].flatten(2).norm(dim=2), labels.argmax(-1, keepdim=True)
        others = rows.scatter(-1, label, -torch.inf).sort(-1).values[:, 1:]
        norms += [rows.gather(-1, label), others]
    return (torch.cat(norms, 1) + PROBABILITY_FLOOR).log()


def round_signals(plan: Plan, evidence: Evidence, x: Tensor, labels: Tensor) -> Tensor:
    """Return candidates' features [Q, F] float64, on CPU, at one model: `gradient_signals` and `signals` of outputs."""
    like = max(evidence.observed.values(), key=torch.numel)
    x, hot = x.to(like.device, torch.float32), labels.to(like.device, torch.float32)
    parts = [gradient_signals(leaves, hot[part]).double().cpu() for part, leaves in example_gradients(evidence, x, hot)]
    features = torch.cat(parts)
    if evidence.params is None:
        return features
    with torch.no_grad():
        outputs = plan.net({name: value.to(x) for name, value in evidence.params.items()}, x).double().cpu()
    return torch.cat([features, signals(plan, outputs, labels)], 1)


@dataclass(frozen=True)
class WhiteBox(AuditAttack):
    """A network of one hidden layer separates members from others by gradients and outputs at several rounds' models.

    Each feature is averaged over the rounds: concatenated, there are more features than known records, and the
    classifier learns noise (AUC 0.73 instead of 0.81 on a digits MLP with 100 known records). Another feature is how
    much of the uploads of ALL rounds a candidate explains (`mia_update_cosine`), which alone has 0.85 there: features
    of the model help if it has overfitted. Scores are probabilities; each half has its own classifier.

    rounds: number of models, evenly spaced, the last one included; the other parameters are those of `mia_nn`.
    """

    name: ClassVar[str] = "mia_whitebox"
    threats: ClassVar[tuple[str, ...]] = ("server/1",)
    audit: ClassVar = "rounds"
    reference: ClassVar[str] = "Nasr, Shokri and Houmansadr, Comprehensive Privacy Analysis of Deep Learning, S&P 2019"

    rounds: PositiveInt = 5
    hidden: InMemoryCount = 64
    decay: NonNegative = 0.1
    seeds: NetworkSeeds = 3
    steps: PositiveInt = 100

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the features [Q, F] float64 of candidates; F = 0 if no upload can be read.

        A round without outputs (of unknown weights) counts only if no round has any. A feature that is not finite for
        any candidate is dropped.
        """
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        assert view.plan.net  # built here: under vmap its initialization could not draw
        x, labels, tables = challenge.x, challenge.labels.double().cpu(), []
        for part in evenly_spaced(rounds_of(view), self.rounds):
            readable = [e for e in view.defense.evidence(part) if not e.nuisance]
            tables += [round_signals(view.plan, e, x, labels) for e in readable[:1]]
        most = max((table.shape[1] for table in tables), default=0)
        means = [torch.stack([table for table in tables if table.shape[1] == most]).nanmean(0)] if tables else []
        explained = update_coefficients(view, x, labels, RIDGE).nanmean(0)
        best = explained.nan_to_num(nan=-torch.inf).max(0).values[:, None]
        features = torch.cat([*means, best], 1)
        return features[:, features.isfinite().any(0)]

    def answer(self, plan: Plan, signal: Tensor, question: MembershipQuestion, generator: torch.Generator) -> Guess:
        """Return the mean probability [Q] of membership, and whether it is at least 0.5."""
        classifier = OutputClassifier(self.hidden, self.decay, self.seeds, self.steps)
        usable = signal.isfinite().all(1) & (signal.shape[1] > 0)
        return classifier.classified(torch.cat([signal, question.labels], 1), usable, question, generator)
