"""Membership: whether a record was trained on; for average records and canaries, and for bounds by audits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ppbench.metrics.audit import DELTA, epsilon_bound
from ppbench.metrics.intervals import Estimate, unsupported
from ppbench.metrics.membership import Half, asr, auc, tpr_at
from ppbench.questions.base import DistanceLaw, Question, Rule
from ppbench.questions.inquiry import FinishedAudit, Inquiry, Scored, TargetModel
from ppbench.records.figure import Terms, bootstrap_seed, record_metric
from ppbench.records.schema import CellConfig, Metric, Score

if TYPE_CHECKING:
    from ppbench.adversary.attack import Challenge, Guess
    from ppbench.adversary.victims import Candidates

AVERAGE = "average"
"""The family of candidates that are ordinary records; all others are canaries."""
FPR_METRICS = {"tpr_at_1pct_fpr": 0.01, "tpr_at_0.1pct_fpr": 0.001}


class MemberScore(Score):
    """One candidate of a membership attack in one `half`; score: higher means member.

    decision: by the threshold of the other half; null if the attack abstained (audits guess on the surest only).
    family: "average" for an ordinary record, else the family of canaries, unknown to the attack.
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


def decision_distance(asr: Any) -> Any:
    """Return the distance of a share of right decisions, scalar or array: 1 at chance, 0 if all are right."""
    return 2 * (1 - np.maximum(asr, 0.5))


class Membership(Question):
    """Which of the candidates were trained on? Each half is attacked with the membership of the other half known."""

    name = "membership"
    title = "Membership inference"
    score = MemberScore
    source = "model"
    reads = False
    audits = True
    order = 2
    chart = "roc"
    chapter = "models"
    distances = (DistanceLaw("mia/1", "asr", decision_distance, "2 (1 - ASR)"),)
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

    def of_model(self, model: TargetModel) -> Inquiry:
        """Return one challenge per half of the candidates."""
        return self._about(model.candidates, [model.candidates.challenge(half) for half in (0, 1)])

    def of_audit(self, audit: FinishedAudit) -> Inquiry:
        """Return one challenge per half, with the reference runs."""
        return self._about(audit.candidates, audit.challenges())

    def _about(self, candidates: Candidates, challenges: list[Challenge]) -> Inquiry:
        return Inquiry(challenges, lambda guesses: score_members(candidates, guesses), candidates.digest())

    def metrics(self, scores: Sequence[MemberScore], terms: Terms) -> list[Metric]:
        """Return the metrics of a membership cell.

        asr, auc, tpr_at_1pct_fpr, tpr_at_0.1pct_fpr: of the average candidates, or of all if there are only canaries.
        Of canaries: canary_auc, canary_tpr_at_1pct_fpr, canary_tpr_at_0.1pct_fpr over all families together, and
        auc_FAMILY of each. If the attack abstained on some: epsilon_lower over the canaries, whose membership is by
        independent coins, and epsilon_gaussian, which bounds Gaussian mechanisms only; no asr, which needs a decision
        on every candidate.
        """
        average = [score for score in scores if not score.canary]
        canaries = [score for score in scores if score.canary]
        metrics = _figures(average or canaries, terms.seed, "", pooled=bool(canaries))
        if canaries:
            metrics += _figures(canaries, terms.seed, "canary_", pooled=True)
            for family in sorted({score.family for score in canaries}):
                family_halves = halves([s for s in canaries if s.family == family])
                metrics.append(_auc(f"auc_{family}", family_halves, terms.seed))
        if any(score.decision is None for score in scores):
            for name, gaussian in (("epsilon_lower", False), ("epsilon_gaussian", True)):
                bound = _bound(canaries, DELTA if terms.delta is None else terms.delta, gaussian)
                metrics.append(record_metric(name, bound, False))
        return metrics

    def headline(self, config: CellConfig) -> str:
        """Return the AUC, in audits that of the canaries."""
        return "canary_auc" if config.audit is not None and config.audit.canaries else "auc"

    def columns(self, headline: str) -> tuple[tuple[str, str], ...]:
        """Return the figures of average records, or of canaries."""
        return self.canaries if headline == "canary_auc" else self.figures

    def blind(self, scores: Sequence[MemberScore], config: CellConfig) -> tuple[float, int, float] | None:
        """Return the share of right decisions; chance is 0.5. None without decisions."""
        decided = [score for score in scores if score.decision is not None]
        hits = sum(score.member == score.decision for score in decided)
        return (hits / len(decided), len(decided), 0.5) if decided else None

    def judged(self, score: MemberScore, metric: str) -> float:
        """Return whether the decision is right, or the score."""
        return float(score.decision == score.member) if metric == "asr" else score.score


def score_members(candidates: Candidates, guesses: Sequence[Guess], form: type[MemberScore] = MemberScore) -> Scored:
    """Score each half by the guess on it; ValueError: scores or decisions are missing or not finite."""
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
    """Return the candidates of each half; an abstention counts as the decision "not a member"."""
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
    """Return the metrics of one kind of candidates. pooled: use one threshold for both halves if each is too small."""
    by_half, metrics = halves(scores), []
    if not prefix:
        silent = any(score.decision is None for score in scores)
        no_asr = unsupported(len(scores), "the attack abstains on some candidates", 0.5) if silent else None
        metrics.append(record_metric("asr", no_asr or asr(by_half, bootstrap_seed(seed, "asr")), False))
    metrics.append(_auc(f"{prefix}auc", by_half, seed))
    return metrics + [
        record_metric(f"{prefix}{name}", tpr_at(by_half, rate, pooled), False) for name, rate in FPR_METRICS.items()
    ]


def _auc(name: str, both: Sequence[Half], seed: int) -> Metric:
    return record_metric(name, auc(both, bootstrap_seed(seed, name)), False)


def _bound(canaries: Sequence[MemberScore], delta: float, gaussian: bool) -> Estimate:
    """Return the lower bound on epsilon from guesses on half of the canaries, a number that no score changes."""
    if not canaries:
        return unsupported(0, "no canaries, whose membership alone is by independent coins", 0.0)
    # The quarter with the highest scores is guessed in, the lowest quarter out; ties are broken by index.
    order = sorted(range(len(canaries)), key=lambda place: (canaries[place].score, canaries[place].index))
    quarter = len(order) // 4
    decision, guessed = np.zeros(len(order), dtype=bool), np.zeros(len(order), dtype=bool)
    decision[order[len(order) - quarter :]] = True
    guessed[order[:quarter]] = guessed[order[len(order) - quarter :]] = True
    return epsilon_bound(np.array([score.member for score in canaries], dtype=bool), decision, guessed, delta, gaussian)
