"""The figures of boards where they are needed: on the page, as long as there is place, and in a folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from ppbench.base.files import write_atomic
from ppbench.report.cap import Cap
from ppbench.report.knowing import Knowledge
from ppbench.report.page.curves import curves
from ppbench.report.page.entries import Board
from ppbench.report.page.evaluations import ALONE
from ppbench.report.page.figures import Picture, Plot, svg_of
from ppbench.report.page.ppc import ppcs
from ppbench.report.page.sections import Chart, about
from ppbench.report.page.tradeoff import tradeoff_of

BUDGET = 8_000_000
"""Characters of figures that a page carries at most; what is beyond is named, and lies in figures/."""
HEAD = 400
"""Bytes at the head of a PNG in which its label stands."""


class Drawings:
    """The figures of a page, up to a number of characters: what comes first is drawn."""

    def __init__(self) -> None:
        self._left = BUDGET

    def chart(self, plot: Plot, caps: tuple[tuple[str, Cap], ...] = ()) -> Chart:
        """Return a figure for the page; caps: of its lines."""
        svg = svg_of(plot, inline=True) if self._left > 0 else ""
        self._left -= len(svg)
        return Chart(plot.title, Markup(svg) or None, caps)


def write_figures(folder: Path, found: Sequence[Board], known: Knowledge) -> list[Path]:
    """Write all boards' figures as SVG, and as PNG those whose label there differs; remove drawings of none."""
    folder.mkdir(exist_ok=True)
    written: list[Path] = []
    uses: Counter[str] = Counter()
    for words, plot in (named for board in found for named in _named(board, known)):
        name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
        uses[name] += 1  # boards may differ in what the words leave out
        name = name if uses[name] == 1 else f"{name}-{uses[name]}"
        vector, dots, picture = folder / f"{name}.svg", folder / f"{name}.png", Picture(plot)
        write_atomic(vector, svg_of(plot).encode())
        if not (dots.is_file() and picture.label.encode() in dots.read_bytes()[:HEAD]):
            write_atomic(dots, picture.png())
        written += [vector, dots]
    for path in folder.iterdir():
        if path.suffix in (".svg", ".png") and path not in written:
            path.unlink()
    return written


def _named(board: Board, known: Knowledge) -> Iterator[tuple[str, Plot]]:
    """Yield a board's figures with words that name their files."""
    setting = board.setting
    plain = (setting.probe, setting.probe_rounds) == ("gradient", 1)
    held = "" if plain else f"{setting.probe} {setting.probe_rounds}"
    suite = "" if setting.suite == ALONE else setting.suite
    where = f"{suite} {setting.data} {setting.train}"
    if (figure := tradeoff_of(board)) is not None and not setting.intended:
        yield f"tradeoff {where} {setting.network} {figure.title} {held}", figure
    for ppc in ppcs(board, known):
        yield f"ppc {where} {setting.network} {setting.threat} {ppc.title} {held} {ppc.distance}", ppc
    for curve in curves(board, about(setting)):
        yield f"{curve.title} {where} {setting.network} {held}", curve
