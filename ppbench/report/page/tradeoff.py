"""One figure per board: each setting's worst case over its accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import seaborn
from matplotlib.figure import Figure

from ppbench.report.controls import CONTROLS
from ppbench.report.metrics import METRICS
from ppbench.report.page.entries import Board, Entry
from ppbench.report.page.figures import INK, tip
from ppbench.report.page.sections import board_title

_MARKERS = "os^Dv<>Ph*"
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
            look |= dict(marker=_MARKERS[index % len(_MARKERS)], markersize=5, linewidth=0.8, linestyle=":")
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
    unit = METRICS.get(board.headline, ("", ""))[0] if board.headline in METRICS else ""
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
