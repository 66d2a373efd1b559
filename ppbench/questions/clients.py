"""Client membership: whether a client took part in training, for the canary clients of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from ppbench.metrics.audit import DELTA
from ppbench.metrics.clients import client_epsilon
from ppbench.questions.base import Question
from ppbench.questions.inquiry import FinishedAudit, Inquiry, Scored
from ppbench.records.figure import Terms, record_metric
from ppbench.records.schema import CellConfig, Metric, Record, Score

if TYPE_CHECKING:
    from torch import Tensor

    from ppbench.adversary.attack import Guess


class ClientScore(Score):
    """One canary direction. member: whether its client took part; score: N(0, 1) for one that did not."""

    kind: Literal["client"] = "client"
    member: bool
    score: float

    @property
    def truth(self) -> tuple[int | str, ...]:
        """Membership."""
        return (self.member,)


class Clients(Question):
    """Which random directions belong to clients that took part? Answers give an estimate of a client's epsilon."""

    name = "client_membership"
    title = "Membership of clients"
    score = ClientScore
    source = "model"
    reads = False
    order = 5
    distances = ()
    figures = (("client_epsilon", "Estimate of a client's ε"), ("client_epsilon_null", "The same of absent canaries"))

    def of_audit(self, audit: FinishedAudit) -> Inquiry:
        """Return one challenge about all directions. UsageError: the audit has no canary clients."""
        clients = audit.clients
        return Inquiry(
            [clients.challenge()], lambda guesses: score_clients(clients.inside, guesses[0]), clients.digest()
        )

    def metrics(self, scores: Sequence[ClientScore], terms: Terms) -> list[Metric]:
        """Return client_epsilon, of canaries that took part, and client_epsilon_null, of those that did not.

        Both at the delta of the defense's guarantee, or 1e-5.
        """
        delta = DELTA if terms.delta is None or not 0 < terms.delta < 1 else terms.delta
        metrics = []
        for name, member in (("client_epsilon", True), ("client_epsilon_null", False)):
            values = np.array([score.score for score in scores if score.member == member], dtype=np.float64)
            metrics.append(record_metric(name, client_epsilon(values, delta), False))
        return metrics

    def blind(self, scores: Sequence[ClientScore], config: CellConfig) -> tuple[float, int, float] | None:
        """Return the share of directions whose score's sign shows membership; chance is 0.5."""
        return sum((s.score > 0) == s.member for s in scores) / len(scores), len(scores), 0.5

    def sentences(self, defense: str, records: Sequence[Record]) -> list[str]:
        """Return a sentence for each estimate of a defense."""
        sentences = []
        for record in records:
            estimate, null = (record.metric(name) for name, _ in self.figures)
            if record.config.defense.id != defense or estimate is None or estimate.value is None:
                continue
            control = record.config.defense.control
            at = "" if control is None else f", {control.name}={control.value:g}"
            null_words = "" if null is None or null.value is None else f"; absent canaries give {null.value:.2g}"
            sentences.append(
                f"Epsilon of a client against an adversary with the model, from {estimate.n} canary clients{at}: "
                f"{estimate.value:.3g} [{estimate.low:.3g}, {estimate.high:.3g}]{null_words}. An estimate, no bound."
            )
        return sentences


def score_clients(inside: Tensor, guess: Guess) -> Scored:
    """Score directions [Q] against `inside` [Q] bool; ValueError: scores are missing or not finite."""
    if guess.score is None or guess.score.shape != inside.shape or not bool(guess.score.isfinite().all()):
        raise ValueError("an attack on clients must answer a finite score for every direction")
    pairs = zip(inside.tolist(), guess.score.tolist(), strict=True)
    return Scored([ClientScore(index=i, member=member, score=score) for i, (member, score) in enumerate(pairs)])
