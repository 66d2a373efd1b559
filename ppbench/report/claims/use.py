"""Rules for claims about what a defended model is good for, beside the undefended model of the same federation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ppbench.federation.claim import Claim
from ppbench.records.schema import Record, Utility
from ppbench.report.claims.case import Case, Finding, Verdict, cells_of
from ppbench.report.compare.paired import level_of, unpaired
from ppbench.report.learning import learning_of

MARGIN = 0.02
"""Share of right answers (or Dice) by which more may be lost than the paper loses and count as the same."""
ERROR_MARGIN = 0.05
"""Share of the undefended error by which ours may be larger than the paper's and count as the same."""
SAME, SAME_ERROR, TWICE = 1e-3, 1e-4, 2
"""How far curves may lie apart, in shares of right answers, of squared errors relative, and in how many rounds they
must have been looked at, for two trainings to be one and the same to rounding. Errors of trainings that stand still lie
within a percent whatever trained them.
"""
DIVERGED = "no model: training diverged"


def _number(number: float | None, form: str) -> str:
    return "n/a" if number is None else f"{number:{form}}"


def _text(utility: Utility, name: str, form: str) -> str:
    """Return a figure with its interval, as "95.0% [93.5, 96.2]"."""
    value, low, high = (_number(end, form) for end in utility.figure(name))
    return f"{value} [{low}, {high}]".replace("%,", ",")


def accuracy_is_kept(case: Case) -> Finding | str:
    """A claimed accuracy holds where the interval of what is lost beside the undefended model ends less than 2 points
    above what the paper loses, and falls where it begins above that; else it cannot
    be told. Where the paper prints no undefended model beside, the accuracy itself is compared. Trainings that are one
    and the same to rounding are told as an identity.
    """
    return _is_kept(case, "accuracy", "accuracy")


def top5_is_kept(case: Case) -> Finding | str:
    """A claimed Top-5 accuracy is judged as an accuracy is."""
    return _is_kept(case, "accuracy_top5", "Top-5 accuracy")


def dice_is_kept(case: Case) -> Finding | str:
    """A claimed Dice coefficient is judged as an accuracy is."""
    return _is_kept(case, "dice", "Dice coefficient")


def _is_kept(case: Case, name: str, words: str) -> Finding | str:
    paper, none = case.claim, case.undefended
    mine = min(case.mine, key=lambda r: (r.utility.figure(name)[0] or 0.0, r.cell_id))
    if paper.value is None:
        return f"the paper prints no {words}"
    theirs = None if none is None else level_of(none.utility, name)
    if none is None or theirs is None:
        return f"the undefended model has no {words} to stand beside"
    ours, may = level_of(mine.utility, name), _may_lose(paper)
    shown, cells = _text(mine.utility, name, ".1%"), cells_of(mine, none)
    beside = f"undefended {_text(none.utility, name, '.1%')}"
    harm = math.inf if ours is None else -ours.value
    if learning_of(none.utility).state == "nothing":
        return Finding(
            "cannot be told", "", f"the undefended model has learnt nothing; {beside}", "", shown, cells, harm
        )
    if ours is None and mine.utility.accuracy is not None:
        return f"no {words} of the defended model was kept"
    if ours is None:
        return Finding("falls", f"to {DIVERGED}", beside, "", DIVERGED, cells, harm)
    if _one_training(mine.utility, none.utility, SAME, relative=False):
        return Finding("identity", "", f"{ONE}; {beside}", "", shown, cells, harm)
    if may is None:
        reason = f"the paper reaches {paper.value:.1%}; {beside}"
        verdict = _verdict(-ours.high, -ours.low, -paper.value, MARGIN)
        to = f"to {ours.value:.1%}" if verdict == "falls" else ""
        return Finding(verdict, to, reason, "", shown, cells, harm)
    lost = unpaired([theirs], [ours], safer=True)
    ends = f"[{100 * lost.low:.1f}, {100 * lost.high:.1f}]"
    reason = f"{100 * lost.worse + 0.0:.1f} points {ends} are lost where the paper loses {100 * may:.2f}; {beside}"
    verdict = _verdict(lost.low, lost.high, may, MARGIN)
    return Finding(verdict, f"to {ours.value:.1%}" if verdict == "falls" else "", reason, "", shown, cells, lost.worse)


def _may_lose(paper: Claim) -> float | None:
    """Return what a paper says is lost beside the undefended model; None where it says nothing."""
    return None if paper.undefended is None or paper.value is None else paper.undefended - paper.value


ONE = "the training is the undefended one in every round, as by an identity, which training does not test"


def _verdict(low: float, high: float, may: float, margin: float) -> Verdict:
    """Return the outcome of two one-sided tests: no more than `margin` beyond `may`, or more than `may`."""
    return "holds" if high < may + margin else "falls" if low > may else "cannot be told"


def _one_training(mine: Utility, none: Utility, apart: float, *, relative: bool) -> bool:
    """Return whether two trainings gave the same figures in every round that was looked at, but for rounding."""
    if mine is none or [at for at, _ in mine.curve] != [at for at, _ in none.curve] or len(none.curve) < TWICE:
        return False
    pairs = [(ours, theirs) for (_, ours), (_, theirs) in zip(mine.curve, none.curve, strict=True)]
    return all(abs(ours - theirs) <= apart * (theirs if relative else 1.0) for ours, theirs in pairs)


def accuracy_is_gained(case: Case) -> Finding | str:
    """A claimed gain of accuracy over the undefended model holds where the interval of ours lies above 0 and reaches
    it; it falls where the interval lies below it.
    """
    mine, none = best_of(case.mine, "accuracy"), case.undefended
    ours = None if mine is None else level_of(mine.utility, "accuracy")
    theirs = None if none is None else level_of(none.utility, "accuracy")
    if mine is None or none is None or ours is None or theirs is None:
        return "there are not two accuracies to set side by side"
    gain, claimed = unpaired([theirs], [ours], safer=True), case.claim.value or 0.0
    low, high = -gain.high, -gain.low
    verdict: Verdict = "falls" if high < claimed else "holds" if low > 0 else "cannot be told"
    figures = f"{_text(mine.utility, 'accuracy', '.1%')}; undefended {_text(none.utility, 'accuracy', '.1%')}"
    reason = f"{-100 * gain.worse + 0.0:.1f} points [{100 * low:.1f}, {100 * high:.1f}] more than undefended"
    to, cells = f"to {ours.value:.1%}" if verdict == "falls" else "", cells_of(mine, none)
    return Finding(verdict, to, reason, "", figures, cells, gain.worse)


def accuracy_rises(case: Case) -> Finding | str:
    """That accuracy rises with the control parameter holds where the interval at its largest value lies above that at
    its smallest; it falls where it lies below.
    """
    by = {r.config.defense.control.value: r for r in case.mine if r.config.defense.control is not None}
    if len(by) < 2:
        return "fewer than two values of the control parameter were run"
    first, last = by[min(by)].utility, by[max(by)].utility
    figures = f"{_text(first, 'accuracy', '.1%')} at {min(by):g}, {_text(last, 'accuracy', '.1%')} at {max(by):g}"
    reason = f"from {min(by):g} to {max(by):g}"
    verdict: Verdict = "cannot be told"
    if None in (first.low, first.high, last.low, last.high):
        reason += ", where training diverged"
    elif (last.low or 0.0) > (first.high or 0.0):
        verdict = "holds"
    elif (last.high or 0.0) < (first.low or 0.0):
        verdict = "falls"
    else:
        reason += ", the intervals overlap"
    rise = (last.accuracy or 0.0) - (first.accuracy or 0.0)
    return Finding(verdict, "", reason, "", figures, cells_of(by[min(by)], by[max(by)]), -rise)


def error_is_kept(case: Case) -> Finding | str:
    """A claimed MSE holds where the interval of its ratio to the undefended one ends less than .05 above the paper's
    ratio, and falls where it begins above that; else it cannot be told. Trainings that are one and the same to
    rounding are told as an identity.
    """

    def error(record: Record) -> tuple[float, str]:
        return float("inf") if record.utility.mse is None else record.utility.mse, record.cell_id

    paper, mine, none = case.claim, max(case.mine, key=error), case.undefended
    if none is None or not none.utility.mse or none.utility.mse_low is None or paper.value is None:
        return "the undefended model has no squared error to stand beside"
    if not paper.undefended:
        return "the paper gives no undefended error beside it"
    shown, cells = _text(mine.utility, "mse", ".4f"), cells_of(mine, none)
    beside = f"undefended {_text(none.utility, 'mse', '.4f')}"
    if mine.utility.mse is None or mine.utility.mse_low is None:
        return Finding("falls", f"to {DIVERGED}", beside, "", DIVERGED, cells, math.inf)
    may = paper.value / paper.undefended
    if _one_training(mine.utility, none.utility, SAME_ERROR, relative=True):
        return Finding("identity", "", f"{ONE}; {beside}", "", shown, cells, mine.utility.mse)
    low, high = _ratio(mine.utility, none.utility)
    share = mine.utility.mse / none.utility.mse
    reason = f"{share:.3f} [{low:.3f}, {high:.3f}] of the undefended error where the paper has {may:.3f}; {beside}"
    verdict = _verdict(low, high, may, ERROR_MARGIN)
    to = f"to {mine.utility.mse:.4f}" if verdict == "falls" else ""
    return Finding(verdict, to, reason, "", shown, cells, share)


def _ratio(mine: Utility, none: Utility) -> tuple[float, float]:
    """Return the interval of a ratio of two errors, on the logarithmic scale by MOVER, as of independent samples."""
    logs = [[math.log(max(end or 0.0, 1e-30)) for end in one.figure("mse")] for one in (mine, none)]
    (ours, low, high), (theirs, least, most) = logs
    middle = ours - theirs
    down, up = math.hypot(ours - low, most - theirs), math.hypot(high - ours, theirs - least)
    return math.exp(middle - down), math.exp(middle + up)


def guarantee_is_given(case: Case) -> Finding | str:
    """A claimed epsilon holds where the mechanism, as implemented, gives one over the whole training, no larger."""
    record = max(case.mine, key=lambda r: (r.privacy.epsilon is None, r.privacy.epsilon or 0.0, r.cell_id))
    privacy, cells = record.privacy, cells_of(record)
    if privacy.epsilon is None:
        reason = (privacy.reason or "no reason is recorded").rstrip(".")
        return Finding("falls", "to no guarantee", reason, "", "none", cells, math.inf)
    guarantee = f"epsilon {privacy.epsilon:.3g}, delta {privacy.delta:.1g} over the whole training"
    fell = privacy.epsilon > (case.claim.value or 0.0)
    to = f"to {privacy.epsilon:.3g}" if fell else ""
    return Finding("falls" if fell else "holds", to, "over the whole training", "", guarantee, cells, privacy.epsilon)


def best_of(records: Sequence[Record], name: str) -> Record | None:
    """Return the record whose model is the best by a figure, of equals the first by name; None without a figure."""
    known = [r for r in records if r.utility.figure(name)[0] is not None]
    return max(known, key=lambda r: (r.utility.figure(name)[0] or 0.0, r.cell_id), default=None)
