"""Membership inference by the loss: a record the model was trained on has a smaller one (Yeom et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.adversary.view import View
from ppbench.errors import UsageError
from ppbench.federation.tree import Tree, leaves
from ppbench.federation.wire import SERVER

CHUNK = 512


def last_model(view: View) -> Tree | None:
    """Return the last message from the server that can hold a model, or None.

    It can when its tensors hold at least as many numbers as the network has parameters: set-up messages, commands
    and seeds are smaller.
    """
    for letter in reversed(view.mail):
        if letter.sender != SERVER or letter.message is None:
            continue
        if view.party not in (None, SERVER, letter.receiver):
            continue
        if sum(leaf.numel() for leaf in leaves(letter.message)) >= view.plan.net.parameter_count:
            return letter.message
    return None


def loss_scores(view: View, x: Tensor, labels: Tensor) -> Tensor:
    """Return the scores [Q] float64 of records x [Q, *shape] with one-hot labels [Q, C]: minus their loss.

    The model is queried as the adversary would, by `defense.predict` on the last message that it holds. A loss that
    is not finite scores as the largest finite one; without any usable model all scores are 0.
    """
    message = last_model(view)
    if message is None:
        return torch.zeros(len(x), dtype=torch.float64)
    with torch.no_grad():
        parts = [
            -view.plan.example_loss(view.defense.predict(view.plan, message, some).double(), y.double())
            for some, y in zip(x.split(CHUNK), labels.split(CHUNK), strict=True)
        ]
    scores = torch.cat(parts)
    finite = scores[scores.isfinite()]
    return torch.where(scores.isfinite(), scores, finite.min() if len(finite) else torch.zeros_like(scores))


def best_threshold(scores: Tensor, member: Tensor) -> float | None:
    """Return the threshold t for which `score >= t` separates known members best, or None when nothing separates.

    Best is the largest balanced accuracy (mean of the shares of members and of non-members decided rightly); of
    equally good thresholds the middle one. Thresholds lie halfway between neighboring distinct scores, so equal
    scores are always decided alike; -inf, which decides "member" for all, stands beside them.

    Args:
        scores: [K] float64, finite.
        member: [K] bool.
    """
    values = scores.unique()
    if len(values) < 2 or member.all() or not member.any():
        return None
    cuts = torch.cat([values.new_tensor([-torch.inf]), (values[1:] + values[:-1]) / 2])
    inside = (scores[member][:, None] >= cuts).double().mean(0)
    outside = (scores[~member][:, None] < cuts).double().mean(0)
    balanced = (inside + outside) / 2
    best = (balanced == balanced.max()).nonzero()[:, 0]
    return float(cuts[best[len(best) // 2]])


@dataclass(frozen=True)
class LossThreshold(Attack):
    """A record is a member when its loss under the last model received is small."""

    name: ClassVar[str] = "mia_loss"
    kind: ClassVar[Kind] = "membership"
    threats: ClassVar[tuple[str, ...]] = ("client/1",)
    reference: ClassVar[str] = "Yeom et al., Privacy Risk in Machine Learning, CSF 2018"

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return score [Q] float64 and decision [Q] bool of every candidate, challenge by challenge.

        The threshold is fitted on the candidates whose membership is known (`known` 0 or 1) and applied to all.
        Where it cannot be fitted (one class known, or equal scores) each decision is a coin from `generator`.

        Raises:
            UsageError: a challenge lacks candidates, their labels or the known half.
        """
        return [self._answer(view, challenge, generator) for challenge in challenges]

    def _answer(self, view: View, challenge: Challenge, generator: torch.Generator) -> Guess:
        if challenge.x is None or challenge.labels is None or challenge.known is None:
            raise UsageError(
                "Attack 'mia_loss' was given a challenge without candidates, labels or known members; a membership "
                "challenge must have all three."
            )
        scores = loss_scores(view, challenge.x, challenge.labels).cpu()
        known = challenge.known.cpu()
        threshold = best_threshold(scores[known >= 0], known[known >= 0] == 1)
        if threshold is None:
            coins = torch.randint(0, 2, (len(scores),), generator=generator)
            return Guess(score=scores, decision=coins == 1)
        return Guess(score=scores, decision=scores >= threshold)
