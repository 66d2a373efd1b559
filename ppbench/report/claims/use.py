"""Rules for claims about what a defended model is good for, about its guarantee, and about what all this costs.

Ratios of times are in no record: they are figures of benchmarks, with the machine and the date that they are from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppbench.base.errors import UsageError
from ppbench.base.files import read_regular
from ppbench.federation.contract import Claim
from ppbench.records.schema import Record, Utility
from ppbench.report.claims.case import Case, Finding, Verdict, cells_of, decided
from ppbench.report.page.costs import ratios

SLACK = 1.01  # of a ratio of bytes: messages have headers
PRINTED = 1e-3  # of a share of bytes: papers print four digits, and leave commands out of the count
OTHER_MACHINE = 1.25  # of a ratio of times, which the paper took on another machine
KEY_OF = {"client_cost_ratio": "client_ratio", "client_backward_ratio": "backward_ratio"}
"""Which figure of a benchmark says something about which metric of a claim."""
DIVERGED = "no model: training diverged"


def _number(number: float | None, form: str) -> str:
    return "n/a" if number is None else f"{number:{form}}"


def _text(utility: Utility, name: str, form: str) -> str:
    """Return a figure with its interval, as "95.0% [93.5, 96.2]"."""
    value, low, high = (_number(end, form) for end in utility.figure(name))
    return f"{value} [{low}, {high}]".replace("%,", ",")


def accuracy_is_kept(case: Case) -> Finding | str:
    """A claimed accuracy holds where ours loses no more, by its interval, than the paper's beside the undefended; on
    other data, another network, other numbers of clients or another partition it does not compare.
    """
    return _is_kept(case, "accuracy", "accuracy")


def top5_is_kept(case: Case) -> Finding | str:
    """Return that a Top-5 accuracy stands in no record."""
    return "records hold how often the first answer is right, not the first five"


def dice_is_kept(case: Case) -> Finding | str:
    """A claimed Dice coefficient is judged as an accuracy is."""
    return _is_kept(case, "dice", "Dice coefficient")


def _is_kept(case: Case, name: str, words: str) -> Finding | str:
    paper, none = case.claim, case.undefended
    mine = min(case.mine, key=lambda r: (r.utility.figure(name)[0] or 0.0, r.cell_id))
    if paper.value is None or paper.undefended is None:
        return f"the paper gives no undefended {words} beside it"
    theirs = None if none is None else none.utility.figure(name)[0]
    if none is None or theirs is None:
        return f"the undefended model has no {words} to stand beside"
    ours, _, high = mine.utility.figure(name)
    told = f"{_text(mine.utility, name, '.1%')}; undefended {_text(none.utility, name, '.1%')}"
    if none.utility.low is not None and none.utility.low <= none.utility.chance:
        reason = "the undefended model has learnt nothing"
        return Finding("cannot be told", "", reason, "", told, cells_of(mine, none))
    if ours is None or high is None:
        return decided(True, DIVERGED, "", told, mine, none)
    may = paper.undefended - paper.value
    lost = f"{100 * (theirs - ours):.1f} points are lost where the paper loses {100 * may:.2f}"
    return decided(high < theirs - may, f"{ours:.1%}", lost, told, mine, none)


def accuracy_rises(case: Case) -> Finding | str:
    """That accuracy rises with the control parameter holds where the interval at its largest value lies above that at
    its smallest; it falls where it lies below.
    """
    by = {r.config.defense.control.value: r for r in case.mine if r.config.defense.control is not None}
    if len(by) < 2:
        return "fewer than two values of the control parameter were run"
    first, last = by[min(by)].utility, by[max(by)].utility
    told = f"{_text(first, 'accuracy', '.1%')} at {min(by):g}, {_text(last, 'accuracy', '.1%')} at {max(by):g}"
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
    return Finding(verdict, "", reason, "", told, cells_of(by[min(by)], by[max(by)]))


def error_is_kept(case: Case) -> Finding | str:
    """A claimed MSE holds where ours, by its interval, is no larger beside the undefended than the paper's."""

    def error(record: Record) -> tuple[float, str]:
        return float("inf") if record.utility.mse is None else record.utility.mse, record.cell_id

    paper, mine, none = case.claim, max(case.mine, key=error), case.undefended
    if none is None or none.utility.mse is None or paper.value is None or not paper.undefended:
        return "the undefended model has no squared error to stand beside"
    told = f"{_text(mine.utility, 'mse', '.4f')}; undefended {_text(none.utility, 'mse', '.4f')}"
    if mine.utility.mse is None or mine.utility.mse_low is None:
        return decided(True, DIVERGED, "", told, mine, none)
    may = paper.value / paper.undefended
    share = mine.utility.mse / none.utility.mse if none.utility.mse else float("inf")
    reason = f"{share:.3f} of the undefended error where the paper has {may:.3f}"
    fell = mine.utility.mse_low > none.utility.mse * max(1.0, may)
    return decided(fell, f"{mine.utility.mse:.4f}", reason, told, mine, none)


def guarantee_is_given(case: Case) -> Finding | str:
    """A claimed epsilon holds where the mechanism, as implemented, gives one over the whole training, no larger."""
    record = max(case.mine, key=lambda r: (r.privacy.epsilon is None, r.privacy.epsilon or 0.0, r.cell_id))
    privacy = record.privacy
    if privacy.epsilon is None:
        reason = (privacy.reason or "no reason is recorded").rstrip(".")
        return decided(True, "no guarantee", reason, "none", record)
    told = f"epsilon {privacy.epsilon:.3g}, delta {privacy.delta:.1g} over the whole training"
    fell = privacy.epsilon > (case.claim.value or 0.0)
    return decided(fell, f"{privacy.epsilon:.3g}", "over the whole training", told, record)


# -- costs -----------------------------------------------------------------------------------------------------------
def upload_is_as_large(case: Case) -> Finding | str:
    """A claimed ratio of uploads holds where a client sends no more numbers; their width is a parameter of its own."""
    mine, none = max(case.mine, key=lambda r: (r.cost.bytes_up, r.cell_id)), case.undefended
    if none is None or not none.cost.bytes_up:
        return "the undefended upload is not there to stand beside"
    width = 2.0 if mine.config.defense.parameters.get("precision") == "float64" else 1.0
    width /= 2.0 if none.config.federation.dtype == "float64" else 1.0
    ratio = mine.cost.bytes_up / none.cost.bytes_up
    numbers = ratio / width
    told = f"{ratio:.2f} in bytes" + (f", {numbers:.2f} in numbers" if width != 1 else "")
    reason = f"{mine.cost.bytes_up:.0f} B a client and round beside {none.cost.bytes_up:.0f} B"
    reason += ", in float64 where the undefended sends float32" if width == 2 else ""
    return decided(numbers > (case.claim.value or 0.0) * SLACK, f"{numbers:.2f}", reason, told, mine, none)


def bytes_are_saved(case: Case) -> Finding | str:
    """A claimed saving of bytes, both ways in a round and without set-up, holds where no less is saved, to 0.001."""

    def sent(record: Record) -> float:
        return record.cost.bytes_up + record.cost.bytes_down

    mine, none = max(case.mine, key=lambda r: (sent(r), r.cell_id)), case.undefended
    if none is None or case.claim.value is None:
        return "the undefended bytes are not there to stand beside"
    saved = 1 - sent(mine) / sent(none)
    reason = f"{sent(mine):.0f} B a client and round beside {sent(none):.0f} B"
    return decided(saved < case.claim.value - PRINTED, f"{saved:.2%}", reason, f"{saved:.2%}", mine, none)


def memory_is_as_small(case: Case) -> Finding | str:
    """A claimed ratio of memories holds where ours is within a quarter of it: papers count a whole process, we what a
    client's computation allocates beyond its inputs.
    """
    none = case.undefended
    known = [(ratio, r) for r in case.mine if none and (ratio := ratios(r.cost, none.cost).memory) is not None]
    if not known or none is None or case.claim.value is None:
        return "the memory of both was not measured"
    ratio, mine = max(known, key=lambda pair: (pair[0], pair[1].cell_id))
    reason = f"{mine.cost.memory_peak} B at most beside {none.cost.memory_peak} B"
    return decided(ratio > case.claim.value * OTHER_MACHINE, f"{ratio:.2f}", reason, f"{ratio:.3f}", mine, none)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. about: "resnet20 float64"; values: its numbers by name; machine, date: where and when."""

    defense: str
    about: str
    values: dict[str, float]
    machine: str
    date: str


def read_figures(paths: Sequence[Path]) -> list[Benchmark]:
    """Return the benchmarks of files {"DEFENSE MODEL VARIANT": {"client_ratio": 2.1, "machine": ""}}, or UsageError."""
    found = []
    for path in paths:
        try:
            data = json.loads(read_regular(path.resolve()))
        except (OSError, ValueError, RecursionError, RuntimeError) as cause:
            raise UsageError(f"{path} cannot be read as JSON ({cause}); give a file that a benchmark wrote.") from cause
        if not isinstance(data, dict) or not all(isinstance(entry, dict) for entry in data.values()):
            raise UsageError(f'{path} must map "DEFENSE MODEL VARIANT" to figures by name, as benchmarks write it.')
        for name, entry in data.items():
            defense, _, about = str(name).partition(" ")
            values = {k: float(v) for k, v in entry.items() if isinstance(v, int | float) and not isinstance(v, bool)}
            machine, date = (str(entry.get(key, "?")) for key in ("machine", "date"))
            found.append(Benchmark(defense, about, values, machine, date))
    return sorted(found, key=lambda b: (b.defense, b.about, b.date))


def time_is_kept(claim: Claim, defense: str, benchmarks: Sequence[Benchmark]) -> tuple[Finding, str] | str:
    """A claimed ratio of times holds where the largest of ours is within a quarter of it, for another machine.

    Returns the finding and the setting of the figures that it is from, or why there is none.
    """
    key = KEY_OF[claim.metric]
    known = [b for b in benchmarks if b.defense == defense and key in b.values]
    if not known:
        return f"no benchmark gives {key} of {defense} (--figures)"
    told = ", ".join(f"{b.values[key]:.2f} ({b.about})" for b in known)
    where = "; ".join(dict.fromkeys(f"{b.machine}, {b.date}" for b in known))
    largest, claimed = max(b.values[key] for b in known), claim.value or 0.0
    reason = f"measured on another machine; up to {OTHER_MACHINE:g} times the claim is put down to that"
    return decided(largest > claimed * OTHER_MACHINE, f"{largest:.2f}", reason, told), f"benchmark, {where}"
