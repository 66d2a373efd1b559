"""Victims, clients and warnings that are worse by themselves, which a figure over all victims does not show.

A defense that leaves out one client of ten moves no median. Here each unit (a client's batch) is tested for whether it
newly falls. Where the others' uploads are those of BASELINE, both runs drew the same: then any other upload is a change
of the code, and needs no test. Where all uploads differ, a client is compared with how often the others change sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import scipy

from ppbench.metrics.modality import modality_of
from ppbench.questions.recognition import is_reidentified
from ppbench.records.figure import grouped
from ppbench.records.schema import Record
from ppbench.report.compare.join import RowPair, Where
from ppbench.report.compare.judge import SIGNIFICANCE, ComparedRow, printable, scenes_of
from ppbench.report.compare.paired import Change
from ppbench.report.controls import BELIED, CONTROLS
from ppbench.report.worst import cell_of

SAME_UPLOAD = 1e-4
"""Relative difference of two discrepancies at the truth up to which they are those of one upload."""
ABOVE_ROUNDING = 1e-6
"""Discrepancy at the truth above which it tells draws apart; below it is rounding."""
FEWEST_SAME = 2
"""Units whose uploads are those of BASELINE, at least, and half of all, for equal draws."""
LEAST_BESIDE = 4
"""Units of other clients, at least, with which a client is compared."""
RISE = {True: 3.0, False: 0.1}
"""How much more of a unit must come out, by whether its modality counts decibels: less is luck of a search."""


@dataclass(frozen=True)
class UnitPair:
    """One unit on both sides, by the worst case over attacks. name: seed, batch size, probe and client.

    fell, falls: whether half of its inputs were rebuilt or re-identified, in BASELINE and in NEW; rebuilt: whether half
    are rebuilt in NEW; base, new: mean amount that came out; same: whether both sides saw one upload, None: unknown.
    """

    name: tuple[int, ...]
    fell: bool
    falls: bool
    rebuilt: bool
    base: float
    new: float
    same: bool | None

    @property
    def client(self) -> int:
        """The client; -1 for a whole cohort."""
        return self.name[-1]


def lone_rows(pairs: Sequence[RowPair]) -> list[ComparedRow]:
    """Return a regression for each point whose victims newly fall alone, and for each new warning of a defense."""
    rows, points = list[ComparedRow](), defaultdict[Where, list[tuple[RowPair, list[UnitPair], float]]](list)
    for some, worst in scenes_of(pairs):
        config = worst.base[0].config
        if config.defense.id in CONTROLS:
            continue
        units, rise = list(_units(some, worst)), RISE[modality_of(config).decibels]
        if alone := changed_alone(units, rise):
            rows.append(_row(worst, alone, "the other units' uploads are as they were, and theirs are not"))
        points[_point(worst.where)].append((worst, units, rise))
    for scenes in points.values():
        if any(row.where == scene.where for scene, *_ in scenes for row in rows):
            continue
        units = _joined([unit for _, some, _ in scenes for unit in some])
        client, p = worst_client(units, scenes[0][2])
        if p * len(points) < SIGNIFICANCE:
            why = f"other clients' victims change sides too seldom for chance (p {p * len(points):.2g})"
            rows.append(_row(scenes[0][0], [u for u in units if u.client == client], why, p * len(points)))
    return rows + list(new_warnings(pairs))


def _point(where: Where) -> Where:
    """Return a defense at one control value, in any scene."""
    return replace(where, stage="", batch=0, probe="", probe_rounds=0, role="", attack="", follows="")


def _units(some: Sequence[RowPair], worst: RowPair) -> Iterator[UnitPair]:
    """Yield the units of one scene; those whose scores name no client are left out."""
    for place, seed in enumerate(worst.seeds):
        named = ([s for s in side[place].victims if s.slot is not None] for side in (worst.base, worst.new))
        sides = [grouped(victims, lambda score: score.unit) for victims in named]
        prints = [[_fingerprints(cell_of(side)) for side in (p.base[place], p.new[place])] for p in some]
        modality, batch = modality_of(worst.base[place].config), worst.where.batch
        for unit in sides[0].keys() & sides[1].keys():
            base, new = sides[0][unit], sides[1][unit]
            taken = [sum(modality.rebuilt(s) or is_reidentified(s) for s in side) / len(side) for side in (base, new)]
            amounts = [sum(modality.amount(s) for s in side) / len(side) for side in (base, new)]
            known = [_same(one.get(unit), two.get(unit)) for one, two in prints]
            known = [same for same in known if same is not None]
            rebuilt = sum(modality.rebuilt(s) for s in new) >= len(new) / 2
            fell, falls = (share >= 0.5 for share in taken)
            same = any(known) if known else None
            yield UnitPair((seed, batch, *unit), fell, falls, rebuilt, amounts[0], amounts[1], same)


def _fingerprints(record: Record) -> dict[tuple[int, ...], float]:
    """Return the discrepancy at the truth of each unit, which no attack's luck changes: it is the upload's."""
    known = {score.unit: getattr(score, "at_truth", None) for score in record.victims}
    return {unit: value for unit, value in known.items() if value is not None}


def _same(base: float | None, new: float | None) -> bool | None:
    """Return whether two discrepancies at the truth are those of one upload; None if they cannot tell."""
    if base is None or new is None or max(base, new) <= ABOVE_ROUNDING:
        return None
    return abs(base - new) <= SAME_UPLOAD * max(base, new)


def changed_alone(units: Sequence[UnitPair], rise: float) -> list[UnitPair]:
    """Return the units that are newly rebuilt from other uploads while most uploads are those of BASELINE."""
    same = sum(unit.same is True for unit in units)
    if same < max(FEWEST_SAME, len(units) / 2):
        return []
    return [u for u in units if u.same is False and u.rebuilt and not u.fell and u.new - u.base > rise]


def worst_client(units: Sequence[UnitPair], rise: float) -> tuple[int, float]:
    """Return the client whose units newly fall least by chance, and the p-value over all clients; 1 for none.

    Chance is how often the units of the others change sides, in either direction: in reruns both are as likely.
    """
    best, clients = (-1, 1.0), {unit.client for unit in units} - {-1}
    for client in sorted(clients):
        own, others = ([u for u in units if (u.client == client) is mine] for mine in (True, False))
        standing = [u for u in own if not u.fell]
        newly = [u for u in standing if u.falls and u.new - u.base > rise]
        if len(newly) < 2 or len(others) < LEAST_BESIDE:
            continue
        changed = sum(u.fell != u.falls for u in others)
        rate = (changed + 1) / (2 * len(others) + 2)
        p = min(1.0, len(clients) * float(scipy.stats.binom.sf(len(newly) - 1, len(standing), rate)))
        best = min(best, (client, p), key=lambda pair: pair[1])
    return best


def _joined(units: Sequence[UnitPair]) -> list[UnitPair]:
    """Return one unit for each name: several stages attack the same victims, which are no further evidence."""
    by_name: dict[tuple[int, ...], UnitPair] = {}
    for unit in units:
        known = by_name.setdefault(unit.name, unit)
        if unit.new - unit.base > known.new - known.base:
            by_name[unit.name] = unit
    return list(by_name.values())


def _row(scene: RowPair, units: Sequence[UnitPair], why: str, p: float = 0.0) -> ComparedRow:
    """Return the regression of some units of a scene."""
    base, new = (sum(values) / len(units) for values in ([u.base for u in units], [u.new for u in units]))
    places = sorted({unit.name[-2:] for unit in units})
    named = ", ".join("probe {} of client {}".format(*place) for place in places[:3])
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    note = f"{named}{more}: {why}"
    worse = new - base
    change = Change(base, new, worse, worse, worse, p, len(units), "victims that newly fall alone", certain=p == 0)
    record = cell_of(scene.base[0])
    return ComparedRow(scene.where, "newly_fallen", "", "regression", change, 0.0, note, record, digits=2)


def new_warnings(pairs: Sequence[RowPair]) -> Iterator[ComparedRow]:
    """Yield a regression for each kind of `BELIED` that a point of a defense has in NEW alone."""
    known, raised = defaultdict[Where, set[str]](set), dict[tuple[Where, str], tuple[Where, str, Record]]()
    for pair in pairs:
        point = _point(pair.where)
        for record in map(cell_of, pair.base):
            known[point] |= {flag.code for flag in record.flags}
        for first, record in zip(map(cell_of, pair.base), map(cell_of, pair.new), strict=True):
            for flag in record.flags:
                if flag.code in BELIED:
                    where = replace(pair.where, attack="", follows="")
                    raised.setdefault((point, flag.code), (where, flag.detail, first))
    for (point, code), (where, detail, record) in raised.items():
        if code not in known[point] and where.defense not in CONTROLS:
            yield ComparedRow(where, code, "", "regression", None, 0.0, f"only in NEW: {detail}", record)


def unasked_clients(pairs: Sequence[RowPair]) -> Iterator[str]:
    """Yield a sentence for each defense none of whose victims are of some client: nothing is known of that client."""
    victims_of, clients = defaultdict[str, set[int]](set), dict[str, int]()
    for pair in pairs:
        for score in pair.new[0].victims:
            if score.slot is not None:
                victims_of[pair.where.defense].add(score.slot[1])
                clients[pair.where.defense] = pair.new[0].config.federation.clients
    for defense, some in sorted(victims_of.items()):
        missing = sorted(set(range(clients[defense])) - some)
        if missing and defense not in CONTROLS:
            named = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            yield f"{printable(defense)}: no victim is of client {named}, so nothing is known of what they send."
