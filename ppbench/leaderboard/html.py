"""The leaderboard as ONE self-contained HTML file: no request to anywhere, readable without JavaScript.

Everything shown is derived from records, their artifacts and the sentences handed in, so the page can be
rebuilt. Every string is escaped; the only raw parts are our own style sheet, our own script (allowed by its
digest alone, see the page's content security policy) and our own drawings.
"""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ppbench.leaderboard.boards import Board, Entry, adaptive, boards
from ppbench.leaderboard.figures import Line, Ppc, ppc_svg, strip
from ppbench.leaderboard.table import Claims, caps, no_claims, rows
from ppbench.metrics.cap import DISTANCE_OF_KIND, Cap, ppc_point, series_key
from ppbench.records.files import write_atomic
from ppbench.records.schema import Metric, Record, Utility
from ppbench.records.store import Images

TEMPLATES = Path(__file__).parent / "templates"
ImagesOf = Callable[[Record], Images | None]
"""Finds a record's reconstructions; `Store.images` is one."""


@dataclass(frozen=True)
class Drawing:
    """A PPC figure of one board: the SVG, and each line's attack with its CAP."""

    defense: str
    svg: Markup
    caps: tuple[tuple[str, Cap], ...]


@dataclass(frozen=True)
class Section:
    """One board with what is drawn for it. strips: data URIs by row, None where a row has no images."""

    board: Board
    strips: tuple[str | None, ...]
    drawings: tuple[Drawing, ...]


@dataclass(frozen=True)
class CostRow:
    """Bytes of one defense setting, and upload and download relative to `none` of the same federation."""

    entry: Entry
    up_ratio: float | None
    down_ratio: float | None


def no_images(record: Record) -> Images | None:
    """Return None: for pages without image strips."""
    return None


def number(value: float | None, digits: int = 2) -> str:
    """Return a figure with `digits` decimals, "n/a" for null, scientific from a million on."""
    if value is None:
        return "n/a"
    return f"{value:.2e}" if abs(value) >= 1e6 else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share as a percentage with one decimal, "n/a" for null."""
    return "n/a" if value is None else f"{100 * value:.1f} %"


def span(estimate: Metric | Utility, factor: float = 1.0) -> str:
    """Return the interval of a figure, times `factor`, with one decimal: "17.2–19.7"; "" without one."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{factor * estimate.low:.1f}–{factor * estimate.high:.1f}"  # noqa: RUF001 - a range takes an en dash


def size(value: float | None) -> str:
    """Return bytes in B, kB, MB or GB (powers of 1000)."""
    if value is None:
        return "n/a"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{value:.0f} B"


def data_uri(png: bytes) -> str:
    """Return a PNG as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _strip(entry: Entry, images: ImagesOf) -> str | None:
    """Return the worst-case attack's strip, or None where it has no images (tables, labels only)."""
    found = None if entry.worst is None else images(entry.worst)
    if found is None or found.guess.ndim != 4 or not len(found.guess):
        return None
    return data_uri(strip(found.guess, found.truth))


def figures(board: Board, records: Sequence[Record]) -> list[Ppc]:
    """Return the PPC figures of a board: one a defense and distance, with at least two control values."""
    lines: dict[tuple[str, str, str], dict[tuple[str, bool], list[Record]]] = defaultdict(dict)
    for entry in board.entries:
        for record in entry.records:
            attack, control = record.config.attack, entry.defense.control
            if ppc_point(record) is None or control is None:
                continue
            key = (entry.defense.id, control.name, DISTANCE_OF_KIND[attack.kind])
            name = attack.id if attack.follows is None else f"{attack.id} after {attack.follows}"
            lines[key].setdefault((name, adaptive(record, records)), []).append(record)
    found = []
    for (defense, control_name, distance), attacks in sorted(lines.items()):
        drawn = []
        for (name, knows), members in sorted(attacks.items()):
            points = tuple(point for r in members if (point := ppc_point(r)) is not None)
            drawn.append(Line(name, knows, points))
        if len({point.control for line in drawn for point in line.points}) > 1:
            title = f"{defense}, batch {board.setting.batch}, {board.setting.stage} weights"
            found.append(Ppc(title, control_name, distance, tuple(drawn)))  # type: ignore[arg-type]
    return found


def _drawings(board: Board, records: Sequence[Record]) -> tuple[Drawing, ...]:
    """Return the board's figures, each with the CAP of every attack on it."""
    series, drawn = caps(records), []
    for ppc in figures(board, records):
        cap_of: dict[str, tuple[str, Cap]] = {}
        for entry in board.entries:
            for record in entry.records:
                config = record.config
                same = DISTANCE_OF_KIND[config.attack.kind] == ppc.distance and config.defense.control is not None
                if same and ppc.title.startswith(f"{config.defense.id}, "):
                    key, follows = series_key(config), config.attack.follows
                    name = config.attack.id if follows is None else f"{config.attack.id} after {follows}"
                    cap_of[key] = (name, series[key].main)
        svg = Markup(ppc_svg(ppc, inline=True))
        drawn.append(Drawing(ppc.title.split(",")[0], svg, tuple(sorted(cap_of.values(), key=lambda c: c[0]))))
    return tuple(drawn)


def _costs(found: Sequence[Board]) -> list[CostRow]:
    """Return one row a defense setting; ratios are to `none` with the same federation and model."""
    entries: dict[str, Entry] = {}
    for board in found:
        for entry in board.entries:
            config = entry.sample.config
            entries.setdefault(f"{config.suite}{config.data}{config.model}{config.federation}{entry.defense}", entry)
    plain = {}
    for entry in entries.values():
        config = entry.sample.config
        if entry.defense.id == "none":
            plain[f"{config.suite}{config.data}{config.model}{config.federation}"] = entry.sample.cost
    table = []
    for entry in entries.values():
        config, cost = entry.sample.config, entry.sample.cost
        base = plain.get(f"{config.suite}{config.data}{config.model}{config.federation}")
        up = cost.bytes_up / base.bytes_up if base is not None and base.bytes_up else None
        down = cost.bytes_down / base.bytes_down if base is not None and base.bytes_down else None
        table.append(CostRow(entry, up, down))
    return sorted(table, key=lambda r: (r.entry.defense.id != "none", r.entry.defense.id, _control(r.entry)))


def _control(entry: Entry) -> float:
    return 0.0 if entry.defense.control is None else entry.defense.control.value


def render(
    records: Sequence[Record],
    *,
    verdict: Sequence[str] = (),
    reliability: Sequence[str] = (),
    claims: Claims = no_claims,
    images: ImagesOf = no_images,
) -> str:
    """Return the page; arguments as `write_html`."""
    found = boards(records, claims)
    sections = [
        Section(board, tuple(_strip(entry, images) for entry in board.entries), _drawings(board, records))
        for board in found
    ]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"number": number, "percent": percent, "size": size, "span": span}
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    by_id = {record.cell_id: record for record in records}
    page = environment.get_template("page.html.j2").render(
        verdict=list(verdict),
        reliability=list(reliability),
        sections=sections,
        costs=_costs(found),
        cells=[(row, by_id[row.cell_id]) for row in rows(records, claims)],
        statuses={s: sum(r.status == s for r in records) for s in ("complete", "diverged", "failed")},
        settings=sorted({f"{r.config.data.name}, {r.config.model.id}" for r in records}),
        environments=sorted({_environment(record) for record in records}),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_digest=digest,
        knows=lambda record: adaptive(record, records),
    )
    return page.lstrip()


def _environment(record: Record) -> str:
    where = record.environment
    return f"ppbench {where.ppbench}, Python {where.python}, torch {where.torch}, {where.device}, {where.dtype}"


def write_html(
    records: Sequence[Record],
    path: Path,
    *,
    verdict: Sequence[str] = (),
    reliability: Sequence[str] = (),
    claims: Claims = no_claims,
    images: ImagesOf = no_images,
) -> None:
    """Write the leaderboard's page, whole or not at all.

    Args:
        records: every cell; failed ones stay visible.
        path: the file.
        verdict: sentences at the top of the page.
        reliability: sentences on the controls, beside what each board says of its own.
        claims: what a paper prints about a record's defense.
        images: finds reconstructions, e.g. `Store.images`.

    Raises:
        UsageError: the file cannot be written, or an artifact is corrupt.
    """
    page = render(records, verdict=verdict, reliability=reliability, claims=claims, images=images)
    write_atomic(path, page.encode())
