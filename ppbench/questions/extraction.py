"""Extraction: the true model's outputs, for an adversary with a masked model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from ppbench.metrics.intervals import bootstrap, proportion
from ppbench.metrics.spec import SHARE, Judgment, MetricSpec, Rule
from ppbench.questions.base import DistanceLaw, Question, one_minus
from ppbench.questions.inquiry import Inquiry, Scored, TargetModel
from ppbench.records.figure import Terms, bootstrap_seed, record_metric
from ppbench.records.schema import CellConfig, Metric, Score
from ppbench.records.scores import Amount, Count

if TYPE_CHECKING:
    from torch import Tensor

    from ppbench.adversary.attack import Guess

SMALLEST_NORM = 1e-300
AGREEMENT = MetricSpec(
    "agreement",
    "Decisions read",
    SHARE,
    "Share of inputs for which the true model's decision was read.",
    short="Agreement",
    judgment=Judgment("decision", 0.02, 0.05),
)
OUTPUT_ERROR = MetricSpec(
    "output_error",
    "Relative error",
    "share of the outputs' norm",
    "Mean error of the extracted outputs.",
    short="Output error",
    higher_is_safer=True,
    judgment=Judgment("mean", 0.02, 0.05),
)


class OutputScore(Score):
    """One query of an extraction attack. agree: whether the guessed outputs have the true model's argmax; error:
    ||guess - true|| of the outputs, in units of the root mean square of ||true|| over the queries; decision: the true
    model's argmax, None in older records.
    """

    kind: Literal["output"] = "output"
    agree: bool
    error: Amount
    decision: Count | None = None


class Extraction(Question):
    """What are the true model's outputs on inputs of the test part?"""

    name = "extraction"
    title = "Extraction of the true model's outputs"
    score = OutputScore
    source = "model"
    reads = False
    order = 3
    intended = ("final",)  # the delivered model is meant to answer as the true one
    noise = False  # noise in uploads hides no model from its receiver
    chapter = "models"
    distances = (DistanceLaw("output/1", AGREEMENT.name, one_minus, "1 - agreement"),)
    specs = (AGREEMENT, OUTPUT_ERROR)

    def of_model(self, model: TargetModel) -> Inquiry:
        """Return one challenge about the first test inputs."""
        from ppbench.adversary.attack import Challenge
        from ppbench.adversary.victims import tensors_digest

        queries, true = model.test.x[: model.count], model.answers
        challenge = Challenge((), 1, x=queries.clone())
        return Inquiry([challenge], lambda guesses: score_outputs(true, guesses[0]), tensors_digest(queries))

    def metrics(self, scores: Sequence[OutputScore], terms: Terms) -> list[Metric]:
        """Return the share of queries with the true argmax, and the mean relative error of the outputs.

        Chance is the share of the best constant answer; 1 / classes for older records without decisions.
        """
        decisions = Counter(score.decision for score in scores)
        chance = 1 / terms.classes if None in decisions else max(decisions.values()) / len(scores)
        agreement = proportion([np.array([score.agree]) for score in scores], chance)
        units = [np.array([score.error]) for score in scores]
        error = bootstrap(units, "mean", bootstrap_seed(terms.seed, OUTPUT_ERROR.name))
        return [record_metric(AGREEMENT, agreement), record_metric(OUTPUT_ERROR, error)]

    def headline(self, config: CellConfig) -> str:
        """Return the agreement of decisions, or without classes the relative error."""
        return AGREEMENT.name if config.model.classes > 1 else OUTPUT_ERROR.name

    def columns(self, headline: str) -> tuple[tuple[str, str], ...]:
        """Return both figures; without classes the error alone."""
        columns = super().columns(headline)
        return columns if headline == AGREEMENT.name else columns[:1]

    def judged(self, score: OutputScore, metric: str) -> float:
        """Return 1 for a right decision, or the error."""
        return {AGREEMENT.name: float(score.agree), OUTPUT_ERROR.name: score.error}[metric]

    def rules_of(self, config: CellConfig) -> tuple[Rule, ...]:
        """Return the rule of the headline."""
        return tuple(rule for rule in self.all_rules if rule.metric == self.headline(config))


def score_outputs(true: Tensor, guess: Guess) -> Scored:
    """Score guessed outputs against the true model's [Q, C]; ValueError: one is missing or not finite."""
    outputs = guess.outputs
    if outputs is None or outputs.shape != true.shape or not bool(outputs.isfinite().all()):
        raise ValueError("an extraction attack must answer finite outputs for every query")
    outputs = outputs.detach().cpu().double()
    decisions = true.argmax(1)
    agree = (outputs.argmax(1) == decisions).tolist()
    size = true.norm(dim=1).square().mean().sqrt().clamp(min=SMALLEST_NORM)  # one output may be about 0
    error = ((outputs - true).norm(dim=1) / size).tolist()
    rows = zip(agree, error, decisions.tolist(), strict=True)
    return Scored([OutputScore(index=i, agree=a, error=e, decision=d) for i, (a, e, d) in enumerate(rows)])
