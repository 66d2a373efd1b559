"""The board of a folder: CSV, HTML and figures, all derived from its records and rebuilt from them at any time."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from ppbench.canaries import harness_check
from ppbench.controls import check_controls
from ppbench.errors import UsageError
from ppbench.federation.contract import Claim, Defense
from ppbench.leaderboard.badges import knowing
from ppbench.leaderboard.boards import Board, boards
from ppbench.leaderboard.claims import Checked, Unchecked, check
from ppbench.leaderboard.curves import curve_png, curve_svg, curves
from ppbench.leaderboard.drawings import figures
from ppbench.leaderboard.evaluations import ALONE, Said, evaluations, said
from ppbench.leaderboard.figures import ppc_png, ppc_svg
from ppbench.leaderboard.html import write_html
from ppbench.leaderboard.sections import about as about_of
from ppbench.leaderboard.table import csv_text, write_csv
from ppbench.leaderboard.worst import worst_csv
from ppbench.records.files import write_atomic
from ppbench.records.schema import Record
from ppbench.records.store import Store
from ppbench.registry import load

WORST_CASE = "worst_case.csv"
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


def summary(records: Sequence[Record]) -> tuple[list[str], list[str]]:
    """Return what was found and what the controls say, in sentences, evaluation by evaluation."""
    return verdict_of(said(records)), checks_of(records)


def verdict_of(told: Sequence[Said]) -> list[str]:
    """Return sentences that stand by themselves: with the evaluation and the defense where there are several."""
    defenses: dict[str, set[str]] = {}
    for one in told:
        defenses.setdefault(one.about, set()).add(one.defense)
    found = []
    for one in told:
        named = len(defenses[one.about]) == 1 or one.sentence.startswith((f"{one.defense} ", f"{one.defense}:"))
        about = f"[{one.about}] " if one.about else ""
        found.append(f"{about}{'' if named else f'{one.defense}: '}{one.sentence}")
    return found


def checks_of(records: Sequence[Record]) -> list[str]:
    """Return what the controls say, in sentences, evaluation by evaluation."""
    groups = evaluations(records)
    about = {key: f"[{key.partition(chr(10))[0]}] " if len(groups) > 1 else "" for key in groups}
    return [f"{about[key]}{check.sentence}" for key, some in groups.items() for check in check_controls(some)]


def outcomes_of(records: Sequence[Record]) -> list[Checked | Unchecked]:
    """Return what becomes of the claims of the papers of the defenses that `records` are about."""
    names = sorted({record.config.defense.id for record in records})
    return check({name: claims for name in names if (claims := _claims(name))}, records, ())


def up_to_date(store: Store) -> bool:
    """Return whether the board shows the records: the tables, written last, are what they give."""
    worst = store.out / WORST_CASE
    if not store.csv_path.is_file() or not store.html_path.is_file() or not worst.is_file():
        return False
    with loaded(store) as records:
        if store.csv_path.read_text(encoding="utf-8") != csv_text(records, claimed):
            return False
        return worst.read_text(encoding="utf-8") == worst_csv(boards(records, claimed, harness_check().ok is True))


@contextmanager
def loaded(store: Store) -> Iterator[list[Record]]:
    """Give all records of a folder, and leave them out of the search for cycles: there are millions of objects in many.

    Raises:
        UsageError: a record is corrupt.
    """
    gc.disable()
    try:
        records = store.load_all()
        gc.freeze()
        gc.enable()
        yield records
    finally:
        gc.unfreeze()
        gc.enable()


def write_board(store: Store) -> list[Path]:
    """Write leaderboard.csv, worst_case.csv, leaderboard.html and figures/ of a folder from its records.

    Figures of boards that are gone are removed.

    Returns:
        What was written.

    Raises:
        UsageError: a record or an artifact is corrupt, there is none, or the folder cannot be written.
    """
    with loaded(store) as records:
        if not records:
            raise UsageError(f"{store.out} holds no records; run ppbench evaluate --out {store.out} first.")
        return _write(store, records)


def _write(store: Store, records: Sequence[Record]) -> list[Path]:
    harness = harness_check()
    sound = harness.ok is True
    found, told, checks = boards(records, claimed, sound), said(records) if harness.ok else [], checks_of(records)
    write_html(
        records,
        store.html_path,
        verdict=verdict_of(told),
        reliability=checks if harness.ok else [harness.sentence, *checks],
        claims=claimed,
        images=store.images,
        sound=sound,
        said=told,
        outcomes=outcomes_of(records) if harness.ok else (),
        found=found,
    )
    worst = store.out / WORST_CASE
    write_atomic(worst, worst_csv(found).encode())
    drawn = _write_figures(store.out / "figures", found, knowing(records))
    write_csv(records, store.csv_path, claims=claimed)  # last: it tells whether the board is complete
    return [store.csv_path, store.html_path, worst, *drawn]


def _write_figures(folder: Path, found: Sequence[Board], known: frozenset[str]) -> list[Path]:
    """Write the figures of all boards, and remove drawings that none of them has."""
    folder.mkdir(exist_ok=True)
    written: list[Path] = []
    for board in found:
        for words, svg, png in _figures(board, known):
            name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
            for suffix, data in ((".svg", svg.encode()), (".png", png)):
                write_atomic(folder / f"{name}{suffix}", data)
                written.append(folder / f"{name}{suffix}")
    for path in folder.iterdir():
        if path.suffix in (".svg", ".png") and path not in written:
            path.unlink()
    return written


def _figures(board: Board, known: frozenset[str]) -> Iterator[tuple[str, str, bytes]]:
    """Yield a board's figures: words that name the file, the SVG and the PNG."""
    setting = board.setting
    once = (setting.probe, setting.probe_rounds) == ("gradient", 1)
    held, about = "" if once else f"{setting.probe} {setting.probe_rounds}", f"{setting.data} {setting.train}"
    about = about if setting.suite == ALONE else f"{setting.suite} {about}"
    for ppc in figures(board, known):
        words = f"ppc {about} {setting.network} {setting.threat} {ppc.title} {held} {ppc.distance}"
        yield words, ppc_svg(ppc), ppc_png(ppc)
    for curve in curves(board, about_of(setting)):
        yield f"{curve.title} {about} {setting.network} {held}", curve_svg(curve), curve_png(curve)
