"""The controls: attacks must break `none` and find nothing in `full_noise`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from scipy import special

from ppbench.base.errors import Exit
from ppbench.metrics.intervals import CONFIDENCE, proportion
from ppbench.metrics.modality import modality_of
from ppbench.metrics.spec import MetricSpec
from ppbench.questions.base import question_for, question_of
from ppbench.questions.recognition import RECOGNITION_METRICS, REIDENTIFIED, is_reidentified
from ppbench.records.figure import Figured, best, grouped, record_metric
from ppbench.records.run_files import Soundness
from ppbench.records.schema import Metric, ProbeInfo, Record

CONTROLS = ("none", "full_noise")
UNREAD = "can be read"
"""Ending of the reason of a cell whose attack had nothing to read."""
UNREPEATED = "not_replayable"
"""Flag of a defense whose server's code cannot be run again on what it received."""
UNREPLAYED = "cannot be replayed"
"""The same in words: the beginning of the flag's clause, and a badge."""
BELIED = ("own_account", "own_weights", "probe_noticed", "audit_noticed", "channel", UNREPEATED)
"""Flags of a defense whose parties contradict its own account of its uploads, or whose account cannot be checked."""
LAW_EXPLAINS = "law_explains"
"""Flag of a setting in which the defense's public law of noise accounts for its uploads."""
BROKEN_SHARE = 0.5  # share of undefended victims that the best attack must rebuild or re-identify
CLEAR_MARGIN = 0.10  # a share counts as beyond chance where its interval begins this much above it
ALARM = 0.01  # probability of a false alarm over all cells of `full_noise` together


def nothing_to_read(record: Record) -> bool:
    """Return whether a cell has no figure because its attack had nothing to read; others of its row may have one."""
    return record.status == "failed" and (record.reason or "").endswith(UNREAD)


@dataclass(frozen=True)
class Check:
    """One control's outcome. ok: None where it was not run.

    control: "board": whether the attacks break the undefended model on one board, which says nothing about other
    boards; "learning": whether the undefended model learned enough to judge usability. others: the same control of the
    other adversaries and probes; this is the weakest.
    """

    control: Literal["none", "full_noise", "harness", "board", "learning"]
    ok: bool | None
    sentence: str
    others: tuple[Check, ...] = ()


def check_harness(outcome: Soundness | None) -> Check:
    """Return the check by the self-test of the harness that computed a folder's cells; outcome: None where unknown."""
    if outcome is None:
        sentence = (
            "Not known: these records lack the outcome of the harness's self-test, as those of an older ppbench do."
        )
        return Check("harness", None, sentence)
    standing = [str(trial) for trial in outcome.trials if not trial.fell]
    if not standing:
        return Check("harness", True, "Both networks of the self-test fall, so the harness works.")
    return Check("harness", False, f"HARNESS FAULT: {'; '.join(standing)}. Nothing can be concluded.")


def probe_words(probing: ProbeInfo) -> str:
    """Return a probe in words: "probe gradient", "probe local, 2 rounds"."""
    return f"probe {probing.probe}" + (f", {probing.probe_rounds} rounds" if probing.probe_rounds > 1 else "")


def value(record: Figured | None, name: str) -> float | None:
    """Return the value of a record's metric, or None."""
    metric = record.metric(name) if record is not None else None
    return metric.value if metric is not None else None


def widened(metric: Metric | None, cells: int) -> tuple[float, float] | None:
    """Return the interval at Bonferroni's level for the largest of `cells` figures, stretched as a normal law's."""
    if metric is None or metric.value is None or metric.low is None or metric.high is None:
        return None
    tail = (1 - CONFIDENCE) / 2
    stretch = float(special.ndtri(tail / max(1, cells)) / special.ndtri(tail))
    return metric.value - (metric.value - metric.low) * stretch, metric.value + (metric.high - metric.value) * stretch


def above_chance(record: Figured | None, name: str, cells: int = 1) -> bool:
    """Return whether a metric lies above its chance level, as the largest of `cells` figures."""
    return exceeds_chance(record.metric(name) if record is not None else None, cells)


def exceeds_chance(metric: Metric | None, figures: int = 1) -> bool:
    """Return whether a figure lies above its chance level, as the largest of so many `figures`."""
    ends = widened(metric, figures)
    return metric is not None and ends is not None and metric.chance is not None and ends[0] > metric.chance


def rebuilding(record: Figured) -> str:
    """Return the name of the headline metric of reconstructions of a cell's data."""
    return question_of("reconstruction").headline(record.config)


def rebuilt_share(record: Figured) -> Metric | None:
    """Return the share of a reconstruction's victims that are rebuilt, with its interval; None without victims."""
    return _share(record, "share_rebuilt", modality_of(record.config).rebuilt)


def taken_share(record: Figured) -> float:
    """Return the share of a reconstruction's victims that are rebuilt, or that are rebuilt or re-identified if larger.

    The latter counts only where it begins `CLEAR_MARGIN` above chance: in a small gallery everything is found.
    """
    share = value_of(rebuilt_share(record))
    rebuilt = modality_of(record.config).rebuilt
    taken = _share(record, "share_taken", lambda victim: rebuilt(victim) or is_reidentified(victim))
    finds = [
        figure
        for name in RECOGNITION_METRICS
        if name.startswith(REIDENTIFIED) and (figure := record.metric(name)) is not None
    ]
    chance = sum(1.0 if figure.chance is None else figure.chance for figure in finds)
    clear = finds and taken is not None and (taken.low or 0.0) - chance > CLEAR_MARGIN
    return max(share, value_of(taken)) if clear else share


def value_of(share: Metric | None) -> float:
    """Return the value of a share, 0 without one."""
    return 0.0 if share is None else share.value or 0.0


def _share(record: Figured, name: str, taken: Callable[[Any], bool]) -> Metric | None:
    units = grouped(record.victims if question_for(record).inputs else (), lambda victim: victim.unit)
    if not units:
        return None
    shares = proportion([np.array([taken(victim) for victim in unit]) for unit in units.values()])
    return record_metric(MetricSpec(name, name), shares)


def check_controls(records: Sequence[Record], whole: Sequence[Record] | None = None) -> list[Check]:
    """Return the checks of `none` and `full_noise` on `records` (one data set, model and threat model).

    `none` must fall at the smallest batch at initialization: half of the victims rebuilt or re-identified, or half of
    the labels recovered where only these were attacked, or members found above chance where only these were. Each
    adversary and probe is judged by itself. Cells of `full_noise` above chance, at 0.01 over all of them, are an alarm.
    Extraction is no control: the undefended model is public.

    whole: what `records` are a part of (`Frame.whole`), if of more evaluations: then all means all of these, and `none`
        need not fall where no defense stands beside it, but one does elsewhere: what leaks of other networks and
        adapters is a result.
    """
    whole = records if whole is None else whole
    noise, among = _noise_cells(records), len(_noise_cells(whole))
    attacked = [r for r in records if question_for(r).chapter == "uploads" and question_for(r).reads]
    attacked = attacked or [r for r in records if question_for(r).chapter == "models" and question_for(r).noise]
    attacked = attacked or [r for r in records if not question_for(r).chapter]
    # By adversary: another one's success proves nothing here.
    scenes = grouped(attacked, lambda record: (record.config.threat_model.id, record.config.probing))
    probed = len({probing for _, probing in scenes}) > 1
    checks = []
    for (threat, probing), some in sorted(scenes.items(), key=lambda pair: (pair[0][0], pair[0][1].order)):
        head = f"[{threat}, {probe_words(probing)}] " if probed else f"[{threat}] "
        check = _undefended_check(some)
        checks.append(replace(check, sentence=head + check.sentence) if len(scenes) > 1 else check)
    weakest = next((check for check in checks if check.ok is not True), checks[0] if checks else _undefended_check([]))
    others = tuple(check for check in checks if check is not weakest)
    if weakest.ok is False and not _compared(records) and _compared(whole):
        weakest = replace(weakest, ok=True, sentence=f"Nothing is compared with it here: {weakest.sentence}")
    return [replace(weakest, others=others), _noise_check(noise, among)]


def _compared(records: Iterable[Record]) -> bool:
    return any(record.config.defense.id not in CONTROLS for record in records)


def _noise_cells(records: Iterable[Record]) -> list[Record]:
    """Return the complete cells of `full_noise` that must find nothing."""
    noise = (r for r in records if r.config.defense.id == "full_noise" and r.status == "complete")
    return [r for r in noise if question_for(r).noise]


Item = TypeVar("Item")


def easiest(items: Iterable[Item], scene: Callable[[Item], tuple[str, int]]) -> list[Item]:
    """Return the items in the scene where attacks have it easiest, which is judged first.

    That is before training if some are there, and of these at the smallest batch. scene: returns stage and batch.
    """
    every = list(items)
    every = [one for one in every if scene(one)[0] == "init"] or every
    smallest = min((scene(one)[1] for one in every), default=0)
    return [one for one in every if scene(one)[1] == smallest]


def _undefended_check(records: Sequence[Record]) -> Check:
    undefended = [r for r in records if r.config.defense.id == "none"]
    read = [
        r
        for r in easiest(undefended, lambda r: (r.config.stage, r.config.batch_size))
        if question_for(r).chapter == "uploads" and r.metric("batch_asr") is None
    ]
    images = [r for r in read if question_for(r).inputs]
    if not read:
        return _members_check(undefended)
    if images:
        modality = modality_of(images[0].config)
        what = modality.broken
        share, attack = _most(images, lambda r: value_of(rebuilt_share(r)))
        if share < BROKEN_SHARE and modality.perceptual:
            what = f"{modality.noun} are rebuilt or re-identified"
            share, attack = _most(images, taken_share)
    else:
        what, strongest = "labels are recovered", best(read, "label_accuracy")
        share = value(strongest, "label_accuracy") or 0.0
        attack = strongest.config.attack.id if strongest is not None else "no attack"
    ok = share >= BROKEN_SHARE
    verb = "breaks" if ok else "does NOT break"
    return Check("none", ok, f"The best attack ({attack}) {verb} the undefended model: {share:.0%} of {what}.")


def _most(images: Sequence[Record], share: Callable[[Figured], float]) -> tuple[float, str]:
    """Return the largest share of victims over attacks, and its attack (of equals the first by name)."""
    shares = [(share(r), r.config.attack.id) for r in images]
    return max(sorted(shares, key=lambda pair: pair[1]), key=lambda pair: pair[0])


def _members_check(undefended: Sequence[Record]) -> Check:
    """Check `none` by its members where nothing else was attacked: on the trained model, in audits by canaries."""
    if easy := [r for r in undefended if r.metric("batch_asr") is not None]:
        return _membership_check(easy, "batch_asr", "members of batches of")
    members = [r for r in undefended if r.metric("asr") is not None]
    members = [r for r in members if r.config.stage == "final"] or members
    if not members and (others := [r for r in undefended if not question_for(r).chapter and question_for(r).specs]):
        return _other_questions_check(others)
    name, what = "asr", "members of"
    if all(r.config.stage == "audit" for r in members) and (audited := [r for r in members if r.metric("canary_auc")]):
        members, name, what = audited, "canary_auc", "canaries in"
    return _membership_check(members, name, what)


def _membership_check(members: Sequence[Record], name: str, what: str) -> Check:
    """Check whether the strongest of the cells on `none` lies above chance by a metric."""
    strongest = best(members, name)
    metric = strongest.metric(name) if strongest is not None else None
    if strongest is None or metric is None or metric.low is None or metric.high is None:
        return Check("none", None, "No attack that this control needs ran on the undefended model.")
    ok = above_chance(strongest, name, len(members))
    figures = f"ASR {metric.value:.1%} [{100 * metric.low:.1f}, {100 * metric.high:.1f}]"
    figures = figures if name.endswith("asr") else f"AUC {metric.value:.2f} [{metric.low:.2f}, {metric.high:.2f}]"
    verb = "finds" if ok else "is NOT shown to find"
    text = f"The best attack {verb} {what} the undefended model ({strongest.config.attack.id}: {figures})."
    return Check("none", ok, text)


def _other_questions_check(undefended: Sequence[Record]) -> Check:
    """Check `none` by the headlines of other packages' questions, where there are only these."""
    names = {r.cell_id: question_for(r).headline(r.config) for r in undefended}
    broken = [r for r in undefended if above_chance(r, names[r.cell_id], len(undefended))]
    verb = "finds" if broken else "is NOT shown to find"
    titles = ", ".join(sorted({question_for(r).title for r in broken or undefended}))
    return Check(
        "none", bool(broken), f"The best attack {verb} what its question seeks in the undefended model ({titles})."
    )


def _noise_check(records: Sequence[Record], among: int) -> Check:
    if not records:
        return Check("full_noise", None, "No attack ran on uploads of pure noise.")
    level = ALARM / among
    alarms = [r for r in records if _chance_probability(r) < level]
    if not alarms:
        return Check("full_noise", True, f"No attack finds anything in uploads of pure noise ({len(records)} cells).")
    names = ", ".join(sorted({f"{r.config.attack.id} at batch {r.config.batch_size}" for r in alarms}))
    return Check("full_noise", False, f"Attacks find something in uploads of pure noise: {names}.")


def _chance_probability(record: Record) -> float:
    """Return the p-value of a cell's score under chance (one-sided binomial over independent units)."""
    law = question_for(record).blind(record.victims, record.config) if record.victims else None
    return 1.0 if law is None else _binomial(*law)


def _binomial(share: float, n: int, chance: float) -> float:
    """Return the probability of at least share * n successes of n."""
    hits = round(share * n)
    return float(special.betainc(hits, n - hits + 1, chance)) if hits > 0 else 1.0


# -- Whether all requested cells are there: the exit code of evaluations and sweeps --


def defenses_without_result(records: Sequence[Record]) -> list[str]:
    """Return the defenses, without controls, of which no cell is complete.

    A defense that sends no byte has a result: nothing can be read.
    """
    defenses = dict.fromkeys(r.config.defense.id for r in records if r.config.defense.id not in CONTROLS)
    known = {
        r.config.defense.id
        for r in records
        if r.status == "complete" or (nothing_to_read(r) and r.cost.bytes_up + r.cost.bytes_setup == 0)
    }
    return [name for name in defenses if name not in known]


def failures(records: Sequence[Record]) -> list[Record]:
    """Return the failed cells, without those whose view has nothing to read, which is a result."""
    return [record for record in records if record.status == "failed" and not nothing_to_read(record)]


def statuses_of(records: Sequence[Record]) -> dict[str, int]:
    """Return the number of cells by status; those whose attack has nothing to read are "not applicable"."""
    words = ["not applicable" if nothing_to_read(record) else record.status for record in records]
    return {word: words.count(word) for word in ("complete", "diverged", "failed", "not applicable")}


def exit_of(records: Sequence[Record], reliable: bool) -> Exit:
    """Return the exit code for the requested cells; reliable: whether the controls ran and hold, which counts first."""
    if not reliable:
        return Exit.CONTROLS
    complete = any(record.status == "complete" for record in records)
    return Exit.OK if complete and not failures(records) and not defenses_without_result(records) else Exit.FOUND
