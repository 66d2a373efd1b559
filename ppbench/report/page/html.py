"""The leaderboard as ONE self-contained HTML file: no network requests, readable without JavaScript.

Everything is derived from records, their artifacts and the given sentences. Every string is escaped; the only raw parts
are style sheets, scripts (allowed only by their digests), our own drawings, and JSON without a `<`.
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
from ppbench.report.page.answer import answer_from
from ppbench.report.page.boards import boards_of
from ppbench.report.page.cells import cell_table
from ppbench.report.page.costs import TimesOf, costs
from ppbench.report.page.curves import curves
from ppbench.report.page.drawings import Drawings
from ppbench.report.page.entries import Board
from ppbench.report.page.evaluations import DefenseSentence, JudgedEvaluation, judged_evaluations, standalone_sentences
from ppbench.report.page.figures import svg_of
from ppbench.report.page.headline import costs_alone
from ppbench.report.page.introduction import introduction_of
from ppbench.report.page.played import role_counts
from ppbench.report.page.ppc import line_caps, ppcs
from ppbench.report.page.profiles import ClaimOutcome, profiles
from ppbench.report.page.sections import Section, board_target
from ppbench.report.page.sprites import Album, ImagesOf
from ppbench.report.page.strip import strips_of
from ppbench.report.page.table import Claims, no_claims, table_rows
from ppbench.report.page.template import template
from ppbench.report.page.tradeoff import tradeoff_of

T = TypeVar("T")
NAMED_FILES = 12
"""How many unreadable files the head of the page names; further ones are folded."""


@dataclass(frozen=True)
class Page:
    """The leaderboard's page.

    records: every cell; harness: check of the self-test, None where unknown; claims: returns the claim for a record;
    images, times: return a record's reconstructions and times; sound: whether the self-test passed, else nothing is
    ranked; sentences, outcomes: of verdicts and of claims; boards, evaluations: of `records`, computed if None;
    problems: sentences on unreadable files, to which images and times add; bare: whether the folder is an accepted
    baseline, which keeps no reconstructions; origin: command, day, commit.
    """

    records: Sequence[Record]
    harness: Check | None = None
    claims: Claims = no_claims
    images: ImagesOf = lambda _: None
    times: TimesOf = lambda _: None
    sound: bool = True
    sentences: Sequence[DefenseSentence] = ()
    outcomes: Sequence[ClaimOutcome] = ()
    boards: Sequence[Board] | None = None
    evaluations: Sequence[JudgedEvaluation] | None = None
    problems: list[str] = field(default_factory=list)
    bare: bool = False
    origin: Origin = field(default_factory=Origin)

    def html(self) -> str:
        """Return the page."""
        frame = frame_of(self.records)
        known = Knowledge.of(frame)
        boards = boards_of(frame, self.claims, self.sound) if self.boards is None else self.boards
        album = Album(_past(self.images, self.problems))
        sections = list(_sections(boards, frame, known, album))
        table = costs(boards, frame, _past(self.times, self.problems))
        parts = profiles(sections, self.sentences, self.outcomes, table, album, known)
        evaluations = judged_evaluations(frame, self.sound) if self.evaluations is None else self.evaluations
        answer = answer_from(boards, evaluations, table, self.harness)
        groups = dict.fromkeys(s.group for s in sections)
        settings = sorted({f"{r.config.data.name}, {r.config.model.id}" for r in frame})
        return template().render(
            titles={name: title for question in questions().values() for name, title in question.figures},
            knows=known.adaptive,
            verdict=standalone_sentences(self.sentences) if len(parts) == 1 else [],
            named_files=NAMED_FILES,
            glance=answer.tables,
            headline=answer.headline,
            trust=answer.trust,
            costs_first=costs_alone(answer.tables),
            strips=[strip for one in answer.tables for strip in strips_of(one, album)],
            origin=self.origin,
            abouts=[introduction_of(part.defense) for part in parts],
            problems=self.problems,
            bare=self.bare,
            sections=sections,
            groups=[(name, [s for s in sections if s.group == name]) for name in groups],
            profiles=parts,
            anchor={part.defense: part.anchor for part in parts},
            played=[(counted.title, Markup(svg_of(counted, inline=True))) for counted in role_counts(frame)],
            costs=table,
            several=len({row.setting for row in table}) > 1,
            cells=cell_table(table_rows(frame, self.claims), frame, known),
            refused=album.refused,
            statuses=statuses_of(frame),
            settings=settings,
            title=_title([part.defense for part in parts], settings),
            environments=sorted({_environment(record) for record in frame}),
        )


def _title(defenses: Sequence[str], settings: Sequence[str]) -> str:
    """Return the page's title, for tabs and bookmarks."""
    what = "controls" if not defenses else defenses[0] if len(defenses) == 1 else f"{len(defenses)} defenses"
    where = settings[0] if len(settings) == 1 else f"{len(settings)} tasks"
    return f"{what} on {where} - ppbench"


def _past(read: Callable[[Record], T | None], problems: list[str]) -> Callable[[Record], T | None]:
    """Return `read` with None instead of UsageError; adds the error's sentence to `problems`, once."""

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
        delivered = board.setting.intended  # the model is meant to answer the question
        yield Section(
            board,
            f"b{index}",
            tuple(album.strip(None if entry.worst is None else entry.worst.leading) for entry in board.entries),
            None if delivered or (figure := tradeoff_of(board)) is None else drawings.chart(figure),
            tuple(
                drawings.chart(ppc, tuple(sorted(lines[ppc.defense, ppc.distance].items())))
                for ppc in ([] if delivered else ppcs(board, known))
            ),
            tuple(drawings.chart(curve) for curve in curves(board, board_target(board.setting))),
        )


def _environment(record: Record) -> str:
    where = record.environment
    return f"ppbench {where.ppbench}, Python {where.python}, torch {where.torch}, {where.device}, {where.dtype}"
