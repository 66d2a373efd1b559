"""The leaderboard as ONE self-contained HTML file: no request to anywhere, readable without JavaScript.

Everything shown is derived from records, their artifacts and the sentences handed in. Every string is escaped; the only
raw parts are style sheets, scripts (allowed by their digests alone), our own drawings, and JSON without a `<`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from markupsafe import Markup

from ppbench.base.errors import UsageError
from ppbench.questions.base import questions
from ppbench.records.origin import Origin
from ppbench.records.schema import Record
from ppbench.report.cap import caps
from ppbench.report.completeness import statuses_of
from ppbench.report.controls import Check
from ppbench.report.frame import Frame, frame_of
from ppbench.report.knowing import Knowledge
from ppbench.report.page.answer import answer_to
from ppbench.report.page.boards import boards
from ppbench.report.page.cells import cells_of
from ppbench.report.page.costs import TimesOf, costs
from ppbench.report.page.curves import curves
from ppbench.report.page.drawings import Drawings
from ppbench.report.page.entries import Board
from ppbench.report.page.evaluations import Judged, Said, judged, verdict_of
from ppbench.report.page.figures import svg_of
from ppbench.report.page.headline import costs_alone
from ppbench.report.page.introduction import about_of
from ppbench.report.page.played import role_counts
from ppbench.report.page.ppc import line_caps, ppcs
from ppbench.report.page.profiles import Outcome, profiles
from ppbench.report.page.sections import Section, about
from ppbench.report.page.sprites import Album, ImagesOf
from ppbench.report.page.strip import strips_of
from ppbench.report.page.table import Claims, no_claims, rows
from ppbench.report.page.template import template
from ppbench.report.page.tradeoff import tradeoff_of

T = TypeVar("T")
TOLD = 12
"""Files that could not be read that are named at the head of the page; further ones are folded."""


@dataclass(frozen=True)
class Page:
    """The leaderboard's page.

    records: every cell; harness: what its self-test says, None: nothing is known; claims: what a paper prints about a
    record's defense; images, times: find what lies beside a record; sound: whether the self-test passed, else nothing
    is ranked; said, outcomes: sentences by defense, and what became of its paper's claims; found, evaluations: of
    `records`, made where they are not given; problems: sentences on what could not be read, to which images and times
    add; bare: whether the folder is an accepted baseline, which keeps no reconstructions; origin: command, day, commit.
    """

    records: Sequence[Record]
    harness: Check | None = None
    claims: Claims = no_claims
    images: ImagesOf = lambda _: None
    times: TimesOf = lambda _: None
    sound: bool = True
    said: Sequence[Said] = ()
    outcomes: Sequence[Outcome] = ()
    found: Sequence[Board] | None = None
    evaluations: Sequence[Judged] | None = None
    problems: list[str] = field(default_factory=list)
    bare: bool = False
    origin: Origin = field(default_factory=Origin)

    def html(self) -> str:
        """Return the page."""
        frame = frame_of(self.records)
        known = Knowledge.of(frame)
        found = boards(frame, self.claims, self.sound) if self.found is None else self.found
        album = Album(_past(self.images, self.problems))
        sections = list(_sections(found, frame, known, album))
        table = costs(found, frame, _past(self.times, self.problems))
        parts = profiles(sections, self.said, self.outcomes, table, album, known)
        told = judged(frame, self.sound) if self.evaluations is None else self.evaluations
        answer = answer_to(found, told, table, self.harness)
        groups = dict.fromkeys(s.group for s in sections)
        settings = sorted({f"{r.config.data.name}, {r.config.model.id}" for r in frame})
        return template().render(
            titles={name: title for question in questions().values() for name, title in question.figures},
            knows=known.adaptive,
            verdict=verdict_of(self.said) if len(parts) == 1 else [],
            told=TOLD,
            glance=answer.tables,
            headline=answer.headline,
            trust=answer.trust,
            costs_first=costs_alone(answer.tables),
            strips=[strip for one in answer.tables for strip in strips_of(one, album)],
            origin=self.origin,
            abouts=[about_of(part.defense) for part in parts],
            problems=self.problems,
            bare=self.bare,
            sections=sections,
            groups=[(name, [s for s in sections if s.group == name]) for name in groups],
            profiles=parts,
            anchor={part.defense: part.anchor for part in parts},
            played=[(counted.title, Markup(svg_of(counted, inline=True))) for counted in role_counts(frame)],
            costs=table,
            several=len({row.setting for row in table}) > 1,
            cells=cells_of(rows(frame, self.claims), frame, known),
            refused=album.refused,
            statuses=statuses_of(frame),
            settings=settings,
            title=_title([part.defense for part in parts], settings),
            environments=sorted({_environment(record) for record in frame}),
        )


def _title(defenses: Sequence[str], settings: Sequence[str]) -> str:
    """Return what the page is, for tabs and bookmarks."""
    what = "controls" if not defenses else defenses[0] if len(defenses) == 1 else f"{len(defenses)} defenses"
    where = settings[0] if len(settings) == 1 else f"{len(settings)} tasks"
    return f"{what} on {where} - ppbench"


def _past(read: Callable[[Record], T | None], problems: list[str]) -> Callable[[Record], T | None]:
    """Return `read`, which gives None instead of raising UsageError; the error's sentence goes to `problems`, once."""

    def tolerant(record: Record) -> T | None:
        try:
            return read(record)
        except UsageError as error:
            if str(error) not in problems:
                problems.append(str(error))
            return None

    return tolerant


def _sections(boards: Sequence[Board], records: Frame, known: Knowledge, album: Album) -> Iterator[Section]:
    """Yield the boards with their images and figures."""
    series, drawings = caps(records), Drawings()
    for index, board in enumerate(boards, start=1):
        lines = line_caps(board, series)
        delivered = board.setting.intended  # for what is asked
        yield Section(
            board,
            f"b{index}",
            tuple(album.strip(None if entry.worst is None else entry.worst.leading) for entry in board.entries),
            None if delivered or (figure := tradeoff_of(board)) is None else drawings.chart(figure),
            tuple(
                drawings.chart(ppc, tuple(sorted(lines[ppc.defense, ppc.distance].items())))
                for ppc in ([] if delivered else ppcs(board, known))
            ),
            tuple(drawings.chart(curve) for curve in curves(board, about(board.setting))),
        )


def _environment(record: Record) -> str:
    where = record.environment
    return f"ppbench {where.ppbench}, Python {where.python}, torch {where.torch}, {where.device}, {where.dtype}"
