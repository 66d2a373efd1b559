"""The record of one evaluated cell (`ppbench.run/1`). A missing number is null with its reason, never NaN.

The hash of `CellConfig` names the cell. Timing is kept apart, so that equal runs give equal records byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from ppbench.base.registry import plugins
from ppbench.metrics.spec import SHARE, Ending, Judgment, MetricSpec
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

# -- Results of a training, with the metrics of its model, and of an attack's tuning, as records keep them --

TRAININGS = 3
"""Most trainings of one cell: its own, and with other seeds if that one collapsed."""


UTILITY_TOLERANCE = 0.01
"""Tolerance of an accuracy or a Dice coefficient; of a mean squared error relative."""
UTILITY_LUCK = 0.5 * UTILITY_TOLERANCE
"""Luck of training of an accuracy; see `Rule.luck`."""
_JUDGED = Judgment("mean", UTILITY_TOLERANCE, UTILITY_LUCK)


@dataclass(frozen=True, kw_only=True)
class ModelMetric(MetricSpec):
    """One metric of the delivered model; a field of `Utility` has its name, and safer means better.

    low, high: the fields with the ends of its interval; constant: those with the value of the best constant answer, the
    first that is known counts; relative: whether tolerance and luck are shares of the value; unless: the metric beside
    which it is not judged, "" for none.
    """

    low: str
    high: str
    constant: tuple[str, ...] = ()
    relative: bool = False
    unless: str = ""

    def field(self, ending: Ending) -> str:
        """Return the field of `Utility` with the value ("") or an end of the interval ("_low", "_high")."""
        return {"": self.name, "_low": self.low, "_high": self.high}[ending]


ACCURACY = ModelMetric(
    "accuracy",
    "Accuracy",
    SHARE,
    "Accuracy of the delivered model on the test part; of next tokens where texts are their own targets.",
    higher_is_safer=True,
    judgment=_JUDGED,
    low="low",
    high="high",
    constant=("constant", "chance"),
)
ACCURACY_TOP5 = ModelMetric(
    "accuracy_top5",
    "Top-5 accuracy",
    SHARE,
    "Share whose class is among the five likeliest; only for more than ten classes.",
    higher_is_safer=True,
    short="",
    low="accuracy_top5_low",
    high="accuracy_top5_high",
)
DICE = ModelMetric(
    "dice",
    "Dice",
    SHARE,
    "Mean Dice coefficient per image of the delivered model where targets are masks.",
    higher_is_safer=True,
    short="",
    columns=(),
    judgment=_JUDGED,
    low="dice_low",
    high="dice_high",
)
MSE = ModelMetric(
    "mse",
    "MSE",
    "squared targets",
    "Mean squared error of the delivered model where targets are numbers.",
    digits=4,
    judgment=_JUDGED,
    low="mse_low",
    high="mse_high",
    constant=("constant_mse",),
    relative=True,
    unless="accuracy",
)
MODEL_METRICS: Final = {spec.name: spec for spec in (ACCURACY, ACCURACY_TOP5, DICE, MSE)}
"""Every metric of the delivered model by name."""


class Utility(Grown):
    """Accuracy of the delivered model on the test part, 95 % Clopper-Pearson interval, chance level.

    curve: (round, accuracy) pairs measured during training, or (round, mse) where targets are numbers.
    mse: mean squared error per output on the test part, with its 95 % interval, if the loss is the squared one.
    dice: mean Dice coefficient per image, with its 95 % interval, if targets are masks; then accuracy is the share
    of pixels, n the number of images, chance the best constant mask's accuracy, and both intervals resample images.
    tokens: of texts that are their own targets, number of next tokens of the test part: accuracy is the share of them
    that are predicted, its interval resamples the n texts, and the constant answer is the most frequent token.
    accuracy_top5: share of the test part whose class is among the five likeliest, where there are more than ten.
    collapsed: how many trainings stayed at chance in every evaluated round (or, tried again, diverged); retrained: the
    seed of the training described here, None if it is the cell's own. All figures are of one training: the first that
    did not collapse, or the cell's own if all did.
    constant, constant_mse: accuracy, or mean squared error, of the best constant answer on the test part; None in older
    records, and where targets are masks: `chance` is that accuracy there.
    """

    accuracy: Share | None
    low: Share | None
    high: Share | None
    n: Count
    chance: Share
    curve: list[tuple[Count, Amount]]
    reason: str | None = None
    mse: Amount | None = None
    mse_low: Amount | None = None
    mse_high: Amount | None = None
    dice: Share | None = None
    dice_low: Share | None = None
    dice_high: Share | None = None
    accuracy_top5: Share | None = None
    accuracy_top5_low: Share | None = None
    accuracy_top5_high: Share | None = None
    collapsed: Annotated[int, Field(ge=0, le=TRAININGS)] = 0
    retrained: Count | None = None
    constant: Share | None = None
    constant_mse: Amount | None = None
    tokens: Count | None = None
    LATER: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("accuracy_top5", "accuracy_top5_low", "accuracy_top5_high", "retrained")),
        **dict.fromkeys(("constant", "constant_mse", "tokens")),
        "collapsed": 0,
    }

    @property
    def counted(self) -> str:
        """Of what accuracy is a share, where not of examples: " of next tokens", as it follows a figure."""
        return "" if self.tokens is None else " of next tokens"

    @property
    def resamples(self) -> bool:
        """Whether its intervals resample masks or texts, of which a record keeps no figures."""
        return self.dice is not None or self.tokens is not None

    @property
    def floor(self) -> float:
        """The accuracy of the best constant answer if it is known, else the chance level."""
        return self.constant_answer(ACCURACY.name) or 0.0

    def constant_answer(self, name: str) -> float | None:
        """Return the value of a metric of `MODEL_METRICS` that the best constant answer reaches; None if unknown."""
        values = (getattr(self, field) for field in MODEL_METRICS[name].constant)
        return next((value for value in values if value is not None), None)

    @property
    def is_collapsed(self) -> bool:
        """Whether every training collapsed, so that accuracy describes no model that learnt."""
        return self.collapsed >= TRAININGS

    @property
    def collapse(self) -> str:
        """The number of collapsed trainings, in words; "" for none."""
        if not self.collapsed:
            return ""
        tried = self.collapsed if self.is_collapsed else self.collapsed + 1
        return f"collapsed in {self.collapsed} of {tried} trainings"

    def figure(self, name: str) -> tuple[float | None, float | None, float | None]:
        """Return a metric of `MODEL_METRICS` with the ends of its interval."""
        metric = MODEL_METRICS[name]
        return getattr(self, metric.name), getattr(self, metric.low), getattr(self, metric.high)


class Cost(Strict):
    """Bytes per client and round from the Wire, and of set-up in all.

    memory_peak: most bytes at a time that the first client's computation in round 1 allocates beyond its inputs
    (`ppbench.run.cost`); null in older records, or if that round overflows.
    """

    bytes_up: Amount
    bytes_down: Amount
    bytes_setup: Count
    memory_peak: Count | None = None


class Privacy(Grown):
    """The formal guarantee over the whole training, or null with the reason.

    probe_epsilon, probe_delta: of a probed client's upload alone, for an example that certainly takes part; null
    without a guarantee, without a probe, and in older records.
    """

    epsilon: Amount | None
    delta: Share | None
    reason: str | None = None
    probe_epsilon: Amount | None = None
    probe_delta: Share | None = None
    LATER: ClassVar[Mapping[str, Any]] = {"probe_epsilon": None, "probe_delta": None}

    @property
    def of_training(self) -> Privacy:
        """The guarantee of the training alone, without the probe: the same in all its cells."""
        return self.model_copy(update=dict(self.LATER))


class Played(Strict):
    """How many rounds of training each client played each role: rounds[role][client], beside its number of examples."""

    roles: list[str]
    rounds: list[list[Count]]
    examples: list[Count]

    @model_validator(mode="after")
    def _fits(self) -> Played:
        if len(self.rounds) != len(self.roles) or any(len(row) != len(self.examples) for row in self.rounds):
            raise ValueError("rounds must have one row per role, with one number per client")
        return self


class Tuned(Strict):
    """Scores of an attack's `variants` (their differing settings) on tuning victims, median dB; chosen: index."""

    variants: list[dict[str, Scalar]]
    scores: list[float]
    chosen: Count

    @model_validator(mode="after")
    def _fits(self) -> Tuned:
        if len(self.scores) != len(self.variants) or self.chosen >= len(self.variants):
            raise ValueError("there must be one score per variant, and chosen must be the index of one")
        return self


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
    LATER: ClassVar[Mapping[str, Any]] = {"code": "", "public": 0, "salt": "", "modality": ""}


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
    """How the model was trained.

    tf32: whether a GPU may use it; None on a CPU, and in older records. sample: clients drawn in each round; 0: all.
    """

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
    sample: Count = 0
    LATER: ClassVar[Mapping[str, Any]] = {"tf32": None, "sample": 0}


class DataInfo(Coded):
    """Which data. sha256: digest of the tensors; sizes in examples; public: those that no client holds.

    salt: 32 hex digits of the SHA-256 of the secret of all draws, by which its holder can prove it; "" for none.
    modality: the kind of inputs that the data set names; "" where their shape and the loss say it.
    """

    name: str
    sha256: str
    train: AtLeastOne
    test: AtLeastOne
    public: Count = 0
    salt: str = Field(default="", pattern="^([0-9a-f]{32})?$")
    modality: str = ""

    @property
    def identity(self) -> str:
        """The digest, with that of the secret and the kind if there are any: of one identity are data and draws."""
        return "+".join(filter(None, (self.sha256, self.salt, self.modality)))


class ModelInfo(Coded):
    """Which network. parameters: their number."""

    id: str
    options: dict[str, Scalar]
    shape: Annotated[list[AtLeastOne], Field(min_length=1)]
    classes: Few
    parameters: Count
    loss: str


class AuditInfo(Grown):
    """An audit. Each field has a column, of which its description and unit are (`ppbench.report.columns`)."""

    references: Count = Field(description="Reference runs of an audit; empty elsewhere.")
    canaries: Count = Field(
        description="Canaries of each family in an audit; empty elsewhere.", json_schema_extra={"unit": "examples"}
    )
    canary_clients: Count = Field(default=0, description="Canary clients of an audit; empty elsewhere.")
    LATER: ClassVar[Mapping[str, Any]] = {"canary_clients": 0}


class ProbeInfo(Grown):
    """What a probed client did with the victims' batch. Each field has a column, as those of `AuditInfo`."""

    probe: Literal["gradient", "local"] = Field(
        default="gradient", description="What a probed client does with the batch: `gradient` or `local` training."
    )
    probe_rounds: AtLeastOne = Field(
        default=1, description="Rounds in which it holds the batch.", json_schema_extra={"unit": "rounds"}
    )

    @property
    def probing(self) -> ProbeInfo:
        """This part alone, of a form that has it among its fields."""
        return ProbeInfo(**{name: getattr(self, name) for name in ProbeInfo.model_fields})

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key of probes."""
        return tuple(getattr(self, name) for name in ProbeInfo.model_fields)


USUAL_PROBE = ProbeInfo()


class CellConfig(ProbeInfo):
    """Everything that determines a cell.

    stage: "init" (initial weights), "iterate" (what clients train on), "final" (after training) or "audit" (after a
    training with canaries); batch_size: examples in a victim's batch; victims: number of victim images, candidates or
    queries. role: of the victims, "" if all clients do the same. tuning: number of images on which the attack's
    settings were tuned.
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
    role: str = ""
    tuning: Count = 0
    perceptual: str = ""
    audit: AuditInfo | None = None
    suite_digest: str = ""
    victims_from: Count | None = None

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)
    LATER: ClassVar[Mapping[str, Any]] = {
        **ProbeInfo.LATER, "tuning": 0, "perceptual": "", "audit": None, "suite_digest": "", "victims_from": None,
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
    "RECORD_SCHEMA", "USUAL_PROBE", "Artifact", "AttackInfo", "AuditInfo", "CellConfig", "Control", "Cost", "DataInfo",
    "DefenseInfo", "Environment", "FederationInfo", "Flag", "Metric", "ModelInfo", "Played", "Privacy", "ProbeInfo",
    "Record", "Scalar", "Score", "Strict", "ThreatInfo", "Tuned", "Utility", "Victim", "lean",
]  # fmt: skip
