"""Write docs/columns.md from the declarations of `ppbench.report.columns`: `python docs/make_columns.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ppbench.base.registry import plugins
from ppbench.questions.base import questions
from ppbench.report.columns import (
    CELLS,
    ENDS,
    KEY,
    LOADED_CELLS,
    LOADED_VICTIMS,
    LOADED_WORST,
    LONG,
    METRICS,
    WORST,
    Column,
)

PAGE = Path(__file__).with_name("columns.md")
FILES = {"L": CELLS, "W": WORST, "c": LOADED_CELLS, "v": LOADED_VICTIMS, "w": LOADED_WORST}
TYPES = {"string": "text", "Int64": "whole number", "Float64": "number", "boolean": "yes or no"}
HEAD = """\
<!-- Made by docs/make_columns.py from ppbench/report/columns.py; change that, not this file. -->

# Every column

Of `leaderboard.csv` (**L**: one row per cell, which is one attack on one defense at one control value), of
`worst_case.csv` (**W**: one row per defense and control value of the boards of reconstruction), and of the tables that
`ppbench.load(FOLDER)` gives: levels "cells" (**c**), "victims" (**v**) and "worst" (**w**), in which every row is one
figure. FOLDER is a folder of results, or an archive of one; `ppbench verify FOLDER` recomputes both files.
`examples/notebook/explore.ipynb` makes figures.

- A file is UTF-8 with commas, a header, and quotes where a field needs them. A missing value is an empty field; yes and
  no are `true` and `false`; shares are 0 to 1. `leaderboard.csv` has ten significant digits, `worst_case.csv` all that
  records have. Text that a spreadsheet would run as a formula stands behind an apostrophe.
- `leaderboard.csv` always has all its columns, in this order, so that files of several boards can be put below one
  another; new ones go last. `worst_case.csv` is to be looked at: a column that would be empty in every row is not
  written.
- In tables of pandas text is `string`, whole numbers are `Int64`, numbers `Float64`, yes and no `boolean`. Text that
  tells rows apart is "" where there is nothing to say, and not missing: grouping by it loses no row.
- `*_low` and `*_high` are the ends of a 95 % interval.
"""
INTRO = {
    "key": """\
## What tells rows apart

No two rows of `worst_case.csv` are equal in all of these; a cell has its `cell_id`.
""",
    "cells": """\
## What else is said of a cell, or of a row of a board
""",
    "metrics": """\
## Metrics

Columns of `leaderboard.csv` where marked, with their intervals and chance where these stand there, too; in tables of
pandas what `metric` may be. `auc_FAMILY` is the AUC of each family of an audit's canaries.
""",
    "worst": """\
## Of `worst_case.csv` alone
""",
    "long": """\
## Of tables of pandas
""",
    "others": """\
## Figures of questions that bring their own

Such a question's figures stand behind all other columns of `leaderboard.csv`, each with `_low` and `_high`, where some
cell answers it: of questions in other packages, and of these in ours.
""",
}


def marks(column: Column) -> str:
    """Return in which files and tables a column is."""
    return " ".join(mark for mark, columns in FILES.items() if column in columns)


def table(lines: Iterable[Sequence[str]]) -> str:
    """Return rows of Markdown: the columns, where they are, type, unit and meaning."""
    head = ("column", "in", "type", "unit", "what it is")
    shown = [head, ("---",) * len(head), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in shown)


def rows(columns: Iterable[Column]) -> list[tuple[str, ...]]:
    """Return one line per column; the ends of an interval stand with the number that they are of."""
    known = {column.name: column for column in columns}
    numbers = {name for name, column in known.items() if column.dtype == "Float64"}
    lines = []
    for name, column in known.items():
        if any(name.endswith(end) and name.removesuffix(end) in numbers for end in ENDS):
            continue
        names = [name, *(f"{name}{end}" for end in ENDS if name in numbers and f"{name}{end}" in known)]
        names_shown = ", ".join(f"`{one}`" for one in names)
        lines.append((names_shown, marks(column), TYPES[column.dtype], column.unit, column.meaning))
    return lines


def metrics() -> list[tuple[str, ...]]:
    """Return one line per metric, with the columns of leaderboard.csv that are its."""
    columns = {column.name for column in CELLS}
    lines = []
    for name, spec in METRICS.items():
        own = [one for one in (f"{name}{end}" for end in (*ENDS, "_chance")) if one in columns]
        names_shown = ", ".join(f"`{one}`" for one in (name, *own))
        lines.append((names_shown, "L" if name in columns else "", "number", spec.unit, spec.meaning))
    return lines


def others() -> list[tuple[str, ...]]:
    """Return a line a figure of our questions without a chapter."""
    own = [
        q for name, q in questions().items() if not q.chapter and plugins("questions")[name].distribution == "ppbench"
    ]
    return [
        (
            ", ".join(f"`{spec.name}{end}`" for end in ("", *ENDS)),
            "L",
            "number",
            spec.unit,
            f"{spec.title} ({question.title})",
        )
        for question in own
        for spec in question.specs
    ]


def page() -> str:
    """Return the dictionary as Markdown."""
    measured = {f"{name}{end}" for name in METRICS for end in ("", *ENDS, "_chance")}
    cells = [column for column in CELLS if column.name not in measured and column not in KEY]
    worst = [column for column in WORST if column not in (*KEY, *CELLS)]
    loaded = dict.fromkeys((*LOADED_CELLS, *LOADED_VICTIMS, *LOADED_WORST))
    rest = [column for column in loaded if column not in (*KEY, *CELLS, *WORST, *LONG)]
    parts = {
        "key": rows(KEY),
        "cells": rows(cells),
        "metrics": metrics(),
        "worst": rows(worst),
        "long": [*rows(LONG), *(line for one in rest for line in rows([one]))],
        "others": others(),
    }
    return "\n".join([HEAD, *(f"{INTRO[name]}\n{table(lines)}" for name, lines in parts.items())])


if __name__ == "__main__":
    PAGE.write_text(page())
