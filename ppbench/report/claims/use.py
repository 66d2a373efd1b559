"""Rules for claims about what a defended model is good for, accuracy and error, and about the guarantee given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ppbench.records.schema import Record, Utility
from ppbench.report.claims.case import Case, Finding, Verdict, cells_of


@dataclass(frozen=True)
class Share:
    """A figure in [0, 1] of a trained model, with its interval; None where training diverged."""

    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        low, high = (_number(end, ".1%") for end in (self.low, self.high))
        return f"{_number(self.value, '.1%')} [{low}, {high}]".replace("%,", ",")


def accuracy_of(record: Record) -> Share:
    """Return a record's accuracy."""
    return Share(record.utility.accuracy, record.utility.low, record.utility.high)


def dice_of(record: Record) -> Share:
    """Return a record's Dice coefficient."""
    return Share(record.utility.dice, record.utility.dice_low, record.utility.dice_high)


def _number(number: float | None, form: str) -> str:
    return "n/a" if number is None else f"{number:{form}}"


def accuracy_is_kept(case: Case) -> Finding | str:
    """A claimed accuracy holds where ours loses no more, by its interval, than the paper's beside the undefended; on
    other data, another network, other numbers of clients or another partition it does not compare.
    """
    return _is_kept(case, accuracy_of, "accuracy")


def top5_is_kept(case: Case) -> Finding | str:
    """Return that a Top-5 accuracy stands in no record."""
    return "records hold how often the first answer is right, not the first five"


def dice_is_kept(case: Case) -> Finding | str:
    """A claimed Dice coefficient is judged as an accuracy is."""
    return _is_kept(case, dice_of, "Dice coefficient")


def _is_kept(case: Case, share: Callable[[Record], Share], name: str) -> Finding | str:
    paper, none = case.claim, next(iter(case.none), None)
    mine = min(case.mine, key=lambda r: (share(r).value or 0.0, r.cell_id))
    if paper.value is None or paper.undefended is None:
        return f"the paper gives no undefended {name} beside it"
    if none is None or share(none).value is None:
        return f"the undefended model has no {name} to stand beside"
    ours, theirs = share(mine), share(none).value or 0.0
    told, cells = f"{ours}; undefended {share(none)}", cells_of(mine, none)
    if _at_chance(none.utility):
        return Finding("cannot be told", "", "the undefended model has learnt nothing", "", told, cells)
    if ours.value is None or ours.high is None:
        return Finding("falls", "to no model: training diverged", "", "", told, cells)
    may = paper.undefended - paper.value
    lost = f"{100 * (theirs - ours.value):.1f} points are lost where the paper loses {100 * may:.2f}"
    if ours.high < theirs - may:
        return Finding("falls", f"to {ours.value:.1%}", lost, "", told, cells)
    return Finding("holds", "", lost, "", told, cells)


def accuracy_rises(case: Case) -> Finding | str:
    """That accuracy rises with the control parameter holds where the interval at its largest value lies above that at
    its smallest; it falls where it lies below.
    """
    by = {r.config.defense.control.value: r for r in case.mine if r.config.defense.control is not None}
    first, last = (by[end(by)] if by else None for end in (min, max))
    if first is None or last is None or first is last:
        return "fewer than two values of the control parameter were run"
    lowest, highest = accuracy_of(first), accuracy_of(last)
    told = f"{lowest} at {min(by):g}, {highest} at {max(by):g}"
    reason = f"from {min(by):g} to {max(by):g}"
    ends = (lowest.low, lowest.high, highest.low, highest.high)
    verdict: Verdict = "cannot be told"
    if None in ends:
        reason += ", where training diverged"
    elif (highest.low or 0.0) > (lowest.high or 0.0):
        verdict = "holds"
    elif (highest.high or 0.0) < (lowest.low or 0.0):
        verdict = "falls"
    else:
        reason += ", the intervals overlap"
    return Finding(verdict, "", reason, "", told, cells_of(first, last))


def _mse(utility: Utility) -> str:
    low, high = (_number(end, ".4f") for end in (utility.mse_low, utility.mse_high))
    return f"{_number(utility.mse, '.4f')} [{low}, {high}]"


def _at_chance(utility: Utility) -> bool:
    return utility.low is not None and utility.low <= utility.chance


def _error(utility: Utility) -> float:
    """Return the squared error; a training that diverged has the largest."""
    return float("inf") if utility.mse is None else utility.mse


def error_is_kept(case: Case) -> Finding | str:
    """A claimed MSE holds where ours, by its interval, is no larger beside the undefended than the paper's."""
    paper, mine = case.claim, max(case.mine, key=lambda r: (_error(r.utility), r.cell_id))
    none = next(iter(case.none), None)
    if none is None or none.utility.mse is None or paper.value is None or not paper.undefended:
        return "the undefended model has no squared error to stand beside"
    told, cells = f"{_mse(mine.utility)}; undefended {_mse(none.utility)}", cells_of(mine, none)
    if mine.utility.mse is None or mine.utility.mse_low is None:
        return Finding("falls", "to no model: training diverged", "", "", told, cells)
    allowed = none.utility.mse * max(1.0, paper.value / paper.undefended)
    share = mine.utility.mse / none.utility.mse if none.utility.mse else float("inf")
    reason = f"{share:.3f} of the undefended error where the paper has {paper.value / paper.undefended:.3f}"
    if mine.utility.mse_low > allowed:
        return Finding("falls", f"to {mine.utility.mse:.4f}", reason, "", told, cells)
    return Finding("holds", "", reason, "", told, cells)


def guarantee_is_given(case: Case) -> Finding | str:
    """A claimed epsilon holds where the mechanism, as implemented, gives one over the whole training, no larger."""
    record = max(case.mine, key=lambda r: (r.privacy.epsilon is None, r.privacy.epsilon or 0.0, r.cell_id))
    privacy, claimed = record.privacy, case.claim.value or 0.0
    if privacy.epsilon is None:
        reason = (privacy.reason or "no reason is recorded").rstrip(".")
        return Finding("falls", "to no guarantee", reason, "", "none", cells_of(record))
    told = f"epsilon {privacy.epsilon:.3g}, delta {privacy.delta:.1g} over the whole training"
    if privacy.epsilon > claimed:
        return Finding("falls", f"to {privacy.epsilon:.3g}", "over the whole training", "", told, cells_of(record))
    return Finding("holds", "", "over the whole training", "", told, cells_of(record))
