"""The bench distrusts itself: do the attacks break `none`, and leave `full_noise` alone?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scipy import stats

from ppbench.metrics.labels import multiset_chance
from ppbench.records.aggregate import unit_of
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


def is_image(record: Record) -> bool:
    """Return whether the cell's data are images: decibels say nothing about rows of a table."""
    return len(record.config.model.shape) == 3


def rebuilt(victim: object, record: Record) -> bool:
    """Return whether a victim is rebuilt: an image above 20 dB, a table row within a tenth of its norm."""
    if not isinstance(victim, ImageScore):
        return False
    if is_image(record):
        return (victim.psnr or 0.0) > 20
    return victim.rmse is not None and victim.rmse < 0.1


def check_controls(records: Sequence[Record]) -> list[Check]:
    """Return what the controls say about the attacks that gave `records` (one data set, model and threat model).

    `none` must fall at the smallest batch at initialization, where gradient inversion is easiest: at least half of
    the victims rebuilt above 20 dB; or, where only labels were attacked, at least half of them recovered. A cell of
    `full_noise` above chance at a level of .01 over all its cells together is an alarm.
    """
    noise = [r for r in records if r.config.defense.id == "full_noise" and r.status == "complete"]
    attacked = [r for r in records if r.config.attack.kind in ("reconstruction", "label")]
    threats = sorted({r.config.threat_model.id for r in attacked})
    found = [_none([r for r in attacked if r.config.threat_model.id == threat]) for threat in threats]
    if len(found) > 1:
        found = [replace(check, sentence=f"[{t}] {check.sentence}") for t, check in zip(threats, found, strict=True)]
    weakest = next((check for check in found if check.ok is not True), None)
    return [weakest or (found[0] if found else _none([])), _full_noise(noise)]


def _none(records: Sequence[Record]) -> Check:
    undefended = [r for r in records if r.config.defense.id == "none"]
    easiest = [r for r in undefended if r.config.stage == "init"] or undefended
    smallest = min((r.config.batch_size for r in easiest), default=1)
    easiest = [r for r in easiest if r.config.batch_size == smallest]
    images = [r for r in easiest if r.config.attack.kind == "reconstruction"]
    labels = [r for r in easiest if r.config.attack.kind == "label"]
    if not images and not labels:
        return Check("none", None, "No reconstruction or label attack ran on the undefended model.")
    if images:
        what = "images above 20 dB" if is_image(images[0]) else "rows within a tenth of their size"
        shares = [(sum(rebuilt(v, r) for v in r.victims) / max(1, len(r.victims)), r.config.attack.id) for r in images]
        share, attack = max(sorted(shares, key=lambda pair: pair[1]), key=lambda pair: pair[0])
    else:
        what, strongest = "labels", best(labels, "label_accuracy")
        share = value(strongest, "label_accuracy") or 0.0
        attack = strongest.config.attack.id if strongest is not None else "no attack"
    ok = share >= BROKEN
    verb = "breaks" if ok else "does NOT break"
    return Check("none", ok, f"The best attack ({attack}) {verb} the undefended model: {share:.0%} of {what}.")


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
    seen = [v for v in victims if isinstance(v, ImageScore | LabelScore)]
    units = len({unit_of(v) for v in seen}) or max(1, len(victims) // max(1, record.config.batch_size))
    images = [v for v in victims if isinstance(v, ImageScore)]
    if images:
        # A blind guess may succeed on a nearly uniform image; one in twenty is allowed for.
        return _binomial(sum(rebuilt(v, record) for v in images) / len(images), units, 0.05)
    labels = [v for v in victims if isinstance(v, LabelScore)]
    if labels:
        chance = multiset_chance(record.config.model.classes, len(labels) // units)
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
