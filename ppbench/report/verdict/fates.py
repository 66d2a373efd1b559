"""What an attack on a model came to, judged by its interval: the rules behind the sentences and the table of claims."""

from __future__ import annotations

from typing import Literal

from ppbench.records.figure import Figured
from ppbench.report.controls import above_chance, widened

Fate = Literal["found", "part", "hidden", "undecided"]
READ, LITTLE = 0.9, 0.2  # shares of the true decisions, beyond chance, from which on they are read, below which hidden
CLOSE, FAR = 0.2, 0.5  # relative errors of predicted numbers up to which they are read, from which on hidden


def members_fate(record: Figured, tried: int, undefended: Figured | None) -> Fate:
    """Return whether an attack finds members.

    "found": its ASR lies above chance at Bonferroni's level; "hidden": it does not, and lies below what the undefended
    model gives away; "undecided": neither, or the undefended model is not known to give any away.

    Args:
        record: the strongest of `tried` membership cells.
        tried: how many.
        undefended: a cell that finds members of the undefended model, or None.
    """
    if above_chance(record, "asr", tried):
        return "found"
    metric, beside = record.metric("asr"), None if undefended is None else undefended.metric("asr")
    if metric is None or metric.high is None or beside is None or beside.value is None:
        return "undecided"
    return "hidden" if metric.high < beside.value else "undecided"


def outputs_fate(record: Figured, tried: int) -> Fate:
    """Return whether an attack reads the true model's outputs: all but all of them, in part, or hardly any.

    Decisions are judged by their agreement beyond chance, (a - chance) / (1 - chance); predictions of numbers, which
    have no classes, and of a model that always decides alike, by their relative error. The interval is Bonferroni's for
    `tried` cells.
    """
    agreement = record.metric("agreement")
    chance = 1.0 if agreement is None else agreement.chance or 0.0
    if record.config.model.classes > 1 and chance < 1:
        ends = widened(agreement, tried)
        if ends is None:
            return "undecided"
        low, high = ((end - chance) / (1 - chance) for end in ends)
        return "found" if low >= READ else "hidden" if high < LITTLE else "part" if low >= LITTLE else "undecided"
    ends = widened(record.metric("output_error"), tried)
    if ends is None:
        return "undecided"
    low, high = ends
    return "found" if high <= CLOSE else "hidden" if low >= FAR else "part" if high < FAR else "undecided"


def same_outputs(record: Figured, tried: int) -> bool:
    """Return whether a model answers as the true one: its decisions, or the outputs themselves within `CLOSE`.

    Where the true model decides alike on most queries, few are left to show that decisions agree beyond chance.
    """
    ends = widened(record.metric("output_error"), tried)
    return outputs_fate(record, tried) == "found" or (ends is not None and ends[1] <= CLOSE)
