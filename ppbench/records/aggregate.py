"""Aggregate per-victim scores to a cell's metrics: a pure function, so that `ppbench verify` can recompute it.

The question defines the metrics. Figures keep 12 significant digits, so that a last bit that differs between
processors does not look like a forged record.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.base.errors import UsageError
from ppbench.base.registry import load_all
from ppbench.records.figure import Terms
from ppbench.records.schema import Metric, Score


def aggregate(victims: Sequence[Score], *, classes: int, seed: int, delta: float | None = None) -> list[Metric]:
    """Return a cell's metrics, each with n, a 95 % interval and its method; no victims: no metrics.

    victims: the per-victim scores, all of one kind; classes, seed, delta: as of `Terms`. UsageError: scores of several
    kinds, or of a question that is not installed.
    """
    kinds = sorted({victim.kind for victim in victims})
    if len(kinds) > 1:
        raise UsageError(f"A cell's victims are scored as {' and '.join(kinds)}; expected one kind.")
    for question in load_all("questions").values() if kinds else ():
        if type(victims[0]) is question.score:  # its class may derive from another question's
            metrics: list[Metric] = question().metrics(victims, Terms(classes, seed, delta))
            return metrics
    if kinds:
        raise UsageError(f"Scores of kind {kinds[0]!r} belong to a question that is not installed here.")
    return []
