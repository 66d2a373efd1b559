"""The leaderboard as ONE self-contained HTML file: no request to anywhere, readable without JavaScript.

Everything shown is derived from records, their artifacts and the sentences handed in, so the page can be
rebuilt. Every string is escaped; the only raw parts are style sheets, scripts (ours and vendored, allowed by their
digests alone, see the page's content security policy), our own drawings, and JSON without a `<`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ppbench.questions.base import questions
from ppbench.records.files import write_atomic
from ppbench.records.schema import Record
from ppbench.records.times import time_of
from ppbench.report.claims.page import claimed_text
from ppbench.report.frame import frame_of
from ppbench.report.page.assets import TEMPLATES, assets
from ppbench.report.page.badges import adaptive, knowing
from ppbench.report.page.boards import boards
from ppbench.report.page.cells import cells_of
from ppbench.report.page.cost_rows import costs
from ppbench.report.page.costs import TimesOf, no_times
from ppbench.report.page.curves import curves
from ppbench.report.page.drawings import charts, drawings, ppcs
from ppbench.report.page.entries import Board
from ppbench.report.page.evaluations import Judged, Said, judged, verdict_of
from ppbench.report.page.formats import error, number, percent, seconds, size, span
from ppbench.report.page.overview import overviews
from ppbench.report.page.played import played_svg, role_counts
from ppbench.report.page.problems import Problems
from ppbench.report.page.profiles import Outcome, profiles
from ppbench.report.page.sections import Section, about, metric_of
from ppbench.report.page.series import caps
from ppbench.report.page.sprites import Album, ImagesOf, no_images
from ppbench.report.page.table import Claims, no_claims, rows
from ppbench.report.worst import attack_of, cell_of

TOLD = 12
"""Sentences at the head of the page; further ones are folded, and stand with their defenses, too."""


def render(
    records: Sequence[Record],
    *,
    reliability: Sequence[str] = (),
    claims: Claims = no_claims,
    images: ImagesOf = no_images,
    times: TimesOf = no_times,
    sound: bool = True,
    said: Sequence[Said] = (),
    outcomes: Sequence[Outcome] = (),
    found: Sequence[Board] | None = None,
    evaluations: Sequence[Judged] | None = None,
    problems: Problems | None = None,
    bare: bool = False,
) -> str:
    """Return the page; arguments as `write_html`, and `times`, which finds how long a client takes."""
    records = frame_of(records)
    found = boards(records, claims, sound) if found is None else found
    problems = problems or Problems()
    known, album = knowing(records), Album(problems.past(images))
    sections = list(_sections(found, records, known, album))
    table = costs(found, records, problems.past(times))
    parts = profiles(sections, said, outcomes, table, album, known)
    glance = overviews(found, judged(records, sound) if evaluations is None else evaluations, table)
    page = (
        _templates()
        .get_template("page.html.j2")
        .render(
            verdict=verdict_of(said) if len(parts) == 1 else [],
            glance=glance if len(parts) > 1 or len(glance) > 1 else [],
            told=TOLD,
            reliability=list(reliability),
            problems=problems.found,
            bare=bare,
            sections=sections,
            groups=[
                (name, [s for s in sections if s.group == name]) for name in dict.fromkeys(s.group for s in sections)
            ],
            profiles=parts,
            titles={name: title for question in questions().values() for name, title in question.figures},
            anchor={part.defense: part.anchor for part in parts},
            played=[(counted.title, played_svg(counted)) for counted in role_counts(records)],
            costs=table,
            several=len({row.setting for row in table}) > 1,
            cells=cells_of(rows(records, claims), records, known),
            refused=album.refused,
            statuses={s: sum(r.status == s for r in records) for s in ("complete", "diverged", "failed")},
            settings=sorted({f"{r.config.data.name}, {r.config.model.id}" for r in records}),
            environments=sorted({_environment(record) for record in records}),
            assets=assets(),
            knows=lambda found: adaptive(found, known),
            attack_of=attack_of,
            cell_of=cell_of,
            metric_of=metric_of,
            claimed_text=claimed_text,
        )
    )
    return page.lstrip()


def _sections(
    found: Sequence[Board], records: Sequence[Record], known: frozenset[str], album: Album
) -> Iterator[Section]:
    """Yield the boards with their images and figures."""
    series = caps(records)
    plotted = [(board, ppcs(board, known), curves(board, about(board.setting))) for board in found]
    drawn = charts(figure for _, some, more in plotted for figure in (*some, *more))
    for index, (board, some, more) in enumerate(plotted, start=1):
        yield Section(
            board,
            f"b{index}",
            tuple(album.strip(None if entry.worst is None else entry.worst.leading) for entry in board.entries),
            drawings(board, islice(drawn, len(some)), some, series),
            tuple(islice(drawn, len(more))),
        )


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
    reliability: Sequence[str] = (),
    claims: Claims = no_claims,
    images: ImagesOf = no_images,
    sound: bool = True,
    said: Sequence[Said] = (),
    outcomes: Sequence[Outcome] = (),
    found: Sequence[Board] | None = None,
    evaluations: Sequence[Judged] | None = None,
    problems: Problems | None = None,
    bare: bool = False,
) -> None:
    """Write the leaderboard's page, whole or not at all.

    Args:
        records: every cell; failed ones stay visible.
        path: the file, in the folder of results: times are read from what lies beside it.
        reliability: sentences on the controls, beside what each board says of its own.
        claims: what a paper prints about a record's defense.
        images: finds reconstructions, e.g. `Store.images`.
        sound: whether the harness's self-test passed; else nothing is ranked.
        said: sentences by defense, for its own part of the page, and for its head where there is one defense only.
        outcomes: what became of the claims of the defenses' papers.
        found: the boards of `records`, where they are known; else they are made.
        evaluations: what may be concluded of each, where it is known; else it is found out.
        problems: what could not be read so far; artifacts and times that cannot be read are added.
        bare: whether the folder is an accepted baseline, which keeps no reconstructions.

    Raises:
        UsageError: the file cannot be written.
    """
    page = render(
        records, reliability=reliability, claims=claims, images=images, times=partial(time_of, path.parent),
        sound=sound, said=said, outcomes=outcomes, found=found, evaluations=evaluations, problems=problems, bare=bare,
    )  # fmt: skip
    write_atomic(path, page.encode())
