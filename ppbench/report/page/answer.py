"""The answer on page, in terminal and JSON: the headline, a table at a glance, and how far to trust it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ppbench.records.schema import Record
from ppbench.report.controls import Check
from ppbench.report.frame import frame_of
from ppbench.report.page.boards import boards_of
from ppbench.report.page.costs import CostRow, TimesOf, costs
from ppbench.report.page.entries import Board
from ppbench.report.page.evaluations import JudgedEvaluation, judged_evaluations
from ppbench.report.page.headline import Headline, headline_of
from ppbench.report.page.overview import Overview, overviews
from ppbench.report.page.table import no_claims
from ppbench.report.page.trust import Trust, trust_of


@dataclass(frozen=True)
class Answer:
    """The answer of an evaluation. tables: a table at a glance for each evaluation."""

    headline: Headline
    boards: tuple[Board, ...]
    tables: tuple[Overview, ...]
    trust: Trust

    def as_dict(self) -> dict[str, Any]:
        """Return headline, settings and reliability in types that JSON has."""
        rows = [row for table in self.tables for row in table.compared]
        return {
            "headline": self.headline.words,
            "tone": self.headline.tone,
            "settings": [setting.as_dict() for row in rows for setting in row.by_control],
            "reliability": self.trust.as_dict(),
        }


def answer_from(
    boards: Sequence[Board], evaluations: Sequence[JudgedEvaluation], costs: Sequence[CostRow], harness: Check | None
) -> Answer:
    """Return the answer from the parts of a page; harness: check of the self-test, None where unknown."""
    tables = overviews(boards, evaluations, costs)
    trust = trust_of(boards, evaluations, harness, tables)
    return Answer(headline_of(tables, trust), tuple(boards), tuple(tables), trust)


def answer_of(records: Sequence[Record], harness: Check | None, times: TimesOf = lambda _: None) -> Answer:
    """Return the answer of `records`. harness: None before the self-test has ended: the controls count alone."""
    frame, sound = frame_of(records), harness is None or harness.ok is not False
    all_boards = boards_of(frame, no_claims, sound)
    return answer_from(all_boards, judged_evaluations(frame, sound), costs(all_boards, frame, times), harness)
