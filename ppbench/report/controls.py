"""The bench distrusts itself: do the attacks break `none`, and leave `full_noise` alone?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from scipy import stats

from ppbench.metrics.intervals import LEVEL, proportion
from ppbench.metrics.modalities import modality_of
from ppbench.questions.base import question_for, question_of
from ppbench.questions.recognition import FOUND, LOOKED, is_found
from ppbench.records.figure import Figured, best, metric_of
from ppbench.records.schema import Metric, Record
from ppbench.records.soundness import Soundness

CONTROLS = ("none", "full_noise")
UNREAD = "can be read"
"""How the reason ends of a cell whose attack had nothing to go by."""
BELIED = ("own_account", "own_weights", "probe_noticed")
"""Flags of a defense whose own account of its uploads is not what its server makes of them, or not in training."""
BROKEN = 0.5  # share of undefended victims that the best attack must rebuild, or whose originals it must let find
CLEAR = 0.10  # a share beyond chance is seen where its interval begins above this
ALARM = 0.01  # probability of a false alarm over all cells of `full_noise` together


def unread(record: Record) -> bool:
    """Return whether a cell has no figure because its attack had nothing to go by: others of its row may have."""
    return record.status == "failed" and (record.reason or "").endswith(UNREAD)


@dataclass(frozen=True)
class Check:
    """One control's outcome. ok: None where the controls were not run.

    control: "board": whether the attacks break the undefended model on one board; where not, nothing speaks against
    the others. "learning": whether the undefended model learned enough to judge usability by.
    """

    control: Literal["none", "full_noise", "harness", "board", "learning"]
    ok: bool | None
    sentence: str


def check_harness(outcome: Soundness | None) -> Check:
    """Return what the self-test says of the harness that computed a folder's cells. None: nobody knows."""
    if outcome is None:
        sentence = "Not known: no outcome of the harness's self-test was recorded here; an older ppbench kept none."
        return Check("harness", None, sentence)
    standing = [str(trial) for trial in outcome.trials if not trial.fell]
    if not standing:
        return Check("harness", True, "Both networks of the self-test fall: the harness finds what must be found.")
    return Check("harness", False, f"HARNESS FAULT: {'; '.join(standing)}. Nothing here may be concluded.")


def probe_words(probe: str, rounds: int) -> str:
    """Return what a probed client did in words: "probe gradient", "probe local, 2 rounds"."""
    return f"probe {probe}" + (f", {rounds} rounds" if rounds > 1 else "")


def value(record: Figured | None, name: str) -> float | None:
    """Return the value of a record's metric, or None."""
    metric = record.metric(name) if record is not None else None
    return metric.value if metric is not None else None


def widened(metric: Metric | None, cells: int) -> tuple[float, float] | None:
    """Return an interval stretched, as a normal law's, to Bonferroni's level for the largest of `cells` figures."""
    if metric is None or metric.value is None or metric.low is None or metric.high is None:
        return None
    tail = (1 - LEVEL) / 2
    stretch = float(stats.norm.isf(tail / max(1, cells)) / stats.norm.isf(tail))
    return metric.value - (metric.value - metric.low) * stretch, metric.value + (metric.high - metric.value) * stretch


def above_chance(record: Figured | None, name: str, cells: int = 1) -> bool:
    """Return whether a metric lies above its chance level, as the largest of `cells` figures."""
    metric = record.metric(name) if record is not None else None
    ends = widened(metric, cells)
    return metric is not None and ends is not None and metric.chance is not None and ends[0] > metric.chance


def rebuilding(record: Figured) -> str:
    """Return the metric that says how well a cell's victims were rebuilt."""
    return question_of("reconstruction").headline(record.config)


def rebuilt_share(record: Figured) -> Metric | None:
    """Return the share of a reconstruction's victims that are rebuilt, with its interval; None without victims."""
    return _share(record, "share_rebuilt", modality_of(record.config).rebuilt)


def taken_share(record: Figured) -> float:
    """Return the share of a reconstruction's victims that are rebuilt, or of those rebuilt or found again if that is
    more; found ones count where their share begins `CLEAR` above chance: a small gallery lets everything be found.
    """
    share = value_of(rebuilt_share(record))
    rebuilt = modality_of(record.config).rebuilt
    taken = _share(record, "share_taken", lambda victim: rebuilt(victim) or is_found(victim))
    finds = [found for name in LOOKED if name.startswith(FOUND) and (found := record.metric(name)) is not None]
    chance = sum(1.0 if found.chance is None else found.chance for found in finds)
    clear = finds and taken is not None and (taken.low or 0.0) - chance > CLEAR
    return max(share, value_of(taken)) if clear else share


def value_of(share: Metric | None) -> float:
    """Return what a share is, 0 where there is none."""
    return 0.0 if share is None else share.value or 0.0


def _share(record: Figured, name: str, taken: Callable[[Any], bool]) -> Metric | None:
    units: dict[tuple[int, ...], list[bool]] = {}
    for victim in record.victims if question_for(record).inputs else ():
        units.setdefault(victim.unit, []).append(taken(victim))
    if not units:
        return None
    return metric_of(name, proportion([np.array(unit) for unit in units.values()]), safer=False)


def check_controls(records: Sequence[Record]) -> list[Check]:
    """Return what the controls say about the attacks that gave `records` (one data set, model and threat model).

    `none` must fall at the smallest batch at initialization: half of the victims rebuilt or found again, or of labels
    recovered where only these were attacked, or members found above chance where only these were. Each adversary and
    probe is judged for itself. Cells of `full_noise` above chance, at .01 over all of them, are an alarm. Extraction
    tells neither: an undefended model is there to be read.
    """
    noise = [r for r in records if r.config.defense.id == "full_noise" and r.status == "complete"]
    noise = [r for r in noise if question_for(r).noise]
    attacked = [r for r in records if question_for(r).chapter == "uploads" and question_for(r).reads]
    attacked = attacked or [r for r in records if question_for(r).chapter == "models" and question_for(r).noise]
    attacked = attacked or [r for r in records if not question_for(r).chapter]
    scenes: dict[tuple[str, str, int], list[Record]] = {}
    for record in attacked:
        about = record.config.threat_model.id, record.config.probe, record.config.probe_rounds
        scenes.setdefault(about, []).append(record)  # another adversary's success vouches for nothing there
    probed = len({scene[1:] for scene in scenes}) > 1
    found = []
    for (threat, probe, rounds), some in sorted(scenes.items(), key=lambda pair: pair[0]):
        head = f"[{threat}, {probe_words(probe, rounds)}] " if probed else f"[{threat}] "
        check = _none(some)
        found.append(replace(check, sentence=head + check.sentence) if len(scenes) > 1 else check)
    weakest = next((check for check in found if check.ok is not True), None)
    return [weakest or (found[0] if found else _none([])), _full_noise(noise)]


def _none(records: Sequence[Record]) -> Check:
    undefended = [r for r in records if r.config.defense.id == "none"]
    easiest = [r for r in undefended if r.config.stage == "init"] or undefended
    smallest = min((r.config.batch_size for r in easiest), default=1)
    easiest = [r for r in easiest if r.config.batch_size == smallest]
    read = [r for r in easiest if question_for(r).chapter == "uploads" and r.metric("batch_asr") is None]
    images = [r for r in read if question_for(r).inputs]
    if not read:
        return _members(undefended)
    if images:
        modality = modality_of(images[0].config)
        what = modality.broken
        share, attack = _most(images, lambda r: value_of(rebuilt_share(r)))
        if share < BROKEN and modality.perceptual:
            what = f"{modality.noun} are rebuilt or found again"
            share, attack = _most(images, taken_share)
    else:
        what, strongest = "labels are recovered", best(read, "label_accuracy")
        share = value(strongest, "label_accuracy") or 0.0
        attack = strongest.config.attack.id if strongest is not None else "no attack"
    ok = share >= BROKEN
    verb = "breaks" if ok else "does NOT break"
    return Check("none", ok, f"The best attack ({attack}) {verb} the undefended model: {share:.0%} of {what}.")


def _most(images: Sequence[Record], share: Callable[[Figured], float]) -> tuple[float, str]:
    """Return the largest share of victims over attacks, and whose it is: of equal ones the first by name."""
    shares = [(share(r), r.config.attack.id) for r in images]
    return max(sorted(shares, key=lambda pair: pair[1]), key=lambda pair: pair[0])


def _members(undefended: Sequence[Record]) -> Check:
    """Judge `none` by its members, where nothing else was attacked: on the trained model, of audits by canaries."""
    if easy := [r for r in undefended if r.metric("batch_asr") is not None]:
        return _found(easy, "batch_asr", "members of batches of")
    members = [r for r in undefended if r.metric("asr") is not None]
    members = [r for r in members if r.config.stage == "final"] or members
    if not members and (others := [r for r in undefended if not question_for(r).chapter and question_for(r).figures]):
        return _others(others)
    name, what = "asr", "members of"
    if all(r.config.stage == "audit" for r in members) and (found := [r for r in members if r.metric("canary_auc")]):
        members, name, what = found, "canary_auc", "canaries in"
    return _found(members, name, what)


def _found(members: Sequence[Record], name: str, what: str) -> Check:
    """Return whether the strongest of the cells on `none` lies above chance by a metric."""
    strongest = best(members, name)
    metric = strongest.metric(name) if strongest is not None else None
    if strongest is None or metric is None or metric.low is None or metric.high is None:
        return Check("none", None, "No attack that could be judged by it ran on the undefended model.")
    ok = above_chance(strongest, name, len(members))
    told = f"ASR {metric.value:.1%} [{100 * metric.low:.1f}, {100 * metric.high:.1f}]"
    told = told if name.endswith("asr") else f"AUC {metric.value:.2f} [{metric.low:.2f}, {metric.high:.2f}]"
    verb = "finds" if ok else "is NOT shown to find"
    text = f"The best attack {verb} {what} the undefended model ({strongest.config.attack.id}: {told})."
    return Check("none", ok, text)


def _others(undefended: Sequence[Record]) -> Check:
    """Judge `none` by questions of other packages, where nothing else was asked: by the headline of any of them."""
    names = {r.cell_id: question_for(r).headline(r.config) for r in undefended}
    broken = [r for r in undefended if above_chance(r, names[r.cell_id], len(undefended))]
    verb = "finds" if broken else "is NOT shown to find"
    titles = ", ".join(sorted({question_for(r).title for r in broken or undefended}))
    return Check("none", bool(broken), f"The best attack {verb} what was asked of the undefended model ({titles}).")


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
    law = question_for(record).blind(record.victims, record.config) if record.victims else None
    return 1.0 if law is None else _binomial(*law)


@lru_cache(maxsize=4096)
def _binomial(share: float, n: int, chance: float) -> float:
    return float(stats.binom.sf(round(share * n) - 1, n, chance))
