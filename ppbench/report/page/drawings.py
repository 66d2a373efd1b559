"""The figures of boards on the page, as long as there is room, and in a folder."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from markupsafe import Markup

from ppbench.base.files import kind_of, make_folder, read_regular, write_atomic
from ppbench.records.schema import USUAL_PROBE
from ppbench.report.cap import Cap
from ppbench.report.entries import Board
from ppbench.report.knowing import Knowledge
from ppbench.report.page.curves import curves, ppcs, tradeoff_of
from ppbench.report.page.figures import Picture, Plot, svg_of
from ppbench.report.page.sections import Chart, board_target
from ppbench.report.words import ALONE

FIGURE_BUDGET = 8_000_000
"""Largest number of characters of figures on a page; further ones are named, and are only in figures/."""
FIGURE_LIST = "figures.json"
"""File with the names of the figures that a board wrote: a later one removes only these."""
_FIGURE = re.compile(r"[a-z0-9-]+\.(?:svg|png)")
PNG_HEAD = 400
"""Number of bytes at the head of a PNG that include its label."""


class Drawings:
    """The figures of a page, drawn in order up to `FIGURE_BUDGET` characters."""

    def __init__(self) -> None:
        self._left = FIGURE_BUDGET

    def chart(self, plot: Plot, caps: tuple[tuple[str, Cap], ...] = ()) -> Chart:
        """Return a figure for the page; caps: of its lines."""
        svg = svg_of(plot, inline=True) if self._left > 0 else ""
        self._left -= len(svg)
        return Chart(plot.title, Markup(svg) or None, caps)


def write_figures(folder: Path, boards: Sequence[Board], known: Knowledge) -> list[Path]:
    """Write all boards' figures as SVG, and as PNG those whose label there differs; remove those of earlier boards.

    Only files named in `FIGURE_LIST` are removed, no folders or links: other pictures are the user's.
    """
    make_folder(folder)
    plots = _by_name([named for board in boards for named in _named(board, known)])
    names = [f"{name}{end}" for name in plots for end in (".svg", ".png")]
    before = _listed(folder)
    _list(folder, {*before, *names})  # first: after a kill, files of this board are known as ours
    for name, plot in plots.items():
        vector, dots, picture = folder / f"{name}.svg", folder / f"{name}.png", Picture(plot)
        write_atomic(vector, svg_of(plot).encode())
        if kind_of(dots, follow=False) != "file" or picture.label.encode() not in read_regular(dots)[:PNG_HEAD]:
            write_atomic(dots, picture.png())
    for name in before.difference(names):
        if kind_of(folder / name, follow=False) == "file":
            (folder / name).unlink()
    _list(folder, {*names})
    return [folder / name for name in names]


def _by_name(named: Sequence[tuple[str, Plot]]) -> dict[str, Plot]:
    """Return figures by the names of their files, from the words that name them."""
    uses: Counter[str] = Counter()
    plots = {}
    for words, plot in named:
        name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
        uses[name] += 1  # words of two boards may be equal
        plots[name if uses[name] == 1 else f"{name}-{uses[name]}"] = plot
    return plots


def _listed(folder: Path) -> set[str]:
    """Return the names of the figures that an earlier board wrote; empty where unknown."""
    try:
        names = json.loads(read_regular(folder / FIGURE_LIST))
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, RecursionError) as cause:
        warnings.warn(
            f"{folder / FIGURE_LIST} cannot be read ({cause}), so figures of earlier boards stay.", stacklevel=2
        )
        return set()
    return {name for name in names if isinstance(name, str) and _FIGURE.fullmatch(name)}


def _list(folder: Path, names: set[str]) -> None:
    write_atomic(folder / FIGURE_LIST, (json.dumps(sorted(names), indent=1) + "\n").encode())


def _named(board: Board, known: Knowledge) -> Iterator[tuple[str, Plot]]:
    """Yield a board's figures with words that name their files."""
    setting = board.setting
    probing = setting.probing
    probed = "" if probing == USUAL_PROBE else f"{probing.probe} {probing.probe_rounds}"
    suite = "" if setting.suite == ALONE else setting.suite
    where = f"{suite} {setting.data} {setting.train}"
    if (figure := tradeoff_of(board)) is not None and not setting.intended:
        yield f"tradeoff {where} {setting.network} {figure.title} {probed}", figure
    for ppc in ppcs(board, known):
        yield f"ppc {where} {setting.network} {setting.threat} {ppc.title} {probed} {ppc.distance}", ppc
    for curve in curves(board, board_target(setting)):
        yield f"{curve.title} {where} {setting.network} {probed}", curve
