"""Exposure: how far training on a planted text gives its secret away (Carlini et al., USENIX Security 2019).

An audit plants canaries with random names and numbers. For each, an attack ranks `SECRET_FORMS` forms of it that differ
in the names and numbers alone. The exposure of a canary is log2 of their number less log2 of its own form's rank
(Definition 3, by sampling as in Section 4.3): by so many bits the attack has fewer secrets to try.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from ppbench.metrics.intervals import Estimate, bootstrap, proportion, unsupported
from ppbench.metrics.spec import SHARE, Judgment, MetricSpec
from ppbench.questions.base import Question
from ppbench.questions.inquiry import FinishedAudit, Inquiry, Scored
from ppbench.records.figure import Terms, bootstrap_seed, record_metric
from ppbench.records.schema import CellConfig, Metric, Record, Score

if TYPE_CHECKING:
    from ppbench.adversary.attack import Challenge, Guess
    from ppbench.adversary.victims import PlantedSecret
    from ppbench.federation.plan import Plan

EXPOSURE = MetricSpec(
    "exposure",
    "Exposure of planted secrets",
    "bits",
    "Mean exposure of the secrets of canaries that were trained on: log2 of the forms ranked, less log2 of the rank.",
    digits=2,
    short="Exposure",
    judgment=Judgment("mean", 0.25, 0.25, subset="canaries", digits=2),
)
EXPOSURE_ABSENT = MetricSpec(
    "exposure_absent",
    "The same of absent canaries",
    "bits",
    "`exposure` of canaries that were not trained on: the control, at chance.",
    digits=2,
    short="",
)
SECRETS_FIRST = MetricSpec(
    "secrets_first",
    "Planted secrets ranked first",
    SHARE,
    "Share of the planted secrets that an attack ranks before all other forms of the canary.",
    short="Secrets first",
)


def bits(rank: float, forms: int) -> float:
    """Return the exposure of a secret of this rank, 1 being the first; of equals the mean of their ranks."""
    return math.log2(forms) - math.log2(rank)


def chance_bits(forms: int) -> float:
    """Return the mean exposure of a secret that is ranked at random, about 1.44 bits."""
    return float(np.mean([bits(rank, forms) for rank in range(1, forms + 1)]))


class SecretScore(Score):
    """One planted secret. rank: of the planted form among `forms`; member: whether the canary was trained on."""

    kind: Literal["secret"] = "secret"
    rank: Annotated[float, Field(ge=1)]
    forms: Annotated[int, Field(ge=2)]
    member: bool

    @property
    def truth(self) -> tuple[int | str, ...]:
        """Membership, and the number of forms."""
        return self.member, self.forms

    @property
    def canary(self) -> bool:
        """Whether it was trained on."""
        return self.member

    @property
    def bits(self) -> float:
        """Its exposure."""
        return bits(self.rank, self.forms)


class Exposure(Question):
    """Which form of a canary was planted?"""

    name = "exposure"
    title = "Exposure of planted secrets"
    score = SecretScore
    source = "model"
    reads = False
    order = 4
    distances = ()
    specs = (EXPOSURE, EXPOSURE_ABSENT, SECRETS_FIRST)

    def of_audit(self, audit: FinishedAudit) -> Inquiry:
        """Return one challenge per canary with a secret, planted or absent."""
        from ppbench.adversary.victims import secrets_digest

        planted = audit.secrets()
        challenges = [secret.challenge() for secret in planted]
        return Inquiry(challenges, lambda guesses: score_secrets(planted, guesses), secrets_digest(planted))

    def malformed(self, guess: Guess, challenge: Challenge, plan: Plan) -> Iterator[str]:
        """Yield faults of the scores: one per form, finite."""
        count = 0 if challenge.x is None else len(challenge.x)
        if guess.score is None or tuple(guess.score.shape) != (count,) or not bool(guess.score.isfinite().all()):
            yield f"the guess's score is {guess.score!r}; it must be finite, of shape ({count},)"

    def metrics(self, scores: Sequence[SecretScore], terms: Terms) -> list[Metric]:
        """Return exposure and secrets_first of the canaries in the training, exposure_absent of the others."""
        inside, absent = ([score for score in scores if score.member == member] for member in (True, False))
        chance = 1 / max(score.forms for score in scores)
        first = [np.array([score.rank == 1]) for score in inside]
        share = proportion(first, chance) if first else unsupported(0, "no canary was trained on", chance)
        return [
            record_metric(EXPOSURE, _mean(inside, bootstrap_seed(terms.seed, EXPOSURE.name))),
            record_metric(EXPOSURE_ABSENT, _mean(absent, bootstrap_seed(terms.seed, EXPOSURE_ABSENT.name))),
            record_metric(SECRETS_FIRST, share),
        ]

    def judged(self, score: SecretScore, metric: str) -> float:
        """Return a secret's exposure."""
        return {EXPOSURE.name: score.bits}[metric]

    def blind(self, scores: Sequence[SecretScore], config: CellConfig) -> tuple[float, int, float] | None:
        """Return the share of planted secrets that are ranked in the better half; chance is 0.5."""
        inside = [score for score in scores if score.member]
        hits = sum(score.rank <= score.forms / 2 for score in inside)
        return (hits / len(inside), len(inside), 0.5) if inside else None

    def sentences(self, defense: str, records: Sequence[Record]) -> list[str]:
        """Return none: exposure is a finding (`ppbench.report.findings`), whose verdict says it."""
        return []


def _mean(scores: Sequence[SecretScore], seed: int) -> Estimate:
    if not scores:
        return unsupported(0, "no such canary")
    mean = bootstrap([np.array([score.bits]) for score in scores], "mean", seed)
    return Estimate(mean.value, mean.interval, mean.n, chance=chance_bits(scores[0].forms))


def score_secrets(planted: Sequence[PlantedSecret], guesses: Sequence[Guess]) -> Scored:
    """Score the ranks of the planted forms, ties by their mean; ValueError: scores are missing or not finite."""
    scores = []
    for secret, guess in zip(planted, guesses, strict=True):
        values = guess.score
        if values is None or values.shape != (len(secret.forms),) or not bool(values.isfinite().all()):
            raise ValueError("an attack on secrets must answer a finite score for every form")
        own = values[secret.place]
        rank = 1 + int((values > own).sum()) + (int((values == own).sum()) - 1) / 2
        scores.append(SecretScore(index=secret.index, rank=rank, forms=len(values), member=secret.member))
    return Scored(scores)
