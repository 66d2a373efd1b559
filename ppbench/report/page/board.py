"""The board of a folder: CSV, HTML and figures, all derived from its records and rebuilt from them at any time."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from ppbench.base.errors import UsageError
from ppbench.base.files import locked, write_atomic
from ppbench.base.registry import load
from ppbench.federation.claim import allowed
from ppbench.federation.contract import Claim, Defense
from ppbench.questions.base import missing_sentences
from ppbench.records.run_files import Origin, origin_of, soundness_of, time_of
from ppbench.records.schema import Record
from ppbench.records.store import Store
from ppbench.report.claims import Checked, Unchecked, check_claims
from ppbench.report.claims.case import data_of
from ppbench.report.controls import Check, check_harness
from ppbench.report.frame import frame_of
from ppbench.report.knowing import Knowledge
from ppbench.report.page.boards import boards_of, csv_text, worst_csv, write_csv
from ppbench.report.page.evaluations import defense_sentences, judged_evaluations

WORST_CASE = "worst_case.csv"
CLAIM_FORMS = {
    ("membership", "iterate"): {"asr": "ASR {:.1%}"},
    ("reconstruction", "init"): {"psnr_median": "PSNR {:.2f} dB"},
}
"""By kind and stage of a cell: the metric that a comparable claim has, except CAP, and its form."""


@lru_cache
def _claims(defense: str) -> tuple[Claim, ...]:
    try:
        plugin: type[Defense] = load("defenses", defense)
    except UsageError:  # records of a defense that is not installed here stay readable
        return ()
    return plugin.claimed


def claimed(record: Record) -> str:
    """Return the claim of the defense's paper for this very setting, as "CAP 0.69 (Table 8)", or ""."""
    config = record.config
    forms = CLAIM_FORMS.get((config.attack.kind, config.stage), {}) | {f"cap_{config.attack.kind}": "CAP {:.2f}"}
    for claim in _claims(config.defense.id):
        fits = (
            claim.metric in forms
            and claim.dataset == data_of(config)
            and claim.model == config.model.id
            and claim.batch in (None, config.batch_size)
            and all(config.defense.parameters.get(name) in allowed(value) for name, value in claim.when)
            and claim.than is None
        )
        if fits and claim.value is not None:
            return f"{forms[claim.metric].format(claim.value)} ({claim.source})"
    return ""


def outcomes_of(records: Sequence[Record]) -> list[Checked | Unchecked]:
    """Return the outcomes of the claims of all defenses in `records`."""
    names = sorted({record.config.defense.id for record in records})
    return check_claims({name: claims for name in names if (claims := _claims(name))}, records, ())


def up_to_date(store: Store) -> bool:
    """Return whether the written tables are those of the records; False while a record cannot be read."""
    worst = store.out / WORST_CASE
    if not store.csv_path.is_file() or not store.html_path.is_file() or not worst.is_file():
        return False
    with loaded_records(store) as (records, problems):
        sound = _harness(store, problems).ok is not False
        if problems:
            return False
        frame = frame_of(records)
        all_boards = boards_of(frame, claimed, sound)
        if store.csv_path.read_text(encoding="utf-8") != csv_text(frame, claimed, all_boards):
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


def write_board(store: Store) -> list[Path]:
    """Write the board of a folder and return its files, see `rebuild`; warns of what cannot be read."""
    written = rebuild(store)
    for problem in written.problems:
        warnings.warn(problem, stacklevel=2)
    return [*written.paths, *written.figures]


def rebuild(store: Store) -> Written:
    """Write leaderboard.csv, worst_case.csv, leaderboard.html and figures/ of a folder from its records.

    Unreadable files are left out; UsageError where no record can be read, or nothing written.
    """
    with locked(store.out, "writing its board"), loaded_records(store) as (records, problems):
        if not records and problems:
            raise UsageError(f"{store.out} holds no record that can be read: {problems[0]}")
        if not records:
            raise UsageError(f"{store.out} holds no records; run ppbench evaluate --out {store.out} first.")
        store.sweep()
        return _write(store, records, problems)


def _write(store: Store, records: Sequence[Record], problems: list[str]) -> Written:
    # Drawing takes a second to import, which a run that finds its board up to date need not wait for.
    from ppbench.report.page.drawings import write_figures
    from ppbench.report.page.html import Page

    harness = _harness(store, problems)
    sound = harness.ok is not False  # where it is unknown, the controls count alone, and the page says so
    records = frame_of(records)
    all_boards, evaluations = boards_of(records, claimed, sound), judged_evaluations(records, sound)
    folder = store.out / "figures"
    drawn = write_figures(folder, all_boards, Knowledge.of(records))  # first: the page reuses these drawings
    page = Page(
        records,
        harness=harness,
        claims=claimed,
        images=store.images,
        times=partial(time_of, store.out),
        sound=sound,
        sentences=defense_sentences(evaluations),
        outcomes=outcomes_of(records) if sound else (),
        boards=all_boards,
        evaluations=evaluations,
        problems=problems,
        bare=store.bare,
        origin=_origin(store, problems),
    )
    write_atomic(store.html_path, page.html().encode())
    worst = store.out / WORST_CASE
    write_atomic(worst, worst_csv(all_boards).encode())
    write_csv(records, store.csv_path, claims=claimed, boards=all_boards)  # last: it marks the board as complete
    return Written((store.html_path, store.csv_path, worst), tuple(drawn), tuple(problems))


def _origin(store: Store, problems: list[str]) -> Origin:
    """Return the origin of the folder's results; adds a sentence to `problems` if it cannot be read."""
    try:
        return origin_of(store)
    except UsageError as error:
        problems.append(str(error))
        return Origin()


def _harness(store: Store, problems: list[str]) -> Check:
    """Return the check of the folder's self-test; adds a sentence to `problems` if it cannot be read."""
    try:
        return check_harness(soundness_of(store))
    except UsageError as error:
        problems.append(str(error))
        return check_harness(None)
