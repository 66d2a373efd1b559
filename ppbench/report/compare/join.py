"""Which cells of two results folders can be compared, and why the others cannot."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Final, Literal

from pydantic import BaseModel

from ppbench.base.errors import UsageError
from ppbench.records.schema import CellConfig, Record
from ppbench.report.frame import key_of
from ppbench.report.worst import Measured

NAMED_KEYS = 3  # differing keys that a sentence names; of the others it gives the number


@dataclass(frozen=True)
class Where:
    """What a row is about, over all seeds: fields of `Key`; suite and threat without their versions."""

    suite: str
    defense: str
    control: str
    value: float | None
    parameters: str
    threat: str
    stage: str
    batch: int
    probe: str
    probe_rounds: int
    role: str
    attack: str
    follows: str

    def order(self) -> tuple[str | int | float, ...]:
        """Return the sort key; rows without a control value come first."""
        return tuple(-math.inf if part is None else part for part in astuple(self))


@dataclass(frozen=True)
class RowPair:
    """The complete cells of one row on both sides, in the order of `seeds`; note: on seeds that had failed."""

    where: Where
    seeds: tuple[int, ...]
    base: tuple[Measured, ...]
    new: tuple[Measured, ...]
    note: str = ""


def notes(pairs: Sequence[RowPair]) -> str:
    """Return the notes of several rows as one."""
    return "; ".join(dict.fromkeys(pair.note for pair in pairs if pair.note))


@dataclass(frozen=True)
class UncomparedRow:
    """A row that is not compared. reason: a clause; record: one of its own; "unjudged": BASELINE's cells failed."""

    where: Where
    status: Literal["missing", "incomparable", "new", "unjudged"]
    reason: str
    record: Record


@dataclass(frozen=True)
class Joined:
    """The rows of two folders."""

    pairs: tuple[RowPair, ...]
    left: tuple[UncomparedRow, ...]


EqualFacts = tuple[tuple[str, str], ...]
_Rows = dict[tuple[Where, EqualFacts], dict[int, Record]]


DEVICE, TF32 = "federation.device", "federation.tf32"
NO_FACTS: Final = {
    **dict.fromkeys(("defense", "stage", "batch_size", "probe", "probe_rounds", "role"), "part of `Where`"),
    **dict.fromkeys(("attack.id", "attack.follows"), "part of `Where`"),
    "schema_": "there is one",
    "seed": "cells are compared seed by seed",
    "victims_from": "the victims themselves are compared",
    **dict.fromkeys(("attack.code", "data.code", "model.code"), "code of other packages' plugins: what is compared"),
    **dict.fromkeys(("data.name", "threat_model.sees"), "words; the digest and the id decide"),
    "attack.adaptive": "the threat model decides it",
    "attack.oracle": "oracles are left out",
    "perceptual": "its figures are not judged",
}
"""Places in a cell's configuration, with all that is in them, that may differ between cells that are compared, and why.
All others are facts: new fields, too."""


def where_of(config: CellConfig) -> Where:
    """Return what a cell is about, without its seed and versions."""
    key = key_of(config)
    known = {**vars(key), **dict(key.probing)}
    about = {field.name: known[field.name] for field in fields(Where)}
    return Where(**{**about, "suite": _unversioned(key.suite), "threat": _unversioned(key.threat)})


def _unversioned(name: str) -> str:
    return name.rpartition("/")[0] or name


def equal_facts(config: CellConfig) -> EqualFacts:
    """Return what must be equal for two cells to be compared, as (place in the configuration, JSON) pairs."""
    facts = {place: json.dumps(value, sort_keys=True) for place, value in _facts("", config)}
    facts[TF32] = json.dumps(bool(config.federation.tf32))  # None where a CPU computed, and in older records
    return tuple(sorted(facts.items()))


def _facts(place: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the facts at and below a place, each with its own place."""
    if place in NO_FACTS:
        return
    parts = dict(value) if isinstance(value, BaseModel) else value
    if isinstance(parts, dict) and parts:
        for name, part in parts.items():
            yield from _facts(f"{place}.{name}" if place else name, part)
    else:
        yield place, parts


def _any_device(key: tuple[Where, EqualFacts]) -> tuple[Where, EqualFacts]:
    return key[0], tuple(fact for fact in key[1] if fact[0] != DEVICE)


def _on_their_devices(ours: _Rows, theirs: _Rows) -> _Rows:
    """Return `theirs` with a row under the key of BASELINE's where both differ in the device alone, and none is equal.

    Draws are made on the CPU, so the device changes rounding, as another torch does, and not what is asked.
    """
    partners = {_any_device(key): key for key in sorted(ours.keys() - theirs.keys(), key=_order)}
    moved = {}
    for key in sorted(theirs, key=_order):
        moved[key if key in ours else partners.pop(_any_device(key), key)] = theirs[key]
    return moved


def differing_facts(base: EqualFacts, new: EqualFacts) -> list[str]:
    """Return "KEY is X, NEW has Y" for each fact in which two cells differ, versions first."""
    one, two = dict(base), dict(new)
    keys = sorted({k for k in one | two if one.get(k) != two.get(k)}, key=lambda k: ("version" not in k, k))
    return [f"{key} is {one.get(key, 'absent')}, NEW has {two.get(key, 'absent')}" for key in keys]


def join(base: Sequence[Record], new: Sequence[Record]) -> Joined:
    """Return the rows of two folders that can be compared, the others with the reason; oracles are left out.

    Rows with equal facts are paired, on whatever device; any other names the row that differs least. UsageError: two
    versions of a defense.
    """
    ours, theirs = _rows(base, "BASELINE"), _rows(new, "NEW")
    theirs = _on_their_devices(ours, theirs)
    pairs: list[RowPair] = []
    left: list[UncomparedRow] = []
    for key in sorted(ours.keys() & theirs.keys(), key=_order):
        row = _paired(key[0], ours[key], theirs[key])
        if isinstance(row, UncomparedRow):
            left.append(row)
            continue
        pairs.append(row)
        if extra := sorted(theirs[key].keys() - ours[key].keys()):
            reason = f"seeds {', '.join(map(str, extra))} are only in NEW; the others are compared"
            left.append(UncomparedRow(key[0], "new", reason, theirs[key][extra[0]]))
    spare = defaultdict[Where, list[EqualFacts]](list)
    for where, facts in sorted(theirs.keys() - ours.keys(), key=_order):
        spare[where].append(facts)
    for where, facts in sorted(ours.keys() - theirs.keys(), key=_order):
        left.append(_unpaired(where, facts, ours[where, facts], spare[where]))
    for where, some in spare.items():
        left += [UncomparedRow(where, "new", "only in NEW", _first(theirs[where, facts])) for facts in some]
    return Joined(tuple(pairs), tuple(sorted(left, key=lambda row: row.where.order())))


def _order(key: tuple[Where, EqualFacts]) -> tuple[tuple[str | int | float, ...], EqualFacts]:
    return key[0].order(), key[1]


def _rows(records: Sequence[Record], side: str) -> _Rows:
    rows: _Rows = defaultdict(dict)
    for record in sorted(records, key=lambda r: r.cell_id):
        config = record.config
        if config.attack.oracle:
            continue
        seeds = rows[where_of(config), equal_facts(config)]
        twin = seeds.setdefault(config.seed, record)
        versions = twin.config.edition, config.edition
        if versions[0] != versions[1]:
            raise UsageError(
                f"{side} holds {config.defense.id!r} in versions {versions[0]!r} and {versions[1]!r}; "
                "give a folder with one of them."
            )
    return rows


def _first(seeds: dict[int, Record]) -> Record:
    return seeds[min(seeds)]


def _unpaired(where: Where, facts: EqualFacts, seeds: dict[int, Record], spare: list[EqualFacts]) -> UncomparedRow:
    """Return the reason why a row of BASELINE has no partner; removes the nearest one from `spare`."""
    record = _first(seeds)
    if all(r.status != "complete" for r in seeds.values()):
        return UncomparedRow(where, "unjudged", f"{record.status} in BASELINE, and not in NEW", record)
    if not spare:
        return UncomparedRow(where, "missing", "not in NEW", record)
    nearest = min(spare, key=lambda other: len(differing_facts(facts, other)))
    spare.remove(nearest)
    named = differing_facts(facts, nearest)
    more = f"; and {len(named) - NAMED_KEYS} more" if len(named) > NAMED_KEYS else ""
    return UncomparedRow(where, "incomparable", "; ".join(named[:NAMED_KEYS]) + more, record)


def _paired(where: Where, base: dict[int, Record], new: dict[int, Record]) -> RowPair | UncomparedRow:
    """Return a row's cells seed by seed, or why they cannot be compared."""
    first = _first(base)
    known = sorted(seed for seed, record in base.items() if record.status == "complete")
    if not known:
        return UncomparedRow(where, "unjudged", f"{first.status} in BASELINE", first)
    if not set(known) & new.keys():
        seeds = f"seed is {', '.join(map(str, known))}, NEW has {', '.join(map(str, sorted(new)))}"
        return UncomparedRow(where, "incomparable", f"{seeds}: another seed has other victims", base[known[0]])
    if absent := [seed for seed in known if seed not in new]:
        return UncomparedRow(where, "missing", f"seed {', '.join(map(str, absent))} is not in NEW", base[absent[0]])
    for seed in known:
        one, two = base[seed], new[seed]
        if two.status != "complete":
            return UncomparedRow(where, "missing", f"complete in BASELINE, {two.status} in NEW: {two.reason}", one)
        if reason := _victims_differ(one, two):
            return UncomparedRow(where, "incomparable", reason, one)
    lost = [f"seed {seed} {record.status} in BASELINE" for seed, record in sorted(base.items()) if seed not in known]
    note = f"{', '.join(lost)}: not judged" if lost else ""
    return RowPair(where, tuple(known), tuple(base[s] for s in known), tuple(new[s] for s in known), note)


def _victims_differ(one: Record, two: Record) -> str:
    """Return why two cells' victims are not the same, a clause; "" where they are."""
    if one.asked is None or two.asked is None:
        side = "BASELINE" if one.asked is None else "NEW"
        return f"asked is absent in {side}, whose records are of before it was kept; make it again"
    if one.asked != two.asked:
        return f"asked is {one.asked}, NEW has {two.asked}: other victims, candidates or queries"
    if len(one.victims) != len(two.victims):
        return f"victims are {len(one.victims)}, NEW has {len(two.victims)}"
    return ""
