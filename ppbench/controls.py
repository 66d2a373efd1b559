"""The bench distrusts itself: do the attacks break `none`, and leave `full_noise` alone?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

from ppbench.metrics.labels import multiset_chance
from ppbench.records.schema import ImageScore, LabelScore, MemberScore, Record, TraceScore

CONTROLS = ("none", "full_noise")
BROKEN = 0.5  # share of undefended victims that the best attack must rebuild
ALARM = 0.01  # probability of a false alarm over all cells of `full_noise` together


@dataclass(frozen=True)
class Check:
    """One control's outcome. ok: None where the controls were not run."""

    control: Literal["none", "full_noise"]
    ok: bool | None
    sentence: str


def best(records: Iterable[Record], name: str) -> Record | None:
    """Return the record with the largest value of metric `name`, the first by attack's name of equal ones, or None."""
    found = [(m.value, r) for r in records if (m := r.metric(name)) is not None and m.value is not None]
    found.sort(key=lambda pair: (pair[1].config.attack.id, pair[1].cell_id))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def value(record: Record | None, name: str) -> float | None:
    """Return the value of a record's metric, or None."""
    metric = record.metric(name) if record is not None else None
    return metric.value if metric is not None else None


def check_controls(records: Sequence[Record]) -> list[Check]:
    """Return what the controls say about the attacks that gave `records` (one data set, model and threat model).

    `none` must fall at the smallest batch at initialization, where gradient inversion is easiest: at least half of
    the victims rebuilt above 20 dB; or, where only labels were attacked, at least half of them recovered. A cell of
    `full_noise` above chance at a level of .01 over all its cells together is an alarm.
    """
    easiest = [r for r in records if r.config.defense.id == "none" and r.config.stage == "init"]
    if not easiest:  # only trained models were attacked
        easiest = [r for r in records if r.config.defense.id == "none"]
    smallest = min((r.config.batch_size for r in easiest), default=1)
    easiest = [r for r in easiest if r.config.batch_size == smallest]
    noise = [r for r in records if r.config.defense.id == "full_noise" and r.status == "complete"]
    return [_none(easiest), _full_noise(noise)]


def _none(records: Sequence[Record]) -> Check:
    images = [r for r in records if r.config.attack.kind == "reconstruction"]
    labels = [r for r in records if r.config.attack.kind == "label"]
    if not images and not labels:
        return Check("none", None, "No reconstruction or label attack ran on the undefended model.")
    name, what = ("share_above_20db", "images above 20 dB") if images else ("label_accuracy", "labels")
    strongest = best(images or labels, name)
    share = value(strongest, name)
    ok = share is not None and share >= BROKEN
    attack = strongest.config.attack.id if strongest is not None else "no attack"
    verb = "breaks" if ok else "does NOT break"
    amount = 0.0 if share is None else share
    return Check("none", ok, f"The best attack ({attack}) {verb} the undefended model: {amount:.0%} of {what}.")


def _full_noise(records: Sequence[Record]) -> Check:
    if not records:
        return Check("full_noise", None, "No attack ran on uploads of pure noise.")
    level = ALARM / len(records)
    alarms = [r for r in records if _chance_probability(r) < level]
    if not alarms:
        return Check("full_noise", True, f"No attack finds anything in uploads of pure noise ({len(records)} cells).")
    names = ", ".join(sorted({f"{r.config.attack.id} at batch {r.config.batch_size}" for r in alarms}))
    return Check("full_noise", False, f"Attacks find something in uploads of pure noise: {names}.")


def _chance_probability(record: Record) -> float:
    """Return the probability of a cell's score under chance (one-sided binomial over independent units)."""
    victims = record.victims
    units = max(1, len(victims) // max(1, record.config.batch_size))
    images = [v for v in victims if isinstance(v, ImageScore)]
    if images:
        # A blind guess above 20 dB is possible on a nearly uniform image; one in twenty is allowed for.
        share = sum((v.psnr or 0) > 20 for v in images) / len(images)
        return _binomial(share, units, 0.05)
    labels = [v for v in victims if isinstance(v, LabelScore)]
    if labels:
        chance = multiset_chance(record.config.model.classes, record.config.batch_size)
        return _binomial(sum(v.label for v in labels) / len(labels), units, chance)
    traces = [v for v in victims if isinstance(v, TraceScore)]
    if traces:
        owners = len({v.owner for v in traces})
        return _binomial(sum(v.owner == v.guess for v in traces) / len(traces), units, 1 / owners)
    members = [v for v in victims if isinstance(v, MemberScore)]
    if members:
        return _binomial(sum(v.member == v.decision for v in members) / len(members), len(members), 0.5)
    return 1.0


def _binomial(share: float, n: int, chance: float) -> float:
    return float(stats.binom.sf(round(share * n) - 1, n, chance))
