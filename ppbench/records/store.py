"""Records on disk: a cell is written whole or not at all, and results outlive crashes.

    OUT/ppbench.json                    the marker: this folder is ours
    OUT/records/<cell_id>.json          the record; written last, so a cell exists if and only if this file does
    OUT/records/<cell_id>.timing.json   seconds; not part of the result
    OUT/records/<cell_id>.safetensors   reconstructions: "guess" and "truth", float32 [n, *shape]
    OUT/times/<training>.json           how long a client takes; not part of the result, as these two (`run_files.py`)
    OUT/selftest.json                   the outcome of the self-test
    OUT/origin.json                     command, day and commit

OUT may be a link to a folder; links, devices and pipes inside it are neither read nor written. Equal records give equal
bytes. The marker of an accepted baseline (`ppbench.verification.baseline`) says that reconstructions were left out:
then they are not required, and only `ppbench baseline accept` writes there. A published board has pictures in their
place, of the cells that its page shows (`Pictures`). No digest in a record is of them: they are checked against scores.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors import numpy as safe

from ppbench.base.errors import UsageError, first_fault
from ppbench.base.files import TEMPORARY, kind_of, listing, make_folder, sweep_abandoned, write_atomic
from ppbench.base.version import __version__
from ppbench.records.archive import files_of
from ppbench.records.schema import RECORD_SCHEMA, Artifact, Record, Strict, lean
from ppbench.records.scores import Amount

if TYPE_CHECKING:
    from torch import Tensor

    Array = NDArray[np.float32] | Tensor

Bytes = NDArray[np.uint8]
MARKER = "ppbench.json"
TIMES_FOLDER = "times"
FOLDERS = ("records", TIMES_FOLDER, "figures", "cache")
"""Folders of results."""
RESULTS_SCHEMA = "ppbench.results/1"
LEFT_OUT = "reconstructions"
_CELL = re.compile(r"[0-9a-f]{32}")
_TEMPORARY = re.compile(rf"(?:ppbench\.json|[0-9a-f]{{32}}\.[a-z.]+|leaderboard\.\w+){TEMPORARY}")
_VERSION = re.compile(r"\d[\w.+]{0,30}")


class Timing(Strict):
    """How long a cell's attack took, in wall-clock seconds; kept beside the record, not in it."""

    seconds: Amount


@dataclass(frozen=True)
class CellImages:
    """A cell's reconstructions and originals, matched: both [n, *shape] float32; guess may hold non-finite values.

    blind: [1, *shape], the mean image, a blind guess; None in older folders.
    """

    guess: NDArray[np.float32]
    truth: NDArray[np.float32]
    blind: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Pictures(CellImages):
    """The first images of a cell as a page draws them: clipped to [0, 1], rounded to 255ths, NaN where not finite."""


PICTURED = 8
"""How many images a page shows of a cell, and a published board keeps: of the first victims, not the best ones."""


def canonical_json(model: BaseModel) -> bytes:
    """Return the JSON of `model` as written to disk: sorted keys, shortest float repr, one final newline."""
    data = model.model_dump(mode="json", by_alias=True)
    return (json.dumps(data, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def marker_bytes(bare: bool = False) -> bytes:
    """Return the marker of a results folder. bare: of an accepted baseline, which holds no reconstructions."""
    about = {"schema": RESULTS_SCHEMA, "version": __version__, **({"without": [LEFT_OUT]} if bare else {})}
    return (json.dumps(about, sort_keys=True) + "\n").encode()


class Store:
    """The output folder of a sweep, or an archive of one, which can only be read. Making a Store writes nothing.

    files: its files, by name; csv_path, html_path: where the board goes, derived from the records.
    bare: whether the folder is an accepted baseline, whose reconstructions were left out on purpose.
    """

    def __init__(self, out: Path) -> None:
        """Open `out`, which need not exist yet. Raises UsageError: it exists and holds no results of ppbench."""
        self.out = Path(out)
        self.files = files_of(self.out)
        self.folder = self.out / "records"
        self.csv_path, self.html_path = self.out / "leaderboard.csv", self.out / "leaderboard.html"
        self.bare = False
        self._check()

    def _check(self) -> None:
        if (kind := kind_of(self.out)) is None:
            return
        if kind == "special":
            raise UsageError(f"{self.out} is a device, pipe or socket; give a folder or an archive of results.")
        marker = self.out / MARKER
        if not self.files.holds(MARKER):
            present = listing(self.out) if kind == "folder" else [self.out]
            foreign = [path.name for path in present if not _TEMPORARY.fullmatch(path.name)]
            if foreign:
                raise UsageError(
                    f"{self.out} holds files that are not ppbench's (such as {foreign[0]!r}) and no {MARKER}; "
                    "give a new or an empty folder."
                )
            return
        try:
            about = json.loads(self.files.read(MARKER))
            schema, left_out = about["schema"], about.get("without", [])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as cause:
            raise UsageError(f"{marker} is not ppbench's marker; give another folder.") from cause
        if schema != RESULTS_SCHEMA:
            raise UsageError(
                f"{self.out} holds results of schema {schema!r}, and this ppbench reads {RESULTS_SCHEMA!r}; "
                f"{_newer(schema, RESULTS_SCHEMA, about.get('version')) or 'give another folder.'}"
            )
        self.bare = left_out == [LEFT_OUT]
        for name in FOLDERS if kind == "folder" else ():
            if (kind_of(self.out / name, follow=False) or "folder") != "folder":
                raise UsageError(f"{self.out / name} is no folder of its own, as results have it there; move it away.")

    def prepare(self) -> None:
        """Make folder and marker; UsageError: the store must not be written."""
        if kind_of(self.out) == "file":
            raise UsageError(f"{self.out} is an archive, which can only be read; give another --out.")
        if self.bare:
            raise UsageError(
                f"{self.out} is an accepted baseline, which `ppbench baseline accept` alone moves; give another --out."
            )
        if kind_of(self.out) is None:
            make_folder(self.out)
        if not self.files.holds(MARKER):  # first: a run killed here leaves a folder that is recognized as ours
            write_atomic(self.out / MARKER, marker_bytes())
        make_folder(self.folder)

    def sweep(self) -> None:
        """Remove unfinished files of killed runs of this machine."""
        cache = self.out / "cache"
        trainings = [path for path in listing(cache) if path.is_dir()] if kind_of(cache) == "folder" else []
        for folder in (self.out, *(self.out / name for name in FOLDERS), *trainings):
            sweep_abandoned(folder)

    def has(self, cell_id: str) -> bool:
        """Return whether the cell is finished."""
        return self.files.holds(f"records/{cell_id}.json")

    def ids(self) -> list[str]:
        """Return the names of the finished cells, sorted."""
        stems = (name.removesuffix(".json") for name in self.files.names("records"))
        return [stem for stem in stems if _CELL.fullmatch(stem)]

    def finished(self, cell_id: str) -> bool:
        """Return whether the cell has a result, complete or diverged; a failed one is worth another try."""
        return self.has(cell_id) and self.load(cell_id).status != "failed"

    def save(
        self, record: Record, *, seconds: float | None = None, tensors: Mapping[str, Array] | None = None
    ) -> Record:
        """Write a cell, its record last; return the record as written, with its artifacts.

        seconds: how long the attack took; tensors: "guess" and "truth", matched images [n, *shape] on the CPU, kept as
        float32, and "blind", [1, *shape]. Raises UsageError: the disk is full or cannot be written; then a new cell
        leaves no files. Raises ValueError: guess or truth is missing, or their shapes differ.
        """
        self.prepare()
        new = not self.has(record.cell_id)
        stem = self.folder / record.cell_id
        images, timing, final = (stem.with_suffix(end) for end in (".safetensors", ".timing.json", ".json"))
        artifacts = []
        try:
            if tensors is not None:
                data = _pack(tensors)
                digest = hashlib.sha256(data).hexdigest()
                artifacts = [Artifact(path=images.name, sha256=digest, bytes=len(data), kind="reconstructions")]
                write_atomic(images, data)
            record = record.model_copy(update={"artifacts": artifacts})
            if seconds is not None:
                write_atomic(timing, canonical_json(Timing(seconds=seconds)))
            write_atomic(final, canonical_json(record))
        except UsageError:
            for part in (images, timing) if new else ():
                part.unlink(missing_ok=True)
            raise
        return record

    def load(self, cell_id: str) -> Record:
        """Return one record. Raises UsageError: it cannot be read or is no record of the current schema."""
        path, data = self.folder / f"{cell_id}.json", b""
        try:
            data = self.files.read(f"records/{cell_id}.json")
            record = Record.model_validate_json(data, strict=True)
        except FileNotFoundError as cause:
            raise UsageError(f"There is no record {cell_id} in {self.folder}.") from cause
        except OSError as cause:
            raise UsageError(f"{path} cannot be read ({cause.strerror}).") from cause
        except ValidationError as cause:
            if why := _by_newer(data):
                raise UsageError(f"{path} {why}") from cause
            raise UsageError(
                f"{path} is not a whole record ({first_fault(cause)}); delete it to have the cell evaluated again."
            ) from cause
        if record.cell_id != cell_id:
            raise UsageError(f"{path} holds cell {record.cell_id}; a record is named by its cell.")
        return lean(record)

    def seconds(self, cell_id: str) -> float | None:
        """Return how long a cell's attack took, None where nothing says so."""
        name = f"records/{cell_id}.timing.json"
        return Timing.model_validate_json(self.files.read(name)).seconds if self.files.holds(name) else None

    def load_all(self) -> list[Record]:
        """Return every record, in the order of the cells' names. Raises UsageError for the first that is corrupt."""
        if self.files.lost:
            raise UsageError(self.files.lost[0])
        return [self.load(cell_id) for cell_id in self.ids()]

    def readable(self) -> tuple[list[Record], list[str]]:
        """Return the records that can be read, in the order of the cells' names, and a sentence for each other."""
        records: list[Record] = []
        problems = [*self.files.lost]
        for cell_id in self.ids():
            try:
                records.append(self.load(cell_id))
            except UsageError as error:
                problems.append(str(error))
        return records, problems

    def images(self, record: Record) -> CellImages | None:
        """Return a record's reconstructions, None without any; UsageError: no pair of equal float32 shapes.

        Of a baseline: its `Pictures`. The path is made from the cell's name, never from the record: a record is data
        and may come from anyone.
        """
        path = self.folder / f"{record.cell_id}.safetensors"  # of a portfolio, those of its best cell
        if not record.artifacts or (self.bare and not self.files.holds(f"records/{path.name}")):
            return None
        try:
            tensors = safe.load(self.files.read(f"records/{path.name}"))
            guess, truth, blind = tensors["guess"], tensors["truth"], tensors.get("blind")
        except (OSError, SafetensorError, KeyError, ValueError) as cause:
            raise UsageError(f"{path} does not hold the cell's reconstructions ({cause}).") from cause
        kind = np.dtype(np.uint8 if self.bare else np.float32)
        if guess.shape != truth.shape or guess.dtype != kind or truth.dtype != kind or not guess.ndim:
            raise UsageError(f"{path} must hold 'guess' and 'truth' as {kind} of one shape.")
        if blind is not None and (blind.dtype != kind or blind.shape != (1, *truth.shape[1:])):
            raise UsageError(f"{path} must hold 'blind' as one {kind} image like those of 'truth'.")
        if not self.bare:
            return CellImages(guess, truth, blind)
        finite = tensors.get("finite")
        if finite is None or finite.dtype != np.bool_ or finite.shape != guess.shape[:1]:
            raise UsageError(f"{path} must hold 'finite' as one truth value for each image.")
        return _pictures(guess, truth, blind, finite)


def _pack(arrays: Mapping[str, Array]) -> bytes:
    packed = {name: np.ascontiguousarray(np.asarray(value), dtype=np.float32) for name, value in arrays.items()}
    known = {"guess", "truth"} <= set(packed) <= {"guess", "truth", "blind"}
    if not known or packed["guess"].shape != packed["truth"].shape:
        shapes = {name: value.shape for name, value in packed.items()}
        raise ValueError(f"a cell's tensors are 'guess' and 'truth' of one shape, and 'blind', not {shapes}")
    return safe.save(packed)


# -- pictures: what a published board keeps of reconstructions --------------------------------------------------------
def picture_bytes(pictures: Pictures) -> bytes:
    """Return the file that keeps pictures, a quarter of the bytes of their numbers.

    "guess" and "truth" are uint8, whole 255ths, as is "blind", [1, *shape]; "finite", bool [n], is of the guesses.
    """
    finite = _finite(pictures.guess)
    guess = pictures.guess.copy()
    guess[~finite] = 0
    kept = {"guess": guess, "truth": pictures.truth}
    kept |= {} if pictures.blind is None else {"blind": pictures.blind}
    return safe.save({**{name: _rounded(value) for name, value in kept.items()}, "finite": finite})


def pictures_of(images: CellImages) -> Pictures:
    """Return the pictures of the first `PICTURED` of a cell's images."""
    guess, truth = images.guess[:PICTURED].copy(), images.truth[:PICTURED]
    finite = _finite(guess)
    guess[~finite] = 0
    return _pictures(_rounded(guess), _rounded(truth), None if images.blind is None else _rounded(images.blind), finite)


def _finite(guess: NDArray[np.float32]) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(guess.reshape(len(guess), -1)).all(axis=1))


def _rounded(values: NDArray[np.float32]) -> Bytes:
    return np.ascontiguousarray(np.rint(values.clip(0, 1) * 255), dtype=np.uint8)


def _pictures(guess: Bytes, truth: Bytes, blind: Bytes | None, finite: NDArray[np.bool_]) -> Pictures:
    """Return pictures of whole 255ths."""
    shown = _unrounded(guess)
    shown[~finite] = np.nan
    return Pictures(shown, _unrounded(truth), None if blind is None else _unrounded(blind))


def _unrounded(values: Bytes) -> NDArray[np.float32]:
    return np.divide(values, 255, dtype=np.float32)


def open_results(path: Path) -> Store:
    """Return the store of a folder or an archive; UsageError: it does not exist or is not ppbench's."""
    if kind_of(path) is None:
        raise UsageError(f"{path} is no folder and no archive of results; give the --out of an evaluation.")
    return Store(path)


# -- what a newer ppbench wrote: nobody should delete what an upgrade can read ----------------------------------------
def _newer(stated: object, known: str, version: object) -> str:
    """Return advice on a schema with a higher number than `known`, "" if `stated` is none."""
    family, _, number = known.rpartition("/")
    head, _, later = stated.rpartition("/") if isinstance(stated, str) else ("", "", "")
    if head != family or not later.isascii() or not later.isdigit() or int(later[:9]) <= int(number):
        return ""
    valid = isinstance(version, str) and _VERSION.fullmatch(version)
    return f"a newer ppbench wrote it: install ppbench-fl{'>=' + str(version) if valid else ' in its latest version'}."


def _by_newer(data: bytes) -> str:
    """Return the message on a record of a newer ppbench, "" for a damaged record."""
    try:
        about = json.loads(data)
        schema, version = about["config"]["schema"], about.get("environment", {}).get("ppbench")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""
    advice = _newer(schema, RECORD_SCHEMA, version)
    return f"is a record of schema {schema!r}, and this ppbench reads {RECORD_SCHEMA!r}; {advice}" if advice else ""
