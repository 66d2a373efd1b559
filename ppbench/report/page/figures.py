"""Figures as SVG and PNG, and that of the privacy-preserving characteristic (PPC); `curves` and `played` have others.

Equal input gives equal bytes: no dates, no process-wide state, ids from a fixed salt. Names of defenses and
attacks are drawn as plain text, never as formulas. A figure is the same in a file and on the page, where the
values of a mark are read by pointing at it.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
import seaborn
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ppbench.questions.base import questions
from ppbench.report.cap import DistanceName, PpcPoint

INK = "#010203"
"""Color of text and axes; the inline form replaces it by `currentColor`, so that it reads on dark pages too.
"""
REGIONS = (("#2ca25f", 0.0, math.log10(2)), (None, math.log10(2), math.log10(11)), ("#de2d26", math.log10(11), 99.0))
_MARKERS = "os^Dv<>Ph*"
DPI = 150
"""Dots an inch of PNGs."""
LABELS = {d.name: f"{d.words} ({d.name})" for question in questions().values() for d in question.distances}
"""What the axis of each distance is called."""


@dataclass(frozen=True)
class Line:
    """One attack over the control values. adaptive: drawn solid and filled; plain ones dashed and hollow."""

    attack: str
    adaptive: bool
    points: tuple[PpcPoint, ...]


@dataclass(frozen=True)
class Ppc:
    """A figure of the privacy-preserving characteristic.

    Attributes:
        title: what it is about.
        control: name of the control parameter.
        distance: which distance the right axis shows.
        lines: at least one, each with at least one point; accuracies are those of the first line to have a
            control.
        defense: whose it is.
    """

    title: str
    control: str
    distance: DistanceName
    lines: tuple[Line, ...]
    defense: str = ""


def style() -> Any:
    """Return the rcParams of all figures; passed to `rc_context`, so nothing process-wide changes.

    Titles have their place given, or matplotlib measures all ticks twice to find one.
    """
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return {
        **seaborn.axes_style("ticks"),
        **dict.fromkeys(ink, INK),
        "svg.fonttype": "none",
        "svg.hashsalt": "ppbench",
        "text.parse_math": False,
        "axes.formatter.use_mathtext": False,
        "font.size": 9,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "legend.frameon": False,
        "axes.titley": 1.0,
    }


def tip(line: Line2D, about: str, points: Iterable[str] = ()) -> None:
    """Let who points at `line` read `about`, and at its markers `points`, one each: titles in the SVG.

    The words travel as the line's id, the only thing of ours that matplotlib writes beside what it draws.
    """
    line.set_gid("tip\n" + "\n".join(" ".join(words.split()) for words in (about, *points)))


def _with_titles(svg: str) -> str:
    """Return matplotlib's SVG with the words of `tip` as titles of the lines and of their markers."""

    def titled(group: re.Match[str]) -> str:
        about, *points = group[2].split("\n")
        words = iter(points)
        drawn = group[3]
        if points:
            drawn = re.sub(r"(<use [^>]*)/>", lambda use: f"{use[1]}><title>{next(words)}</title></use>", drawn)
        return f'<g class="tip"><title>{about}</title>{drawn}'

    return re.sub(r"<g id=([\"'])tip\n(.*?)\1>(.*?)(?=<g id=|</svg>)", titled, svg, flags=re.DOTALL)


def _whiskers(values: Sequence[tuple[float, float | None, float | None]]) -> NDArray[np.float64]:
    """Return [2, n] distances from (value, low, high) to the ends of the intervals; 0 where there is none."""
    ends = [(v - (v if lo is None else lo), (v if hi is None else hi) - v) for v, lo, hi in values]
    return np.abs(np.array(ends, dtype=np.float64)).T


def _draw(ppc: Ppc) -> Figure:
    """Return the figure: accuracy on the left axis, distances on the right, regions where ratios are known.

    It is laid out by hand: matplotlib's own layout takes as long as the drawing.
    """
    points = [point for line in ppc.lines for point in line.points]
    by_ratio = all(point.ratio is not None for point in points)
    grid = sorted({point.control for point in points})
    legend = 0.19 * ((len(ppc.lines) + 2) // 2)  # inches, which must not eat up the plot
    width, height, side, foot = 5.4, 2.95 + legend, 0.64, 0.58 + legend
    figure = Figure(figsize=(width, height))
    figure.subplots_adjust(left=side / width, right=1 - side / width, top=1 - 0.3 / height, bottom=foot / height)
    left = figure.subplots()
    left.yaxis.set_label_coords(-0.47 / (width - 2 * side), 0.5)
    left.xaxis.set_label_coords(0.5, -0.3 / (height - 0.3 - foot))
    right = left.twinx()

    def at(point: PpcPoint) -> float:
        known = point.x()
        return known if by_ratio and known is not None else float(grid.index(point.control))

    one_each = {point.control: point for point in reversed(points)}
    _accuracy(ppc, left, sorted(one_each.values(), key=at), at)
    palette = seaborn.color_palette("colorblind")
    for index, line in enumerate(ppc.lines):
        color, marker = palette[(index + 1) % len(palette)], _MARKERS[index % len(_MARKERS)]
        shown = sorted(line.points, key=at)
        values = [(p.distance.value, p.distance.low, p.distance.high) for p in shown]
        label = f"{line.attack[:40]} ({'adaptive' if line.adaptive else 'plain'})"
        drawn = right.errorbar(
            [at(p) for p in shown],
            [p.distance.value for p in shown],
            yerr=_whiskers(values),
            color=color,
            marker=marker,
            markersize=5,
            markerfacecolor=color if line.adaptive else "none",
            linestyle="-" if line.adaptive else "--",
            linewidth=1.5,
            capsize=2,
            label=label,
        )
        words = (_words(ppc, p, ppc.distance, *v) for p, v in zip(shown, values, strict=True))
        tip(drawn.lines[0], label, (f"{label}, {value}" for value in words))
    right.set_ylim(0, max(1.05, 1.1 * right.get_ylim()[1] if right.get_ylim()[1] > 1.05 else 1.05))
    _axes(figure, left, right, ppc, grid, by_ratio)
    return figure


def _words(ppc: Ppc, point: PpcPoint, name: str, value: float, low: float | None, high: float | None) -> str:
    """Return what a marker says: "sigma = 0.1: recon/1 0.512 (0.480 to 0.560), gradient / perturbation 3.1"."""
    interval = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    ratio = "" if point.ratio is None else f", gradient / perturbation {point.ratio:.3g}"
    return f"{ppc.control} = {point.control:g}: {name} {value:.3f}{interval}{ratio}"


def _accuracy(ppc: Ppc, axis: Any, points: Sequence[PpcPoint], at: Any) -> None:
    values = [(p.accuracy, p.accuracy_low, p.accuracy_high) for p in points]
    drawn = axis.errorbar(
        [at(p) for p in points],
        [p.accuracy for p in points],
        yerr=_whiskers(values),
        color=INK,
        linewidth=2,
        marker="o",
        markersize=3,
        capsize=2,
        label="accuracy (left axis)",
    )
    tip(drawn.lines[0], "accuracy", (_words(ppc, p, "accuracy", *v) for p, v in zip(points, values, strict=True)))


def _axes(figure: Figure, left: Any, right: Any, ppc: Ppc, grid: Sequence[float], by_ratio: bool) -> None:
    left.set_ylim(0, 1.02)
    left.set_ylabel("accuracy")
    right.set_ylabel(LABELS[ppc.distance])
    if by_ratio:
        low, high = left.get_xlim()
        for color, start, stop in REGIONS:
            if color is not None and stop > low and start < high:
                left.axvspan(max(start, low), min(stop, high), color=color, alpha=0.13, linewidth=0, zorder=0)
        left.set_xlim(low, high)
        left.set_xlabel("log10(r + 1), r = gradient / perturbation")
    else:  # evenly spaced: grids mix decades with steps, and 0 has no place on a logarithmic axis
        left.set_xticks(range(len(grid)), [f"{value:g}" for value in grid])
        left.set_xlabel(ppc.control[:60])
    left.set_title(ppc.title[:80], fontsize=10)
    handles = [axis.get_legend_handles_labels() for axis in (left, right)]
    figure.legend(
        [h for some, _ in handles for h in some],
        [label for _, some in handles for label in some],
        loc="lower center",
        ncols=2,
        fontsize=8,
    )


def ppc_svg(ppc: Ppc, *, inline: bool = False) -> str:
    """Return the figure as SVG, see `finished`."""
    about = f"{ppc.title}: accuracy and distance over {ppc.control}"
    return finished(drawn_svg(lambda: _draw(ppc), str(ppc)), about, inline)


_KEPT: dict[str, str] = {}
_MANY = 400  # figures: more than a page has drawn


def drawn_svg(draw: Callable[[], Figure], salt: str) -> str:
    """Return the figure that `draw` makes as matplotlib's SVG; the ids in it are made from `salt`.

    What was drawn of equal `salt`, which must say all of the figure, is kept for the next who asks.
    """
    return _KEPT[salt] if salt in _KEPT else Picture(draw, salt).svg


class Picture:
    """A figure that is drawn once, as SVG and, where asked, as PNG.

    svg: as of `drawn_svg`; label: what the PNG is known by: equal labels, equal bytes.
    """

    def __init__(self, draw: Callable[[], Figure], salt: str) -> None:
        """Make the figure with `draw` and draw it as SVG."""
        self._style = style() | {"svg.hashsalt": salt}
        with matplotlib.rc_context(self._style):
            self._figure, buffer = draw(), io.StringIO()
            self._figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        self.svg = _with_titles(buffer.getvalue())
        if len(_KEPT) >= _MANY:
            _KEPT.clear()
        _KEPT[salt] = self.svg
        made_by = f"{matplotlib.__version__} {DPI} {self.svg}"
        self.label = hashlib.sha256(made_by.encode()).hexdigest()

    def png(self) -> bytes:
        """Return the figure as PNG on white, DPI dots an inch, with its label inside."""
        buffer, about = io.BytesIO(), {"Software": None, "Source": self.label}
        with matplotlib.rc_context(self._style):
            self._figure.savefig(
                buffer, format="png", dpi=DPI, facecolor="white", metadata=about, pil_kwargs={"compress_level": 3}
            )
        return buffer.getvalue()


def finished(svg: str, about: str, inline: bool) -> str:
    """Return `drawn_svg`'s SVG for a file or, `inline`, for pasting into HTML, see `inline_svg`."""
    return inline_svg(svg, about) if inline else svg.replace(INK, "#222222")


def inline_svg(svg: str, about: str) -> str:
    """Return matplotlib's SVG for pasting into HTML; `about` is read to who cannot see it.

    It has no prolog, no metadata, no namespace declarations (so nothing that looks like an address), page-colored ink,
    the page's font, ids of its own, and a third of the characters. A page narrower than four fifths of it scrolls it.
    """
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    view, width = re.search(r'viewBox="[^"]*"', head), re.search(r'viewBox="0 0 ([\d.]+)', head)
    ends = "" if width is None else f"min-width:{0.8 * float(width[1]):.0f}px;max-width:{1.8 * float(width[1]):.0f}px"
    label = escape(about, quote=True)
    # matplotlib numbers its groups alike in every figure; a page may hold each id once.
    rest = re.sub(r'<g id="[\w.]+_\d+"', "<g", rest)
    rest = re.sub(r"<[^>]*>", _short, rest)
    rest = re.sub(r">\s+<", "><", rest)
    return f'<svg role="img" aria-label="{label}" style="{ends}" {view[0] if view else ""}>{rest}'.replace(
        INK, "currentColor"
    )


def _short(element: re.Match[str]) -> str:
    """Return a tag with two digits after the point and without what the page says: fonts, turns by nothing."""
    text = re.sub(r' transform="rotate\(-0 [^"]*"|font-family: [^;"]*;? ?', "", element[0])
    return re.sub(r"\s+", " ", re.sub(r"(\.\d\d)\d+", r"\1", text))


def ppc_picture(ppc: Ppc) -> Picture:
    """Return the figure, drawn."""
    return Picture(lambda: _draw(ppc), str(ppc))
