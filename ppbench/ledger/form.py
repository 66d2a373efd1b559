"""Forms of the ledger's files: JSON whose every value is checked, and safetensors; nothing is ever unpickled.

T/index.json                        the published transcripts, one line each
T/ID/transcript.json                `TranscriptInfo`
T/ID/view.safetensors               mail and states as `base.tree` keeps them, for `load_transcript`
T/ID/gradients.safetensors          the same for a reader without ppbench: observed updates and weights by name
TRUTH/truth/ID.json, .safetensors   `Truth`; stays with the organizer, in the folder of results of the same cells
NAME.json, NAME.safetensors         a submitter's answers, `GuessAbout`
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError
from torch import Tensor

from ppbench.base.errors import UsageError, because, first_fault, shown
from ppbench.base.files import kind_of, read_regular, write_atomic
from ppbench.base.tree import update_digest
from ppbench.records.schema import CellConfig, DataInfo, DefenseInfo, FederationInfo, ModelInfo, ProbeInfo, Record
from ppbench.records.scores import Amount, AtLeastOne, Count, Scalar, Share, Strict, Whole
from ppbench.records.store import Store

TRANSCRIPT_SCHEMA: Literal["ppbench.transcript/1"] = "ppbench.transcript/1"
TRUTH_SCHEMA: Literal["ppbench.truth/1"] = "ppbench.truth/1"
GUESSES_SCHEMA: Literal["ppbench.guesses/1"] = "ppbench.guesses/1"
ABOUT, VIEW, GRADIENTS = "transcript.json", "view.safetensors", "gradients.safetensors"
JSON_BYTES = 1 << 24
TENSOR_BYTES = 1 << 30
"""Largest sizes of our files; larger ones are not read."""
MAX_ENTRIES = 100_000
Hex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it holds what cannot be printed")
    return text


ShownWord = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]
ShownLine = Annotated[str, Field(max_length=2000), AfterValidator(_printable)]
"""Text shown to people: one line of printable characters; pages escape it."""
Form = TypeVar("Form", bound=Strict)


class File(Strict):
    """A file beside `transcript.json`."""

    sha256: Hex
    bytes: Count


class QuestionSlots(Strict):
    """One question: the (probe, client) slots whose batches are mixed in an observation; guesses keep their order."""

    unit: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1, max_length=MAX_ENTRIES)]


class ObservedUpdate(Strict):
    """An update in gradients.safetensors, as tensors "gradient.N.PARAMETER" where N is its place in the list.

    question: index of its question. weights: W of "weights.W.PARAMETER", the weights at which the update is exactly the
    gradient of the mean loss over the question's examples, as far as the adversary knows; None if it is anything else,
    as under a mechanism that alters it. law, std: of noise on each entry.
    """

    question: Count
    channel: ShownWord
    weights: Count | None
    law: Literal["gaussian", "laplace"] | None = None
    std: Amount | None = None


class TranscriptInfo(ProbeInfo):
    """A transcript: one adversary's view of one defense at one setting, and the questions about it.

    id: 32 hex digits of the SHA-256 of all other fields, in canonical JSON. title: for people. sees: the threat model
    in words. party: -1 is the server, None a listener. plan: the public plan of the federation (`federation.plan`).
    code, layers: where the network's code is, and its layers in words. kinds: questions that may be answered.
    batch: examples in the batch of a slot. draws: seeds of our own attacks' draws, so that they repeat; they derive
    from a secret by SHA-256 and reveal nothing else. commitment: SHA-256 of a secret nonce and the truth's digest.
    """

    schema_: Literal["ppbench.transcript/1"] = Field(default=TRANSCRIPT_SCHEMA, alias="schema")
    id: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]
    title: ShownWord
    threat: ShownWord
    sees: ShownLine
    party: Whole | None
    plan: dict[str, Any]
    defense: DefenseInfo
    federation: FederationInfo
    data: DataInfo
    model: ModelInfo
    code: ShownWord
    layers: Annotated[str, Field(max_length=100_000)]
    stage: Literal["init", "iterate", "final"]
    batch: AtLeastOne
    role: Annotated[str, Field(max_length=200)]
    kinds: Annotated[tuple[ShownWord, ...], Field(min_length=1, max_length=20)]
    questions: Annotated[tuple[QuestionSlots, ...], Field(min_length=1, max_length=MAX_ENTRIES)]
    sessions: Annotated[tuple[tuple[Whole, Whole, ShownWord], ...], Field(max_length=MAX_ENTRIES)]
    observed: Annotated[tuple[ObservedUpdate, ...], Field(max_length=MAX_ENTRIES)]
    draws: Annotated[dict[ShownWord, Count], Field(max_length=1000)]
    commitment: Hex
    files: Annotated[dict[Annotated[str, Field(pattern=r"^[a-z]{1,40}\.safetensors$")], File], Field(max_length=10)]
    ppbench: ShownWord
    torch: ShownWord

    def name(self) -> str:
        """Return the id that belongs to the other fields."""
        fields = self.model_dump(mode="json", by_alias=True, exclude={"id"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


class Truth(Strict):
    """The organizer's half of a transcript. cell: a record of the same view, training and configuration.

    Tensors beside: x [Q, U * B, *shape], y [Q, U * B, C], mean, and gallery and classes of held-out images, if any.
    """

    schema_: Literal["ppbench.truth/1"] = Field(default=TRUTH_SCHEMA, alias="schema")
    id: Id
    nonce: Hex
    cell: Id


class AttackCost(Strict):
    """The cost of an attack, as its author states it. evaluations: of gradients, all questions together."""

    seconds: Amount | None = None
    evaluations: Count | None = None
    hardware: ShownLine = ""


class GuessAbout(Strict):
    """A submitter's answers to a transcript.

    kind: the question answered. name, version: of the attack. reference: where it is described, or its code. knows:
    whether it uses knowledge of the defense. auxiliary: what it used besides the transcript, data above all.
    """

    schema_: Literal["ppbench.guesses/1"] = Field(default=GUESSES_SCHEMA, alias="schema")
    transcript: Id
    kind: ShownWord
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,79}$")]
    reference: ShownLine
    licence: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_printable)]
    knows: bool
    auxiliary: ShownLine = ""
    cost: AttackCost = AttackCost()

    def parameters(self, digest: str) -> dict[str, Scalar]:
        """Return the attack's parameters in records. digest: of the answers."""
        stated = {"reference": self.reference, "licence": self.licence, "auxiliary": self.auxiliary, "guesses": digest}
        spent = {f"cost.{name}": value for name, value in self.cost.model_dump().items() if value not in (None, "")}
        return {**stated, **spent}


def truth_commitment(nonce: str, *truth: Tensor) -> str:
    """Return the SHA-256 of a nonce, 64 hex digits, and of tensors: dtypes, shapes and values, little-endian."""
    digest = hashlib.sha256(f"{TRUTH_SCHEMA}/{nonce}".encode())
    update_digest(digest, *truth)
    return digest.hexdigest()


def row_key(config: CellConfig) -> str:
    """Return the key of a cell's row: its configuration but for attack, knowledge, tuning and feature network."""
    fields = config.model_dump(mode="json", by_alias=True)
    neutral = {"attack": None, "tuning": 0, "perceptual": "", "threat_model": config.threat_model.id}
    return json.dumps(fields | neutral, sort_keys=True)


def read_bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file; UsageError: there is none, it cannot be read, or exceeds `most` bytes."""
    if (kind := kind_of(path, follow=False)) != "file":
        shown_kind = "device, pipe or socket" if kind == "special" else kind
        what = "There is nothing at" if kind is None else f"A {shown_kind}, not a file of its own, is at"
        raise UsageError(f"{what} {path}; give the file as it was written.")
    try:
        if (size := path.stat().st_size) > most:
            raise UsageError(f"{path} has {size:,} bytes, and here no more than {most:,} are read; give another file.")
        return read_regular(path)
    except OSError as cause:
        raise UsageError(f"{path} cannot be read ({cause.strerror}); give another file.") from cause


def parse_json(model: type[Form], path: Path) -> Form:
    """Return a JSON file as `model`; UsageError: it is not of this form, with its first fault."""
    data = read_bounded(path, JSON_BYTES)
    try:
        content = model.model_validate_json(data, strict=True)
        json.loads(data, object_pairs_hook=_once)
    except ValidationError as error:
        raise UsageError(f"{path} does not have the required form ({first_fault(error)}).") from error
    except ValueError as error:
        raise UsageError(f"{path} does not have the required form ({because(error)}).") from error
    return content


def _once(pairs: list[tuple[str, Any]]) -> None:
    """Refuse an object with a duplicate name (ValueError): readers differ in which of the two counts."""
    if len(pairs) != len(dict(pairs)):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(name, 40)} appears twice in one object")


# -- The ledger's book: every submission to every transcript, in order, with the decision. Entries are only ever
# added --
# TRUTH/ledger.jsonl has one line per submission; the records of all of them lie in TRUTH/external.

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
