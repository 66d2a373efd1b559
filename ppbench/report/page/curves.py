"""Two figures of a board: each attack's result by the number of gradient evaluations, and ROC curves on log scales."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import median
from typing import Any

import numpy as np
import seaborn
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from ppbench.metrics.membership import merged, roc
from ppbench.metrics.modality import modality_of
from ppbench.questions.base import metric_specs, question_for, question_of, questions
from ppbench.questions.image_metrics import ABOVE_DB, ABOVE_WORDS
from ppbench.questions.images import reached
from ppbench.questions.membership import halves
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.cap import STRAY_MARK, UNLEARNT, Cap, PpcPoint, ppc_point
from ppbench.report.controls import CONTROLS
from ppbench.report.entries import Board, Entry
from ppbench.report.frame import TRAINED
from ppbench.report.knowing import Knowledge
from ppbench.report.page.figures import INK, MARKERS, Plot, tip
from ppbench.report.page.sections import board_title, weights_words

PANELS = 6
"""Rows of a board in one figure; further ones go into another."""
BUDGET_MARKS = 150
"""Largest number of budgets at which a line is drawn: evenly chosen among those at which something changed."""
ROC_LINES = 10
"""ROC curves in one figure, as many as there are colors; further rows go into another figure."""


@dataclass(frozen=True)
class BudgetLine:
    """One attack: gradient evaluations a batch, ascending; share above `ABOVE_DB` and median PSNR reached."""

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
        return f"{self.title}: share of victims {ABOVE_WORDS} and median PSNR"

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
                _steps(grid[0][column], line, line.share, f"{end}, {line.share[-1]:.1%} {ABOVE_WORDS}", look)
                _steps(grid[1][column], line, line.decibels, f"{end}, median PSNR {line.decibels[-1]:.1f} dB", look)
            grid[0][column].set_title(title[:32], fontsize=9)
        top = max(max(line.decibels) for _, lines in self.panels for line in lines)
        grid[0][0].set(xscale="log", ylim=(-0.03, 1.03), ylabel=f"share {ABOVE_WORDS}")
        grid[1][0].set(ylim=(0, max(25.0, 1.05 * top)), ylabel="median PSNR, dB")
        for axis in grid[1]:
            axis.axhline(ABOVE_DB, color=INK, linewidth=0.7, linestyle=":")
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
    share = tuple(sum(v > ABOVE_DB for v in row) / len(row) for row in values)
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


# -- One figure per board: each setting's worst case over its accuracy --

FigureInterval = tuple[float, float, float]
"""A figure, and the low and high end of its 95 % interval."""


@dataclass(frozen=True)
class TradeoffPoint:
    """A row of a board. series: its defense and what differs beside the control value; about: the control value."""

    series: str
    about: str
    accuracy: FigureInterval
    leak: FigureInterval

    @property
    def words(self) -> str:
        """The tooltip."""
        accuracy, leak = (f"{v:.3g} ({low:.3g} to {high:.3g})" for v, low, high in (self.accuracy, self.leak))
        return f"{self.series} {self.about}".strip() + f": accuracy {accuracy}, worst case {leak}"


@dataclass(frozen=True)
class Tradeoff:
    """Settings of a board by series. metric: that of the ranks; safer: whether less of it leaks more; chance: the value
    of a blind guess, None where unknown.
    """

    title: str
    metric: str
    safer: bool
    chance: float | None
    settings: tuple[TradeoffPoint, ...]

    @property
    def label(self) -> str:
        """The text for screen readers."""
        return f"{self.title}: worst case over accuracy. " + "; ".join(one.words for one in self.settings)

    def draw(self) -> Figure:
        """Return the figure; up leaks more, whatever the metric, and the best corner is below right."""
        figure = Figure(figsize=(5.8, 3.4))
        figure.subplots_adjust(left=0.1, right=0.72, top=0.91, bottom=0.14)
        axis, palette = figure.subplots(), seaborn.color_palette("colorblind")
        names = [name for name, _ in groupby(one.series for one in self.settings)]
        for index, name in enumerate(names):
            some = [one for one in self.settings if one.series == name]
            look: dict[str, Any] = {"color": INK if name in CONTROLS else palette[index % len(palette)]}
            look |= dict(marker=MARKERS[index % len(MARKERS)], markersize=5, linewidth=0.8, linestyle=":")
            xs, ys = [one.accuracy[0] for one in some], [one.leak[0] for one in some]
            ends: dict[str, Any] = {
                "xerr": _ends([one.accuracy for one in some]),
                "yerr": _ends([one.leak for one in some]),
            }
            drawn = axis.errorbar(xs, ys, **ends, elinewidth=0.7, label=name[:40], **look)
            tip(drawn.lines[0], name, (one.words for one in some))
            for one, x, y in zip(some, xs, ys, strict=True):
                value = one.about.rpartition("=")[2].strip()
                axis.annotate(value, (x, y), (4, 3), textcoords="offset points", fontsize=7)
        if self.chance is not None:
            axis.axhline(self.chance, color=INK, linewidth=0.7, linestyle=(0, (2, 2)))
        if self.safer:
            axis.invert_yaxis()
        axis.set_xlabel("accuracy")
        axis.set_ylabel(f"leaks more, by {self.metric}")
        axis.set_title(self.title[:80], fontsize=10)
        figure.legend(loc="center right", fontsize=7.5)
        return figure


def _ends(figures: Sequence[FigureInterval]) -> list[list[float]]:
    """Return how far the intervals reach below, and above."""
    return [[abs(one[0] - one[side]) for one in figures] for side in (1, 2)]


def tradeoff_of(board: Board) -> Tradeoff | None:
    """Return a board's figure; None where fewer than two defended settings have both figures."""
    entries = sorted(board.entries, key=lambda entry: entry.key.value or 0.0)  # lines follow the control value
    settings = [one for entry in entries for one in _settings(entry, board.headline)]
    if sum(one.series not in CONTROLS for one in settings) < 2:
        return None
    metrics = [m for e in board.entries if e.worst is not None and (m := e.worst.metric(board.headline)) is not None]
    blind = [e.leak.blind for e in board.entries if e.leak is not None and e.leak.blind is not None]
    chance = blind[0] if blind and board.images else next((m.chance for m in metrics if m.chance is not None), None)
    spec = metric_specs().get(board.headline)
    unit = "" if spec is None else spec.unit
    words = f"{board.headline}{f' ({unit})' if unit else ''}"
    ordered = sorted(settings, key=lambda one: (one.series not in CONTROLS, one.series))
    return Tradeoff(board_title(board.setting), words, any(m.higher_is_safer for m in metrics), chance, tuple(ordered))


def _settings(entry: Entry, name: str) -> Iterator[TradeoffPoint]:
    metric = None if entry.worst is None else entry.worst.metric(name)
    use = entry.sample.utility
    if metric is None or metric.value is None or use.accuracy is None:
        return
    series = " ".join(word for word in (entry.defense.id, entry.differs) if word)
    accuracy = _span(use.accuracy, use.low, use.high)
    yield TradeoffPoint(series, entry.control, accuracy, _span(metric.value, metric.low, metric.high))


def _span(value: float, low: float | None, high: float | None) -> FigureInterval:
    return value, value if low is None else low, value if high is None else high


# -- The figure of the privacy-preserving characteristic (PPC): accuracy and distance over the control parameter --

REGIONS = (("#2ca25f", 0.0, math.log10(2)), ("#de2d26", math.log10(11), 99.0))
DISTANCE_LABELS = {d.name: f"{d.words} ({d.name})" for question in questions().values() for d in question.distances}
"""The axis label of each distance."""
MarkedValue = tuple[PpcPoint, str, float, float | None, float | None]
"""A point, and the name, value and interval of its accuracy or distance."""


@dataclass(frozen=True)
class AttackLine:
    """One attack over the control values. adaptive: drawn solid and filled; plain ones dashed and hollow."""

    attack: str
    adaptive: bool
    points: tuple[PpcPoint, ...]


@dataclass(frozen=True)
class Ppc:
    """A figure of one defense: accuracy on the left axis, `distance` on the right, regions where ratios are known."""

    title: str
    control: str
    distance: str
    lines: tuple[AttackLine, ...]
    defense: str = ""

    @property
    def label(self) -> str:
        """The text for screen readers."""
        return f"{self.title}: accuracy and distance over {self.control}"

    @cached_property
    def points(self) -> list[PpcPoint]:
        """The points of all lines."""
        return [point for line in self.lines for point in line.points]

    @cached_property
    def grid(self) -> list[float]:
        """The control values, ascending."""
        return sorted({point.control for point in self.points})

    @cached_property
    def by_ratio(self) -> bool:
        """Whether all ratios of gradient to perturbation are known, so that they are the x-axis."""
        return all(point.ratio is not None for point in self.points)

    def at(self, point: PpcPoint) -> float:
        """Return a point's x-coordinate: its ratio, or evenly spaced (grids mix decades with steps, and have a 0)."""
        known = point.x()
        return known if self.by_ratio and known is not None else float(self.grid.index(point.control))

    def draw(self) -> Figure:
        """Return the figure, laid out by hand: matplotlib's own layout takes as long as the drawing."""
        legend = 0.19 * ((len(self.lines) + 2) // 2)  # inches, added to the plot
        width, height, side, foot = 5.4, 2.95 + legend, 0.64, 0.58 + legend
        figure = Figure(figsize=(width, height))
        figure.subplots_adjust(left=side / width, right=1 - side / width, top=1 - 0.3 / height, bottom=foot / height)
        left = figure.subplots()
        left.yaxis.set_label_coords(-0.47 / (width - 2 * side), 0.5)
        left.xaxis.set_label_coords(0.5, -0.3 / (height - 0.3 - foot))
        right = left.twinx()
        self._accuracy(left)
        for index, line in enumerate(self.lines):
            self._distances(right, index, line)
        right.set_ylim(0, max(1.05, 1.1 * right.get_ylim()[1] if right.get_ylim()[1] > 1.05 else 1.05))
        self._axes(left, right)
        (marks, labels), (more, others) = (axis.get_legend_handles_labels() for axis in (left, right))
        figure.legend(marks + more, labels + others, loc="lower center", ncols=2, fontsize=8)
        return figure

    def _accuracy(self, axis: Any) -> None:
        one_each = {point.control: point for point in reversed(self.points)}.values()
        values = [(p, "accuracy", p.accuracy, p.accuracy_low, p.accuracy_high) for p in one_each]
        look = dict(color=INK, linewidth=2, marker="o", markersize=3, label="accuracy (left axis)")
        self._curve(axis, values, look, "accuracy")
        for mark, sign in ((UNLEARNT, "x"), (STRAY_MARK, "D")):
            places = sorted({(self.at(p), p.accuracy) for p in self.points if p.mark == mark})  # of any seed
            if places:
                axis.plot(*zip(*places, strict=True), sign, color=INK, markersize=9, fillstyle="none", label=mark)

    def _distances(self, axis: Any, index: int, line: AttackLine) -> None:
        palette = seaborn.color_palette("colorblind")
        color, marker = palette[(index + 1) % len(palette)], MARKERS[index % len(MARKERS)]
        label = f"{line.attack[:40]} ({'adaptive' if line.adaptive else 'plain'})"
        values = [(p, self.distance, p.distance.value, p.distance.low, p.distance.high) for p in line.points]
        look = dict(color=color, marker=marker, markersize=5, linewidth=1.5, label=label)
        look |= dict(markerfacecolor=color if line.adaptive else "none", linestyle="-" if line.adaptive else "--")
        self._curve(axis, values, look, label, f"{label}, ")

    def _curve(
        self, axis: Any, values: Sequence[MarkedValue], look: dict[str, Any], about: str, head: str = ""
    ) -> None:
        """Draw values with their intervals and tooltips."""
        shown = sorted(values, key=lambda value: self.at(value[0]))
        places, heights = [self.at(point) for point, *_ in shown], [value for _, _, value, _, _ in shown]
        ends = _ends([_span(v, low, high) for _, _, v, low, high in shown])
        drawn = axis.errorbar(places, heights, yerr=ends, capsize=2, **look)
        tip(drawn.lines[0], about, (head + self._words(*value) for value in shown))

    def _words(self, point: PpcPoint, name: str, value: float, low: float | None, high: float | None) -> str:
        """Return a marker's tooltip: "sigma = 0.1: recon/1 0.512 (0.480 to 0.560), gradient / perturbation 3.1"."""
        interval = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
        ratio = "" if point.ratio is None else f", gradient / perturbation {point.ratio:.3g}"
        mark = f", {point.mark}" if point.mark else ""
        return f"{self.control} = {point.control:g}: {name} {value:.3f}{interval}{ratio}{mark}"

    def _axes(self, left: Any, right: Any) -> None:
        left.set_ylim(0, 1.02)
        left.set_ylabel("accuracy")
        right.set_ylabel(DISTANCE_LABELS[self.distance])
        left.set_title(self.title[:80], fontsize=10)
        if not self.by_ratio:
            left.set_xticks(range(len(self.grid)), [f"{value:g}" for value in self.grid])
            left.set_xlabel(self.control[:60])
            return
        low, high = left.get_xlim()
        for color, start, stop in REGIONS:
            if stop > low and start < high:
                left.axvspan(max(start, low), min(stop, high), color=color, alpha=0.13, linewidth=0, zorder=0)
        left.set_xlim(low, high)
        left.set_xlabel("log10(r + 1), r = gradient / perturbation")


def ppcs(board: Board, known: Knowledge) -> list[Ppc]:
    """Return one figure per defense and distance with two control values; other differences make other lines."""
    lines: dict[tuple[str, str, str], dict[tuple[str, bool], list[PpcPoint]]] = defaultdict(dict)
    far = {
        entry.key.only(TRAINED) for entry in board.entries if any(badge.text == STRAY_MARK for badge in entry.badges)
    }
    for entry in board.entries:
        for record in entry.records:
            point, control = ppc_point(record, far=far), entry.defense.control
            if point is not None and control is not None:
                key = (entry.defense.id, control.name, point.distance.name)
                lines[key].setdefault((_line_name(entry, record), known.adaptive(record)), []).append(point)
    figures = []
    for (defense, control_name, distance), attacks in sorted(lines.items()):
        drawn = [AttackLine(name, knows, tuple(points)) for (name, knows), points in sorted(attacks.items())]
        if len({point.control for line in drawn for point in line.points}) > 1:
            batch = "" if question_of(board.setting.kind).source == "model" else f"batch {board.setting.batch}, "
            title = f"{defense}, {batch}{weights_words(board.setting)}"
            figures.append(Ppc(title, control_name, distance, tuple(drawn), defense))
    return figures


def _line_name(entry: Entry, record: Record) -> str:
    """Return the name of a line: the attack, the one that it follows, the victims' role, other differences."""
    attack, role = record.config.attack, record.config.role
    name = attack.id if attack.follows is None else f"{attack.id} after {attack.follows}"
    name = f"{name} ({role})" if role else name
    return f"{name}, {entry.differs}" if entry.differs else name


def line_caps(board: Board, series: Mapping[str, Cap]) -> dict[tuple[str, str], dict[str, Cap]]:
    """Return the CAP of every line of a board's figures by its name, for each defense and distance."""
    by_line: dict[tuple[str, str], dict[str, Cap]] = defaultdict(dict)
    for entry in board.entries:
        for record in entry.records if entry.defense.control is not None else ():
            cap = series[record.cell_id]
            by_line[entry.defense.id, cap.distance][_line_name(entry, record)] = cap
    return by_line
