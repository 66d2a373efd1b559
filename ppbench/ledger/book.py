"""The ledger's book: every submission to every transcript, in order, with the decision. Entries are only ever added.

TRUTH/ledger.jsonl has one line per submission; the records of all of them lie in TRUTH/external.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ppbench.base.errors import UsageError, first_fault
from ppbench.base.files import kind_of, write_atomic
from ppbench.ledger.form import JSON_BYTES, Hex, Id, ShownLine, ShownWord, read_bounded
from ppbench.records.schema import Record
from ppbench.records.scores import Amount, Count, Share, Strict
from ppbench.records.store import Store

BOOK_FILE, EXTERNAL = "ledger.jsonl", "external"
MAX_BOOK_BYTES = JSON_BYTES * 4


class BookEntry(Strict):
    """A submission. day: UTC, YYYY-MM-DD. scene: the transcript's title. attack: "external:NAME". cell: its record.

    tries: number of submissions to this transcript so far, this one included. holder: the attack of the former worst
    case.
    """

    day: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    transcript: Id
    scene: ShownWord
    kind: ShownWord
    attack: ShownWord
    version: ShownWord
    reference: ShownLine
    guesses: Hex
    cell: Id
    tries: Annotated[int, Field(ge=1)]
    level: Share
    p: Amount
    metric: ShownWord
    before: float | None
    after: float
    holder: ShownLine
    moved: bool
    reason: ShownLine


def read_book(truth: Path) -> list[BookEntry]:
    """Return all submissions, in order; UsageError: the book is damaged."""
    path = truth / BOOK_FILE
    if kind_of(path, follow=False) is None:
        return []
    book = []
    for number, line in enumerate(read_bounded(path, MAX_BOOK_BYTES).decode(errors="replace").splitlines(), 1):
        try:
            book.append(BookEntry.model_validate_json(line, strict=True))
        except ValidationError as error:
            why = first_fault(error)
            raise UsageError(f"{path}, line {number} is no entry ({why}); give back what was there.") from error
    return book


def add_entry(truth: Path, entry: BookEntry) -> None:
    """Append a submission to the book."""
    path = truth / BOOK_FILE
    before = read_bounded(path, MAX_BOOK_BYTES) if kind_of(path, follow=False) else b""
    write_atomic(path, before + entry.model_dump_json().encode() + b"\n")


def counting_records(truth: Path, book: list[BookEntry]) -> list[Record]:
    """Return the records that count: all of ours, and the external ones that moved a row."""
    outside, moved = Store(truth / EXTERNAL), sorted({entry.cell for entry in book if entry.moved})
    return [*Store(truth).load_all(), *(outside.load(cell) for cell in moved if outside.has(cell))]


def tries_at(book: list[BookEntry], transcript: str) -> Count:
    """Return the number of submissions to a transcript."""
    return sum(entry.transcript == transcript for entry in book)
