"""Metrics of membership cells: average records, canaries, and what an audit bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ppbench.metrics.audit import DELTA, audited
from ppbench.metrics.intervals import Estimate, refused
from ppbench.metrics.membership import Half, asr, auc, tpr_at
from ppbench.records.figure import metric_of, seed_of
from ppbench.records.schema import MemberScore, Metric

AVERAGE = "average"
"""The family of candidates that are records of the data; all others are canaries."""
RATES = {"tpr_at_1pct_fpr": 0.01, "tpr_at_0.1pct_fpr": 0.001}


def members_metrics(scores: Sequence[MemberScore], seed: int, delta: float | None = None) -> list[Metric]:
    """Return the metrics of a membership cell.

    asr, auc, tpr_at_1pct_fpr, tpr_at_0.1pct_fpr: of the average candidates, or of all where there are only canaries.
    Where canaries were among them: canary_auc, canary_tpr_at_1pct_fpr, canary_tpr_at_0.1pct_fpr over the canaries of
    all families together, and auc_FAMILY of each. Where the attack abstained on some: epsilon_lower over the
    canaries, whose membership is by independent coins, and no asr, which needs a decision on everyone.

    Args:
        scores: at least one.
        seed: of the bootstraps.
        delta: of the guarantee that is tested; None: the audit's own.
    """
    average = [score for score in scores if score.family == AVERAGE]
    canaries = [score for score in scores if score.family != AVERAGE]
    found = _figures(average or canaries, seed, "", pooled=bool(canaries))
    if canaries:
        found += _figures(canaries, seed, "canary_", pooled=True)
        for family in sorted({score.family for score in canaries}):
            name = f"auc_{family}"
            found.append(_auc(name, halves([s for s in canaries if s.family == family]), seed))
    if any(score.decision is None for score in scores):
        found.append(metric_of("epsilon_lower", _bound(canaries, DELTA if delta is None else delta), False))
    return found


def halves(scores: Sequence[MemberScore]) -> list[Half]:
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
        found.append(metric_of("asr", whole or asr(both, seed_of(seed, "asr")), False))
    found.append(_auc(f"{prefix}auc", both, seed))
    return found + [metric_of(f"{prefix}{name}", tpr_at(both, rate, pooled), False) for name, rate in RATES.items()]


def _auc(name: str, both: Sequence[Half], seed: int) -> Metric:
    return metric_of(name, auc(both, seed_of(seed, name)), False)


def _bound(canaries: Sequence[MemberScore], delta: float) -> Estimate:
    """Return the lower bound on epsilon from guesses on half of the canaries, a number that no score moves.

    The quarter with the highest scores of all, of both halves together, is called in, the quarter with the lowest out;
    equal scores by their places, which tell nothing. Without canaries nobody's membership is by independent coins.
    """
    if not canaries:
        return refused(0, "no canaries, whose membership alone is by independent coins", 0.0)
    order = sorted(range(len(canaries)), key=lambda place: (canaries[place].score, canaries[place].index))
    quarter = len(order) // 4
    decision, guessed = np.zeros(len(order), dtype=bool), np.zeros(len(order), dtype=bool)
    decision[order[len(order) - quarter :]] = True
    guessed[order[:quarter]] = guessed[order[len(order) - quarter :]] = True
    return audited(np.array([score.member for score in canaries], dtype=bool), decision, guessed, delta)
