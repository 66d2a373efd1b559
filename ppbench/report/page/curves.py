"""Two figures of a board: each attack's result by the number of gradient evaluations, and ROC curves on log scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import seaborn
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from ppbench.metrics.membership import merged, roc
from ppbench.metrics.modalities import BROKEN_DB, modality_of
from ppbench.questions.base import question_for, question_of
from ppbench.questions.flags import reached
from ppbench.questions.membership import halves
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.page.entries import Board
from ppbench.report.page.figures import INK, Plot, tip

PANELS = 6
"""Rows of a board in one figure; further ones go into another."""
BUDGET_MARKS = 150
"""Largest number of budgets at which a line is drawn: evenly chosen among those at which something changed."""
ROC_LINES = 10
"""ROC curves in one figure, as many as there are colors; further rows go into another figure."""


@dataclass(frozen=True)
class BudgetLine:
    """One attack: gradient evaluations a batch, ascending; share of victims above 20 dB and median PSNR reached."""

    attack: str
    marks: tuple[int, ...]
    share: tuple[float, ...]
    decibels: tuple[float, ...]


@dataclass(frozen=True)
class Budget:
    """Budget curves. panels: a title for each defense setting, and its attacks."""

    title: str
    panels: tuple[tuple[str, tuple[BudgetLine, ...]], ...]

    @property
    def label(self) -> str:
        """The text for screen readers."""
        return f"{self.title}: share of victims above 20 dB and median PSNR"

    def draw(self) -> Figure:
        """Return the figure: one column per panel, the share above, the median PSNR below, one line per attack."""
        names = sorted({line.attack for _, lines in self.panels for line in lines})
        style, count = dict(zip(names, _styles(len(names)), strict=True)), len(self.panels)
        columns = max(1, min(4, count + 1, len(names)))
        figure = _figure(max(4.2, 1.9 * count + 0.7), 4.0, rows=math.ceil(len(names) / columns))
        grid = figure.subplots(2, count, sharex=True, sharey="row", squeeze=False)
        figure.subplots_adjust(wspace=0.08, hspace=0.1)
        for column, (title, lines) in enumerate(self.panels):
            for line in lines:
                look, end = style[line.attack], f"{line.attack}: {line.marks[-1]} evaluations"
                _steps(grid[0][column], line, line.share, f"{end}, {line.share[-1]:.1%} above 20 dB", look)
                _steps(grid[1][column], line, line.decibels, f"{end}, median PSNR {line.decibels[-1]:.1f} dB", look)
            grid[0][column].set_title(title[:32], fontsize=9)
        top = max(max(line.decibels) for _, lines in self.panels for line in lines)
        grid[0][0].set(xscale="log", ylim=(-0.03, 1.03), ylabel="share above 20 dB")
        grid[1][0].set(ylim=(0, max(25.0, 1.05 * top)), ylabel="median PSNR, dB")
        for axis in grid[1]:
            axis.axhline(BROKEN_DB, color=INK, linewidth=0.7, linestyle=":")
            axis.xaxis.set_major_formatter(_plain)
        for axis in grid.flat:
            axis.xaxis.set_minor_locator(NullLocator())  # they take half of the time to draw
        grid[1][(count - 1) // 2].set_xlabel("gradient evaluations a batch")
        handles = [Line2D([], [], linewidth=1.4, label=name[:40], **style[name]) for name in names]
        figure.legend(handles=handles, loc="lower center", ncols=columns, fontsize=8)
        return figure


@dataclass(frozen=True)
class RocLine:
    """The ROC curve of the strongest attack on one defense setting, its points ascending; members, others: how many."""

    name: str
    fpr: tuple[float, ...]
    tpr: tuple[float, ...]
    members: int
    others: int


@dataclass(frozen=True)
class Rocs:
    """ROC curves of a board: of average records and of canaries, each setting under its strongest attack."""

    title: str
    average: tuple[RocLine, ...]
    canaries: tuple[RocLine, ...]

    @property
    def label(self) -> str:
        """The text for screen readers."""
        return f"{self.title}: ROC curves, log scales"

    def draw(self) -> Figure:
        """Return the figure: average records, and canaries where there are any, on logarithmic scales with chance."""
        panels = [p for p in (("average records", self.average), ("canaries", self.canaries)) if p[1]]
        rows = max(len(lines) for _, lines in panels)
        figure = _figure(4.1 * len(panels), 3.9, rows=rows + 1)
        (axes,) = figure.subplots(1, len(panels), squeeze=False)
        figure.subplots_adjust(wspace=0.25)
        for axis, (title, lines) in zip(axes, panels, strict=True):
            _roc_panel(axis, title, lines)
        return figure


def curves(board: Board, about: str) -> list[Plot]:
    """Return the curves of a board, [] where there is nothing to draw; about: what it attacks, in words."""
    chart = question_of(board.setting.kind).chart
    if chart == "budget" and board.images:
        return [*budgets(board, about)]
    return [*rocs(board, about)] if chart == "roc" else []


def budget_line(record: Record) -> BudgetLine | None:
    """Return an attack's result by the number of gradient evaluations per batch; None if it did not search.

    A victim counts with the answer at that budget: along `ImageScore.path`, else 0 dB until its batch was done.
    """
    scores: Sequence[Any] = record.victims if question_for(record).inputs else ()
    marks = sorted({max(1, m) for score in scores for m in (score.evaluations, *(m for m, _ in score.path))})
    if record.status != "complete" or not marks or marks[-1] <= 1:
        return None
    if len(marks) > BUDGET_MARKS:
        marks = [marks[i] for i in np.unique(np.linspace(0, len(marks) - 1, BUDGET_MARKS).round().astype(int))]
    values = [[reached(score, mark) for score in scores] for mark in marks]
    share = tuple(sum(v > BROKEN_DB for v in row) / len(row) for row in values)
    return BudgetLine(record.config.attack.id, tuple(marks), share, tuple(median(row) for row in values))


def budgets(board: Board, about: str) -> list[Budget]:
    """Return the budget curves of a board of images, PANELS rows per figure, without rows of full noise."""
    panels = []
    for entry in board.entries:
        lines = [line for record in entry.records if (line := budget_line(record)) is not None]
        if lines and entry.defense.id != "full_noise" and modality_of(entry.sample.config).decibels:
            panels.append((entry.name, tuple(sorted(lines, key=lambda line: line.attack))))
    panels.sort(key=lambda panel: panel[0] != "none")  # the undefended first; else as on the board
    parts = [tuple(panels[i : i + PANELS]) for i in range(0, len(panels), PANELS)]
    return [Budget(f"Budget, {about}" + _part(i, len(parts)), part) for i, part in enumerate(parts)]


def rocs(board: Board, about: str) -> list[Rocs]:
    """Return the ROC curves of a membership board, ROC_LINES rows per figure."""
    average = _strongest(board, "auc", canaries=False)
    canaries = _strongest(board, "canary_auc", canaries=True)
    parts = range(0, max(len(average), len(canaries)), ROC_LINES)
    return [
        Rocs(
            f"ROC, {about}" + _part(i, len(parts)),
            tuple(average[at : at + ROC_LINES]),
            tuple(canaries[at : at + ROC_LINES]),
        )
        for i, at in enumerate(parts)
    ]


def _part(index: int, parts: int) -> str:
    return f", part {index + 1}" if parts > 1 else ""


def _strongest(board: Board, metric: str, canaries: bool) -> list[RocLine]:
    """Return the ROC curve of the attack with the largest `metric` on each row, one threshold for both halves."""
    lines = []
    for entry in board.entries:
        record = best([r for r in entry.records if r.status == "complete"], metric)
        members = [] if record is None else [v for v in record.victims if v.canary == canaries]
        # Where there are only canaries, `auc` is theirs; the panel of average records then stays empty.
        curve = roc(merged(halves(members))) if members else None
        if record is not None and curve is not None:
            fpr, tpr = (tuple(rates.tolist()) for rates in (curve.fpr, curve.tpr))
            lines.append(RocLine(f"{entry.name}: {record.config.attack.id}", fpr, tpr, curve.members, curve.others))
    return lines


def _steps(axis: Any, line: BudgetLine, values: tuple[float, ...], words: str, look: dict[str, Any]) -> None:
    """Draw an attack's result as steps, with a dot at its end."""
    marks, shown = (line.marks, values) if len(line.marks) > 1 else (line.marks * 2, values * 2)
    (steps,) = axis.plot(marks, shown, drawstyle="steps-post", linewidth=1.4, **look)
    (dot,) = axis.plot(marks[-1:], shown[-1:], linestyle="none", marker="o", markersize=4, color=steps.get_color())
    tip(steps, words)
    tip(dot, words)


def _roc_panel(axis: Any, title: str, lines: Sequence[RocLine]) -> None:
    floor = 0.5 / max(max(line.others, line.members) for line in lines)
    for line, style in zip(lines, _styles(len(lines)), strict=True):
        fpr, tpr = np.array(line.fpr), np.array(line.tpr)
        label = f"{line.name[:48]} (n = {line.members} + {line.others})"
        ends = np.maximum(fpr, floor), np.maximum(tpr, floor)
        (steps,) = axis.step(*ends, where="post", linewidth=1.4, label=label, **style)
        rates = (f"{tpr[fpr <= rate].max(initial=0.0):.1%} at {rate:.0%}" for rate in (0.01, 0.1, 0.5))
        tip(steps, f"{label}: TPR {', '.join(rates)} FPR")
    axis.plot([floor, 1], [floor, 1], color=INK, linewidth=0.8, linestyle=(0, (2, 2)), label="chance")
    axis.set_title(title, fontsize=10)
    axis.set(xscale="log", yscale="log", xlim=(floor, 1), ylim=(floor, 1.05))
    axis.set(xlabel="false-positive rate", ylabel="true-positive rate")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(_plain)
        side.set_minor_locator(NullLocator())
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=7.5)


def _plain(value: float, _: int) -> str:
    """Return the label of a tick of a logarithmic axis, without the formula that matplotlib makes of it."""
    return f"{value:g}"


def _styles(count: int) -> list[dict[str, Any]]:
    """Return colors, and dashes where there are more lines than colors."""
    palette, dashes = seaborn.color_palette("colorblind"), ("-", "--", ":", "-.")
    return [{"color": palette[i % 10], "linestyle": dashes[i // 10 % 4]} for i in range(count)]


def _figure(width: float, height: float, rows: int) -> Figure:
    """Return a figure of that size in inches, plus a legend of `rows`; laid out by hand, which halves the time."""
    whole = height + 0.2 * rows
    figure, foot = Figure(figsize=(width, whole)), (0.6 + 0.2 * rows) / whole
    figure.subplots_adjust(left=0.62 / width, right=1 - 0.12 / width, top=1 - 0.3 / whole, bottom=foot)
    return figure
