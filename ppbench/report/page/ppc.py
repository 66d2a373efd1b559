"""The figure of the privacy-preserving characteristic (PPC): accuracy and distance over the control parameter."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import seaborn
from matplotlib.figure import Figure

from ppbench.questions.base import question_of, questions
from ppbench.records.schema import Record
from ppbench.report.cap import UNLEARNT, Cap, PpcPoint, SeriesCap, ppc_point
from ppbench.report.frame import TRAINED
from ppbench.report.knowing import Knowledge
from ppbench.report.page.entries import Board, Entry
from ppbench.report.page.figures import INK, tip
from ppbench.report.page.sections import weights_words
from ppbench.report.strays import STRAY_MARK

REGIONS = (("#2ca25f", 0.0, math.log10(2)), ("#de2d26", math.log10(11), 99.0))
_MARKERS = "os^Dv<>Ph*"
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
        color, marker = palette[(index + 1) % len(palette)], _MARKERS[index % len(_MARKERS)]
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
        ends = [(v - (v if low is None else low), (v if high is None else high) - v) for _, _, v, low, high in shown]
        drawn = axis.errorbar(places, heights, yerr=np.abs(np.array(ends, dtype=np.float64)).T, capsize=2, **look)
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


def line_caps(board: Board, series: Mapping[str, SeriesCap]) -> dict[tuple[str, str], dict[str, Cap]]:
    """Return the CAP of every line of a board's figures by its name, for each defense and distance."""
    by_line: dict[tuple[str, str], dict[str, Cap]] = defaultdict(dict)
    for entry in board.entries:
        for record in entry.records if entry.defense.control is not None else ():
            cap = series[record.cell_id].main
            by_line[entry.defense.id, cap.distance][_line_name(entry, record)] = cap
    return by_line
