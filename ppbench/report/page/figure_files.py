"""The folder of a board's figures: an SVG and a PNG of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ppbench.records.files import write_atomic
from ppbench.report.page.curves import curve_picture, curve_svg, curves
from ppbench.report.page.drawings import figures
from ppbench.report.page.entries import Board
from ppbench.report.page.evaluations import ALONE
from ppbench.report.page.figures import Picture, ppc_picture, ppc_svg
from ppbench.report.page.sections import about as about_of

HEAD = 400
"""Bytes at the head of a PNG in which its label stands."""


def write_figures(folder: Path, found: Sequence[Board], known: frozenset[str]) -> list[Path]:
    """Write the figures of all boards, and remove drawings that none of them has.

    A PNG that lies there with the label of the figure as it is now is not drawn again.
    """
    folder.mkdir(exist_ok=True)
    written: list[Path] = []
    uses: Counter[str] = Counter()
    for board in found:
        for words, svg, picture in _figures(board, known):
            name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
            uses[name] += 1  # boards may differ in what the words leave out
            name = name if uses[name] == 1 else f"{name}-{uses[name]}"
            vector, dots = folder / f"{name}.svg", folder / f"{name}.png"
            write_atomic(vector, svg.encode())
            if not (dots.is_file() and picture.label.encode() in dots.read_bytes()[:HEAD]):
                write_atomic(dots, picture.png())
            written += [vector, dots]
    for path in folder.iterdir():
        if path.suffix in (".svg", ".png") and path not in written:
            path.unlink()
    return written


def _figures(board: Board, known: frozenset[str]) -> Iterator[tuple[str, str, Picture]]:
    """Yield a board's figures: words that name the file, the SVG, and the picture for the PNG."""
    setting = board.setting
    once = (setting.probe, setting.probe_rounds) == ("gradient", 1)
    held, about = "" if once else f"{setting.probe} {setting.probe_rounds}", f"{setting.data} {setting.train}"
    about = about if setting.suite == ALONE else f"{setting.suite} {about}"
    for ppc in figures(board, known):
        words = f"ppc {about} {setting.network} {setting.threat} {ppc.title} {held} {ppc.distance}"
        picture = ppc_picture(ppc)  # drawn anew and kept: its SVG is taken from there
        yield words, ppc_svg(ppc), picture
    for curve in curves(board, about_of(setting)):
        picture = curve_picture(curve)
        yield f"{curve.title} {about} {setting.network} {held}", curve_svg(curve), picture
