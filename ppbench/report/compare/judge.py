"""From changes to verdicts: a tolerance, an interval, and Holm's correction over the rows of a defense.

A defense has two families of rows, each corrected by itself: the headlines, which a dozen victims can still decide,
and all others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scipy import stats

from ppbench.metrics.intervals import CONFIDENCE
from ppbench.questions.base import Rule
from ppbench.records.schema import Record
from ppbench.report.compare.join import RowPair, Where
from ppbench.report.compare.paired import Change
from ppbench.report.worst import cell_of

RowStatus = Literal["regression", "improved", "ok", "inconclusive", "missing", "incomparable", "new", "unjudged"]
SIGNIFICANCE = 1 - CONFIDENCE
_Z = float(stats.norm.isf(SIGNIFICANCE / 2))
MOST_VICTIMS = 10**6
"""Numbers of victims beyond this are not named: such a row cannot be decided."""


@dataclass(frozen=True)
class ComparedRow:
    """One line of a comparison.

    where: what it is about; `attack` may be "worst case of N attacks", or "" where none is needed; metric: "" where the
    whole cell could not be compared; status: see docs/compare.md; change: None where nothing was compared; tolerance:
    the least worsening that counts; note: what a reader must know; record: its first in BASELINE; adjusted: p-value
    after Holm's correction over the `family` rows of its kind, headlines or others; needed: victims that would decide
    it; blind: whether it is an undecided headline that so few victims cannot decide among so many rows.
    """

    where: Where
    metric: str
    subset: str
    status: RowStatus
    change: Change | None
    tolerance: float
    note: str
    record: Record
    adjusted: float | None = None
    needed: int | None = None
    headline: bool = False
    family: int = 0
    blind: bool = False

    @property
    def point(self) -> str:
        """Defense and control value, as "dp sigma=0.01"."""
        where = self.where
        value = f" {where.control}={where.value:g}" if where.value is not None else f" over {where.control}"
        return printable(f"{where.defense}{value if where.control else ''}")

    @property
    def attack(self) -> str:
        """The attack, with the one whose images it starts from; "" where none is needed."""
        where = self.where
        return printable(f"{where.attack} after {where.follows}" if where.follows else where.attack)

    @property
    def title(self) -> str:
        """The metric with its subset, as "auc (canaries)"; "all" where the whole cell is meant."""
        return f"{self.metric} (canaries)" if self.subset == "canaries" else self.metric or "all"

    @property
    def place(self) -> str:
        """Stage, batch size, threat model, role and probe in words, "" without any."""
        where = self.where
        parts = [
            where.stage,
            f"batch {where.batch}" if where.batch else "",
            f"to {where.threat}" if where.threat else "",
        ]
        parts += [where.role, f"probe {where.probe} x{where.probe_rounds}" if where.probe == "local" else ""]
        return printable(", ".join(part for part in parts if part))

    @property
    def name(self) -> str:
        """The row in one line, as "dlg, init, batch 1, to server: psnr_median"."""
        about = ", ".join(part for part in (self.attack, self.place) if part)
        return f"{about}: {self.title}" if about else self.title

    def figure(self, value: float) -> str:
        """Return a figure with two or three decimals, by its metric."""
        digits = 2 if self.metric in ("psnr_median", "epsilon_claimed", "epsilon_lower") else 3
        return f"{round(value, digits) + 0.0:.{digits}f}"  # no "-0.000"

    @property
    def levels(self) -> str:
        """Both figures, as "8.41 to 19.37"; "" where nothing was compared."""
        return f"{self.figure(self.change.base)} to {self.figure(self.change.new)}" if self.change else ""


def printable(text: str) -> str:
    """Return `text` with a question mark for every character that is not printable, such as a line break."""
    return "".join(c if c.isprintable() else "?" for c in text)


def unjudged_row(pair: RowPair, rule: Rule, change: Change | None, note: str) -> ComparedRow:
    """Return a row without a verdict; without a change it is missing from NEW. The note names versions."""
    one, two = pair.base[0].config.edition, pair.new[0].config.edition
    notes = [note, pair.note, "" if one == two else f"version {one} -> {two}"]
    status: RowStatus = "missing" if change is None else "ok"
    note = "; ".join(part for part in notes if part)
    return ComparedRow(pair.where, rule.name, rule.subset, status, change, rule.tolerance, note, cell_of(pair.base[0]))


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method (1979), in the given order."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    adjusted, so_far = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        so_far = max(so_far, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = so_far
    return adjusted


def judged_rows(rows: Sequence[ComparedRow]) -> list[ComparedRow]:
    """Return the rows with verdicts; Holm's correction is over the estimated changes of each family of each defense."""
    families = defaultdict[tuple[str, bool], list[int]](list)
    for place, row in enumerate(rows):
        if row.change is not None and not row.change.certain:
            families[row.where.defense, row.headline].append(place)
    corrected = list(rows)
    for places in families.values():
        adjusted = holm([change.p for place in places if (change := rows[place].change) is not None])
        for place, p in zip(places, adjusted, strict=True):
            corrected[place] = replace(rows[place], adjusted=p, family=len(places))
    return [_verdict(row) for row in corrected]


def _verdict(row: ComparedRow) -> ComparedRow:
    change = row.change
    if change is None:
        return row
    sure = change.certain or (row.adjusted is not None and row.adjusted < SIGNIFICANCE)
    if sure and change.low > 0 and change.worse > row.tolerance:
        status: RowStatus = "regression"
    elif sure and change.high < 0 and change.worse < -row.tolerance:
        status = "improved"
    else:
        status = "ok" if change.high < row.tolerance else "inconclusive"
    if status != "inconclusive":
        return replace(row, status=status)
    if row.headline and change.floor * row.family >= SIGNIFICANCE:
        return replace(row, status=status, blind=True, needed=_seeing(change, row.family))
    return replace(row, status=status, needed=_needed(change, row.tolerance, row.adjusted))


def _seeing(change: Change, family: int) -> int:
    """Return how many victims could decide a blind row; each further unit halves its least p-value."""
    more = math.floor(math.log2(change.floor * family / SIGNIFICANCE)) + 1
    return math.ceil(change.n * (change.units + more) / change.units)


def _needed(change: Change, tolerance: float, adjusted: float | None) -> int | None:
    """Return how many victims would decide a row if the estimate were exact; None beyond `MOST_VICTIMS`."""
    shared = _Z * change.luck  # what is not luck of training shrinks with the root of n
    if change.worse < tolerance:
        half, margin = change.high - change.worse, tolerance - change.worse
    else:
        times = 1.0 if not adjusted or change.p <= 0 else max(1.0, adjusted / change.p)
        half = change.worse - change.low
        margin = change.worse * _Z / float(stats.norm.isf(SIGNIFICANCE / times / 2))
    if margin <= shared:
        return None
    number = change.n * (half**2 - shared**2) / (margin**2 - shared**2)
    return None if number > MOST_VICTIMS else max(change.n + 1, math.ceil(number))
