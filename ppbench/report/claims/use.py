"""Rules for claims about a defended model's utility, against the undefended model of the same federation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ppbench.federation.claim import Claim
from ppbench.records.schema import Record, Utility
from ppbench.report.claims.case import ClaimCase, ClaimFinding, ClaimVerdict, cell_names
from ppbench.report.compare.paired import model_figure, unpaired
from ppbench.report.learning import learning_of

ACCURACY_MARGIN = 0.02
"""By how much the loss of accuracy (or Dice) may exceed the paper's and count as the same."""
ERROR_MARGIN = 0.05
"""By how much the ratio of errors may exceed the paper's and count as the same."""
SAME_ACCURACY, SAME_ERROR, FEWEST_ROUNDS = 1e-3, 1e-4, 2
"""How far two curves may lie apart (accuracies absolute, squared errors relative), and how many evaluated rounds they
need, for two trainings to count as equal to rounding. Errors of trainings that stand still lie within a percent anyway.
"""
DIVERGED = "no model: training diverged"


def _number(number: float | None, form: str) -> str:
    return "n/a" if number is None else f"{number:{form}}"


def _text(utility: Utility, name: str, form: str) -> str:
    """Return a figure with its interval, as "95.0% [93.5, 96.2]"."""
    value, low, high = (_number(end, form) for end in utility.figure(name))
    return f"{value} [{low}, {high}]".replace("%,", ",")


def accuracy_is_kept(case: ClaimCase) -> ClaimFinding | str:
    """A claimed accuracy holds where the interval of what is lost beside the undefended model ends less than 2 points
    above what the paper loses, falls where it begins above that, and is inconclusive otherwise. Where the paper prints
    no undefended model, the accuracy itself is compared. Trainings that are equal to rounding are reported as an
    identity.
    """
    return _is_kept(case, "accuracy", "accuracy")


def top5_is_kept(case: ClaimCase) -> ClaimFinding | str:
    """A claimed Top-5 accuracy is judged as an accuracy is."""
    return _is_kept(case, "accuracy_top5", "Top-5 accuracy")


def dice_is_kept(case: ClaimCase) -> ClaimFinding | str:
    """A claimed Dice coefficient is judged as an accuracy is."""
    return _is_kept(case, "dice", "Dice coefficient")


def _is_kept(case: ClaimCase, name: str, words: str) -> ClaimFinding | str:
    paper, none = case.claim, case.undefended
    mine = min(case.mine, key=lambda r: (r.utility.figure(name)[0] or 0.0, r.cell_id))
    if paper.value is None:
        return f"the paper prints no {words}"
    theirs = None if none is None else model_figure(none.utility, name)
    if none is None or theirs is None:
        return f"the undefended model has no {words} to compare with"
    ours, may = model_figure(mine.utility, name), _may_lose(paper)
    shown, cells = _text(mine.utility, name, ".1%"), cell_names(mine, none)
    beside = f"undefended {_text(none.utility, name, '.1%')}"
    harm = math.inf if ours is None else -ours.value
    if learning_of(none.utility).state == "nothing":
        return ClaimFinding(
            "inconclusive", "", f"the undefended model has learned nothing; {beside}", "", shown, cells, harm
        )
    if ours is None and mine.utility.accuracy is not None:
        return f"no {words} of the defended model was kept"
    if ours is None:
        return ClaimFinding("falls", f"to {DIVERGED}", beside, "", DIVERGED, cells, harm)
    if _one_training(mine.utility, none.utility, SAME_ACCURACY, relative=False):
        return ClaimFinding("identity", "", f"{SAME_TRAINING}; {beside}", "", shown, cells, harm)
    if may is None:
        reason = f"the paper reaches {paper.value:.1%}; {beside}"
        verdict = _verdict(-ours.high, -ours.low, -paper.value, ACCURACY_MARGIN)
        to = f"to {ours.value:.1%}" if verdict == "falls" else ""
        return ClaimFinding(verdict, to, reason, "", shown, cells, harm)
    lost = unpaired([theirs], [ours], safer=True)
    ends = f"[{100 * lost.low:.1f}, {100 * lost.high:.1f}]"
    reason = f"{100 * lost.worse + 0.0:.1f} points {ends} are lost where the paper loses {100 * may:.2f}; {beside}"
    verdict = _verdict(lost.low, lost.high, may, ACCURACY_MARGIN)
    return ClaimFinding(
        verdict, f"to {ours.value:.1%}" if verdict == "falls" else "", reason, "", shown, cells, lost.worse
    )


def _may_lose(paper: Claim) -> float | None:
    """Return the paper's loss against its undefended model; None where it prints none."""
    return None if paper.undefended is None or paper.value is None else paper.undefended - paper.value


SAME_TRAINING = "the training equals the undefended one in every round, as by an identity, which training does not test"


def _verdict(low: float, high: float, may: float, margin: float) -> ClaimVerdict:
    """Return the outcome of two one-sided tests: no more than `margin` beyond `may`, or more than `may`."""
    return "holds" if high < may + margin else "falls" if low > may else "inconclusive"


def _one_training(mine: Utility, none: Utility, apart: float, *, relative: bool) -> bool:
    """Return whether two trainings have the same figures in every evaluated round, to rounding."""
    if mine is none or [at for at, _ in mine.curve] != [at for at, _ in none.curve] or len(none.curve) < FEWEST_ROUNDS:
        return False
    pairs = [(ours, theirs) for (_, ours), (_, theirs) in zip(mine.curve, none.curve, strict=True)]
    return all(abs(ours - theirs) <= apart * (theirs if relative else 1.0) for ours, theirs in pairs)


def accuracy_is_gained(case: ClaimCase) -> ClaimFinding | str:
    """A claimed gain of accuracy over the undefended model holds where the interval of ours lies above 0 and reaches
    it; it falls where the interval lies below it.
    """
    mine, none = best_of(case.mine, "accuracy"), case.undefended
    ours = None if mine is None else model_figure(mine.utility, "accuracy")
    theirs = None if none is None else model_figure(none.utility, "accuracy")
    if mine is None or none is None or ours is None or theirs is None:
        return "there are no two accuracies to compare"
    gain, claimed = unpaired([theirs], [ours], safer=True), case.claim.value or 0.0
    low, high = -gain.high, -gain.low
    verdict: ClaimVerdict = "falls" if high < claimed else "holds" if low > 0 else "inconclusive"
    figures = f"{_text(mine.utility, 'accuracy', '.1%')}; undefended {_text(none.utility, 'accuracy', '.1%')}"
    reason = f"{-100 * gain.worse + 0.0:.1f} points [{100 * low:.1f}, {100 * high:.1f}] more than undefended"
    to, cells = f"to {ours.value:.1%}" if verdict == "falls" else "", cell_names(mine, none)
    return ClaimFinding(verdict, to, reason, "", figures, cells, gain.worse)


def accuracy_rises(case: ClaimCase) -> ClaimFinding | str:
    """That accuracy rises with the control parameter holds where the interval at its largest value lies above that at
    its smallest; it falls where it lies below.
    """
    by = {r.config.defense.control.value: r for r in case.mine if r.config.defense.control is not None}
    if len(by) < 2:
        return "fewer than two values of the control parameter were run"
    first, last = by[min(by)].utility, by[max(by)].utility
    figures = f"{_text(first, 'accuracy', '.1%')} at {min(by):g}, {_text(last, 'accuracy', '.1%')} at {max(by):g}"
    reason = f"from {min(by):g} to {max(by):g}"
    verdict: ClaimVerdict = "inconclusive"
    if None in (first.low, first.high, last.low, last.high):
        reason += ", where training diverged"
    elif (last.low or 0.0) > (first.high or 0.0):
        verdict = "holds"
    elif (last.high or 0.0) < (first.low or 0.0):
        verdict = "falls"
    else:
        reason += ", the intervals overlap"
    rise = (last.accuracy or 0.0) - (first.accuracy or 0.0)
    return ClaimFinding(verdict, "", reason, "", figures, cell_names(by[min(by)], by[max(by)]), -rise)


def error_is_kept(case: ClaimCase) -> ClaimFinding | str:
    """A claimed MSE holds where the interval of its ratio to the undefended one ends less than 0.05 above the paper's
    ratio, falls where it begins above that, and is inconclusive otherwise. Trainings that are equal to rounding are
    reported as an identity.
    """

    def error(record: Record) -> tuple[float, str]:
        return float("inf") if record.utility.mse is None else record.utility.mse, record.cell_id

    paper, mine, none = case.claim, max(case.mine, key=error), case.undefended
    if none is None or not none.utility.mse or none.utility.mse_low is None or paper.value is None:
        return "the undefended model has no squared error to compare with"
    if not paper.undefended:
        return "the paper prints no undefended error"
    shown, cells = _text(mine.utility, "mse", ".4f"), cell_names(mine, none)
    beside = f"undefended {_text(none.utility, 'mse', '.4f')}"
    if mine.utility.mse is None or mine.utility.mse_low is None:
        return ClaimFinding("falls", f"to {DIVERGED}", beside, "", DIVERGED, cells, math.inf)
    may = paper.value / paper.undefended
    if _one_training(mine.utility, none.utility, SAME_ERROR, relative=True):
        return ClaimFinding("identity", "", f"{SAME_TRAINING}; {beside}", "", shown, cells, mine.utility.mse)
    low, high = _ratio(mine.utility, none.utility)
    share = mine.utility.mse / none.utility.mse
    reason = f"{share:.3f} [{low:.3f}, {high:.3f}] of the undefended error where the paper has {may:.3f}; {beside}"
    verdict = _verdict(low, high, may, ERROR_MARGIN)
    to = f"to {mine.utility.mse:.4f}" if verdict == "falls" else ""
    return ClaimFinding(verdict, to, reason, "", shown, cells, share)


def _ratio(mine: Utility, none: Utility) -> tuple[float, float]:
    """Return the interval of a ratio of two errors of independent samples, on the logarithmic scale by MOVER."""
    logs = [[math.log(max(end or 0.0, 1e-30)) for end in one.figure("mse")] for one in (mine, none)]
    (ours, low, high), (theirs, least, most) = logs
    middle = ours - theirs
    down, up = math.hypot(ours - low, most - theirs), math.hypot(high - ours, theirs - least)
    return math.exp(middle - down), math.exp(middle + up)


def guarantee_is_given(case: ClaimCase) -> ClaimFinding | str:
    """A claimed epsilon holds where the mechanism, as implemented, gives one over the whole training, no larger."""
    record = max(case.mine, key=lambda r: (r.privacy.epsilon is None, r.privacy.epsilon or 0.0, r.cell_id))
    privacy, cells = record.privacy, cell_names(record)
    if privacy.epsilon is None:
        reason = (privacy.reason or "no reason is recorded").rstrip(".")
        return ClaimFinding("falls", "to no guarantee", reason, "", "none", cells, math.inf)
    guarantee = f"epsilon {privacy.epsilon:.3g}, delta {privacy.delta:.1g} over the whole training"
    fell = privacy.epsilon > (case.claim.value or 0.0)
    to = f"to {privacy.epsilon:.3g}" if fell else ""
    return ClaimFinding(
        "falls" if fell else "holds", to, "over the whole training", "", guarantee, cells, privacy.epsilon
    )


def best_of(records: Sequence[Record], name: str) -> Record | None:
    """Return the record whose model is best by a figure, ties by cell id; None where none has it."""
    known = [r for r in records if r.utility.figure(name)[0] is not None]
    return max(known, key=lambda r: (r.utility.figure(name)[0] or 0.0, r.cell_id), default=None)
