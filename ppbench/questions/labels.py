"""Label recovery: the classes of a probed batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ppbench.metrics.intervals import Estimate, proportion
from ppbench.metrics.labels import multiset_chance, multiset_hits
from ppbench.metrics.spec import SHARE, Judgment, MetricSpec
from ppbench.questions.base import DistanceLaw, Question, one_minus
from ppbench.questions.inquiry import Inquiry, Probe, Scored
from ppbench.records.figure import Terms, grouped, record_metric
from ppbench.records.schema import Metric
from ppbench.records.scores import ProbedScore

if TYPE_CHECKING:
    from ppbench.adversary.attack import Challenge, Guess
    from ppbench.adversary.victims import Victims
    from ppbench.federation.plan import Plan


LABEL_ACCURACY = MetricSpec(
    "label_accuracy",
    "Labels",
    SHARE,
    "Share of labels recovered, compared as multisets.",
    judgment=Judgment("decision", 0.02, 0.05),
)
LABEL_DISTANCE = DistanceLaw("label/1", LABEL_ACCURACY.name, one_minus, "1 - label accuracy")
"""The distance of labels, also of labels that come with images."""


class LabelScore(ProbedScore):
    """One recovered label; label: whether it is right."""

    kind: Literal["label"] = "label"
    label: bool


class Labels(Question):
    """Which labels does a batch have? Compared as multisets: a gradient does not show which image has which label."""

    name = "label"
    title = "Label recovery"
    score = LabelScore
    board = "reconstruction"
    chapter = "uploads"
    distances = (LABEL_DISTANCE,)
    specs = (LABEL_ACCURACY,)

    def of_probe(self, probe: Probe) -> Inquiry:
        """Return one challenge per unit."""
        victims = probe.victims
        return Inquiry(victims.challenges(), lambda guesses: score_labels(victims, guesses), victims.digest())

    def malformed(self, guess: Guess, challenge: Challenge, plan: Plan) -> Iterator[str]:
        """Yield faults of the labels: int64, one per example."""
        yield from mislabelled(guess, challenge, plan)

    def metrics(self, scores: Sequence[LabelScore], terms: Terms) -> list[Metric]:
        """Return label_accuracy, its chance that of blind multisets."""
        groups = grouped(scores, lambda score: score.unit).values()
        units = [np.array([score.label for score in unit], dtype=bool) for unit in groups]
        return [record_metric(LABEL_ACCURACY, label_accuracy(units, terms.classes))]

    def judged(self, score: LabelScore, metric: str) -> float:
        """Return 1 for a right label."""
        return {LABEL_ACCURACY.name: float(score.label)}[metric]


def label_accuracy(units: Sequence[NDArray[np.bool_]], classes: int) -> Estimate:
    """Return the share of right labels; chance is that of blind guessing, averaged over victims."""
    chance = sum(len(unit) * multiset_chance(classes, len(unit)) for unit in units) / sum(map(len, units))
    return proportion(units, chance)


def mislabelled(guess: Guess, challenge: Challenge, plan: Plan) -> Iterator[str]:
    """Yield faults of the labels of a guess."""
    import torch

    labels, count = guess.y, len(challenge.unit) * challenge.batch
    if labels is None or tuple(labels.shape) != (count,) or labels.dtype != torch.int64:
        form = "nothing" if labels is None else f"{labels.dtype} {tuple(labels.shape)}"
        yield f"the guess y is {form}; it must be int64 of shape ({count},)"
    elif not 0 <= int(labels.min()) <= int(labels.max()) < plan.spec.classes:
        yield f"the guess y {labels.tolist()} names classes that do not exist"


def score_labels(victims: Victims, guesses: Sequence[Guess]) -> Scored:
    """Score recovered labels as multisets; a missing guess is wrong."""
    scores = []
    for unit, guess in zip(victims.units, guesses, strict=True):
        labels = victims.truth(unit).y.argmax(1).tolist()
        hits = multiset_hits(guess.y.tolist() if guess.y is not None else [], labels)
        for index, hit in enumerate(hits):
            slot = unit[index // victims.batch]
            position, cohort = index % victims.batch, len(unit) > 1
            scores.append(LabelScore(probe=slot.probe, client=slot.client, index=position, label=hit, cohort=cohort))
    return Scored(scores)
