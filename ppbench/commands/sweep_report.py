"""What a person sees of a sweep in the terminal: what would be done, and what was found, a line a defense."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from ppbench.commands.terminal import console, plain_table, say_verdict
from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.controls import value
from ppbench.report.frame import ROW, Frame, frame_of
from ppbench.report.worst import worst_of
from ppbench.run.cells import Cell
from ppbench.run.sweep import Planned, Swept


def planned_report(planned: Planned) -> None:
    """Print which cells a sweep would compute, and where they go."""
    asked = [cell for one in planned.asked for cell in one.cells]
    missing = {cell.id for one in planned.todo for cell in one.cells}
    names = ("defense", "control values", "attacks", "cells", "missing")
    table = plain_table(names, wrapped=("control values",))
    by: dict[str, list[Cell]] = defaultdict(list)
    for cell in asked:
        by[cell.config.defense.id].append(cell)
    for name, some in by.items():
        controls = sorted({c.config.defense.control.value for c in some if c.config.defense.control is not None})
        lacking = sum(cell.id in missing for cell in some)
        told = ", ".join(f"{v:g}" for v in controls)
        table.add_row(name, told, str(len({c.config.attack.id for c in some})), str(len(some)), str(lacking))
    to = console()
    to.print(f"{escape(planned.suite.name)} ({planned.suite.digest}): {escape(planned.suite.title)}")
    to.print(table)
    verb = f"{len(missing)} of {len(asked)} cells are missing and would be computed, from {planned.trainings} trainings"
    to.print(f"{verb}; results go to {escape(str(planned.store.out))}.", highlight=False)


def swept_report(swept: Swept) -> None:
    """Print a line a defense, what the controls say, what was found, what failed, and where the board is."""
    to = console()
    to.print(defenses(swept.records))
    say_verdict(to, swept, swept.verdict, " there")
    for reason, count in Counter(r.reason or "" for r in swept.failed).items():
        to.print(f"[red]failed, {count} cells:[/] {escape(reason)}", highlight=False)
    cells, found = len(swept.records), len(swept.records) - swept.computed
    told = f"{cells} cells ({found} found finished, {len(swept.failed)} failed)"
    where = swept.out / "leaderboard.html"
    to.print(f"{escape(swept.suite.name)}: {told} in {escape(str(where))}", highlight=False)


def defenses(records: Sequence[Record]) -> Table:
    """Return a table with the most that any cell of a defense gave away, over its grid and all attacks."""
    table = plain_table(("defense", "accuracy", "PSNR, worst case", "labels", "ASR", "canary TPR", "cells"))
    for key, some in frame_of(records).by(("defense",)).items():
        ends = sorted(r.utility.accuracy for r in some if r.utility.accuracy is not None)
        table.add_row(
            escape(key.defense),
            " to ".join(dict.fromkeys(f"{end:.1%}" for end in (*ends[:1], *ends[-1:]))),
            _images(some),
            *(_most(some, name) for name in ("label_accuracy", "asr", "canary_tpr_at_1pct_fpr")),
            str(len(some)),
        )
    return table


def _most(records: Sequence[Record], name: str) -> str:
    """Return the largest figure with its attack, "" where no cell has it."""
    top = best(records, name)
    return "" if top is None else f"{value(top, name):.1%} {escape(top.config.attack.id)}"


def _images(records: Frame) -> str:
    """Return the highest median PSNR of a worst case."""
    images = records.of([r for r in records if question_for(r).inputs])
    top = worst_of((row.worst("psnr_median") for row in images.by(ROW).values()), "psnr_median")
    return "" if top is None else f"{value(top, 'psnr_median'):.1f} dB {escape(top.name)}"
