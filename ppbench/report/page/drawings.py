"""The figures of boards: what each shows, as a specification for the browser and drawn for print."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ppbench.questions.base import question_of
from ppbench.records.schema import Record
from ppbench.report.cap_series import Cap, DistanceName, PpcPoint, ppc_point
from ppbench.report.page.badges import adaptive
from ppbench.report.page.boards import Board, Entry
from ppbench.report.page.charts import ppc_spec
from ppbench.report.page.curve_charts import curve_spec
from ppbench.report.page.curves import Budget, Curve, curve_svg, curves
from ppbench.report.page.figures import Line, Ppc, ppc_svg
from ppbench.report.page.sections import about, weights
from ppbench.report.page.series import SeriesCap

ALL, SOME = 80, 6
"""Figures that a page draws for print, too, in units of a PPC figure (.15 s, 40 kB): all, or the first SOME of more."""
BUDGET = 4
"""Units of a figure of budget curves."""


@dataclass(frozen=True)
class Chart:
    """One figure. spec: JSON of Vega-Lite; svg: drawn for who runs no script and for print, None where left out."""

    title: str
    spec: Markup
    svg: Markup | None


@dataclass(frozen=True)
class Drawing:
    """A PPC figure of one board, and each line's attack with its CAP."""

    chart: Chart
    caps: tuple[tuple[str, Cap], ...]


@dataclass(frozen=True)
class Shown:
    """A board's figures before they are drawn."""

    ppcs: tuple[Ppc, ...]
    curves: tuple[Curve, ...]


def shown(board: Board, known: frozenset[str]) -> Shown:
    """Return what is drawn of a board; nothing is plotted of what a model is delivered for."""
    ppcs = () if board.setting.intended else tuple(figures(board, known))
    return Shown(ppcs, tuple(curves(board, about(board.setting))))


def printed(some: Sequence[Shown]) -> Iterator[bool]:
    """Yield whether each figure is drawn for print, too: board by board, PPC figures before curves."""
    units = [BUDGET if isinstance(f, Budget) else 1 for one in some for f in (*one.ppcs, *one.curves)]
    limit = ALL if sum(units) <= ALL else SOME
    spent = 0
    for unit in units:
        spent += unit
        yield spent <= limit


def ppc_chart(ppc: Ppc, static: bool) -> Chart:
    """Return a PPC figure; static: with its drawing for print."""
    return Chart(ppc.title, ppc_spec(ppc), Markup(ppc_svg(ppc, inline=True)) if static else None)


def curve_chart(curve: Curve, static: bool) -> Chart:
    """Return budget or ROC curves; static: with their drawing for print."""
    return Chart(curve.title, curve_spec(curve), Markup(curve_svg(curve, inline=True)) if static else None)


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
    board: Board, ppcs: Sequence[Ppc], series: Mapping[str, SeriesCap], static: Iterator[bool]
) -> tuple[Drawing, ...]:
    """Return the board's PPC figures, each with the CAP of every attack on it; static: of each, drawn for print?"""
    told = line_caps(board, series)
    return tuple(
        Drawing(ppc_chart(ppc, next(static)), tuple(sorted(told[ppc.defense, ppc.distance].items()))) for ppc in ppcs
    )
