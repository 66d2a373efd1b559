"""Records in, one table out: a row a cell, and the one key of what may be compared with what.

Whatever makes two cells incomparable is a field of `Key`, or stands in `NOT_DISTINGUISHING` with the reason. All groups
that the report makes (boards, their rows, sentences, series along a control value, trainings, the reach of controls)
are the projections below; no other module makes one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from ppbench.questions.base import question_of
from ppbench.records.schema import CellConfig, Record, Scalar
from ppbench.report.worst import WorstCase, contenders, worst_case

NOT_DISTINGUISHING: Final = {
    "schema_": "there is one; records of another are not read",
    "data.name": "the digest says which data they are; a name may be another machine's",
    "attack.code": "boards take the worst of all attacks, compare those of one version; see `compare.join`",
    "victims_from": "which examples were drawn; `Record.asked` says whether two cells asked about the same",
    "threat_model.sees": "wording of what the threat model's versioned id stands for",
}
"""Fields of a cell's configuration that are no part of the key, and why."""


@dataclass(frozen=True)
class Key:
    """What a cell is of. Fields that a projection leaves out are blank: the default.

    A field that older records lack has the default of the records' schema, which is what they were computed with.

    Attributes:
        digest, train, test, public: digest of the data, and how many examples each part has.
        architecture, federation: the whole `ModelInfo` and `FederationInfo`, as JSON.
        defense, version, parameters: the defense; its version with the code of strangers (`CellConfig.edition`); its
            parameters but the control parameter, as JSON.
        kind: the board that the cell is for, its question or the one whose board it shares.
        asked, attack, attack_version, settings: what kind of attack, which, and its parameters (a budget) as JSON.
        knows, informed, oracle: whether the attack counts as adaptive, whether the threat model says that it knows the
            defense, and whether it chose its answer by the truth.
        data: the name of the data, for words only: it distinguishes nothing.
        others: as of `CellConfig`.
    """

    suite: str = ""
    suite_digest: str = ""
    digest: str = ""
    train: int = 0
    test: int = 0
    public: int = 0
    architecture: str = "{}"
    federation: str = "{}"
    seed: int | None = None
    defense: str = ""
    version: str = ""
    parameters: str = "{}"
    control: str = ""
    value: float | None = None
    role: str = ""
    kind: str = ""
    threat: str = ""
    auxiliary: str = ""
    stage: str = ""
    batch: int = 0
    probe: str = ""
    probe_rounds: int = 0
    references: int | None = None
    canaries: int | None = None
    canary_clients: int | None = None
    asked: str = ""
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
    data: str = field(default="", compare=False)

    def only(self, names: Iterable[str]) -> Key:
        """Return the key with all fields blank but `names` and the words of the data."""
        return Key(**{name: getattr(self, name) for name in names}, data=self.data)

    def text(self) -> str:
        """Return the key as one line that sorts and files can be named by."""
        return json.dumps([getattr(self, name) for name in NAMES])

    @property
    def model(self) -> str:
        """The network's name."""
        return str(json.loads(self.architecture)["id"])

    @property
    def network(self) -> str:
        """The network with its options in words."""
        model = json.loads(self.architecture)
        return network(model["id"], model["options"])

    @property
    def intended(self) -> bool:
        """Whether the model is delivered for what is asked; then nothing is ranked."""
        return self.stage in question_of(self.kind).intended


NAMES: Final = tuple(f.name for f in fields(Key) if f.compare)
TASK: Final = ("suite", "suite_digest", "digest", "train", "test", "public", "architecture")
"""Who asked, of which data and which network."""
EVALUATION: Final = (*TASK, "federation", "seed")
"""Cells whose controls vouch for one another, and that sentences are made of: all defenses in one federation."""
DEFENSE: Final = ("defense", "version", "parameters", "control", "value")
TRAINED: Final = (*EVALUATION, *DEFENSE)
"""One defense as configured, in one federation: what a client's costs are of."""
AUDIT: Final = ("references", "canaries", "canary_clients")
SCENE: Final = ("threat", "auxiliary", "stage", "batch", "probe", "probe_rounds", *AUDIT)
"""What an adversary is given: whose view, of which model, of what probe, with which audit."""
SETTING: Final = (*TRAINED, *SCENE, "role")
"""What a sentence is about: a defense at one control value, in one scene, over all attacks on it."""
ROW: Final = (*SETTING, "kind")
"""A row of a board. Its worst case is over all that was tried on it: budget and tuning are single attacks' own."""
BOARD: Final = (*TASK, *SCENE, "kind")
"""A board: its rows may be ranked. Federation and seed tell its rows apart."""
SCOPE: Final = (*TASK, "threat", "auxiliary", "probe", "probe_rounds")
"""The cells over which a board's controls are judged: one adversary's, of every stage and batch."""
GRID: Final = tuple(name for name in ROW if name != "value")
"""Rows that differ in the control value alone: the CAP of worst cases is a mean over them."""
SERIES: Final = tuple(name for name in NAMES if name != "value")
"""Cells that differ in the control value alone: the CAP of one attack is a mean over them."""
FREE: Final = ("seed", "version")
"""What `compare` compares: several seeds of two versions of a defense, or of the code of what others brought."""
MODEL: Final = tuple(name for name in (*TRAINED, *AUDIT) if name not in FREE)
"""A trained model, whatever its seed and the defense's version."""
POINT: Final = tuple(name for name in SETTING if name not in FREE)
"""A setting, whatever its seed and the defense's version."""
RUNS: Final = tuple(name for name in TRAINED if name != "value")
"""Trainings that differ in the control value alone."""


def network(model: str, options: Mapping[str, Scalar]) -> str:
    """Return a network in words: "mlp (bias=False, hidden=64,64)"."""
    words = ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
    return f"{model} ({words})" if words else model


SAME: Final = (
    "suite", "suite_digest", "seed", "role", "stage", "probe", "probe_rounds", "tuning", "victims", "perceptual",
)  # fmt: skip
"""Fields of a configuration that the key has under the same name."""


def key_of(config: CellConfig) -> Key:
    """Return the key of a cell."""
    defense, control, attack, data = config.defense, config.defense.control, config.attack, config.data
    rest = {k: v for k, v in defense.parameters.items() if control is None or k != control.name}
    return Key(
        **{name: getattr(config, name) for name in SAME},
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
        references=None if config.audit is None else config.audit.references,
        canaries=None if config.audit is None else config.audit.canaries,
        canary_clients=None if config.audit is None else config.audit.canary_clients,
        asked=attack.kind,
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
    """Records with their keys and worst cases, each made once, also for its groups; they must not change meanwhile."""

    _keys: dict[int, tuple[Record, Key]]
    _worst: dict[tuple[str, frozenset[int]], tuple[list[Record], WorstCase | None]]

    def __new__(cls, records: Iterable[Record], parent: Frame | None = None) -> Frame:
        """Hold `records`; parent: the frame that they are of."""
        made = super().__new__(cls, records)
        made._keys = {} if parent is None else parent._keys
        made._worst = {} if parent is None else parent._worst
        return made

    def of(self, records: Iterable[Record]) -> Frame:
        """Return a frame of some records of this one."""
        return Frame(records, self)

    def key(self, record: Record) -> Key:
        """Return a record's key."""
        known = self._keys.get(id(record))
        if known is None:
            known = self._keys[id(record)] = (record, key_of(record.config))  # the record stays, so its id does
        return known[1]

    def by(self, names: Sequence[str]) -> dict[Key, Frame]:
        """Return the records by a projection of their keys, in the order in which each comes up first."""
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
    """Return `records` as a frame; one that is a frame already as it is."""
    return records if isinstance(records, Frame) else Frame(records)
