"""The record of one evaluated cell (`ppbench.run/1`). A missing number is null with its reason, never NaN.

The hash of `CellConfig` names the cell. Timing is kept apart, so that equal runs give equal records byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from ppbench.base.registry import plugins
from ppbench.records.outcome import Cost, Played, Privacy, Tuned, Utility
from ppbench.records.scores import (
    Amount,
    AtLeastOne,
    Count,
    Grown,
    OtherScore,
    Scalar,
    Score,
    Share,
    Strict,
    Victim,
    Whole,
)

RECORD_SCHEMA: Literal["ppbench.run/1"] = "ppbench.run/1"
MAX_COUNT, MAX_ROUNDS = 10**6, 10**9
"""Most clients, classes, victims, examples of a batch; most rounds. Verification repeats draws for so many."""
Few = Annotated[int, Field(ge=1, le=MAX_COUNT)]


class ThreatInfo(Strict):
    """Whose view is attacked. id: e.g. "server/1"; sees: in words; knows_defense: adaptive attack or not."""

    id: str
    sees: str
    knows_defense: bool
    auxiliary: str = ""


class Control(Strict):
    """The control parameter and its value: the x-axis of a defense's trade-off."""

    name: str
    value: float


class Coded(Grown):
    """Part of a configuration that a plugin may define. code: digest of another package's source (`sources.code_of`).

    So an edited plugin never reuses cells of its older code; names of our own cells stay.
    """

    code: str = ""
    LATER: ClassVar[Mapping[str, Any]] = {"code": "", "public": 0, "salt": ""}


class DefenseInfo(Coded):
    """A defense as configured."""

    id: str
    version: str
    parameters: dict[str, Scalar]
    control: Control | None

    @property
    def edition(self) -> str:
        """The version, with the code of another package's defense: "1+3f9a0c12b4de"."""
        return f"{self.version}+{self.code}" if self.code else self.version


class AttackInfo(Coded):
    """An attack as configured. kind: its question's name; follows: the attack whose answers it uses, else None.

    code: of the attack, its question and the attack that it follows, together.
    """

    id: str
    version: str
    kind: str
    parameters: dict[str, Scalar]
    adaptive: bool
    oracle: bool = False
    follows: str | None = None


class FederationInfo(Grown):
    """How the model was trained. tf32: whether a GPU may use it; None on a CPU, and in older records."""

    clients: Few
    rounds: Annotated[int, Field(ge=1, le=MAX_ROUNDS)]
    schedule: str
    upload: str
    local_epochs: AtLeastOne
    batch: AtLeastOne
    optimizer: str
    lr: Amount
    momentum: Share
    beta2: Share = 0.999
    decay_at: list[Whole]
    decay: Share
    partition: str
    server_optimizer: str
    server_lr: Amount
    backend: str
    device: str
    dtype: str
    tf32: bool | None = None
    LATER: ClassVar[Mapping[str, Any]] = {"tf32": None}


class DataInfo(Coded):
    """Which data. sha256: digest of the tensors; sizes in examples; public: those that no client holds.

    salt: 32 hex digits of the SHA-256 of the secret of all draws, by which its holder can prove it; "" for none.
    """

    name: str
    sha256: str
    train: AtLeastOne
    test: AtLeastOne
    public: Count = 0
    salt: str = Field(default="", pattern="^([0-9a-f]{32})?$")

    @property
    def identity(self) -> str:
        """The digest, with that of the secret if there is one: records of one identity have the same data and draws."""
        return "+".join(filter(None, (self.sha256, self.salt)))


class ModelInfo(Coded):
    """Which network. parameters: their number."""

    id: str
    options: dict[str, Scalar]
    shape: Annotated[list[AtLeastOne], Field(min_length=1)]
    classes: Few
    parameters: Count
    loss: str


class AuditInfo(Grown):
    """An audit: how many reference runs were trained, how many canaries of each family it had, how many clients."""

    references: Count
    canaries: Count
    canary_clients: Count = 0
    LATER: ClassVar[Mapping[str, Any]] = {"canary_clients": 0}


class CellConfig(Grown):
    """Everything that determines a cell.

    stage: "init" (random weights), "iterate" (what clients train on), "final" (after training) or "audit" (after a
    training with canaries); batch_size: examples in a victim's batch; victims: number of victim images, candidates or
    queries. probe, probe_rounds: what a probed client did with the batch, and how often; role: of the victims, "" if
    all clients do the same. tuning: number of images on which the attack's settings were tuned.
    perceptual: the feature network of LPIPS and feature errors with its digest, "" for none.
    victims_from: number of each client's examples that were skipped before victims were drawn; None: not used.
    suite: its name, as "digits-quick/1"; suite_digest: hash of what its cells share (`ppbench.run.suite`), "" for a
    single evaluation.
    """

    schema_: Literal["ppbench.run/1"] = Field(default=RECORD_SCHEMA, alias="schema")
    suite: str
    threat_model: ThreatInfo
    defense: DefenseInfo
    attack: AttackInfo
    federation: FederationInfo
    data: DataInfo
    model: ModelInfo
    stage: Literal["init", "iterate", "final", "audit"]
    batch_size: Few
    victims: Few
    seed: Whole
    probe: Literal["gradient", "local"] = "gradient"
    probe_rounds: AtLeastOne = 1
    role: str = ""
    tuning: Count = 0
    perceptual: str = ""
    audit: AuditInfo | None = None
    suite_digest: str = ""
    victims_from: Count | None = None

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)
    LATER: ClassVar[Mapping[str, Any]] = {
        "tuning": 0, "perceptual": "", "audit": None, "suite_digest": "", "victims_from": None,
    }  # fmt: skip

    @property
    def edition(self) -> str:
        """The defense's version, with the code of other packages' parts of the training: "1+3f9a0c12b4de"."""
        return "+".join(filter(None, (self.defense.edition, self.data.code, self.model.code)))

    def cell_id(self) -> str:
        """Return the name of the cell: the first 32 hex digits of the SHA-256 of its canonical JSON."""
        text = json.dumps(self.model_dump(mode="json", by_alias=True), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Metric(Strict):
    """One aggregate over n victims (images, labels, candidates).

    value: null with `reason` if n cannot support it. low, high: 95 % interval by `method`; null without one, then
    `method` says why. chance: the value of blind guessing, if defined. realized_fpr: for TPR at a false-positive rate,
    the rate that was reached.
    """

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    method: str
    n: Count
    higher_is_safer: bool
    reason: str | None = None
    chance: float | None = None
    realized_fpr: Share | None = None


class Artifact(Strict):
    """A file beside the record."""

    path: str
    sha256: str
    bytes: Count
    kind: Literal["reconstructions"]


class Flag(Strict):
    """Something a reader must know about this cell."""

    code: str
    severity: Literal["info", "warning", "error"]
    detail: str


class Environment(Grown):
    """Where it ran; not part of the cell's name. apart: for an isolated attack, what it had no access to."""

    ppbench: str
    python: str
    torch: str
    device: str
    threads: AtLeastOne
    dtype: str
    apart: str = Field(default="", max_length=300)
    LATER: ClassVar[Mapping[str, Any]] = {"apart": ""}


class Record(Strict):
    """One evaluated cell, whole. Only status "complete" is ranked.

    asked: hash of the questions and their answers (victims, candidates, queries), in the order of the scores: two cells
    of one hash may be compared victim by victim. None without questions, and in older records.
    """

    model_config = ConfigDict(defer_build=True)  # questions, which say what scores are, are built on this module

    cell_id: str
    config: CellConfig
    victims: list[Victim]
    metrics: list[Metric]
    utility: Utility
    cost: Cost
    privacy: Privacy
    played: Played | None = None
    tuned: Tuned | None = None
    asked: str | None = None
    artifacts: list[Artifact] = Field(default_factory=list)
    flags: list[Flag] = Field(default_factory=list)
    status: Literal["complete", "diverged", "failed"]
    reason: str | None = None
    environment: Environment

    @model_validator(mode="after")
    def _check_kind_of_scores(self) -> Record:
        kind = self.config.attack.kind
        if any(type(score) is OtherScore for score in self.victims) and kind in plugins("questions"):
            raise ValueError(f"scores of kind {self.victims[0].kind!r} do not answer the question {kind!r}")
        return self

    def metric(self, name: str) -> Metric | None:
        """Return the aggregate called `name`, or None when this cell has none."""
        return next((m for m in self.metrics if m.name == name), None)


def lean(record: Record) -> Record:
    """Return `record` in a third of the memory: pydantic's set of fields per object is shared by the class."""
    for one in (*record.victims, *record.metrics):
        object.__setattr__(one, "__pydantic_fields_set__", _fields(type(one)))
    return record


@cache
def _fields(model: type[Strict]) -> set[str]:
    return set(model.model_fields)


__all__ = [
    "RECORD_SCHEMA", "Artifact", "AttackInfo", "AuditInfo", "CellConfig", "Control", "Cost", "DataInfo", "DefenseInfo",
    "Environment", "FederationInfo", "Flag", "Metric", "ModelInfo", "Played", "Privacy", "Record", "Scalar", "Score",
    "Strict", "ThreatInfo", "Tuned", "Utility", "Victim", "lean",
]  # fmt: skip
