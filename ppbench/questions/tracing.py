"""Tracing: the client that owns an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ppbench.metrics.labels import tracing_accuracy
from ppbench.metrics.spec import CHANCE, SHARE, Judgment, MetricSpec
from ppbench.questions.base import DistanceLaw, Question, one_minus
from ppbench.questions.inquiry import FinishedAudit, Inquiry, Probe, Scored
from ppbench.records.figure import Terms, record_metric
from ppbench.records.schema import CellConfig, Metric, Score
from ppbench.records.scores import Count, Whole

if TYPE_CHECKING:
    from torch import Tensor

    from ppbench.adversary.attack import Guess


TRACING_ACCURACY = MetricSpec(
    "tracing_accuracy",
    "Traced to the owner",
    SHARE,
    "Share of images traced to the client that owns them.",
    short="Tracing",
    columns=CHANCE,
    judgment=Judgment("decision", 0.02, 0.05),
)


class TraceScore(Score):
    """One traced image: its owner, and the attack's answer."""

    kind: Literal["trace"] = "trace"
    owner: Count
    guess: Whole

    @property
    def truth(self) -> tuple[int | str, ...]:
        """The owner."""
        return (self.owner,)


class Tracing(Question):
    """Which client owns each image? From an attack's reconstructions, or in audits from the mail of all rounds."""

    name = "tracing"
    title = "Tracing"
    score = TraceScore
    reads = False
    follows = "reconstruction"
    owners = 2
    order = 4
    chapter = "uploads"
    distances = (DistanceLaw("trace/1", TRACING_ACCURACY.name, one_minus, "1 - tracing accuracy"),)
    specs = (TRACING_ACCURACY,)

    def of_probe(self, probe: Probe) -> Inquiry:
        """Return one challenge about all victims' images, with the adversary's own reconstructions of them."""
        import torch

        from ppbench.adversary.attack import Challenge

        victims = probe.victims
        slots = tuple(slot for unit in victims.units for slot in unit)
        images = [g.x for g in probe.answers if g.x is not None]
        complete = len(images) == len(victims.units)
        rebuilt = torch.cat(images) if complete else torch.full((0, *probe.view.plan.spec.shape), 0.0)
        queries, owners = victims.queries(probe.seeds)
        challenge = Challenge(slots, victims.batch, x=queries, reconstructions=rebuilt)
        return Inquiry([challenge], lambda guesses: score_traces(owners, guesses[0]), victims.digest())

    def of_audit(self, audit: FinishedAudit) -> Inquiry:
        """Return the challenge which client owns each member."""
        challenge, owners = audit.tracing()
        return Inquiry([challenge], lambda guesses: score_traces(owners, guesses[0]), audit.candidates.digest())

    def metrics(self, scores: Sequence[TraceScore], terms: Terms) -> list[Metric]:
        """Return tracing_accuracy."""
        figure = tracing_accuracy([v.owner for v in scores], [v.guess for v in scores])
        return [record_metric(TRACING_ACCURACY, figure)]

    def blind(self, scores: Sequence[TraceScore], config: CellConfig) -> tuple[float, int, float] | None:
        """Return the share of traced images; chance is 1 / owners, a batch is one unit. None for too few owners."""
        if len({v.owner for v in scores}) < self.owners:
            return None
        share = sum(v.owner == v.guess for v in scores) / len(scores)
        return share, max(1, len(scores) // max(1, config.batch_size)), 1 / len({v.owner for v in scores})

    def together(self, score: TraceScore, config: CellConfig) -> tuple[int, ...]:
        """Return the owner as cluster for batches, because one upload decides on all images in it; else the unit."""
        batches = config.audit is None and config.batch_size > 1
        return (score.owner,) if batches else score.unit

    def judged(self, score: TraceScore, metric: str) -> float:
        """Return 1 for an image traced to its owner."""
        return {TRACING_ACCURACY.name: float(score.owner == score.guess)}[metric]


def score_traces(owners: Tensor, guess: Guess) -> Scored:
    """Score guessed owners against the true `owners` [Q] of the queries; -1 is no answer."""
    answers = guess.owner.tolist() if guess.owner is not None else [-1] * len(owners)
    pairs = zip(owners.tolist(), answers, strict=True)
    return Scored([TraceScore(index=i, owner=owner, guess=answer) for i, (owner, answer) in enumerate(pairs)])
