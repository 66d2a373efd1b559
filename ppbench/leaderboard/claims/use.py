"""Rules for claims about what a defense costs: accuracy, error, bytes, and the guarantee that it gives for them."""

from __future__ import annotations

from typing import Literal

from ppbench.leaderboard.claims.case import Case, Finding, cells_of
from ppbench.records.schema import Record, Utility

SLACK = 1.01  # of a ratio of bytes: messages have headers


def _utility(record: Record | None, name: Literal["accuracy", "mse"]) -> str:
    u = None if record is None else record.utility
    if u is None:
        return "not run"
    if name == "accuracy":
        return f"{_number(u.accuracy, '.1%')} [{_number(u.low, '.1%')}, {_number(u.high, '.1%')}]".replace("%,", ",")
    return f"{_number(u.mse, '.4f')} [{_number(u.mse_low, '.4f')}, {_number(u.mse_high, '.4f')}]"


def _number(number: float | None, form: str) -> str:
    return "n/a" if number is None else f"{number:{form}}"


def accuracy_is_kept(case: Case) -> Finding | str:
    """A claimed accuracy holds where ours loses no more, by its interval, than the paper's beside the undefended."""
    paper, mine = case.claim, min(case.mine, key=lambda r: (r.utility.accuracy or 0.0, r.cell_id))
    none = next(iter(case.none), None)
    if none is None or none.utility.accuracy is None or paper.value is None or paper.undefended is None:
        return "the undefended model has no accuracy to stand beside"
    ours, theirs = mine.utility, none.utility
    told, cells = f"{_utility(mine, 'accuracy')}; undefended {_utility(none, 'accuracy')}", cells_of(mine, none)
    if _at_chance(theirs):
        return Finding("cannot be told", "", "the undefended model has learnt nothing", "", told, cells)
    if ours.accuracy is None or ours.high is None:
        return Finding("falls", "to no model: training diverged", "", "", told, cells)
    may = paper.undefended - paper.value
    lost = f"{100 * (none.utility.accuracy - ours.accuracy):.1f} points are lost where the paper loses {100 * may:.2f}"
    if ours.high < none.utility.accuracy - may:
        return Finding("falls", f"to {ours.accuracy:.1%}", lost, "", told, cells)
    return Finding("holds", "", lost, "", told, cells)


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
    told, cells = f"{_utility(mine, 'mse')}; undefended {_utility(none, 'mse')}", cells_of(mine, none)
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


def upload_is_as_large(case: Case) -> Finding | str:
    """A claimed ratio of uploads holds where a client sends no more numbers; their width is a parameter of its own."""
    mine, none = max(case.mine, key=lambda r: (r.cost.bytes_up, r.cell_id)), next(iter(case.none), None)
    if none is None or not none.cost.bytes_up:
        return "the undefended upload is not there to stand beside"
    width = 2.0 if mine.config.defense.parameters.get("precision") == "float64" else 1.0
    width /= 2.0 if none.config.federation.dtype == "float64" else 1.0
    ratio = mine.cost.bytes_up / none.cost.bytes_up
    numbers, claimed = ratio / width, case.claim.value or 0.0
    told = f"{ratio:.2f} in bytes" + (f", {numbers:.2f} in numbers" if width != 1 else "")
    reason = f"{mine.cost.bytes_up:.0f} B a client and round beside {none.cost.bytes_up:.0f} B"
    reason += ", in float64 where the undefended sends float32" if width == 2 else ""
    if numbers > claimed * SLACK:
        return Finding("falls", f"to {numbers:.2f}", reason, "", told, cells_of(mine, none))
    return Finding("holds", "", reason, "", told, cells_of(mine, none))
