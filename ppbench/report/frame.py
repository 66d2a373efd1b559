"""Records as one table with one row per cell, and the key that decides which cells may be compared.

Every field of a configuration is in `Key`, or in `NOT_DISTINGUISHING` with the reason. All groups of the report
(boards, their rows, sentences, series along a control value, trainings, the scope of controls) are projections of the
key to its parts, which are defined below and nowhere else. A new option of federation, network, probe or audit is in
its part of the record, and so in the key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from pydantic import BaseModel

from ppbench.questions.base import question_for, question_of
from ppbench.records.schema import USUAL_PROBE, AuditInfo, CellConfig, ProbeInfo, Record, Scalar
from ppbench.report.worst import WorstCase, contenders, worst_case

NOT_DISTINGUISHING: Final = {
    "schema_": "there is one; records of other schemas are not read",
    "data.name": "the digest says which data they are; a name may be another machine's",
    "attack.code": "boards take the worst over all attacks, `compare` pairs those of one version; see `compare.join`",
    "victims_from": "which examples were drawn; `Record.asked` decides whether two cells have the same victims",
    "threat_model.sees": "a description; the versioned id decides",
}
"""Fields of a cell's configuration that are not in the key, and why."""


@dataclass(frozen=True)
class TaskKey:
    """The suite, the data and the network. digest: of the data; train, test, public: how many examples each part has.

    architecture: the whole `ModelInfo`, as JSON.
    """

    suite: str = ""
    suite_digest: str = ""
    digest: str = ""
    train: int = 0
    test: int = 0
    public: int = 0
    architecture: str = "{}"


@dataclass(frozen=True)
class FederationKey:
    """How every defense on the task is trained. federation: the whole `FederationInfo`, as JSON."""

    federation: str = "{}"
    seed: int | None = None


@dataclass(frozen=True)
class DefenseKey:
    """A defense as configured. version: with other packages' code (`CellConfig.edition`).

    parameters: without the control parameter, as JSON; control, value: its name and value.
    """

    defense: str = ""
    version: str = ""
    parameters: str = "{}"
    control: str = ""
    value: float | None = None


@dataclass(frozen=True)
class BoardKey:
    """Which row of which board. role: of the victims; kind: the question whose board it is, the cell's or another."""

    role: str = ""
    kind: str = ""


@dataclass(frozen=True)
class SceneKey:
    """What an adversary has: whose view, of which model, of what probe, with which audit."""

    threat: str = ""
    auxiliary: str = ""
    stage: str = ""
    batch: int = 0
    probing: ProbeInfo = USUAL_PROBE
    audit: AuditInfo | None = None


@dataclass(frozen=True)
class AttackKey:
    """An attack as configured, and on whom. question: its own kind; settings: its parameters, as JSON.

    knows, informed, oracle: whether the attack is adaptive, whether the threat model knows the defense, and whether the
    attack chose its answer by the truth.
    """

    question: str = ""
    attack: str = ""
    attack_version: str = ""
    settings: str = "{}"
    knows: bool = False
    informed: bool = False
    oracle: bool = False
    follows: str = ""
    tuning: int = 0
    victims: int = 0
    perceptual: str = ""


@dataclass(frozen=True)
class Key(AttackKey, SceneKey, BoardKey, DefenseKey, FederationKey, TaskKey):
    """The key of a cell, of the fields of its parts. Fields that a projection leaves out have their default.

    Fields that older records lack have the schema's defaults, with which they were computed. Other attributes are as in
    `CellConfig`. data: the name of the data, for text only: it distinguishes nothing.
    """

    data: str = field(default="", compare=False)

    def only(self, names: Iterable[str]) -> Key:
        """Return the key with defaults for all fields except `names` and `data`."""
        return Key(**{name: getattr(self, name) for name in names}, data=self.data)

    def text(self) -> str:
        """Return the key as one line of JSON, for sorting."""
        values = (getattr(self, name) for name in NAMES)
        return json.dumps([[*dict(one).values()] if isinstance(one, BaseModel) else one for one in values])

    @property
    def model(self) -> str:
        """The network's name."""
        return str(json.loads(self.architecture)["id"])

    @property
    def network(self) -> str:
        """The network with its options in words."""
        model = json.loads(self.architecture)
        return network_words(model["id"], model["options"])

    @property
    def intended(self) -> bool:
        """Whether the model is meant to answer the question, so that nothing is ranked."""
        return self.stage in question_of(self.kind).intended


def names_of(*parts: type) -> tuple[str, ...]:
    """Return the names of the fields of parts of the key, in the key's order."""
    named = {f.name for part in parts for f in fields(part)}
    return tuple(f.name for f in fields(Key) if f.compare and f.name in named)


NAMES: Final = names_of(Key)
TASK: Final = names_of(TaskKey)
EVALUATION: Final = names_of(TaskKey, FederationKey)
"""All defenses in one federation: these cells share controls and sentences."""
TRAINED: Final = names_of(TaskKey, FederationKey, DefenseKey)
"""One training: a defense as configured, in one federation."""
SCENE: Final = names_of(SceneKey)
SETTING: Final = (*names_of(TaskKey, FederationKey, DefenseKey, SceneKey), "role")
"""A defense at one control value, in one scene, over all attacks: the subject of a sentence."""
ROW: Final = (*SETTING, "kind")
"""A row of a board. Its worst case is over all attacks on it, whatever their budget and tuning."""
BOARD: Final = (*names_of(TaskKey, SceneKey), "kind")
"""A board, whose rows may be ranked; these may differ in federation and seed."""
SCOPE: Final = (*TASK, "threat", "auxiliary", "probing")
"""The cells over which a board's controls are checked: one adversary's, at every stage and batch."""
GRID: Final = tuple(name for name in ROW if name != "value")
"""Rows that differ only in the control value: the CAP of worst cases is a mean over them."""
SERIES: Final = tuple(name for name in NAMES if name != "value")
"""Cells that differ only in the control value: the CAP of one attack is a mean over them."""
FREE: Final = ("seed", "version")
"""Fields over which `compare` compares: seeds, and versions of a defense or of other packages' code."""
MODEL: Final = tuple(name for name in (*TRAINED, "audit") if name not in FREE)
"""A trained model, whatever its seed and the defense's version."""
POINT: Final = tuple(name for name in SETTING if name not in FREE)
"""A setting, whatever its seed and the defense's version."""
RUNS: Final = tuple(name for name in TRAINED if name != "value")
"""Trainings that differ only in the control value."""


SHOWN_DIGEST = len("sha256:") + 8
"""Characters of a digest that tell networks apart on a page; keys hold all of it."""


def network_words(model: str, options: Mapping[str, Scalar]) -> str:
    """Return a network in words: "mlp (bias=False, hidden=64,64)"; of a digest of weights the beginning."""
    shown = {name: str(value) if name != "weights" else str(value)[:SHOWN_DIGEST] for name, value in options.items()}
    words = ", ".join(f"{name}={value}" for name, value in sorted(shown.items()))
    return f"{model} ({words})" if words else model


SHARED_FIELDS: Final = (
    "suite", "suite_digest", "seed", "role", "stage", "probing", "audit", "tuning", "victims", "perceptual",
)  # fmt: skip
"""Fields that the key and the configuration have under one name."""


def key_of(config: CellConfig) -> Key:
    """Return the key of a cell."""
    defense, control, attack, data = config.defense, config.defense.control, config.attack, config.data
    rest = {k: v for k, v in defense.parameters.items() if control is None or k != control.name}
    return Key(
        **{name: getattr(config, name) for name in SHARED_FIELDS},
        digest=data.identity,
        train=data.train,
        test=data.test,
        public=data.public,
        architecture=json.dumps(config.model.model_copy(update={"code": ""}).model_dump(), sort_keys=True),
        federation=config.federation.model_dump_json(),
        defense=defense.id,
        version=config.edition,
        parameters=json.dumps(rest, sort_keys=True),
        control="" if control is None else control.name,
        value=None if control is None else control.value,
        kind=question_of(attack.kind).board or attack.kind,
        threat=config.threat_model.id,
        auxiliary=config.threat_model.auxiliary,
        batch=config.batch_size,
        question=attack.kind,
        attack=attack.id,
        attack_version=attack.version,
        settings=json.dumps(attack.parameters, sort_keys=True),
        knows=attack.adaptive,
        informed=config.threat_model.knows_defense,
        oracle=attack.oracle,
        follows=attack.follows or "",
        data=data.name,
    )


class Frame(tuple[Record, ...]):
    """Records with cached keys and worst cases, shared with groups of them; the records must not change.

    whole: the frame that this one is a group of, itself if it is none.
    """

    _keys: dict[int, tuple[Record, Key]]
    _worst: dict[tuple[str, frozenset[int]], tuple[list[Record], WorstCase | None]]
    whole: Frame

    def __new__(cls, records: Iterable[Record], parent: Frame | None = None) -> Frame:
        """Hold `records`; parent: a frame with them, whose caches are shared."""
        made = super().__new__(cls, records)
        made._keys = {} if parent is None else parent._keys
        made._worst = {} if parent is None else parent._worst
        made.whole = made if parent is None else parent.whole
        return made

    def of(self, records: Iterable[Record]) -> Frame:
        """Return a frame of some records of this one."""
        return Frame(records, self)

    def about_inputs(self) -> Frame:
        """Return the cells that ask for inputs themselves."""
        return self.of([record for record in self if question_for(record).inputs])

    def key(self, record: Record) -> Key:
        """Return a record's key."""
        known = self._keys.get(id(record))
        if known is None:
            known = self._keys[id(record)] = (record, key_of(record.config))  # the record stays, so its id does
        return known[1]

    def by(self, names: Sequence[str]) -> dict[Key, Frame]:
        """Return the records grouped by a projection of their keys, in order of first appearance."""
        groups: dict[Key, list[Record]] = {}
        shared: dict[tuple[object, ...], Key] = {}
        for record in self:
            key = self.key(record)
            values = tuple([getattr(key, name) for name in names])
            if values not in shared:
                shared[values] = key.only(names)
            groups.setdefault(shared[values], []).append(record)
        return {key: Frame(some, self) for key, some in groups.items()}

    def worst(self, metric: str) -> WorstCase | None:
        """Return the worst case over the frame's records, which must be of one row; see `worst_case`."""
        cells = contenders(self, metric)
        name = metric, frozenset(map(id, cells))
        if name not in self._worst:
            self._worst[name] = cells, worst_case(cells, metric)  # the cells stay, so their ids do
        return self._worst[name][1]


def frame_of(records: Iterable[Record]) -> Frame:
    """Return `records` as a frame, unchanged if they are one."""
    return records if isinstance(records, Frame) else Frame(records)
