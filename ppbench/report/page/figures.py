"""Drawing of all figures, as SVG and PNG; the plots are in `curves` and `html`.

Equal input gives equal bytes: no dates, no process-wide state, ids from a fixed salt. Names are drawn as plain text,
never as formulas. A figure is the same in a file and on the page.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable
from html import escape
from typing import Any, Final, Protocol

import matplotlib
import seaborn
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK = "#010203"
"""Color of text and axes; the inline form replaces it by `currentColor`, so that it reads on dark pages too."""
MARKERS = "os^Dv<>Ph*"
"""Markers of the series of a figure, in order."""
DPI = 150
"""Dots per inch of PNGs."""
STYLE: Final[Any] = {
    **seaborn.axes_style("ticks"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "axes.titley": 1.0,  # or matplotlib measures all ticks twice to find a place
}
"""The rcParams of all figures, for `rc_context`, so that nothing process-wide changes."""


class Plot(Protocol):
    """A figure to draw: frozen, with a `str` that includes all of it."""

    @property
    def title(self) -> str:
        """Its title."""

    @property
    def label(self) -> str:
        """The text for screen readers."""

    def draw(self) -> Figure:
        """Return the figure."""


def tip(line: Line2D, about: str, points: Iterable[str] = ()) -> None:
    """Give a line the tooltip `about`, and its markers `points`: kept in the line's id until the SVG has titles."""
    line.set_gid("tip\n" + "\n".join(" ".join(words.split()) for words in (about, *points)))


def _with_titles(svg: str) -> str:
    """Return matplotlib's SVG with the words of `tip` as titles of the lines and of their markers."""

    def titled(group: re.Match[str]) -> str:
        about, *points = group[2].split("\n")
        words, drawn = iter(points), group[3]
        if points:
            drawn = re.sub(r"(<use [^>]*)/>", lambda use: f"{use[1]}><title>{next(words)}</title></use>", drawn)
        return f'<g class="tip"><title>{about}</title>{drawn}'

    return re.sub(r"<g id=([\"'])tip\n(.*?)\1>(.*?)(?=<g id=|</svg>)", titled, svg, flags=re.DOTALL)


_KEPT: dict[str, str] = {}
_MANY = 400  # figures: more than a page has drawn


class Picture:
    """A figure, drawn once. svg: matplotlib's; label: a hash in its PNG: equal labels, equal bytes."""

    def __init__(self, plot: Plot) -> None:
        self._style = STYLE | {"svg.hashsalt": str(plot)}
        with matplotlib.rc_context(self._style):
            self._figure, buffer = plot.draw(), io.StringIO()
            self._figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
        self.svg = _with_titles(buffer.getvalue())
        self.label = hashlib.sha256(f"{matplotlib.__version__} {DPI} {self.svg}".encode()).hexdigest()
        if len(_KEPT) >= _MANY:
            _KEPT.clear()
        _KEPT[str(plot)] = self.svg

    def png(self) -> bytes:
        """Return the figure as PNG on white, with its label inside."""
        buffer, about = io.BytesIO(), {"Software": None, "Source": self.label}
        fast = {"compress_level": 3}
        with matplotlib.rc_context(self._style):
            self._figure.savefig(buffer, format="png", dpi=DPI, facecolor="white", metadata=about, pil_kwargs=fast)
        return buffer.getvalue()


def svg_of(plot: Plot, *, inline: bool = False) -> str:
    """Return a figure as SVG for a file or, `inline`, for pasting into HTML; cached."""
    svg = _KEPT.get(str(plot)) or Picture(plot).svg
    return _inline(svg, plot.label) if inline else svg.replace(INK, "#222222")


def _inline(svg: str, label: str) -> str:
    """Return matplotlib's SVG for a page: with its ink and font, a third of the size, and without addresses."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    view, width = re.search(r'viewBox="[^"]*"', head), re.search(r'viewBox="0 0 ([\d.]+)', head)
    ends = "" if width is None else f"min-width:{0.8 * float(width[1]):.0f}px;max-width:{1.8 * float(width[1]):.0f}px"
    # matplotlib numbers its groups alike in every figure; a page may hold each id once.
    rest = re.sub(r'<g id="[\w.]+_\d+"', "<g", rest)
    rest = re.sub(r">\s+<", "><", re.sub(r"<[^>]*>", _short, rest))
    start = f'<svg role="img" aria-label="{escape(label, quote=True)}" style="{ends}" {view[0] if view else ""}>'
    return (start + rest).replace(INK, "currentColor")


def _short(element: re.Match[str]) -> str:
    """Return a tag with two decimals, without fonts and null rotations."""
    text = re.sub(r' transform="rotate\(-0 [^"]*"|font-family: [^;"]*;? ?', "", element[0])
    return re.sub(r"\s+", " ", re.sub(r"(\.\d\d)\d+", r"\1", text))
