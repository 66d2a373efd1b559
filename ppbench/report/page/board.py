"""The board of a folder: CSV, HTML and figures, all derived from its records and rebuilt from them at any time."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ppbench.base.errors import UsageError
from ppbench.base.files import locked, write_atomic
from ppbench.questions.base import missing_sentences
from ppbench.records.run_files import Origin, origin_of, soundness_of, time_of
from ppbench.records.schema import Record
from ppbench.records.store import Store
from ppbench.report.controls import check_harness
from ppbench.report.frame import frame_of
from ppbench.report.knowing import Knowledge
from ppbench.report.page.boards import boards_of, csv_text, defense_sentences, judged_evaluations, tolerant, worst_csv
from ppbench.report.page.profiles import PaperClaims

if TYPE_CHECKING:
    from ppbench.report.page.html import Page

WORST_CASE = "worst_case.csv"


def up_to_date(store: Store, claims: PaperClaims) -> bool:
    """Return whether the written tables are those of the records; False while a record cannot be read."""
    worst = store.out / WORST_CASE
    if not store.csv_path.is_file() or not store.html_path.is_file() or not worst.is_file():
        return False
    with loaded_records(store) as (records, problems):
        sound = check_harness(tolerant(soundness_of, problems)(store)).ok is not False
        if problems:
            return False
        frame = frame_of(records)
        all_boards = boards_of(frame, claims.words, sound)
        if store.csv_path.read_text(encoding="utf-8") != csv_text(frame, claims.words, all_boards):
            return False
        return worst.read_text(encoding="utf-8") == worst_csv(all_boards)


@contextmanager
def loaded_records(store: Store) -> Iterator[tuple[list[Record], list[str]]]:
    """Yield the readable records, with the garbage collector paused (there are millions of objects), and problems."""
    gc.disable()
    try:
        records, problems = store.readable()
        gc.freeze()
        gc.enable()
        yield records, problems + missing_sentences(records)
    finally:
        gc.unfreeze()
        gc.enable()


@dataclass(frozen=True)
class Written:
    """A written board. paths: page and tables; problems: what could not be read and is missing, in sentences."""

    paths: tuple[Path, ...]
    figures: tuple[Path, ...]
    problems: tuple[str, ...]


def write_board(store: Store, claims: PaperClaims) -> list[Path]:
    """Write the board of a folder and return its files, see `rebuild`; warns of what cannot be read."""
    written = rebuild(store, claims)
    for problem in written.problems:
        warnings.warn(problem, stacklevel=2)
    return [*written.paths, *written.figures]


def rebuild(store: Store, claims: PaperClaims) -> Written:
    """Write leaderboard.csv, worst_case.csv, leaderboard.html and figures/ of a folder from its records.

    Unreadable files are left out; UsageError where no record can be read, or nothing written.
    """
    with locked(store.out, "writing its board"), loaded_records(store) as (records, problems):
        if not records and problems:
            raise UsageError(f"{store.out} holds no record that can be read: {problems[0]}")
        if not records:
            raise UsageError(f"{store.out} holds no records; run ppbench evaluate --out {store.out} first.")
        store.sweep()
        return _write(store, records, problems, claims)


def _write(store: Store, records: Sequence[Record], problems: list[str], claims: PaperClaims) -> Written:
    # Drawing takes a second to import, which a run that finds its board up to date need not wait for.
    from ppbench.report.page.drawings import write_figures

    records = frame_of(records)
    page = page_of(store, records, problems, claims)
    assert page.boards is not None
    drawn = write_figures(store.out / "figures", page.boards, Knowledge.of(records))  # first: the page reuses these
    write_atomic(store.html_path, page.html().encode())
    worst = store.out / WORST_CASE
    write_atomic(worst, worst_csv(page.boards).encode())
    table = csv_text(records, claims.words, page.boards)
    write_atomic(store.csv_path, table.encode())  # last: it marks the board as complete
    return Written((store.html_path, store.csv_path, worst), tuple(drawn), tuple(problems))


def page_of(store: Store, records: Sequence[Record], problems: list[str], claims: PaperClaims) -> Page:
    """Return the page of a folder's readable records, not drawn yet; `problems`, to which it adds, stand on it."""
    from ppbench.report.page.html import Page

    harness = check_harness(tolerant(soundness_of, problems)(store))
    sound = harness.ok is not False  # where it is unknown, the controls count alone, and the page says so
    records = frame_of(records)
    evaluations = judged_evaluations(records, sound)
    return Page(
        records,
        harness=harness,
        claims=claims.words,
        images=store.images,
        times=partial(time_of, store.out),
        sound=sound,
        sentences=defense_sentences(evaluations),
        outcomes=claims.outcomes(records) if sound else (),
        boards=boards_of(records, claims.words, sound),
        evaluations=evaluations,
        problems=problems,
        bare=store.bare,
        origin=tolerant(origin_of, problems)(store) or Origin(),
    )
