"""Members of a batch: whether a record was among those that a client's upload was made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from ppbench.questions.base import DistanceLaw, Question, Rule
from ppbench.questions.inquiry import Inquiry, Probe
from ppbench.questions.membership import MemberScore, Membership, hidden, score_members
from ppbench.records.figure import Terms
from ppbench.records.schema import CellConfig, Metric

if TYPE_CHECKING:
    from ppbench.adversary.attack import Challenge, Guess
    from ppbench.federation.plan import Plan


class BatchScore(MemberScore):
    """One candidate for a member of a batch."""

    kind: Literal["batch_member"] = "batch_member"  # type: ignore[assignment]  # the class says of which question


class BatchMembers(Question):
    """Which of the candidates were in a victim's batch? As many records of the test part stand beside the victims.

    It is the membership question that an undefended federation loses at any accuracy: a batch is small, and its upload
    says much of each record. A delivered model says little of any where it generalizes.
    """

    name = "batch_membership"
    title = "Members of a batch"
    source = "probe"
    reads = True
    score = BatchScore
    order = 3
    chapter = "uploads"
    distances = (DistanceLaw("batch/1", "batch_asr", hidden, "2 (1 - ASR)"),)
    figures = (("batch_auc", "AUC"), ("batch_asr", "ASR"))
    rules = (
        Rule("batch_asr", "batch_asr", "all", "decision", 0.02, False, 0.05),
        Rule("batch_auc", "batch_auc", "all", "auc", 0.02, False, 0.05),
    )

    def of_probe(self, probe: Probe) -> Inquiry:
        """Return the questions about either half of the candidates: the victims and as many others."""
        from ppbench.adversary.victims import beside

        candidates = beside(probe.victims, probe.test, probe.seeds)
        challenges = [candidates.challenge(half) for half in (0, 1)]
        score = partial(score_members, candidates, form=BatchScore)
        return Inquiry(challenges, score, candidates.digest())

    def malformed(self, guess: Guess, challenge: Challenge, plan: Plan) -> Iterator[str]:
        """Yield what is wrong with scores and decisions: one a candidate, finite."""
        count = 0 if challenge.x is None else len(challenge.x)
        for name, value in (("score", guess.score), ("decision", guess.decision)):
            if value is None or tuple(value.shape) != (count,) or not bool(value.double().isfinite().all()):
                yield f"the guess's {name} is {value!r}; it must be finite, of shape ({count},)"

    def metrics(self, scores: Sequence[MemberScore], terms: Terms) -> list[Metric]:
        """Return batch_asr and batch_auc. Records of one batch share an upload; intervals take them as independent."""
        found = Membership().metrics(scores, terms)
        return [m.model_copy(update={"name": f"batch_{m.name}"}) for m in found if m.name in ("asr", "auc")]

    def judged(self, score: MemberScore, metric: str) -> float:
        """Return whether the decision is right, or the score."""
        return Membership().judged(score, metric.removeprefix("batch_"))

    def blind(self, scores: Sequence[MemberScore], config: CellConfig) -> tuple[float, int, float] | None:
        """Return the share of right decisions, coins being right half of the time."""
        return Membership().blind(scores, config)
