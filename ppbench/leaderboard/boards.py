"""What the page shows: records grouped into boards, a row for each defense and control value, ranked by worst
case.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ppbench.controls import BROKEN, Check, check_controls
from ppbench.leaderboard.table import Claims
from ppbench.records.schema import DefenseInfo, Flag, Metric, Record

BoardKind = Literal["reconstruction", "membership", "tracing"]
BOARD_OF: dict[str, BoardKind] = {
    "reconstruction": "reconstruction",
    "label": "reconstruction",
    "membership": "membership",
    "tracing": "tracing",
}
HEADLINE: dict[BoardKind, str] = {
    "reconstruction": "psnr_median",
    "membership": "auc",
    "tracing": "tracing_accuracy",
}
CONTROL_IDS = ("none", "full_noise")


@dataclass(frozen=True)
class Setting:
    """What the rows of one board share. data_sha256 and model_options keep look-alikes apart."""

    suite: str
    kind: BoardKind
    threat: str
    data: str
    data_sha256: str
    model: str
    model_options: str
    stage: str
    batch: int


@dataclass(frozen=True)
class Badge:
    """A short remark on a row. tone: how it is colored; title: the sentence behind it."""

    text: str
    tone: Literal["info", "good", "warning", "error"]
    title: str


@dataclass(frozen=True)
class Entry:
    """One row: a defense at one control value, under all attacks of its board.

    Attributes:
        defense: the defense as configured.
        seed: master seed of the row's cells.
        role: a control, or one of the compared.
        sample: any of the row's records, for accuracy, cost and epsilon: they are the same in all.
        records: all of the row's records, failed ones too.
        plain: the strongest plain attack, or None.
        worst: the strongest of all attacks (no oracle), or None.
        labels: the highest label accuracy over all attacks, and by whom.
        rank: "1", "2-4", or "" where it is not ranked.
        badges: remarks, and what is missing.
        flags: flags of the row's records, each once.
        claimed: what its paper prints.
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

    @property
    def control(self) -> str:
        """The control parameter and its value, e.g. "sigma = 0.01"; "" without one."""
        control = self.defense.control
        return "" if control is None else f"{control.name} = {control.value:g}"

    @property
    def broken(self) -> tuple[Record, ...]:
        """The row's records that are not complete."""
        return tuple(record for record in self.records if record.status != "complete")


@dataclass(frozen=True)
class Board:
    """Rows that may be compared. reliable: whether the controls hold, so that ranks mean something."""

    setting: Setting
    entries: tuple[Entry, ...]
    checks: tuple[Check, ...]
    reliable: bool


def setting_of(record: Record) -> Setting:
    """Return the board that a record belongs to."""
    config = record.config
    return Setting(
        config.suite,
        BOARD_OF[config.attack.kind],
        config.threat_model.id,
        config.data.name,
        config.data.sha256,
        config.model.id,
        json.dumps(config.model.options, sort_keys=True),
        config.stage,
        config.batch_size,
    )


def headline(record: Record | None, kind: BoardKind) -> Metric | None:
    """Return the metric that a board ranks by; higher is more leakage."""
    return None if record is None else record.metric(HEADLINE[kind])


def strongest(records: Iterable[Record], name: str) -> Record | None:
    """Return the complete record with the highest value of a metric, oracles left out; None when there is
    none.
    """
    best: tuple[float, Record] | None = None
    for record in sorted(records, key=lambda r: r.cell_id):
        metric = record.metric(name)
        if record.status != "complete" or record.config.attack.oracle or metric is None or metric.value is None:
            continue
        if best is None or metric.value > best[0]:
            best = (metric.value, record)
    return None if best is None else best[1]


def boards(records: Sequence[Record], claims: Claims) -> list[Board]:
    """Return every board of `records`; of one suite, data set and model: reconstruction, membership, tracing."""
    groups: dict[Setting, list[Record]] = defaultdict(list)
    for record in records:
        if record.config.attack.kind in BOARD_OF:
            groups[setting_of(record)].append(record)
    order: tuple[BoardKind, ...] = ("reconstruction", "membership", "tracing")
    keys = sorted(
        groups,
        key=lambda s: (s.suite, s.data, s.model, order.index(s.kind), s.threat, s.stage != "init", s.batch, str(s)),
    )
    return [_board(key, groups[key], records, claims) for key in keys]


def adaptive(record: Record, records: Iterable[Record]) -> bool:
    """Return whether an attack knows the defense, itself or through the attack whose images it uses."""
    attack = record.config.attack
    return attack.adaptive or any(
        other.config.attack.id == attack.follows and other.config.attack.adaptive for other in records
    )


def _board(setting: Setting, members: Sequence[Record], records: Sequence[Record], claims: Claims) -> Board:
    rows: dict[str, list[Record]] = defaultdict(list)
    for record in members:
        config = record.config
        key = [config.defense.model_dump_json(), config.federation.model_dump_json(), config.seed]
        rows[json.dumps(key)].append(record)
    entries = [_entry(rows[key], setting.kind, records, claims) for key in sorted(rows)]
    checks = _checks(setting, entries, records)
    reliable = all(check.ok is True for check in checks)
    ranked = _ranked(entries, setting.kind) if reliable else entries
    return Board(setting, tuple(sorted(ranked, key=lambda e: _order(e, setting.kind))), checks, reliable)


def _entry(members: Sequence[Record], kind: BoardKind, records: Sequence[Record], claims: Claims) -> Entry:
    sample = next((r for r in members if r.status == "complete"), members[0])
    plain = strongest((r for r in members if not adaptive(r, records)), HEADLINE[kind])
    worst = strongest(members, HEADLINE[kind])
    flags = {(flag.code, flag.detail): flag for record in members for flag in record.flags}
    claimed = sorted({text for record in members if (text := claims(record))})
    defense = sample.config.defense
    return Entry(
        defense=defense,
        seed=sample.config.seed,
        role="control" if defense.id in CONTROL_IDS else "compared",
        sample=sample,
        records=tuple(sorted(members, key=lambda r: (r.config.attack.id, r.cell_id))),
        plain=plain,
        worst=worst,
        labels=strongest(members, "label_accuracy"),
        rank="",
        badges=tuple(_badges(members, records)),
        flags=tuple(flags[key] for key in sorted(flags)),
        claimed="; ".join(claimed),
    )


def _badges(members: Sequence[Record], records: Sequence[Record]) -> Iterable[Badge]:
    """Yield the remarks that a reader must not miss."""
    defense, utility = members[0].config.defense.id, members[0].utility
    if defense in CONTROL_IDS:
        yield Badge("control", "info", "Shows whether the attacks work at all; never ranked.")
    elif not any(adaptive(r, records) and r.status == "complete" for r in members):
        yield Badge("plain attacks only", "warning", "No attack here knows this defense, so it is not ranked.")
    for status, tone in (("diverged", "error"), ("failed", "error")):
        number = sum(record.status == status for record in members)
        if number:
            title = f"{number} of {len(members)} cells {status}; the worst case may be worse than shown."
            yield Badge(status, tone, title)  # type: ignore[arg-type]  # a literal in the loop above
    if utility.low is not None and utility.low <= utility.chance:
        yield Badge("accuracy at chance", "warning", "The model is no better than guessing; its privacy is cheap.")


def _checks(setting: Setting, entries: Sequence[Entry], records: Sequence[Record]) -> tuple[Check, ...]:
    """Return the controls' verdict on one board.

    The harness's checks are made over the data set, model and threat model; a board adds its own condition:
    where the attacks do not break `none` on this very board (batch size, stage), its ranks would order the
    attacks' failures.
    """
    same = ("suite", "threat", "data_sha256", "model", "model_options")
    scope = [r for r in records if all(getattr(setting_of(r), k) == getattr(setting, k) for k in same)]
    found = {check.control: check for check in check_controls(scope)}
    return (_none_falls(setting, entries, found["none"]), found["full_noise"])


def _none_falls(setting: Setting, entries: Sequence[Entry], general: Check) -> Check:
    undefended = [e for e in entries if e.defense.id == "none"]
    if not undefended:
        return Check("none", None, "The undefended model is not on this board.")
    if setting.kind == "reconstruction" and all(e.worst is None for e in undefended):
        return general  # only labels were attacked
    name = "share_above_20db" if setting.kind == "reconstruction" else HEADLINE[setting.kind]
    broken = []
    for entry in undefended:
        best = strongest(entry.records, name)
        metric = None if best is None else best.metric(name)
        if metric is None or metric.value is None:
            broken.append(False)
        elif setting.kind == "reconstruction":
            broken.append(metric.value >= BROKEN)
        else:
            broken.append(metric.low is not None and metric.low > (metric.chance or 0.0))
    if all(broken) and (general.ok is not False or setting.kind != "reconstruction"):
        return Check("none", True, "The attacks break the undefended model on this board.")
    if not all(broken):
        return Check("none", False, "The attacks do NOT break the undefended model on this board.")
    return general


def _rankable(entry: Entry, kind: BoardKind) -> bool:
    refused = {"plain attacks only", "diverged", "failed", "control"}
    metric = headline(entry.worst, kind)
    known = metric is not None and metric.low is not None and metric.high is not None
    return known and not refused & {badge.text for badge in entry.badges}


def _ranked(entries: Sequence[Entry], kind: BoardKind) -> list[Entry]:
    """Return the entries with rank intervals: two rows whose intervals overlap are not separated."""
    spans: dict[int, tuple[float, float]] = {}
    for index, entry in enumerate(entries):
        metric = headline(entry.worst, kind)
        if _rankable(entry, kind) and metric is not None and metric.low is not None and metric.high is not None:
            spans[index] = (metric.low, metric.high)
    ranked = []
    for index, entry in enumerate(entries):
        if index not in spans:
            ranked.append(entry)
            continue
        low, high = spans[index]
        first = 1 + sum(other[1] < low for other in spans.values())
        last = len(spans) - sum(other[0] > high for other in spans.values())
        ranked.append(replace(entry, rank=str(first) if first == last else f"{first}-{last}"))
    return ranked


def _order(entry: Entry, kind: BoardKind) -> tuple[int, float, str, float]:
    """Return the sort key: `none`, then the least leaking first, rows without a figure, `full_noise`."""
    metric = headline(entry.worst, kind) or (None if entry.labels is None else entry.labels.metric("label_accuracy"))
    value = float("inf") if metric is None or metric.value is None else metric.value
    place = {"none": 0, "full_noise": 2}.get(entry.defense.id, 1)
    control = entry.defense.control
    return place, value, entry.defense.id, 0.0 if control is None else control.value
