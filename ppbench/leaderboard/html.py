"""The leaderboard as ONE self-contained HTML file: no request to anywhere, readable without JavaScript.

Everything shown is derived from records, their artifacts and the sentences handed in, so the page can be
rebuilt. Every string is escaped; the only raw parts are our own style sheet, our own script (allowed by its
digest alone, see the page's content security policy) and our own drawings.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ppbench.leaderboard.boards import Entry, adaptive, boards
from ppbench.leaderboard.costs import TimesOf, no_times
from ppbench.leaderboard.figures import strip
from ppbench.leaderboard.played import played_svg, role_counts
from ppbench.leaderboard.sections import Section, costs, drawings, drawn_curves, metric_of
from ppbench.leaderboard.table import Claims, no_claims, rows, tuned_text
from ppbench.records.files import write_atomic
from ppbench.records.schema import Metric, Record, Utility
from ppbench.records.store import Images
from ppbench.records.times import time_of

TEMPLATES = Path(__file__).parent / "templates"
ImagesOf = Callable[[Record], Images | None]
"""Finds a record's reconstructions; `Store.images` is one."""


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


def error(value: float | None) -> str:
    """Return a relative error as a percentage, from 10 on as a factor: "1.2 %", "98 times"; "n/a" for null."""
    if value is None:
        return "n/a"
    return f"{100 * value:.1f} %" if value < 10 else f"{value:.3g} times"


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


def seconds(value: float) -> str:
    """Return a time in s, ms or µs with three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def data_uri(png: bytes) -> str:
    """Return a PNG as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _strip(entry: Entry, images: ImagesOf) -> str | None:
    """Return the worst-case attack's strip, or None where it has no images (tables, labels only)."""
    found = None if entry.worst is None else images(entry.worst)
    if found is None or found.guess.ndim != 4 or not len(found.guess):
        return None
    return data_uri(strip(found.guess, found.truth))


def render(
    records: Sequence[Record],
    *,
    verdict: Sequence[str] = (),
    reliability: Sequence[str] = (),
    claims: Claims = no_claims,
    images: ImagesOf = no_images,
    times: TimesOf = no_times,
    sound: bool = True,
) -> str:
    """Return the page; arguments as `write_html`, and `times`, which finds how long a client takes."""
    found = boards(records, claims, sound)
    sections = [
        Section(
            board,
            tuple(_strip(entry, images) for entry in board.entries),
            drawings(board, records),
            drawn_curves(board),
        )
        for board in found
    ]
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    by_id, table = {record.cell_id: record for record in records}, costs(found, records, times)
    page = (
        _templates()
        .get_template("page.html.j2")
        .render(
            verdict=list(verdict),
            reliability=list(reliability),
            sections=sections,
            played=[(counted.title, played_svg(counted)) for counted in role_counts(records)],
            costs=table,
            several=len({row.setting for row in table}) > 1,
            cells=[(row, by_id[row.cell_id]) for row in rows(records, claims)],
            statuses={s: sum(r.status == s for r in records) for s in ("complete", "diverged", "failed")},
            settings=sorted({f"{r.config.data.name}, {r.config.model.id}" for r in records}),
            environments=sorted({_environment(record) for record in records}),
            style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
            script=Markup(script),
            script_digest=digest,
            knows=lambda record: adaptive(record, records),
            metric_of=metric_of,
            tuned=tuned_text,
        )
    )
    return page.lstrip()


def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"number": number, "percent": percent, "size": size, "span": span, "error": error}
    environment.filters["seconds"] = seconds
    return environment


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
    sound: bool = True,
) -> None:
    """Write the leaderboard's page, whole or not at all.

    Args:
        records: every cell; failed ones stay visible.
        path: the file, in the folder of results: times are read from what lies beside it.
        verdict: sentences at the top of the page.
        reliability: sentences on the controls, beside what each board says of its own.
        claims: what a paper prints about a record's defense.
        images: finds reconstructions, e.g. `Store.images`.
        sound: whether the harness's own canaries fall; else nothing is ranked.

    Raises:
        UsageError: the file cannot be written, or an artifact or a file of times is corrupt.
    """
    times = partial(time_of, path.parent)
    page = render(
        records, verdict=verdict, reliability=reliability, claims=claims, images=images, times=times, sound=sound
    )
    write_atomic(path, page.encode())
