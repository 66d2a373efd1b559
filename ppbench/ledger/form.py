"""What the files of the ledger hold: JSON whose every value is checked, beside safetensors; nothing is ever unpickled.

T/index.json                        what is published, a line a transcript
T/ID/transcript.json                `About`
T/ID/view.safetensors               mail and states as `base.tree` keeps them, for `load_transcript`
T/ID/gradients.safetensors          the same for a reader without ppbench: observed updates and weights by name
TRUTH/truth/ID.json, .safetensors   `Truth`; stays with the organizer, in the folder of results of the same cells
NAME.json, NAME.safetensors         somebody's answers, `GuessAbout`
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
from ppbench.base.files import kind_of, read_regular
from ppbench.base.tree import hashed
from ppbench.records.schema import CellConfig, DataInfo, DefenseInfo, FederationInfo, ModelInfo
from ppbench.records.scores import Amount, Count, Scalar, Some, Strict, Whole

SCHEMA: Literal["ppbench.transcript/1"] = "ppbench.transcript/1"
TRUTH: Literal["ppbench.truth/1"] = "ppbench.truth/1"
GUESSES: Literal["ppbench.guesses/1"] = "ppbench.guesses/1"
ABOUT, VIEW, GRADIENTS = "transcript.json", "view.safetensors", "gradients.safetensors"
JSON_BYTES = 1 << 24
TENSOR_BYTES = 1 << 30
"""The largest files of ours; what is larger is not read."""
MANY = 100_000
Hex = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Id = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it holds what cannot be printed")
    return text


Word = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]
Line = Annotated[str, Field(max_length=2000), AfterValidator(_printable)]
"""What people are shown: one line of printable characters, that a page escapes."""
S = TypeVar("S", bound=Strict)


class File(Strict):
    """A file beside `transcript.json`."""

    sha256: Hex
    bytes: Count


class Asked(Strict):
    """One question: the (probe, client) slots whose batches are mixed in what is seen; guesses are in their order."""

    unit: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1, max_length=MANY)]


class Observed(Strict):
    """An update in gradients.safetensors, as tensors "gradient.N.PARAMETER" where N is its place in the list.

    question: place of the question it is about. weights: "weights.W.PARAMETER" are those at which it is exactly the
    gradient of the mean loss over the question's examples, as far as the adversary may believe; None where it is
    something else, as under a mechanism that alters it. law, std: of noise on each entry.
    """

    question: Count
    channel: Word
    weights: Count | None
    law: Literal["gaussian", "laplace"] | None = None
    std: Amount | None = None


class About(Strict):
    """A transcript: what one adversary saw of one defense at one setting, and what is asked about it.

    id: 32 hex digits of the SHA-256 of all else here, in canonical JSON. title: for people. sees: the threat model in
    words. party: -1 is the server, None a listener. plan: all that is public of the federation (`federation.plan`).
    code, layers: where the network's code is, and its layers in words. kinds: questions that may be answered.
    batch: examples in the batch of a slot. draws: seeds of our own attacks' draws, so that they repeat; they derive
    from a secret by SHA-256 and lead to nothing else. commitment: SHA-256 of a secret nonce and the truth's digest.
    """

    schema_: Literal["ppbench.transcript/1"] = Field(default=SCHEMA, alias="schema")
    id: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]
    title: Word
    threat: Word
    sees: Line
    party: Whole | None
    plan: dict[str, Any]
    defense: DefenseInfo
    federation: FederationInfo
    data: DataInfo
    model: ModelInfo
    code: Word
    layers: Annotated[str, Field(max_length=100_000)]
    stage: Literal["init", "iterate", "final"]
    batch: Some
    probe: Literal["gradient", "local"]
    probe_rounds: Some
    role: Annotated[str, Field(max_length=200)]
    kinds: Annotated[tuple[Word, ...], Field(min_length=1, max_length=20)]
    questions: Annotated[tuple[Asked, ...], Field(min_length=1, max_length=MANY)]
    sessions: Annotated[tuple[tuple[Whole, Whole, Word], ...], Field(max_length=MANY)]
    observed: Annotated[tuple[Observed, ...], Field(max_length=MANY)]
    draws: Annotated[dict[Word, Count], Field(max_length=1000)]
    commitment: Hex
    files: Annotated[dict[Annotated[str, Field(pattern=r"^[a-z]{1,40}\.safetensors$")], File], Field(max_length=10)]
    ppbench: Word
    torch: Word

    def name(self) -> str:
        """Return the id that belongs to what is said here."""
        fields = self.model_dump(mode="json", by_alias=True, exclude={"id"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


class Truth(Strict):
    """The organizer's half. cell: a record of the same view, whose training and configuration are the transcript's.

    Tensors beside: x [Q, U * B, *shape], y [Q, U * B, C], mean, and gallery and classes of held-out images, if any.
    """

    schema_: Literal["ppbench.truth/1"] = Field(default=TRUTH, alias="schema")
    id: Id
    nonce: Hex
    cell: Id


class Spent(Strict):
    """What an attack cost, as its author tells. evaluations: of gradients, all questions together."""

    seconds: Amount | None = None
    evaluations: Count | None = None
    hardware: Line = ""


class GuessAbout(Strict):
    """Somebody's answers to a transcript.

    kind: the question answered. name, version: of the attack. reference: where it is described, or its code. knows:
    whether it uses that the defense is known. auxiliary: what it used besides the transcript, data above all.
    """

    schema_: Literal["ppbench.guesses/1"] = Field(default=GUESSES, alias="schema")
    transcript: Id
    kind: Word
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,79}$")]
    reference: Line
    licence: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_printable)]
    knows: bool
    auxiliary: Line = ""
    cost: Spent = Spent()

    def parameters(self, digest: str) -> dict[str, Scalar]:
        """Return what records hold of it. digest: of the answers."""
        stated = {"reference": self.reference, "licence": self.licence, "auxiliary": self.auxiliary, "guesses": digest}
        spent = {f"cost.{name}": value for name, value in self.cost.model_dump().items() if value not in (None, "")}
        return {**stated, **spent}


def commitment(nonce: str, *truth: Tensor) -> str:
    """Return the SHA-256 of a nonce, 64 hex digits, and of tensors: dtypes, shapes and values, little-endian."""
    digest = hashlib.sha256(f"{TRUTH}/{nonce}".encode())
    hashed(digest, *truth)
    return digest.hexdigest()


def row_of(config: CellConfig) -> str:
    """Return what the cells of one view share: all but the attack, what it knows, and how it was tuned and measured."""
    fields = config.model_dump(mode="json", by_alias=True)
    neutral = {"attack": None, "tuning": 0, "perceptual": "", "threat_model": config.threat_model.id}
    return json.dumps(fields | neutral, sort_keys=True)


def bounded(path: Path, most: int) -> bytes:
    """Return the bytes of a file, no link; UsageError: it is none, cannot be read, or is larger than `most` bytes."""
    if (described_kind := kind_of(path, follow=False)) != "file":
        shown_kind = "device, pipe or socket" if described_kind == "special" else described_kind
        what = "There is nothing at" if described_kind is None else f"A {shown_kind}, not a file of its own, is at"
        raise UsageError(f"{what} {path}; give the file as it was written.")
    try:
        if (size := path.stat().st_size) > most:
            raise UsageError(f"{path} has {size:,} bytes, and here no more than {most:,} are read; give another file.")
        return read_regular(path)
    except OSError as cause:
        raise UsageError(f"{path} cannot be read ({cause.strerror}); give another file.") from cause


def parsed(model: type[S], path: Path) -> S:
    """Return what a JSON file says; UsageError: it is not of this form, by its first fault."""
    data = bounded(path, JSON_BYTES)
    try:
        parsed_file = model.model_validate_json(data, strict=True)
        json.loads(data, object_pairs_hook=_once)
    except ValidationError as error:
        raise UsageError(f"{path} is not of the form that it must have ({first_fault(error)}).") from error
    except ValueError as error:
        raise UsageError(f"{path} is not of the form that it must have ({because(error)}).") from error
    return parsed_file


def _once(pairs: list[tuple[str, Any]]) -> None:
    """Refuse an object with a name twice (ValueError): readers differ in which of the two counts."""
    if len(pairs) != len(dict(pairs)):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(name, 40)} stands twice in one object")


def written(model: Strict) -> bytes:
    """Return the JSON of a file of ours: sorted keys, one final newline."""
    fields = model.model_dump(mode="json", by_alias=True)
    return (json.dumps(fields, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()
