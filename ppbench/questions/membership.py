"""Membership: whether a record was trained on. Average records, canaries, and what an audit bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ppbench.metrics.audit import DELTA, audited
from ppbench.metrics.intervals import Estimate, refused
from ppbench.metrics.membership import Half, asr, auc, tpr_at
from ppbench.questions.base import DistanceLaw, Question, Rule
from ppbench.questions.inquiry import Audit, Inquiry, Model, Scored
from ppbench.records.figure import Terms, bootstrap_seed, record_metric
from ppbench.records.schema import CellConfig, Metric, Score

if TYPE_CHECKING:
    from ppbench.adversary.attack import Challenge, Guess
    from ppbench.adversary.victims import Candidates

AVERAGE = "average"
"""The family of candidates that are records of the data; all others are canaries."""
RATES = {"tpr_at_1pct_fpr": 0.01, "tpr_at_0.1pct_fpr": 0.001}


class MemberScore(Score):
    """One candidate of a membership attack, asked in one `half`; score: higher is member.

    decision: by the other half's fit; null where the attack abstained (audits guess on the surest only). family:
    "average" for a record of the data, else the family of canaries; the scorer's, never the attack's.
    """

    kind: Literal["member"] = "member"
    half: Annotated[int, Field(ge=0, le=1)]
    member: bool
    score: float
    decision: bool | None
    family: str = AVERAGE

    @property
    def stratum(self) -> tuple[int, bool]:
        """Half and membership."""
        return self.half, self.member

    @property
    def truth(self) -> tuple[int | str, ...]:
        """Half, membership and family."""
        return self.half, self.member, self.family

    @property
    def canary(self) -> bool:
        """Whether it belongs to a family of canaries."""
        return self.family != AVERAGE


def hidden(asr: Any) -> Any:
    """Return the distance of a share of right decisions, or of several: 1 at chance, 0 where all are right."""
    return 2 * (1 - np.maximum(asr, 0.5))


class Membership(Question):
    """Which of the candidates were trained on? Asked in two halves, the other half's membership being known."""

    name = "membership"
    title = "Membership inference"
    score = MemberScore
    source = "model"
    reads = False
    audits = True
    order = 2
    chart = "roc"
    chapter = "models"
    distances = (DistanceLaw("mia/1", "asr", hidden, "2 (1 - ASR)"),)
    figures = (
        *(("auc", "AUC"), ("asr", "ASR")),
        *(("tpr_at_1pct_fpr", "TPR at 1 % FPR"), ("tpr_at_0.1pct_fpr", "TPR at 0.1 % FPR")),
    )
    canaries = (("canary_auc", "Canaries, AUC"), ("canary_tpr_at_1pct_fpr", "Canaries, TPR at 1 % FPR"))
    rules = (
        Rule("asr", "asr", "average", "decision", 0.02, False, 0.02),
        Rule("auc", "auc", "average", "auc", 0.02, False, 0.02),
        Rule("tpr_at_1pct_fpr", "tpr_at_1pct_fpr", "average", "tpr", 0.02, False, 0.02),
        Rule("canary_auc", "auc", "canaries", "auc", 0.02, False, 0.02),
        Rule("canary_tpr_at_1pct_fpr", "tpr_at_1pct_fpr", "canaries", "tpr", 0.02, False, 0.05),
        Rule("epsilon_lower", "epsilon_lower", "canaries", "epsilon", 0.25, False, 0.25),
    )

    def of_model(self, model: Model) -> Inquiry:
        """Return the questions about either half of the candidates."""
        return self._about(model.candidates, [model.candidates.challenge(half) for half in (0, 1)])

    def of_audit(self, audit: Audit) -> Inquiry:
        """Return the questions about either half, with the references."""
        return self._about(audit.candidates, audit.challenges())

    def _about(self, candidates: Candidates, challenges: list[Challenge]) -> Inquiry:
        return Inquiry(challenges, lambda guesses: score_members(candidates, guesses), candidates.digest())

    def metrics(self, scores: Sequence[MemberScore], terms: Terms) -> list[Metric]:
        """Return the metrics of a membership cell.

        asr, auc, tpr_at_1pct_fpr, tpr_at_0.1pct_fpr: of the average candidates, or of all where there are only
        canaries. Of canaries: canary_auc, canary_tpr_at_1pct_fpr, canary_tpr_at_0.1pct_fpr over all families together,
        and auc_FAMILY of each. Where the attack abstained on some: epsilon_lower over the canaries, whose membership is
        by independent coins, and epsilon_gaussian, which a Gaussian mechanism alone must keep below its own; no asr,
        which needs a decision on everyone.
        """
        average = [score for score in scores if not score.canary]
        canaries = [score for score in scores if score.canary]
        found = _figures(average or canaries, terms.seed, "", pooled=bool(canaries))
        if canaries:
            found += _figures(canaries, terms.seed, "canary_", pooled=True)
            for family in sorted({score.family for score in canaries}):
                some = halves([s for s in canaries if s.family == family])
                found.append(_auc(f"auc_{family}", some, terms.seed))
        if any(score.decision is None for score in scores):
            for name, gaussian in (("epsilon_lower", False), ("epsilon_gaussian", True)):
                bound = _bound(canaries, DELTA if terms.delta is None else terms.delta, gaussian)
                found.append(record_metric(name, bound, False))
        return found

    def headline(self, config: CellConfig) -> str:
        """Return the AUC, in audits that of the canaries."""
        return "canary_auc" if config.audit is not None and config.audit.canaries else "auc"

    def columns(self, headline: str) -> tuple[tuple[str, str], ...]:
        """Return the figures of average records, or of canaries."""
        return self.canaries if headline == "canary_auc" else self.figures

    def blind(self, scores: Sequence[MemberScore], config: CellConfig) -> tuple[float, int, float] | None:
        """Return the share of right decisions, coins being right half of the time; None where there are none."""
        decided = [score for score in scores if score.decision is not None]
        hits = sum(score.member == score.decision for score in decided)
        return (hits / len(decided), len(decided), 0.5) if decided else None

    def judged(self, score: MemberScore, metric: str) -> float:
        """Return whether the decision is right, or the score."""
        return float(score.decision == score.member) if metric == "asr" else score.score


def score_members(candidates: Candidates, guesses: Sequence[Guess], form: type[MemberScore] = MemberScore) -> Scored:
    """Score each half by the answer in which it was unknown; ValueError: scores or decisions lack or are infinite."""
    scores = []
    families = candidates.family
    for half, guess in enumerate(guesses):
        if guess.score is None or guess.decision is None or not bool(guess.score.isfinite().all()):
            raise ValueError("a membership attack must answer finite scores and decisions for every candidate")
        silent = [False] * len(guess.score) if guess.abstain is None else guess.abstain.tolist()
        for index in (candidates.half == half).nonzero().flatten().tolist():
            scores.append(
                form(
                    index=index,
                    half=half,
                    member=bool(candidates.member[index]),
                    score=float(guess.score[index]),
                    decision=None if silent[index] else bool(guess.decision[index]),
                    family=families[index] if families else AVERAGE,
                )
            )
    return Scored(scores)


def halves(scores: Sequence[Any]) -> list[Half]:
    """Return the candidates by the half in which they were asked; an abstention reads as "not a member"."""
    return [
        Half(
            np.array([score.member for score in some], dtype=bool),
            np.array([score.score for score in some], dtype=np.float64),
            np.array([score.decision is True for score in some], dtype=bool),
        )
        for number in sorted({score.half for score in scores})
        for some in [[score for score in scores if score.half == number]]
    ]


def _figures(scores: Sequence[MemberScore], seed: int, prefix: str, pooled: bool) -> list[Metric]:
    """Return the figures of one kind of candidates. pooled: one threshold for both halves where each is too small."""
    both, found = halves(scores), []
    if not prefix:
        silent = any(score.decision is None for score in scores)
        whole = refused(len(scores), "the attack abstains on some candidates", 0.5) if silent else None
        found.append(record_metric("asr", whole or asr(both, bootstrap_seed(seed, "asr")), False))
    found.append(_auc(f"{prefix}auc", both, seed))
    return found + [record_metric(f"{prefix}{name}", tpr_at(both, rate, pooled), False) for name, rate in RATES.items()]


def _auc(name: str, both: Sequence[Half], seed: int) -> Metric:
    return record_metric(name, auc(both, bootstrap_seed(seed, name)), False)


def _bound(canaries: Sequence[MemberScore], delta: float, gaussian: bool) -> Estimate:
    """Return the lower bound on epsilon from guesses on half of the canaries, a number that no score moves."""
    if not canaries:
        return refused(0, "no canaries, whose membership alone is by independent coins", 0.0)
    # The quarter with the highest scores is called in, that with the lowest out; equal ones by their places.
    order = sorted(range(len(canaries)), key=lambda place: (canaries[place].score, canaries[place].index))
    quarter = len(order) // 4
    decision, guessed = np.zeros(len(order), dtype=bool), np.zeros(len(order), dtype=bool)
    decision[order[len(order) - quarter :]] = True
    guessed[order[:quarter]] = guessed[order[len(order) - quarter :]] = True
    return audited(np.array([score.member for score in canaries], dtype=bool), decision, guessed, delta, gaussian)
