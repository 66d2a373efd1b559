"""The figures of boards: what each shows, and its drawing for the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from markupsafe import Markup

from ppbench.questions.base import question_of
from ppbench.records.schema import Record
from ppbench.report.cap import Cap, DistanceName, PpcPoint, ppc_point
from ppbench.report.page.badges import adaptive
from ppbench.report.page.curves import Curve, curve_svg
from ppbench.report.page.entries import Board, Entry
from ppbench.report.page.figures import Line, Ppc, ppc_svg
from ppbench.report.page.sections import Chart, Drawing, weights
from ppbench.report.page.series import SeriesCap

BUDGET = 8_000_000
"""Characters of figures that a page carries at most; what is beyond is named, and lies in figures/."""


def charts(board_figures: Iterable[Ppc | Curve]) -> Iterator[Chart]:
    """Yield each figure, drawn as long as there is place on the page."""
    left = BUDGET
    for figure in board_figures:
        svg = ""
        if left > 0:
            svg = ppc_svg(figure, inline=True) if isinstance(figure, Ppc) else curve_svg(figure, inline=True)
        left -= len(svg)
        yield Chart(figure.title, Markup(svg) or None)


def ppcs(board: Board, known: frozenset[str]) -> list[Ppc]:
    """Return the PPC figures of a board; none of what a model is delivered for."""
    return [] if board.setting.intended else figures(board, known)


def figures(board: Board, known: frozenset[str]) -> list[Ppc]:
    """Return the PPC figures of a board: one a defense and distance, with at least two control values.

    Rows that differ in more than the control value (a seed, another parameter) are lines of their own.
    """
    lines: dict[tuple[str, str, DistanceName], dict[tuple[str, bool], list[PpcPoint]]] = defaultdict(dict)
    for entry in board.entries:
        for record in entry.records:
            point, control = ppc_point(record), entry.defense.control
            if point is None or control is None:
                continue
            key = (entry.defense.id, control.name, point.distance.name)
            lines[key].setdefault((line_name(entry, record), adaptive(record, known)), []).append(point)
    found = []
    for (defense, control_name, distance), attacks in sorted(lines.items()):
        drawn = [Line(name, knows, tuple(points)) for (name, knows), points in sorted(attacks.items())]
        if len({point.control for line in drawn for point in line.points}) > 1:
            batch = "" if question_of(board.setting.kind).source == "model" else f"batch {board.setting.batch}, "
            title = f"{defense}, {batch}{weights(board.setting)}"
            found.append(Ppc(title, control_name, distance, tuple(drawn), defense))
    return found


def line_name(entry: Entry, record: Record) -> str:
    """Return what a line of a figure is called: the attack, whose images it uses, the victims' role, what differs."""
    attack, role = record.config.attack, record.config.role
    name = attack.id if attack.follows is None else f"{attack.id} after {attack.follows}"
    name = f"{name} ({role})" if role else name
    return f"{name}, {entry.differs}" if entry.differs else name


def line_caps(board: Board, series: Mapping[str, SeriesCap]) -> dict[tuple[str, str], dict[str, Cap]]:
    """Return the CAP of every line of a board's figures by its name, for each defense and distance."""
    found: dict[tuple[str, str], dict[str, Cap]] = defaultdict(dict)
    for entry in board.entries:
        for record in entry.records:
            if entry.defense.control is not None:
                key = entry.defense.id, series[record.cell_id].main.distance
                found[key][line_name(entry, record)] = series[record.cell_id].main
    return found


def drawings(
    board: Board, charts: Iterable[Chart], ppcs: Sequence[Ppc], series: Mapping[str, SeriesCap]
) -> tuple[Drawing, ...]:
    """Return the board's PPC figures, each with the CAP of every attack on it."""
    caps = line_caps(board, series)
    return tuple(
        Drawing(chart, tuple(sorted(caps[ppc.defense, ppc.distance].items())))
        for chart, ppc in zip(charts, ppcs, strict=True)
    )
