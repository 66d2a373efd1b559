"""White-box membership inference (Nasr, Shokri and Houmansadr, S&P 2019): a classifier of gradients over rounds.

The server holds the model of every round. On each candidate it computes what a training step would see: the norm of
each layer's gradient, the last layer's gradient, the loss and the outputs; and how the candidate's gradient fits what
clients sent. A small network learns from candidates of known membership what members look like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.membership.base import FLOOR, Asked, AuditAttack
from ppbench.attacks.membership.network import OutputClassifier, Seeds, signals
from ppbench.attacks.membership.update_cosine import RIDGE, example_gradients, rounds_of, update_coefficients
from ppbench.base.tree import Params
from ppbench.federation.bounds import InMemoryCount, NonNegative, PositiveInt
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View


def spread(items: Sequence[View], count: int) -> list[View]:
    """Return `count` of `items`, evenly spaced, the last one included; all where there are no more."""
    if len(items) <= count:
        return list(items)
    return [items[round((k + 1) * len(items) / count) - 1] for k in range(count)]


def gradient_signals(gradients: Params, labels: Tensor) -> Tensor:
    """Return the logs of each tensor's gradient norm, and of the last matrix' rows, [q, tensors + rows] float32.

    Of leaves [q, *parameter] and labels [q, C]. Of as many rows as there are classes the label's comes first, then the
    others in ascending order: which class it is is no sign of membership.
    """
    norms = [value.flatten(1).norm(dim=1, keepdim=True) for value in gradients.values()]
    matrices = [value for value in gradients.values() if value.dim() > 2 and value.shape[1] == labels.shape[1]]
    if matrices:
        rows, label = matrices[-1].flatten(2).norm(dim=2), labels.argmax(-1, keepdim=True)
        others = rows.scatter(-1, label, -torch.inf).sort(-1).values[:, 1:]
        norms += [rows.gather(-1, label), others]
    return (torch.cat(norms, 1) + FLOOR).log()


def round_signals(plan: Plan, evidence: Evidence, x: Tensor, labels: Tensor) -> Tensor:
    """Return what one model says of candidates [Q, F] float64, CPU: `gradient_signals`, and `signals` of outputs."""
    like = max(evidence.observed.values(), key=torch.numel)
    x, hot = x.to(like.device, torch.float32), labels.to(like.device, torch.float32)
    parts = [gradient_signals(leaves, hot[part]).double().cpu() for part, leaves in example_gradients(evidence, x, hot)]
    found = torch.cat(parts)
    if evidence.params is None:
        return found
    with torch.no_grad():
        outputs = plan.net({name: value.to(x) for name, value in evidence.params.items()}, x).double().cpu()
    return torch.cat([found, signals(plan, outputs, labels)], 1)


@dataclass(frozen=True)
class WhiteBox(AuditAttack):
    """A network of one hidden layer tells members from others by gradients and outputs at several rounds' models.

    Each feature is averaged over the rounds: concatenated, there are more features than known records, and the
    classifier learns noise (AUC .73 instead of .81 on a digits MLP with 100 known records). Beside them stands how much
    of the uploads of ALL rounds a candidate explains (`mia_update_cosine`), which by itself has .85 there: features of
    the model pay where it has overfitted. Scores are probabilities; each half has a classifier of its own.

    `rounds` models are looked into, evenly spaced, the last one included; the rest is of the classifier (`mia_nn`).
    """

    name: ClassVar[str] = "mia_whitebox"
    threats: ClassVar[tuple[str, ...]] = ("server/1",)
    audit: ClassVar = "rounds"
    reference: ClassVar[str] = "Nasr, Shokri and Houmansadr, Comprehensive Privacy Analysis of Deep Learning, S&P 2019"

    rounds: PositiveInt = 5
    hidden: InMemoryCount = 64
    decay: NonNegative = 0.1
    seeds: Seeds = 3
    steps: PositiveInt = 100

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the features [Q, F] float64 of candidates; F = 0 where no upload can be read.

        A round without outputs (its weights are not known) counts only where no round has any. A feature that is not
        finite for any candidate is left out.
        """
        assert challenge.x is not None and challenge.labels is not None  # `run` has checked
        assert view.plan.net  # built here: under vmap its initialization could not draw
        x, labels, looks = challenge.x, challenge.labels.double().cpu(), []
        for part in spread(rounds_of(view), self.rounds):
            readable = [e for e in view.defense.evidence(part) if not e.nuisance]
            looks += [round_signals(view.plan, e, x, labels) for e in readable[:1]]
        most = max((look.shape[1] for look in looks), default=0)
        means = [torch.stack([look for look in looks if look.shape[1] == most]).nanmean(0)] if looks else []
        explained = update_coefficients(view, x, labels, RIDGE).nanmean(0)
        best = explained.nan_to_num(nan=-torch.inf).max(0).values[:, None]
        found = torch.cat([*means, best], 1)
        return found[:, found.isfinite().any(0)]

    def answer(self, plan: Plan, signal: Tensor, asked: Asked, generator: torch.Generator) -> Guess:
        """Return the mean probability [Q] of membership, and whether it is at least .5."""
        classifier = OutputClassifier(self.hidden, self.decay, self.seeds, self.steps)
        usable = signal.isfinite().all(1) & (signal.shape[1] > 0)
        return classifier.classified(torch.cat([signal, asked.labels], 1), usable, asked, generator)
