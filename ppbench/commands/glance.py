"""The answer in the terminal: the headline, its reliability, and a table with one row per setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ppbench.metrics.modalities import modality_of
from ppbench.report.controls import value
from ppbench.report.page.answer import Answer
from ppbench.report.page.overview import Overview
from ppbench.report.page.standing import Setting
from ppbench.report.worst import Measured

PLAIN_WIDTH = 120  # columns where standard output is no terminal


def console(width: int = PLAIN_WIDTH) -> Console:
    """Return the console for reports; `width` columns wide if it is no terminal."""
    screen = Console()
    return screen if screen.is_terminal else Console(width=width)


def plain_table(names: Iterable[str], title: str | None = None, wrapped: Iterable[str] = ()) -> Table:
    """Return an empty table without frame; only columns in `wrapped` wrap, all others are cut."""
    table = Table(title=title, title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=name not in wrapped, overflow="fold" if name in wrapped else "ellipsis")
    return table


def say_answer(to: Console, answer: Answer) -> None:
    """Print the headline and its reliability."""
    style = {"error": "bold red", "good": "bold green", "warning": "bold yellow"}.get(answer.headline.tone, "bold")
    to.print(f"[{style}]{escape(answer.headline.words)}[/]", highlight=False)
    bad = {"failed": "bold red", "unknown": "yellow"}.get(answer.trust.state, "dim")
    unlearned = answer.trust.state == "unlearned"
    head = "" if answer.trust.reliable else "NOTHING CONCLUDED: " if unlearned else "EVALUATION UNRELIABLE: "
    to.print(f"[{bad}]{head}{escape(answer.trust.sentence)}[/]", highlight=False)


NARROW, WIDE = 100, 130
"""Widths of a terminal: below the first a table has only the first figures, from the second on it has all."""


def glance(overview: Overview, width: int) -> Table:
    """Return a table with one row per setting, or for several defenses one row each, that fits `width`."""
    single = len(overview.compared) == 1
    columns: list[tuple[str, Callable[[Setting], str]]] = [
        ("accuracy", _accuracy),
        ("worst case", _leaked),
        ("labels", lambda v: _share(v.labels, "label_accuracy")),
        ("found", lambda v: _share(v.found_again, "reidentified")),
        ("in batch", lambda v: _share(v.batch, "batch_asr")),
        ("members", lambda v: _share(v.members, "asr")),
        ("epsilon", lambda v: v.epsilon or "-"),
        ("upload", _ratio),
    ]
    columns = columns[: 2 if width < NARROW else 5 if width < WIDE else None]
    names = ["setting" if single else "defense", "verdict", *(name for name, _ in columns)]
    table = plain_table(names, wrapped=names[:2])
    for column, least in zip(table.columns, (14, 12), strict=False):
        column.min_width = least
    for row in overview.rows:
        for v in row.by_control if single else [row.value]:
            verdict = v.verdict if single and v.entry.role == "compared" else row.verdict
            table.add_row(escape(_setting(v, single)), escape(verdict), *(cell(v) for _, cell in columns))
    return table


def _setting(v: Setting, single: bool) -> str:
    if v.entry.defense.id == "none":
        return "undefended"
    words = (v.entry.control.replace(" = ", "="), v.differs)
    about = ", ".join(word for word in words if word)
    return about or v.entry.defense.id if single else " ".join(word for word in (v.entry.defense.id, about) if word)


def _accuracy(v: Setting) -> str:
    if v.accuracy is None:
        return "-" if v.mse is None else f"MSE {v.mse:.3g}"
    return f"{v.accuracy:.1%}" + ("" if v.loss is None else f" ({round(v.loss, 1) + 0.0:+.1f})")


def _leaked(v: Setting) -> str:
    if v.metric is None or v.metric.value is None:
        return "-"
    modality = modality_of(v.entry.sample.config)
    blind = v.leak.blind if v.leak is not None and modality.decibels else None
    return modality.brief(v.metric.value) + ("" if blind is None else f" (blind {blind:.0f})")


def _share(record: Measured | None, name: str) -> str:
    share = value(record, name)
    return "-" if share is None else f"{share:.0%}"


def _ratio(v: Setting) -> str:
    up = None if v.cost is None else v.cost.ratios.up
    return "-" if up is None else f"{up:.2f}x"
