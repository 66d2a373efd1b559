"""Which cells of two results folders are about the same, and why the others are not."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Final, Literal

from ppbench.base.errors import UsageError
from ppbench.records.schema import CellConfig, Record
from ppbench.report.frame import key_of
from ppbench.report.worst import Measured

SHOWN = 3  # differing keys that a sentence names; how many more there are is said


@dataclass(frozen=True)
class Where:
    """What a row is about, whatever its seeds, as in `Key`; suite and threat are without their versions."""

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
        """Return what rows are sorted by; none of a control value comes first."""
        return tuple(-math.inf if part is None else part for part in astuple(self))


@dataclass(frozen=True)
class Pair:
    """The cells of one row that can be compared: complete, in the order of `seeds`; note: seeds that had failed."""

    where: Where
    seeds: tuple[int, ...]
    base: tuple[Measured, ...]
    new: tuple[Measured, ...]
    note: str = ""


def notes(pairs: Sequence[Pair]) -> str:
    """Return the notes of several rows as one."""
    return "; ".join(dict.fromkeys(pair.note for pair in pairs if pair.note))


@dataclass(frozen=True)
class Left:
    """A row that cannot be compared, and why, in a clause. record: one of its own; "unjudged": BASELINE's broke."""

    where: Where
    status: Literal["missing", "incomparable", "new", "unjudged"]
    reason: str
    record: Record


@dataclass(frozen=True)
class Joined:
    """The rows of two folders."""

    pairs: tuple[Pair, ...]
    left: tuple[Left, ...]


Facts = tuple[tuple[str, str], ...]
_Rows = dict[tuple[Where, Facts], dict[int, Record]]


FACTS: Final = {
    **{"suite": "suite", "suite_digest": "suite_digest", "tuning": "tuning", "victims": "victims"},
    **{"threat": "threat_model.id", "auxiliary": "threat_model.auxiliary", "informed": "threat_model.knows_defense"},
    **{"asked": "attack.kind", "attack_version": "attack.version", "settings": "attack.parameters"},
    **{"digest": "data.sha256", "train": "data.train", "test": "data.test", "public": "data.public"},
    **{"architecture": "model", "federation": "federation"},
    **{"references": "audit.references", "canaries": "audit.canaries", "canary_clients": "audit.canary_clients"},
}
"""Fields of a cell's key that must be equal for two cells to be compared, and where they stand in its configuration."""
NO_FACTS: Final = {
    "seed": "cells are compared seed by seed",
    "version": "of the defense, and the code of strangers' plugins: what is compared",
    "kind": "the kind of attack says it, too",
    "knows": "the threat model says it, too",
    "oracle": "oracles are left out",
    "perceptual": "its figures are not judged",
}
"""Fields of the key that are neither in `Where` nor facts, and why."""


def where_of(config: CellConfig) -> Where:
    """Return what a cell is about, its seed and all versions aside."""
    key = key_of(config)
    names = [field.name for field in fields(Where)]
    about = {name: getattr(key, name) for name in names}
    return Where(**{**about, "suite": _unversioned(key.suite), "threat": _unversioned(key.threat)})


def _unversioned(name: str) -> str:
    return name.rpartition("/")[0] or name


def facts_of(config: CellConfig) -> Facts:
    """Return what must be equal for two cells to be compared, as (place in the configuration, JSON) pairs."""
    key = key_of(config)
    facts: dict[str, str] = {}
    for name, where in FACTS.items():
        value = getattr(key, name)
        if name in ("architecture", "federation", "settings"):
            facts |= {
                f"{where}.{part}": json.dumps(inner, sort_keys=True) for part, inner in _flat("", json.loads(value))
            }
        else:
            facts[where] = json.dumps(value)
    return tuple(sorted(facts.items()))


def _flat(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), part)
    elif prefix:
        yield prefix, value


def differing(base: Facts, new: Facts) -> list[str]:
    """Return "key is X, NEW has Y" for each key in which two cells differ, versions first."""
    one, two = dict(base), dict(new)
    keys = sorted({k for k in one | two if one.get(k) != two.get(k)}, key=lambda k: ("version" not in k, k))
    return [f"{key} is {one.get(key, 'absent')}, NEW has {two.get(key, 'absent')}" for key in keys]


def join(base: Sequence[Record], new: Sequence[Record]) -> Joined:
    """Return the rows of two folders that can be compared, the others with the reason; oracles are left out.

    Cells of the same facts meet first, the others the cell that differs least. UsageError: two versions of a defense.
    """
    ours, theirs = _rows(base, "BASELINE"), _rows(new, "NEW")
    pairs: list[Pair] = []
    left: list[Left] = []
    for key in sorted(ours.keys() & theirs.keys(), key=_order):
        row = _paired(key[0], ours[key], theirs[key])
        if isinstance(row, Left):
            left.append(row)
            continue
        pairs.append(row)
        if extra := sorted(theirs[key].keys() - ours[key].keys()):
            reason = f"seeds {', '.join(map(str, extra))} are only in NEW; the others are compared"
            left.append(Left(key[0], "new", reason, theirs[key][extra[0]]))
    spare = defaultdict[Where, list[Facts]](list)
    for where, facts in sorted(theirs.keys() - ours.keys(), key=_order):
        spare[where].append(facts)
    for where, facts in sorted(ours.keys() - theirs.keys(), key=_order):
        left.append(_unpaired(where, facts, ours[where, facts], spare[where]))
    for where, some in spare.items():
        left += [Left(where, "new", "only in NEW", _first(theirs[where, facts])) for facts in some]
    return Joined(tuple(pairs), tuple(sorted(left, key=lambda row: row.where.order())))


def _order(key: tuple[Where, Facts]) -> tuple[tuple[str | int | float, ...], Facts]:
    return key[0].order(), key[1]


def _rows(records: Sequence[Record], side: str) -> _Rows:
    rows: _Rows = defaultdict(dict)
    for record in sorted(records, key=lambda r: r.cell_id):
        config = record.config
        if config.attack.oracle:
            continue
        seeds = rows[where_of(config), facts_of(config)]
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


def _unpaired(where: Where, facts: Facts, seeds: dict[int, Record], spare: list[Facts]) -> Left:
    """Return why a row of BASELINE has no partner; takes the nearest one out of `spare`."""
    record = _first(seeds)
    if all(r.status != "complete" for r in seeds.values()):
        return Left(where, "unjudged", f"{record.status} in BASELINE, and not in NEW", record)
    if not spare:
        return Left(where, "missing", "not in NEW", record)
    nearest = min(spare, key=lambda other: len(differing(facts, other)))
    spare.remove(nearest)
    named = differing(facts, nearest)
    more = f"; and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    return Left(where, "incomparable", "; ".join(named[:SHOWN]) + more, record)


def _paired(where: Where, base: dict[int, Record], new: dict[int, Record]) -> Pair | Left:
    """Return a row's cells seed by seed, or why they cannot be compared."""
    first = _first(base)
    known = sorted(seed for seed, record in base.items() if record.status == "complete")
    if not known:
        return Left(where, "unjudged", f"{first.status} in BASELINE", first)
    if not set(known) & new.keys():
        seeds = f"seed is {', '.join(map(str, known))}, NEW has {', '.join(map(str, sorted(new)))}"
        return Left(where, "incomparable", f"{seeds}: another seed asks about other victims", base[known[0]])
    if absent := [seed for seed in known if seed not in new]:
        return Left(where, "missing", f"seed {', '.join(map(str, absent))} is not in NEW", base[absent[0]])
    for seed in known:
        one, two = base[seed], new[seed]
        if two.status != "complete":
            return Left(where, "missing", f"complete in BASELINE, {two.status} in NEW: {two.reason}", one)
        if reason := _victims_differ(one, two):
            return Left(where, "incomparable", reason, one)
    lost = [f"seed {seed} {record.status} in BASELINE" for seed, record in sorted(base.items()) if seed not in known]
    note = f"{', '.join(lost)}: not judged" if lost else ""
    return Pair(where, tuple(known), tuple(base[s] for s in known), tuple(new[s] for s in known), note)


def _victims_differ(one: Record, two: Record) -> str:
    """Return why two cells' victims are not the same, "" where they are."""
    if one.asked is None or two.asked is None:
        side = "BASELINE" if one.asked is None else "NEW"
        return f"asked is absent in {side}, whose records are of before it was kept; make it again"
    if one.asked != two.asked:
        return f"asked is {one.asked}, NEW has {two.asked}: other victims, candidates or queries"
    if len(one.victims) != len(two.victims):
        return f"victims are {len(one.victims)}, NEW has {len(two.victims)}"
    return ""
