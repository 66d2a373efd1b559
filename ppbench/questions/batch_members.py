"""Batch membership: whether a record was in the batch of a client's upload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from ppbench.questions.base import DistanceLaw, Question, Rule
from ppbench.questions.inquiry import Inquiry, Probe
from ppbench.questions.membership import MemberScore, Membership, decision_distance, score_members
from ppbench.records.figure import Terms
from ppbench.records.schema import CellConfig, Metric

if TYPE_CHECKING:
    from ppbench.adversary.attack import Challenge, Guess
    from ppbench.federation.plan import Plan


class BatchScore(MemberScore):
    """One candidate for a member of a batch."""

    kind: Literal["batch_member"] = "batch_member"  # type: ignore[assignment]  # each question has its own kind


class BatchMembers(Question):
    """Which of the candidates were in a victim's batch? The non-members are as many records of the test part.

    An undefended federation fails this question at any accuracy, because the upload of a small batch depends strongly
    on each record, whereas a delivered model that generalizes depends little on any.
    """

    name = "batch_membership"
    title = "Members of a batch"
    source = "probe"
    reads = True
    score = BatchScore
    order = 3
    chapter = "uploads"
    distances = (DistanceLaw("batch/1", "batch_asr", decision_distance, "2 (1 - ASR)"),)
    figures = (("batch_auc", "AUC"), ("batch_asr", "ASR"))
    rules = (
        Rule("batch_asr", "batch_asr", "all", "decision", 0.02, False, 0.05),
        Rule("batch_auc", "batch_auc", "all", "auc", 0.02, False, 0.05),
    )

    def of_probe(self, probe: Probe) -> Inquiry:
        """Return one challenge per half of the candidates: the victims and as many others."""
        from ppbench.adversary.victims import beside

        candidates = beside(probe.victims, probe.test, probe.seeds)
        challenges = [candidates.challenge(half) for half in (0, 1)]
        score = partial(score_members, candidates, form=BatchScore)
        return Inquiry(challenges, score, candidates.digest())

    def malformed(self, guess: Guess, challenge: Challenge, plan: Plan) -> Iterator[str]:
        """Yield faults of scores and decisions: one per candidate, finite."""
        count = 0 if challenge.x is None else len(challenge.x)
        for name, value in (("score", guess.score), ("decision", guess.decision)):
            if value is None or tuple(value.shape) != (count,) or not bool(value.double().isfinite().all()):
                yield f"the guess's {name} is {value!r}; it must be finite, of shape ({count},)"

    def metrics(self, scores: Sequence[MemberScore], terms: Terms) -> list[Metric]:
        """Return batch_asr and batch_auc; intervals treat records of one batch as independent."""
        metrics = Membership().metrics(scores, terms)
        return [m.model_copy(update={"name": f"batch_{m.name}"}) for m in metrics if m.name in ("asr", "auc")]

    def judged(self, score: MemberScore, metric: str) -> float:
        """Return whether the decision is right, or the score."""
        return Membership().judged(score, metric.removeprefix("batch_"))

    def blind(self, scores: Sequence[MemberScore], config: CellConfig) -> tuple[float, int, float] | None:
        """Return the share of right decisions; chance is 0.5."""
        return Membership().blind(scores, config)
