"""Accepted baselines: BASELINE/accepted.jsonl says which records were accepted, when and why, one line per move."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from ppbench.base.errors import UsageError
from ppbench.records.archive import files_of
from ppbench.records.schema import Record, Strict
from ppbench.records.store import Store, canonical_json

HISTORY = "accepted.jsonl"


class Moved(Strict):
    """Numbers of cells that a move added, removed, and changed (one name, other results)."""

    added: int
    removed: int
    changed: int


class Accepted(Strict):
    """A line of accepted.jsonl: when (UTC, "2026-05-03T17:04:05Z"), why, by which version; digest: `records_digest`."""

    date: str
    reason: str = Field(min_length=1)
    ppbench: str
    cells: int
    digest: str
    moved: Moved


def records_digest(records: Sequence[Record]) -> str:
    """Return the SHA-256 over the canonical JSON of `records`, by name; the layout of files does not count."""
    digest = hashlib.sha256()
    for record in sorted(records, key=lambda r: r.cell_id):
        digest.update(f"{record.cell_id} {hashlib.sha256(canonical_json(record)).hexdigest()}\n".encode())
    return digest.hexdigest()


def history(out: Path) -> list[Accepted]:
    """Return a baseline's accepted.jsonl, oldest first, [] where there is none; UsageError where it was changed."""
    files = files_of(out)
    path = files.path / HISTORY
    try:
        lines = files.read(HISTORY).decode().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as cause:
        raise UsageError(f"{path} cannot be read ({cause}); restore it from version control.") from cause
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(Accepted.model_validate_json(line, strict=True))
        except ValidationError as cause:
            raise UsageError(
                f"{path} line {number} is no entry of `ppbench baseline accept`; restore the file from version control."
            ) from cause
    return entries


def baseline_problems(store: Store, records: Sequence[Record]) -> Iterator[str]:
    """Yield a clause if a baseline with these records was not moved by `ppbench baseline accept`."""
    try:
        lines = history(store.out)
    except UsageError as error:
        yield str(error)
        return
    if not lines:
        if store.bare:
            yield f"{HISTORY} is missing, though the marker says that this is an accepted baseline"
        return
    last, digest = lines[-1], records_digest(records)
    if digest != last.digest:
        yield (
            f"the {len(records)} records have the digest {digest[:16]}, the last line of {HISTORY} says "
            f"{last.digest[:16]} of {last.cells}; a baseline is moved by `ppbench baseline accept` alone"
        )
