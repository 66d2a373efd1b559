"""What the page shows: records grouped into boards, a row for each defense and control value, ranked by worst
case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ppbench.questions.base import Missing, asked, question_of
from ppbench.records.schema import DefenseInfo, Flag, Record
from ppbench.report.controls import CONTROLS, Check, best, is_image
from ppbench.report.frame import BOARD, ROW, SCOPE, Frame, Key, frame_of
from ppbench.report.page.badges import Badge, adaptive, badges_of, knowing
from ppbench.report.page.differences import differences
from ppbench.report.page.ranks import order, ranked
from ppbench.report.page.reliability import board_checks
from ppbench.report.page.table import Claims
from ppbench.report.worst import WorstCase

STAGE_ORDER = ("init", "iterate", "final", "audit")


@dataclass(frozen=True)
class Entry:
    """One row: a defense at one control value, under all attacks of its board.

    Attributes:
        key: what its cells share, by `ROW`.
        defense: the defense as configured.
        role: a control, or one of the compared.
        sample: any of the row's records, for accuracy, cost and epsilon: they are the same in all.
        records: all of the row's records, failed ones too.
        plain: the worst case over the attacks that do not know the defense, or None.
        worst: the worst case over all attacks, or None.
        labels: the highest label accuracy over all attacks, and by whom.
        rank: "1", "2-4", or "" where it is not ranked.
        badges: remarks, and what is missing.
        flags: flags of the row's records, each once.
        claimed: what its paper prints.
        differs: in what else than the control value the row is not like others of its board, in words.
    """

    key: Key
    defense: DefenseInfo
    role: Literal["control", "compared"]
    sample: Record
    records: tuple[Record, ...]
    plain: WorstCase | None
    worst: WorstCase | None
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
        setting: what they share, a key by `BOARD`.
        headline: the metric that they are ranked by.
        entries: the rows.
        checks: what the controls say of this board.
        reliable: whether the controls hold, so that ranks mean something.
    """

    setting: Key
    headline: str
    entries: tuple[Entry, ...]
    checks: tuple[Check, ...]
    reliable: bool

    @property
    def images(self) -> bool:
        """Whether the data are images: rows of tables are not judged in decibels."""
        return is_image(self.entries[0].sample)


def boards(records: Sequence[Record], claims: Claims, sound: bool = True) -> list[Board]:
    """Return every board of `records`; of one suite, data set and model in the order of their questions.

    Args:
        records: every cell.
        claims: what a paper prints about a record's defense.
        sound: whether the harness's self-test passed (`ppbench.run.selftest`); else no board is ranked.
    """
    frame = frame_of(records)
    scopes, known = frame.by(SCOPE), knowing(records)
    known_here = frame.of([record for record in frame if not isinstance(asked(record), Missing)])
    groups = sorted(known_here.by(BOARD).items(), key=lambda pair: _place(pair[0]))
    return [_board(key, some, scopes[key.only(SCOPE)], known, claims, sound) for key, some in groups]


def _place(setting: Key) -> tuple[object, ...]:
    """Return what boards are sorted by."""
    about = setting.suite, setting.data, setting.model, question_of(setting.kind).order, setting.kind, setting.threat
    return *about, STAGE_ORDER.index(setting.stage), setting.batch, setting.text()


def _board(
    setting: Key, members: Frame, scope: Sequence[Record], known: frozenset[str], claims: Claims, sound: bool
) -> Board:
    sample = members[0].config
    name = question_of(setting.kind).headline(sample)
    rows = members.by(ROW)
    differs = differences(list(rows))
    entries = [_entry(key, rows[key], name, known, claims, differs[key]) for key in sorted(rows, key=Key.text)]
    checks = board_checks(setting.kind, name, entries, scope)
    reliable = sound and all(check.ok is True for check in checks)
    ranks = reliable and not setting.intended
    placed = ranked(entries, name) if ranks else entries
    return Board(setting, name, tuple(sorted(placed, key=lambda e: order(e, name))), checks, reliable)


def _entry(key: Key, members: Frame, name: str, known: frozenset[str], claims: Claims, differs: str) -> Entry:
    sample = min(members, key=lambda r: (r.status != "complete", r.cell_id))
    flags = {(flag.code, flag.detail): flag for record in members for flag in record.flags}
    claimed = sorted({text for record in members if (text := claims(record))})
    defense, plain = sample.config.defense, members.of([r for r in members if not adaptive(r, known)])
    worst = members.worst(name)
    return Entry(
        key=key,
        defense=defense,
        role="control" if defense.id in CONTROLS else "compared",
        sample=sample,
        records=tuple(sorted(members, key=lambda r: (r.config.attack.id, r.cell_id))),
        plain=worst if len(plain) == len(members) else plain.worst(name),
        worst=worst,
        labels=best([r for r in members if r.config.model.classes > 1], "label_accuracy"),
        rank="",
        badges=tuple(badges_of(members, known)),
        flags=tuple(flags[key] for key in sorted(flags)),
        claimed="; ".join(claimed),
        differs=differs,
    )
