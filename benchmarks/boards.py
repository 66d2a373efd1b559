"""Compute committed boards a seed at a time and publish each: sweep, accept, pack, write table and manifest.

Run: PPBENCH_SHARED=FOLDER python benchmarks/boards.py OUT [--board NAME ...] [--seeds 0 1 2] [--until 21:15]
FOLDER holds data/cifar10, data/mnist (parquet), data/bank-marketing.csv.gz and, for reviews, data/reviews.tsv and
data/minilm. Results grow in OUT/NAME, where a killed run goes on; leaderboards/results/NAME gets records.zip,
worst_case.csv and manifest.toml, and keeps the seeds that it has of the same state of the suite, computed here or on
another machine. What `ppbench baseline accept` refuses is not published. Without --board: all of `BOARDS`, each seed
that is not published yet, seed by seed; after --until (local time) no other is begun. --grown: published seeds too, of
a suite that lists more defenses than it did. Afterwards `python docs/make_boards.py` writes the boards' pages.

records.zip has no reconstructions but pictures (`picture_bytes`): the first victims' images of the cells that the
board's page shows. They come from the folders in OUT/NAME, and from the archive as it was. --pictures: of published
boards, computes those of these cells again that neither has, and adds their pictures; records and tables stay. Images
are taken only where they give the published scores, as `ppbench verify` checks; the others are counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ppbench.base.toml_files import tomllib
from ppbench.questions.base import question_for
from ppbench.records.archive import pack_archive, unpack_archive
from ppbench.records.run_files import restate
from ppbench.records.schema import CellConfig, Record
from ppbench.records.store import MARKER, TIMES_FOLDER, CellImages, Pictures, Store, picture_bytes, pictures_of
from ppbench.report.integrity import history
from ppbench.report.page.board import summary_of
from ppbench.report.page.profiles import ImagesOf
from ppbench.run.suite import load_suite
from ppbench.verification.baseline import accept
from ppbench.verification.recheck import recheck

RESULTS = Path(__file__).parents[1] / "leaderboards" / "results"
SECONDS = 3600


@dataclass(frozen=True)
class Board:
    """What is swept for a board.

    data: what opens its data, KIND:PATH with the path in FOLDER/data; "" where PPBENCH_DATA gives the place. only:
    filters of the sweep. preset: of the suite, "" for the suite as it is. timed: whether what clients took is published
    beside the records.
    """

    suite: str
    data: str = ""
    only: tuple[str, ...] = ()
    preset: str = "two-cores"
    timed: bool = False

    @property
    def name(self) -> str:
        """Its folder in leaderboards/results."""
        return "-".join(filter(None, (self.suite, self.preset)))

    def command(self, seeds: Sequence[int], folder: str = "") -> list[str]:
        """Return the sweep of some seeds. folder: what stands before the data's name, nothing as it is published."""
        kind, _, path = self.data.partition(":")
        data = ["--dataset", f"{kind}:{folder}{path}"] if self.data else []
        filters = [*self.only, f"seed={','.join(map(str, seeds))}"]
        preset = ["--preset", self.preset] if self.preset else []
        return ["ppbench", "sweep", self.suite, *preset, *data, *(f"--only={one}" for one in filters)]


# MNIST on networks with convolutions and DenseNet are left out: image searches tell nothing there (docs/benchmarks.md).
BOARDS = {
    board.name: board
    for board in (
        Board("mnist-dlnet", "parquet:mnist"),
        Board("cifar10-dlnet", "parquet:cifar10"),
        Board("fedpc-theorems", "parquet:cifar10"),
        Board("fedpc-workers", "parquet:cifar10", preset=""),
        Board("baffle-masks", "parquet:mnist"),
        Board("baffle-perturbations", "parquet:mnist", preset=""),
        Board("cifar10-perturbed", "parquet:cifar10", only=("model=mlp",)),
        Board("cifar10-perturbed", "parquet:cifar10", only=("model=resnet20",), preset="convolutions"),
        Board("mnist-perturbed", "parquet:mnist", only=("model=mlp",)),
        Board("mnist-perturbed", "parquet:mnist", only=("model=mlp",), preset="extended"),
        Board("perturbed-models", "parquet:cifar10"),
        Board("perturbed-models", "parquet:cifar10", preset="resnet20"),
        Board("bank-marketing"),
        Board("cost", "parquet:cifar10", preset="", timed=True),
        Board("messages", "parquet:cifar10", preset=""),
        Board("digits-quick", preset=""),  # what a run of the suite is compared with
        Board("digits-quick", preset="three-seeds"),
        Board("compression", preset=""),
        Board("classic", preset=""),
        Board("text", preset=""),
        Board("text", "text:reviews.tsv?text=review&label=rating&length=32", preset="reviews"),
        Board("text-pretrained", preset=""),  # beside transformers and tokenizers
        Board("deployed", "parquet:cifar10"),  # with Flower, NVFlare and Opacus beside ppbench
        Board("cifar10-resnet20", "parquet:cifar10", preset="gifd"),  # five hours of a core
        Board("cifar10-dlnet", "parquet:cifar10", preset="trainings"),  # 23 minutes a training on a core
    )
}


def published(name: str) -> dict[str, Any]:
    """Return the manifest of a board, {} where none is committed."""
    path = RESULTS / name / "manifest.toml"
    return tomllib.loads(path.read_text()) if path.is_file() else {}


def is_published(board: Board, seed: int) -> bool:
    """Return whether a seed of a board is committed, all of it, that was computed from the suite as it is today."""
    former = published(board.name)
    seeds = former.get("seeds", [])
    today = former.get("suite_digest") == load_suite(board.suite, board.preset).digest
    return seed in seeds and today and former["command"] == " ".join(board.command(seeds))


def swept(board: Board, seed: int, out: Path, data: Path, workers: int) -> float:
    """Compute what is missing of a seed; return the processor hours. CalledProcessError: it failed."""
    before = _used()
    words = [*board.command([seed], f"{data}/"), "--out", str(out), "--workers", str(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PPBENCH_DATA": str(data)}
    subprocess.run([sys.executable, "-m", *words], check=True, env=environment)
    return (_used() - before) / SECONDS


def _used() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def attack_hours(folder: Path) -> float:
    """Return the hours, wall clock, that the attacks of all cells took."""
    return sum(json.loads(path.read_text())["seconds"] for path in folder.glob("records/*.timing.json")) / SECONDS


def publish(board: Board, folder: Path, reason: str, hours: float, machine: str) -> None:
    """Write a committed board; hours: of the processor, for what is new. Raises UsageError for results with problems.

    A board of another state of its suite, or of cells that came out otherwise, is replaced, and its hours with it.
    """
    place, former = RESULTS / board.name, published(board.name)
    with tempfile.TemporaryDirectory() as made:
        base, packed = Path(made) / "base", Path(made) / "records.zip"
        if former:
            unpack_archive(place / "records.zip", base)
        times = _times(board, base, folder)
        shutil.rmtree(base / TIMES_FOLDER, ignore_errors=True)  # a baseline with times would be refused
        accept(folder, base, reason, recheck, keep=True)
        seeds = sorted({r.config.seed for r in Store(base).load_all()})
        restate(base, " ".join(board.command(seeds)))
        for name, text in times.items():
            (base / TIMES_FOLDER).mkdir(exist_ok=True)
            (base / TIMES_FOLDER / name).write_bytes(text)
        add_pictures(base, _sources(board, folder.parent))
        pack_archive(base, packed)
        place.mkdir(parents=True, exist_ok=True)
        (place / "records.zip").write_bytes(packed.read_bytes())
        (place / "worst_case.csv").write_bytes((base / "worst_case.csv").read_bytes())
        accepted, records = history(base)[-1], Store(base).load_all()
    replaced = accepted.moved.removed or accepted.moved.changed
    where, earlier = records[0].environment, {} if replaced else former
    about = {
        "command": " ".join(board.command(seeds)),
        "accepted": accepted.date,
        "machine": machine,
        "ppbench": where.ppbench,
        "torch": where.torch,
        "python": where.python,
        "cells": len(records),
        "seeds": seeds,
        "suite_digest": records[0].config.suite_digest,
        "cpu_hours": round(hours + earlier.get("cpu_hours", 0.0), 2),
        "attack_hours": round(attack_hours(folder) + earlier.get("attack_hours", 0.0), 2),
        "records_digest": accepted.digest,
    }
    _write_manifest(place, about)


def _write_manifest(place: Path, about: dict[str, Any]) -> None:
    """Write a board's manifest, with the digest of its archive as it is."""
    about = {**about, "archive_sha256": hashlib.sha256((place / "records.zip").read_bytes()).hexdigest()}
    lines = [
        "# What was run, where and when; records: records.zip.",
        *(f"{k} = {json.dumps(v)}" for k, v in about.items()),
    ]
    (place / "manifest.toml").write_text("\n".join(lines) + "\n")


def _times(board: Board, *folders: Path) -> dict[str, bytes]:
    """Return the files of what clients took, of a board that publishes them; those of a later folder count."""
    result = (path for folder in folders for path in sorted((folder / TIMES_FOLDER).glob("*.json")) if board.timed)
    return {path.name: path.read_bytes() for path in result}


# -- pictures: what a board's page shows of reconstructions, kept beside its records ----------------------------------
def illustrate(board: Board, out: Path, data: Path, workers: int) -> None:
    """Add to a published board the pictures that it lacks, of cells that are computed again in `out`.

    CalledProcessError: that failed.
    """
    place = RESULTS / board.name
    with tempfile.TemporaryDirectory() as made:
        base, packed = Path(made) / "base", Path(made) / "records.zip"
        unpack_archive(place / "records.zip", base)
        lacking = _lacking(base, _sources(board, out))
        for seed in sorted({record.config.seed for record in lacking}):
            filters = _filters([record.config for record in lacking if record.config.seed == seed])
            again = replace(board, only=(*board.only, *filters))
            print(f"{board.name}: {swept(again, seed, out / f'again-{seed}', data, workers):.2f} processor hours")
        add_pictures(base, _sources(board, out))
        pack_archive(base, packed)
        (place / "records.zip").write_bytes(packed.read_bytes())
    _write_manifest(place, published(board.name))


def _filters(configs: Sequence[CellConfig]) -> tuple[str, ...]:
    """Return the filters of a sweep that let some cells through, and few others."""
    values = {
        "attack": {config.attack.id for config in configs},
        "defense": {config.defense.id for config in configs},
        "stage": {config.stage for config in configs},
        "batch": {str(config.batch_size) for config in configs},
    }
    return tuple(f"{key}={','.join(sorted(some))}" for key, some in values.items())


def add_pictures(base: Path, sources: Sequence[Store]) -> None:
    """Keep beside the accepted records `base` the images that their page shows, and print what is lacking."""
    records = {record.cell_id: record for record in Store(base).load_all()}
    for path in base.glob("records/*.safetensors"):  # of cells that it showed before
        path.unlink()
    for cell in sorted(_shown(base, partial(_images, sources))):
        images = _images(sources, records[cell])
        assert images is not None  # the page shows them
        (base / "records" / f"{cell}.safetensors").write_bytes(picture_bytes(images))
    if lacking := _lacking(base, sources):
        print(f"{len(lacking)} cells that a page would show have no images that give their scores; see --pictures")


def _lacking(base: Path, sources: Sequence[Store]) -> list[Record]:
    """Return the cells whose images a page would show, and that are in none of `sources`."""

    def images(record: Record) -> CellImages | None:
        blank = np.zeros((len(record.victims), *record.config.model.shape), dtype=np.float32)
        return CellImages(blank, blank) if record.artifacts else None

    cells, store = sorted(_shown(base, images)), Store(base)
    return [record for record in map(store.load, cells) if _images(sources, record) is None]


def _shown(base: Path, images: ImagesOf) -> frozenset[str]:
    """Return the names of the cells whose images the page of some records shows."""
    pictures = summary_of(Store(base), base.name, images).pictures
    return frozenset[str]().union(*(strip.cells for strip in pictures))


def _sources(board: Board, out: Path) -> list[Store]:
    """Return the results in a folder of a board, and the board as it is published."""
    folders = [path for path in sorted(out.glob("*")) if (path / MARKER).is_file()]
    archive = RESULTS / board.name / "records.zip"
    return [Store(path) for path in (*folders, archive) if path.exists()]


def _images(sources: Sequence[Store], record: Record) -> Pictures | None:
    """Return a record's pictures from the first source whose images give its scores, to the rounding of pictures.

    Their digests need not be those in the record: another processor's sums end in other digits.
    """
    for store in sources:
        images = store.images(store.load(record.cell_id)) if store.has(record.cell_id) else None
        if images is not None:
            pictures = images if isinstance(images, Pictures) else pictures_of(images)
            if not any(question_for(record).contradicted(record, pictures)):
                return pictures
    return None


def main() -> int:
    """Compute and publish what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--board", nargs="+", choices=BOARDS, default=[*BOARDS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--until", type=lambda text: datetime.strptime(text, "%H:%M").time())
    parser.add_argument("--cpu-hours", type=float, default=0.0, help="what OUT took before this call")
    parser.add_argument("--grown", action="store_true", help="published seeds too: the suite lists more than it did")
    parser.add_argument("--pictures", action="store_true", help="add the pictures that published boards lack")
    parser.add_argument("--machine", default="two shared CPU cores, x86_64")
    args = parser.parse_args()
    shared = os.environ.get("PPBENCH_SHARED")
    if not shared:
        parser.error("the environment variable PPBENCH_SHARED must name the folder that holds data/")
    data = (Path(shared) / "data").resolve()
    for name in args.board if args.pictures else ():
        if published(name):
            illustrate(BOARDS[name], args.out.resolve() / name, data, args.workers)
    for seed in () if args.pictures else args.seeds:
        for name in args.board:
            if args.until is not None and datetime.now().time() >= args.until:
                return 0
            board, folder = BOARDS[name], args.out.resolve() / name / str(seed)
            seeds = {config.seed for config in load_suite(board.suite, board.preset).configs}
            if seed not in seeds or (is_published(board, seed) and not args.grown):
                continue
            folder.parent.mkdir(parents=True, exist_ok=True)
            hours = swept(board, seed, folder, data, args.workers) + args.cpu_hours
            publish(board, folder, f"seed {seed}", hours, args.machine)
            print(f"{name}, seed {seed}: {hours:.2f} processor hours", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
