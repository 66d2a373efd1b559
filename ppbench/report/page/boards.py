"""What the page shows: records grouped into boards, a row for each defense and control value, ranked by worst
case.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ppbench.questions.base import Missing, asked, question_of
from ppbench.records.schema import DefenseInfo, Flag, Record, Scalar
from ppbench.report.controls import CONTROLS, Check, best, is_image
from ppbench.report.page.badges import Badge, adaptive, badges_of, knowing
from ppbench.report.page.differences import differences
from ppbench.report.page.ranks import order, ranked
from ppbench.report.page.reliability import board_checks
from ppbench.report.page.table import Claims
from ppbench.report.portfolio import worst_case

STAGE_ORDER = ("init", "iterate", "final", "audit")


@dataclass(frozen=True)
class Setting:
    """What the rows of one board share. data_sha256, train (examples) and model_options keep look-alikes apart.

    probe, probe_rounds: what a probed client did with the victims' batch, and how often.
    """

    suite: str
    kind: str
    threat: str
    data: str
    data_sha256: str
    train: int
    model: str
    model_options: str
    stage: str
    batch: int
    probe: str
    probe_rounds: int

    @property
    def network(self) -> str:
        """The network with its options in words."""
        return network(self.model, json.loads(self.model_options))

    @property
    def intended(self) -> bool:
        """Whether the model is delivered for what is asked, to answer as the true one; then nothing is ranked."""
        return self.kind == "extraction" and self.stage == "final"


@dataclass(frozen=True)
class Entry:
    """One row: a defense at one control value, under all attacks of its board.

    Attributes:
        defense: the defense as configured.
        seed: master seed of the row's cells.
        role: a control, or one of the compared.
        sample: any of the row's records, for accuracy, cost and epsilon: they are the same in all.
        records: all of the row's records, failed ones too.
        plain: the strongest plain attack, or None; of reconstructions the strongest on each victim (`portfolio`).
        worst: the same of all attacks (no oracle), or None.
        labels: the highest label accuracy over all attacks, and by whom.
        rank: "1", "2-4", or "" where it is not ranked.
        badges: remarks, and what is missing.
        flags: flags of the row's records, each once.
        claimed: what its paper prints.
        differs: in what else than the control value the row is not like others of its board, in words.
    """

    defense: DefenseInfo
    seed: int
    role: Literal["control", "compared"]
    sample: Record
    records: tuple[Record, ...]
    plain: Record | None
    worst: Record | None
    labels: Record | None
    rank: str
    badges: tuple[Badge, ...]
    flags: tuple[Flag, ...]
    claimed: str
    differs: str = ""

    @property
    def name(self) -> str:
        """The defense, its control value and what else tells the row from others: "spn alpha2 = 0.1, seed 1"."""
        about = ", ".join(word for word in (self.control, self.differs) if word)
        return f"{self.defense.id} {about}".strip()

    @property
    def control(self) -> str:
        """The control parameter, its value and the victims' role, e.g. "beta = 0.2, pilot"; "" without any."""
        control, part = self.defense.control, self.sample.config.role
        return ", ".join(
            ([] if control is None else [f"{control.name} = {control.value:g}"]) + ([part] if part else [])
        )

    @property
    def broken(self) -> tuple[Record, ...]:
        """The row's records that are not complete."""
        return tuple(record for record in self.records if record.status != "complete")


@dataclass(frozen=True)
class Board:
    """Rows that may be compared.

    Attributes:
        setting: what they share.
        headline: the metric that they are ranked by.
        entries: the rows.
        checks: what the controls say of this board.
        reliable: whether the controls hold, so that ranks mean something.
    """

    setting: Setting
    headline: str
    entries: tuple[Entry, ...]
    checks: tuple[Check, ...]
    reliable: bool

    @property
    def images(self) -> bool:
        """Whether the data are images: rows of tables are not judged in decibels."""
        return is_image(self.entries[0].sample)


def network(model: str, options: Mapping[str, Scalar]) -> str:
    """Return a network in words: "mlp (bias=False, hidden=64,64)"."""
    told = ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
    return f"{model} ({told})" if told else model


def setting_of(record: Record) -> Setting:
    """Return the board that a record belongs to."""
    config = record.config
    return Setting(
        config.suite,
        asked(record).board or config.attack.kind,
        config.threat_model.id,
        config.data.name,
        config.data.sha256,
        config.data.train,
        config.model.id,
        json.dumps(config.model.options, sort_keys=True),
        config.stage,
        config.batch_size,
        config.probe,
        config.probe_rounds,
    )


def boards(records: Sequence[Record], claims: Claims, sound: bool = True) -> list[Board]:
    """Return every board of `records`; of one suite, data set and model in the order of their questions.

    Args:
        records: every cell.
        claims: what a paper prints about a record's defense.
        sound: whether the harness's self-test passed (`ppbench.run.selftest`); else no board is ranked.
    """
    groups: dict[Setting, list[Record]] = defaultdict(list)
    scopes: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        setting = setting_of(record)
        scopes[_scope(setting)].append(record)
        if not isinstance(asked(record), Missing):
            groups[setting].append(record)
    keys = sorted(
        groups,
        key=lambda s: (
            *(s.suite, s.data, s.model, question_of(s.kind).order, s.kind, s.threat),
            *(STAGE_ORDER.index(s.stage), s.batch, str(s)),
        ),
    )
    known = knowing(records)
    return [_board(key, groups[key], scopes[_scope(key)], known, claims, sound) for key in keys]


def _scope(setting: Setting) -> tuple[str, ...]:
    """Return what the records share over which a board's controls are judged."""
    train = str(setting.train)
    return setting.suite, setting.threat, setting.data_sha256, train, setting.model, setting.model_options


def _board(
    setting: Setting,
    members: Sequence[Record],
    scope: Sequence[Record],
    known: frozenset[str],
    claims: Claims,
    sound: bool,
) -> Board:
    rows: dict[str, list[Record]] = defaultdict(list)
    for record in members:
        config = record.config
        key = [config.defense.model_dump_json(), config.federation.model_dump_json(), str(config.seed), config.role]
        rows["\n".join(key)].append(record)
    name = question_of(setting.kind).headline(members[0].config)
    differs = differences({key: some[0].config for key, some in rows.items()})
    entries = [_entry(rows[key], name, known, claims, differs[key]) for key in sorted(rows)]
    checks = board_checks(setting.kind, name, entries, scope)
    reliable = sound and all(check.ok is True for check in checks)
    placed = ranked(entries, name) if reliable and not setting.intended else entries
    return Board(setting, name, tuple(sorted(placed, key=lambda e: order(e, name))), checks, reliable)


def _entry(members: Sequence[Record], name: str, known: frozenset[str], claims: Claims, differs: str) -> Entry:
    sample = next((r for r in members if r.status == "complete"), members[0])
    flags = {(flag.code, flag.detail): flag for record in members for flag in record.flags}
    claimed = sorted({text for record in members if (text := claims(record))})
    defense, plain = sample.config.defense, [r for r in members if not adaptive(r, known)]
    worst = _strongest(members, name)
    return Entry(
        defense=defense,
        seed=sample.config.seed,
        role="control" if defense.id in CONTROLS else "compared",
        sample=sample,
        records=tuple(sorted(members, key=lambda r: (r.config.attack.id, r.cell_id))),
        plain=worst if len(plain) == len(members) else _strongest(plain, name),
        worst=worst,
        labels=best([r for r in members if r.config.model.classes > 1], "label_accuracy"),
        rank="",
        badges=tuple(badges_of(members, known)),
        flags=tuple(flags[key] for key in sorted(flags)),
        claimed="; ".join(claimed),
        differs=differs,
    )


def _strongest(members: Sequence[Record], name: str) -> Record | None:
    """Return the worst case: of reconstructions victim by victim, of other kinds the cell that leaks most."""
    images = [r for r in members if r.config.attack.kind == "reconstruction"]
    return worst_case(images) if images else best(members, name)
