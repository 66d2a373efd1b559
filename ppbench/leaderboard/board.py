"""The board of a folder: CSV, HTML and figures, all derived from its records and rebuilt from them at any time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from ppbench.canaries import harness_check
from ppbench.controls import CONTROLS, check_controls
from ppbench.errors import UsageError
from ppbench.federation.contract import Claim, Defense
from ppbench.leaderboard.boards import Board, boards, network
from ppbench.leaderboard.curves import curve_png, curve_svg, curves
from ppbench.leaderboard.figures import ppc_png, ppc_svg
from ppbench.leaderboard.html import write_html
from ppbench.leaderboard.sections import about as about_of
from ppbench.leaderboard.sections import figures
from ppbench.leaderboard.table import csv_text, write_csv
from ppbench.leaderboard.worst import worst_csv
from ppbench.records.files import write_atomic
from ppbench.records.schema import Record
from ppbench.records.store import Store
from ppbench.registry import load
from ppbench.verdict import sentences

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


def evaluations(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records by what their rows share: data, network, federation and seed. A key's first line says it."""
    found: dict[str, list[Record]] = {}
    for record in records:
        config = record.config
        model, fed = network(config.model.id, config.model.options), config.federation
        data = f"{config.data.name}, {config.data.train} examples"
        about = f"{data}, {model}, {fed.clients} clients, {fed.rounds} rounds, seed {config.seed}"
        about = " ".join(about.split())
        parts = (config.data, config.model, config.federation)
        found.setdefault("\n".join([about, *(part.model_dump_json() for part in parts)]), []).append(record)
    return found


def summary(records: Sequence[Record]) -> tuple[list[str], list[str]]:
    """Return what was found and what the controls say, in sentences, evaluation by evaluation."""
    verdict: list[str] = []
    reliability: list[str] = []
    several = len(evaluations(records)) > 1
    for key, some in evaluations(records).items():
        about = f"[{key.partition(chr(10))[0]}] " if several else ""
        defenses = sorted({r.config.defense.id for r in some} - set(CONTROLS))
        for defense in defenses:
            for sentence in sentences(defense, some):
                named = len(defenses) == 1 or sentence.startswith(f"{defense} ") or sentence.startswith(f"{defense}:")
                verdict.append(f"{about}{'' if named else f'{defense}: '}{sentence}")
        reliability += [f"{about}{check.sentence}" for check in check_controls(some)]
    return verdict, reliability


def up_to_date(store: Store) -> bool:
    """Return whether the board shows the records: the table, written last, is what they give."""
    if not store.csv_path.is_file() or not store.html_path.is_file():
        return False
    return store.csv_path.read_text(encoding="utf-8") == csv_text(store.load_all(), claimed)


def write_board(store: Store) -> list[Path]:
    """Write leaderboard.csv, worst_case.csv, leaderboard.html and figures/ of a folder from its records.

    Returns:
        What was written.

    Raises:
        UsageError: a record or an artifact is corrupt, there is none, or the folder cannot be written.
    """
    records = store.load_all()
    if not records:
        raise UsageError(f"{store.out} holds no records; run ppbench evaluate --out {store.out} first.")
    verdict, reliability = summary(records)
    harness = harness_check()
    write_html(
        records,
        store.html_path,
        verdict=verdict if harness.ok else (),
        reliability=reliability if harness.ok else [harness.sentence, *reliability],
        claims=claimed,
        images=store.images,
        sound=harness.ok is True,
    )
    found = boards(records, claimed, harness.ok is True)
    worst = store.out / "worst_case.csv"
    write_atomic(worst, worst_csv(found).encode())
    written = [store.csv_path, store.html_path, worst]
    folder = store.out / "figures"
    folder.mkdir(exist_ok=True)
    for board in found:
        for words, svg, png in _figures(board, records):
            name = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")
            for suffix, data in ((".svg", svg.encode()), (".png", png)):
                write_atomic(folder / f"{name}{suffix}", data)
                written.append(folder / f"{name}{suffix}")
    write_csv(records, store.csv_path, claims=claimed)  # last: it tells whether the board is complete
    return written


def _figures(board: Board, records: Sequence[Record]) -> Iterator[tuple[str, str, bytes]]:
    """Yield a board's figures: words that name the file, the SVG and the PNG."""
    setting = board.setting
    once = (setting.probe, setting.probe_rounds) == ("gradient", 1)
    held, about = "" if once else f"{setting.probe} {setting.probe_rounds}", f"{setting.data} {setting.train}"
    for ppc in figures(board, records):
        words = f"ppc {about} {setting.network} {setting.threat} {ppc.title} {held} {ppc.distance}"
        yield words, ppc_svg(ppc), ppc_png(ppc)
    for curve in curves(board, about_of(setting)):
        yield f"{curve.title} {about} {setting.network} {held}", curve_svg(curve), curve_png(curve)
