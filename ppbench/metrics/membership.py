"""Membership-inference figures: AUC, balanced accuracy (ASR), TPR at a low FPR, each as the mean over two halves.

Decisions in each half use a threshold fitted on the other. ROC curves are scikit-learn's, which handle ties.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ppbench.metrics.intervals import (
    Estimate,
    Floats,
    auc_interval,
    balanced_interval,
    clopper_pearson,
    unsupported,
)


@dataclass(frozen=True)
class Half:
    """The candidates of one half: member [Q] bool, score [Q] float64 (higher means member), decision [Q] bool."""

    member: NDArray[np.bool_]
    score: Floats
    decision: NDArray[np.bool_]


@dataclass(frozen=True)
class Roc:
    """A ROC curve at all thresholds of the scores, from (0, 0) to (1, 1): fpr, tpr [P] float64, ascending.

    There is no threshold between two points, so it is drawn in steps. members, others: numbers of candidates.
    """

    fpr: Floats
    tpr: Floats
    members: int
    others: int


def roc(half: Half) -> Roc | None:
    """Return the ROC curve of a half, or of several halves `merged`; None if members or non-members are missing."""
    from sklearn.metrics import roc_curve

    if _one_class([half]) is not None:
        return None
    false, true, _ = roc_curve(half.member, half.score, drop_intermediate=False)
    members = int(half.member.sum())
    return Roc(np.asarray(false), np.asarray(true), members, len(half.member) - members)


def merged(halves: Sequence[Half]) -> Half:
    """Return all candidates of one or more halves as one half, whose scores share one threshold."""
    return Half(
        np.concatenate([half.member for half in halves]),
        np.concatenate([half.score for half in halves]),
        np.concatenate([half.decision for half in halves]),
    )


def _one_class(halves: Sequence[Half]) -> str | None:
    """Return why no figure can be computed, or None: every half needs members and non-members."""
    if not halves or any(half.member.all() or not half.member.any() for half in halves):
        return "a half of the candidates has no members or no non-members"
    return None


def _size(halves: Sequence[Half]) -> int:
    return sum(len(half.member) for half in halves)


def auc(halves: Sequence[Half], seed: int) -> Estimate:
    """Return the mean area under the ROC curve of the halves, in [0, 1], chance 0.5."""
    from sklearn.metrics import roc_auc_score

    reason = _one_class(halves)
    if reason is not None:
        return unsupported(_size(halves), reason, 0.5)
    value = float(np.mean([roc_auc_score(half.member, half.score) for half in halves]))
    interval = auc_interval([(h.score[h.member], h.score[~h.member]) for h in halves], seed)
    return Estimate(value, interval, _size(halves), chance=0.5)


def asr(halves: Sequence[Half], seed: int) -> Estimate:
    """Return the attack success rate: mean over the halves of (TPR + TNR) / 2 of the decisions, chance 0.5."""
    reason = _one_class(halves)
    if reason is not None:
        return unsupported(_size(halves), reason, 0.5)
    strata = [h.decision[h.member == member] == member for h in halves for member in (True, False)]
    value = float(np.mean([stratum.mean() for stratum in strata]))
    return Estimate(value, balanced_interval(strata, seed), _size(halves), chance=0.5)


def operating_point(half: Half, fpr: float) -> tuple[float, float]:
    """Return (TPR, realized FPR) at the threshold with the greatest TPR among those with FPR <= `fpr`."""
    from sklearn.metrics import roc_curve

    false, true, _ = roc_curve(half.member, half.score, drop_intermediate=False)
    allowed = np.flatnonzero(false <= fpr)
    best = allowed[np.argmax(true[allowed])]
    return float(true[best]), float(false[best])


def tpr_at(halves: Sequence[Half], fpr: float, pooled: bool = False) -> Estimate:
    """Return the mean over the halves of the TPR at a false-positive rate, with the mean realized FPR.

    No value if a half has fewer than 1 / fpr non-members: even one false positive exceeds the rate. Then, with
    `pooled`, one threshold for all candidates is used if these suffice, as `method` says. The interval is that of the
    proportion of members found, at fixed thresholds.
    """
    reason, size = _one_class(halves), _size(halves)
    if reason is not None:
        return unsupported(size, reason, fpr)
    fewest, method = min(int((~half.member).sum()) for half in halves), "Clopper-Pearson"
    if fpr * fewest < 1 and pooled:
        halves, method = [merged(halves)], "Clopper-Pearson, one threshold for both halves"
        fewest = int((~halves[0].member).sum())
    if fpr * fewest < 1:
        where = "in both halves" if pooled else "a half"
        return unsupported(size, f"{fewest} non-members {where}, FPR {fpr:.1%} needs {int(np.ceil(1 / fpr))}", fpr)
    points = [operating_point(half, fpr) for half in halves]
    members = sum(int(half.member.sum()) for half in halves)
    value = float(np.mean([true for true, _ in points]))
    realized = float(np.mean([false for _, false in points]))
    return Estimate(value, clopper_pearson(value * members, members, method), size, None, fpr, realized)
