"""The board of a folder: CSV, HTML and figures, all derived from its records and rebuilt from them at any time."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ppbench.base.errors import UsageError
from ppbench.base.registry import load
from ppbench.federation.contract import Claim, Defense
from ppbench.questions.base import missing
from ppbench.records.files import write_atomic
from ppbench.records.schema import Record
from ppbench.records.soundness import soundness_of
from ppbench.records.store import Store
from ppbench.report.claims import Checked, Unchecked, check
from ppbench.report.controls import Check, check_harness
from ppbench.report.page.badges import knowing
from ppbench.report.page.boards import Board, boards
from ppbench.report.page.curves import curve_picture, curve_svg, curves
from ppbench.report.page.drawings import figures
from ppbench.report.page.evaluations import ALONE, checks_of, judged, said
from ppbench.report.page.figures import Picture, ppc_picture, ppc_svg
from ppbench.report.page.html import write_html
from ppbench.report.page.problems import Problems
from ppbench.report.page.sections import about as about_of
from ppbench.report.page.table import csv_text, write_csv
from ppbench.report.page.worst import worst_csv

WORST_CASE = "worst_case.csv"
HEAD = 400
"""Bytes at the head of a PNG in which its label stands."""
ASKED = {("membership", "iterate"): "asr", ("reconstruction", "init"): "psnr_median"}
"""What a claim must be about to stand beside a cell of a kind and stage, CAP aside."""


@lru_cache
def _claims(defense: str) -> tuple[Claim, ...]:
    try:
        plugin: type[Defense] = load("defenses", defense)
    except UsageError:  # records of a defense that is not installed here stay readable
        return ()
    return plugin.claimed


def claimed(record: Record) -> str:
    """Return what the defense's paper claims for this cell, as "CAP 0.69 (Table 8)", or "" where it says nothing.

    A claim holds for a data set, a model and, where it names them, a batch size and parameters of the defense. What the
    records make of it, in other settings too, is `ppbench claims`'s to say.
    """
    config = record.config
    for claim in _claims(config.defense.id):
        about = f"cap_{config.attack.kind}", ASKED.get((config.attack.kind, config.stage))
        fits = (
            claim.metric in about
            and claim.value is not None
            and claim.dataset == config.data.name.rpartition(":")[2]
            and claim.model == config.model.id
            and claim.batch in (None, config.batch_size)
            and all(config.defense.parameters.get(name) == value for name, value in claim.when)
        )
        if fits:
            figure = {"asr": f"ASR {claim.value:.1%}", "psnr_median": f"PSNR {claim.value:.2f} dB"}
            return f"{figure.get(claim.metric, f'CAP {claim.value:.2f}')} ({claim.source})"
    return ""


def outcomes_of(records: Sequence[Record]) -> list[Checked | Unchecked]:
    """Return what becomes of the claims of the papers of the defenses that `records` are about."""
    names = sorted({record.config.defense.id for record in records})
    return check({name: claims for name in names if (claims := _claims(name))}, records, ())


def up_to_date(store: Store) -> bool:
    """Return whether the board shows the records: the tables, written last, are what they give.

    A folder with a record that cannot be read is never up to date: what is wrong is said each time, not once.
    """
    worst = store.out / WORST_CASE
    if not store.csv_path.is_file() or not store.html_path.is_file() or not worst.is_file():
        return False
    with loaded(store) as (records, problems):
        sound = _harness(store, problems).ok is not False
        if problems or store.csv_path.read_text(encoding="utf-8") != csv_text(records, claimed):
            return False
        return worst.read_text(encoding="utf-8") == worst_csv(boards(records, claimed, sound))


@contextmanager
def loaded(store: Store) -> Iterator[tuple[list[Record], list[str]]]:
    """Give all records of a folder that can be read, and a sentence for what cannot, or answers a missing question.

    They are left out of the search for cycles: there are millions of objects in many.
    """
    gc.disable()
    try:
        records, problems = store.readable()
        gc.freeze()
        gc.enable()
        yield records, problems + missing(records)
    finally:
        gc.unfreeze()
        gc.enable()


@dataclass(frozen=True)
class Written:
    """A board as written. paths: its files; problems: what could not be read and is missing on it, in sentences."""

    paths: tuple[Path, ...]
    problems: tuple[str, ...]


def write_board(store: Store) -> list[Path]:
    """Write the board of a folder, see `rebuild`; what could not be read is warned of.

    Returns:
        What was written.

    Raises:
        UsageError: no record can be read, or the folder cannot be written.
    """
    written = rebuild(store)
    for problem in written.problems:
        warnings.warn(problem, stacklevel=2)
    return list(written.paths)


def rebuild(store: Store) -> Written:
    """Write leaderboard.csv, worst_case.csv, leaderboard.html and figures/ of a folder from its records.

    A record, an artifact or a file of times that cannot be read costs nothing but itself. Figures of boards that are
    gone are removed.

    Raises:
        UsageError: no record can be read, or the folder cannot be written.
    """
    with loaded(store) as (records, problems):
        if not records and problems:
            raise UsageError(f"{store.out} holds no record that can be read: {problems[0]}")
        if not records:
            raise UsageError(f"{store.out} holds no records; run ppbench evaluate --out {store.out} first.")
        return _write(store, records, Problems(problems))


def _write(store: Store, records: Sequence[Record], problems: Problems) -> Written:
    harness = _harness(store, problems.found)
    sound = harness.ok is not False  # where it is not known, the controls vouch alone, and the page says so
    found, told = boards(records, claimed, sound), judged(records, sound)
    checks = [check.sentence for check in checks_of(told)]
    drawn = _write_figures(store.out / "figures", found, knowing(records))  # first: the page takes what is drawn here
    write_html(
        records,
        store.html_path,
        reliability=checks if harness.ok else [harness.sentence, *checks],
        claims=claimed,
        images=store.images,
        sound=sound,
        said=said(told),
        outcomes=outcomes_of(records) if sound else (),
        found=found,
        evaluations=told,
        problems=problems,
        bare=store.bare,
    )
    worst = store.out / WORST_CASE
    write_atomic(worst, worst_csv(found).encode())
    write_csv(records, store.csv_path, claims=claimed)  # last: it tells whether the board is complete
    return Written((store.csv_path, store.html_path, worst, *drawn), tuple(problems.found))


def _harness(store: Store, problems: list[str]) -> Check:
    """Return what the folder's self-test says; of one that cannot be read a sentence goes to `problems`."""
    try:
        return check_harness(soundness_of(store))
    except UsageError as error:
        problems.append(str(error))
        return check_harness(None)


def _write_figures(folder: Path, found: Sequence[Board], known: frozenset[str]) -> list[Path]:
    """Write the figures of all boards, and remove drawings that none of them has.

    A PNG that lies there with the label of the figure as it is now is not drawn again.
    """
    folder.mkdir(exist_ok=True)
    written: list[Path] = []
    for board in found:
        for words, svg, picture in _figures(board, known):
            name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
            vector, dots = folder / f"{name}.svg", folder / f"{name}.png"
            write_atomic(vector, svg.encode())
            if not (dots.is_file() and picture.label.encode() in dots.read_bytes()[:HEAD]):
                write_atomic(dots, picture.png())
            written += [vector, dots]
    for path in folder.iterdir():
        if path.suffix in (".svg", ".png") and path not in written:
            path.unlink()
    return written


def _figures(board: Board, known: frozenset[str]) -> Iterator[tuple[str, str, Picture]]:
    """Yield a board's figures: words that name the file, the SVG, and the picture for the PNG."""
    setting = board.setting
    once = (setting.probe, setting.probe_rounds) == ("gradient", 1)
    held, about = "" if once else f"{setting.probe} {setting.probe_rounds}", f"{setting.data} {setting.train}"
    about = about if setting.suite == ALONE else f"{setting.suite} {about}"
    for ppc in figures(board, known):
        words = f"ppc {about} {setting.network} {setting.threat} {ppc.title} {held} {ppc.distance}"
        picture = ppc_picture(ppc)  # drawn anew and kept: its SVG is taken from there
        yield words, ppc_svg(ppc), picture
    for curve in curves(board, about_of(setting)):
        picture = curve_picture(curve)
        yield f"{curve.title} {about} {setting.network} {held}", curve_svg(curve), picture
