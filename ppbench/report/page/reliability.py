"""What the controls say of one board: whether its ranks mean something."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.questions.base import question_of
from ppbench.questions.image_metrics import NEAR
from ppbench.records.schema import Record
from ppbench.report.controls import BROKEN, Check, check_controls, rebuilt_share
from ppbench.report.page.entries import Entry


def board_checks(kind: str, headline: str, entries: Sequence[Entry], scope: Sequence[Record]) -> tuple[Check, ...]:
    """Return the controls' verdict on one board.

    The harness's checks are made over the data set, model and threat model; a board adds its own condition:
    where the attacks do not break `none` on this very board (batch size, stage), its ranks would order the
    attacks' failures.

    Args:
        kind: what the board is about.
        headline: the metric that it is ranked by.
        entries: its rows.
        scope: all records of the same suite, data, network and threat model.
    """
    found = {check.control: check for check in check_controls(scope)}
    own = _none_falls(kind, headline, entries, found["none"])
    # Uploads of noise hide no model from who is sent it: extraction has one control only.
    return (own, found["full_noise"]) if question_of(kind).noise else (own,)


def _none_falls(kind: str, headline: str, entries: Sequence[Entry], general: Check) -> Check:
    undefended = [e for e in entries if e.defense.id == "none"]
    if not undefended:
        return Check("none", None, "The undefended model is not on this board.")
    if question_of(kind).inputs and all(e.worst is None for e in undefended):
        return general  # only labels were attacked
    broken = [any(_broken(record, kind, headline) for record in entry.records) for entry in undefended]
    if all(broken) and (general.ok is not False or not question_of(kind).inputs):
        return Check("none", True, "The attacks break the undefended model on this board.")
    if not all(broken):
        return Check("none", False, "The attacks do NOT break the undefended model on this board.")
    return general


def _broken(record: Record, kind: str, headline: str) -> bool:
    """Return whether an attack breaks the undefended model: half of the victims rebuilt, its outputs read, or a figure
    above chance.
    """
    if record.status != "complete" or record.config.attack.oracle:
        return False
    if question_of(kind).inputs:
        share = rebuilt_share(record)
        return share is not None and (share.value or 0.0) >= BROKEN
    metric = record.metric(headline)
    if metric is None or metric.value is None:
        return False
    if metric.name == "output_error":
        return metric.value <= NEAR
    return metric.low is not None and metric.low > (metric.chance or 0.0)
