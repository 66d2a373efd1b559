"""The ledger's book: every submission to every transcript, in order, with what was decided. It is only ever added to.

TRUTH/ledger.jsonl has a line a submission; the records of all of them lie in TRUTH/external, moved or not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ppbench.base.errors import UsageError, first_fault
from ppbench.base.files import kind_of, write_atomic
from ppbench.ledger.form import JSON_BYTES, Hex, Id, Line, Word, bounded
from ppbench.records.schema import Record
from ppbench.records.scores import Amount, Count, Share, Strict
from ppbench.records.store import Store

NAME, EXTERNAL = "ledger.jsonl", "external"
MOST = JSON_BYTES * 4


class Entry(Strict):
    """A submission. day: UTC, YYYY-MM-DD. scene: the transcript's title. attack: "external:NAME". cell: its record.

    tries: how many submissions this transcript had had, this one counted. holder: the attack that stood before.
    """

    day: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    transcript: Id
    scene: Word
    kind: Word
    attack: Word
    version: Word
    reference: Line
    guesses: Hex
    cell: Id
    tries: Annotated[int, Field(ge=1)]
    level: Share
    p: Amount
    metric: Word
    before: float | None
    after: float
    holder: Line
    moved: bool
    reason: Line


def entries(truth: Path) -> list[Entry]:
    """Return all submissions, in order; UsageError: the book is damaged."""
    path = truth / NAME
    if kind_of(path, follow=False) is None:
        return []
    book = []
    for number, line in enumerate(bounded(path, MOST).decode(errors="replace").splitlines(), 1):
        try:
            book.append(Entry.model_validate_json(line, strict=True))
        except ValidationError as error:
            why = first_fault(error)
            raise UsageError(f"{path}, line {number} is no entry ({why}); give back what was there.") from error
    return book


def add(truth: Path, entry: Entry) -> None:
    """Write one more submission into the book."""
    path = truth / NAME
    before = bounded(path, MOST) if kind_of(path, follow=False) else b""
    write_atomic(path, before + entry.model_dump_json().encode() + b"\n")


def counted(truth: Path, book: list[Entry]) -> list[Record]:
    """Return the records that count: all of ours, and of the external ones those that moved a row."""
    outside, moved = Store(truth / EXTERNAL), sorted({entry.cell for entry in book if entry.moved})
    return [*Store(truth).load_all(), *(outside.load(cell) for cell in moved if outside.has(cell))]


def tries_at(book: list[Entry], transcript: str) -> Count:
    """Return how many submissions a transcript has had."""
    return sum(entry.transcript == transcript for entry in book)
