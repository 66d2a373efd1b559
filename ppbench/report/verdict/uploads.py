"""Verdicts on what uploads give away of inputs: images, or rows of a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ppbench.federation.threats import recorded_threat
from ppbench.metrics.labels import multiset_chance
from ppbench.metrics.modality import modality_of
from ppbench.questions.image_metrics import gallery_size
from ppbench.records.figure import Figured, best
from ppbench.records.schema import Record, Utility
from ppbench.report.controls import above_chance, rebuilding, value
from ppbench.report.frame import Key
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import Leak, Side, leak_of
from ppbench.report.verdict.lines import (
    STAGE_WORDS,
    SettingRow,
    attack_at,
    decibels,
    figure,
    listed_values,
    probe_text,
    undefended_row,
    upload_rows,
    utility_text,
)
from ppbench.report.verdict.verdict import Fate, Verdict, fate_of, joint_fate, members_fate, unless_belied
from ppbench.report.worst import attack_of

# -- Verdicts on what uploads give away beside inputs: the labels of a batch, and its members --

BATCH_ASR = "batch_asr"


def batch_member_verdicts(
    mine: Sequence[SettingRow], rows: Sequence[SettingRow], stage: str, batch: int
) -> list[Verdict]:
    """Return whether uploads reveal who was in a batch, one verdict per group of control values with one fate."""
    attacked = [row for row in mine if (row.key.stage, row.key.batch) == (stage, batch) and row.top(BATCH_ASR)]
    none = None if mine and mine[0].key.defense == "none" else undefended_row(rows, stage, batch)
    undefended = None if none is None else none.top(BATCH_ASR)
    known = undefended if above_chance(undefended, BATCH_ASR) else None
    tried = sum(value(record, BATCH_ASR) is not None for row in attacked for record in row.records)
    groups: dict[Fate, list[SettingRow]] = {}
    for row in attacked:
        became = members_fate(row.top(BATCH_ASR), tried, known, BATCH_ASR)  # type: ignore[arg-type]  # `attacked` rows have one
        groups.setdefault(unless_belied(became, [f for r in row.records for f in r.flags]), []).append(row)
    beside = "" if undefended is None else f", undefended {figure(undefended, BATCH_ASR, '.0%')}"
    verdicts = []
    for became, some in groups.items():
        top = max(some, key=lambda row: value(row.top(BATCH_ASR), BATCH_ASR) or 0.0)
        labels = [row.control for row in some if row.control]
        where = f" at {listed_values(labels)}" if labels and len(groups) > 1 else ""
        head = f"who was in a batch of {batch}"
        does = {
            "falls": f"An upload{where} reveals {head}",
            "stands": f"An upload{where} does not reveal {head} to an unaware attack",
            "undecided": f"Whether an upload{where} reveals {head} is undecided",
        }[became]
        strongest = top.top(BATCH_ASR)
        at, asr = attack_at(attack_of(strongest), top.control), figure(strongest, BATCH_ASR, ".0%")
        text = f"{at}: ASR at most {asr}{beside}, chance 50%"
        keys = tuple(row.key for row in some)
        verdicts.append(Verdict(top.key.defense, "members", became, f"{does} ({text}).", keys, strongest, BATCH_ASR))
    return verdicts


def label_verdicts(rows: Sequence[SettingRow], stage: str) -> list[Verdict]:
    """Return how many labels were recovered: by batch size, and by control value at the smallest batch of a stage."""
    recovered = [(row, value(cell, "label_accuracy") or 0.0, cell) for row in rows if (cell := row.labels) is not None]
    if not recovered:
        return []
    top = best([cell for _, _, cell in recovered], "label_accuracy")
    classes, by_batch = recovered[0][2].config.model.classes, []
    for batch in sorted({row.key.batch for row, _, _ in recovered}):
        ends = [end(v for row, v, _ in recovered if row.key.batch == batch) for end in (min, max)]
        span = " to ".join(dict.fromkeys(f"{end:.0%}" for end in ends))
        by_batch.append(f"{span} at batch {batch} (chance {multiset_chance(classes, batch):.0%})")
    sentences = [f"Labels recovered by the strongest attack of each cell: {', '.join(by_batch)}."]
    smallest = min(row.key.batch for row, _, _ in recovered)
    shares: dict[str, list[str]] = {}
    for row, v, _ in recovered:
        if (row.key.stage, row.key.batch) == (stage, smallest) and row.control:
            shares.setdefault(f"{v:.0%}", []).append(row.control)
    if len(shares) > 1:
        text = ", ".join(f"{share} at {listed_values(labels)}" for share, labels in shares.items())
        sentences.append(f"Labels at batch {smallest}, {STAGE_WORDS[stage]}: {text}.")
    keys = tuple(row.key for row, _, _ in recovered)
    return [
        Verdict(rows[0].key.defense, "labels", None, sentence, keys, top, "label_accuracy") for sentence in sentences
    ]


Leaks = Mapping[Key, Leak]
"""The leak of inputs, by setting."""


def upload_verdicts(defense: str, records: Sequence[Record]) -> list[Verdict]:
    """Return the verdicts on uploads, by adversary.

    On inputs there is one per control value, at the smallest batch, at random weights if attacked there; values at
    which the server sees what it would see without the defense share one.
    """
    verdicts, known = list[Verdict](), Knowledge.of(records)
    everything = upload_rows(records)
    masked = any(r.config.stage == "iterate" and r.config.defense.id == defense for r in records)
    seen = sorted({row.key.threat for row in everything})
    usual = [recorded_threat(threat).lone_server for threat in seen] == [True]
    scenes = {(row.key.threat, row.key.probing) for row in everything}
    for threat, probing in sorted(scenes, key=lambda scene: (scene[0], scene[1].order)):
        rows = [row for row in everything if (row.key.threat, row.key.probing) == (threat, probing)]
        words = ["" if usual else threat, probe_text(rows[0], everything)]
        prefix = f"[{', '.join(word for word in words if word)}] " if any(words) else ""
        leaks = leaks_of(rows, known)
        for role in sorted({row.key.role for row in rows if row.key.defense == defense}):
            some = [row for row in rows if row.key.defense != defense or row.key.role == role]
            results = _seen(defense, some, leaks, masked and recorded_threat(threat).lone_server, role)
            verdicts += [verdict.worded(prefix + verdict.sentence) for verdict in results]
    return verdicts


def leaks_of(rows: Sequence[SettingRow], known: Knowledge) -> Leaks:
    """Return the leak of inputs in each row of one scene, beside the undefended row of the same stage and batch."""
    leaks: dict[Key, Leak] = {}
    for row in sorted(rows, key=lambda row: row.key.defense != "none"):
        none = undefended_row(rows, row.key.stage, row.key.batch)
        beside = None if none is None else leaks.get(none.key)
        if (leak := leak_of(row.records, vouched=known.vouches(row.records), none=beside)) is not None:
            leaks[row.key] = leak
    return leaks


def _seen(defense: str, rows: Sequence[SettingRow], leaks: Leaks, masked: bool, role: str) -> list[Verdict]:
    """Return one adversary's verdicts on victims in one role. masked: whether one may say "this is FedSGD"."""
    mine = [row for row in rows if row.key.defense == defense]
    stage = "init" if any(row.key.stage == "init" for row in mine) else "final"
    undefended = next((row.utility for row in rows if row.key.defense == "none"), None)
    undefended = None if defense == "none" else undefended
    smallest = min((row.key.batch for row in mine), default=1)
    first = _attacked(mine, leaks, stage, smallest)
    if first and not modality_of(first[0].records[0].config).decibels:
        errors = [_verdict([row], leaks, _row_error(row, leaks[row.key], undefended)) for row in first]
        return errors + label_verdicts(mine, stage)
    bare = [row for row in first if masked and _as_undefended(row, leaks)]
    verdicts = [_fedsgd(bare, leaks, undefended, everywhere=len(bare) == len(first))] if bare else []
    verdicts += [_verdict([row], leaks, _images(row, leaks[row.key], undefended)) for row in first if row not in bare]
    scenes = [(stage, batch) for batch in sorted({row.key.batch for row in mine} - {smallest})]
    scenes += [("final", smallest)] if stage == "init" else []
    more = [verdict for scene in scenes for verdict in _scene(_attacked(mine, leaks, *scene), leaks, stage)]
    more += [*label_verdicts(mine, stage), *batch_member_verdicts(mine, rows, stage, smallest)]
    if not role:
        return verdicts + more
    return verdicts + [v.worded(f"Of the {role}: {v.sentence[0].lower()}{v.sentence[1:]}") for v in more]


def _attacked(rows: Sequence[SettingRow], leaks: Leaks, stage: str, batch: int) -> list[SettingRow]:
    return [row for row in rows if (row.key.stage, row.key.batch) == (stage, batch) and row.key in leaks]


def _verdict(
    rows: Sequence[SettingRow], leaks: Leaks, sentence: str, of: SettingRow | None = None, plain: bool = False
) -> Verdict:
    """Return the verdict on inputs in the settings of `rows`; of: row of the figures; plain: of unaware attacks."""
    metric = rebuilding(rows[0].records[0])
    what = modality_of(rows[0].records[0].config).content
    leak = leaks[(of or rows[0]).key]
    strongest = leak.unaware.worst if plain else leak.worst
    became = joint_fate(fate_of(leaks[row.key].level) for row in rows)
    return Verdict(rows[0].key.defense, what, became, sentence, tuple(r.key for r in rows), strongest, metric, leak)


def _where(row: SettingRow) -> str:
    return f"batch {row.key.batch}, {STAGE_WORDS[row.key.stage]}"


def _row_error(row: SettingRow, leak: Leak, undefended: Utility | None) -> str:
    utility, worst = utility_text(row.utility, undefended), leak.worst
    modality = modality_of(row.records[0].config)
    if worst is None:
        return _unattacked(row, modality.inputs, utility)
    most = f"{modality.figure} {figure(worst, modality.headline, modality.form)} ({attack_of(worst)})"
    became = {
        "rebuilt": f"{modality.inputs} are rebuilt",
        "recognizable": f"{modality.inputs} are rebuilt in part",
        "blind": f"{modality.inputs} come out no better than blind",
        "undecided": f"what becomes of {modality.inputs} is undecided",
    }[leak.level]
    return f"{row.name}: {became}, {most}{_clauses(leak)}; {_where(row)}; {utility}."


def _unattacked(row: SettingRow, what: str, utility: str) -> str:
    return f"{row.name}: what becomes of {what} is undecided, no attack on it gave a figure; {_where(row)}; {utility}."


def _as_undefended(row: SettingRow, leaks: Leaks) -> bool:
    """Return whether an unaware attack rebuilds images from single gradients as well as without the defense."""
    mine, none = leaks[row.key], leaks[row.key].undefended
    if none is None or mine.unaware.level != "rebuilt" or none.unaware.level != "rebuilt":
        return False
    if mine.unaware.worst is None or none.worst is None or row.records[0].config.federation.upload != "gradient":
        return False
    ours, theirs = (case.metric("psnr_median") for case in (mine.unaware.worst, none.worst))
    if ours is None or theirs is None:
        return False
    if any(end is None for end in (ours.low, ours.high, theirs.low, theirs.high)):
        return ours.value == theirs.value
    return bool(ours.low <= theirs.high and theirs.low <= ours.high)  # type: ignore[operator]  # none is None


def _fedsgd(bare: Sequence[SettingRow], leaks: Leaks, undefended: Utility | None, *, everywhere: bool) -> Verdict:
    """Return the verdict on a masked defense whose server reads plain gradients at the control values `bare`."""
    least = min(bare, key=lambda row: (value(leaks[row.key].unaware.worst, "psnr_median") or 0.0, row.control))
    labels = [row.control for row in bare if row.control]
    where = (
        f" at {listed_values(labels)}" if labels and not everywhere else " over the whole grid" if len(bare) > 1 else ""
    )
    several, plain, none = len(bare) > 1, leaks[least.key].unaware.worst, leaks[least.key].undefended
    at, few = attack_at(attack_of(plain), least.control if several else ""), "at least " if several else ""
    sentence = (
        f"To the server this is FedSGD{where}: images are rebuilt as they are without a defense ({at}: {few}"
        f"{decibels(plain)}, undefended {decibels(None if none is None else none.worst)}); {_where(least)}; "
        f"{utility_text(least.utility, undefended)}."
    )
    return _verdict(bare, leaks, sentence, least, plain=True)


def _images(row: SettingRow, leak: Leak, undefended: Utility | None) -> str:
    """Return the sentence on images at one control value, for unaware and aware attackers."""
    utility = utility_text(row.utility, undefended)
    if leak.worst is None:
        return _unattacked(row, "images", utility)
    blind = "" if leak.blind is None else f", blind guess {leak.blind:.1f} dB"
    strong = f"{attack_of(leak.worst)}: {decibels(leak.worst)}{blind}"
    weak = "" if leak.unaware.worst is None else f"{attack_of(leak.unaware.worst)}: {decibels(leak.unaware.worst)}"
    if leak.plain == "rebuilt":
        beside = f"; an aware attacker: {strong}" if leak.worst.knows else blind
        words = f"images are rebuilt, even by an unaware attacker ({weak}{beside})"
    elif leak.level == "rebuilt":
        words = f"images are rebuilt by an aware attacker ({strong}){_to_the_unaware(leak, weak)}"
    elif leak.level == "recognizable":
        words = f"images are recognizable ({'; '.join([*_clear_readings(leak.everybody), strong])})"
    elif leak.level == "blind":
        words = f"the attacks tried here see no more of images than a blind guess (best: {strong}; {_unseen(leak)})"
    else:
        words = f"what becomes of images is undecided (best: {strong})"
    return f"{row.name}: {words}{_clauses(leak)}; {_where(row)}; {utility}."


def _to_the_unaware(leak: Leak, weak: str) -> str:
    if not weak:
        return ""
    sees = {
        "recognizable": "can recognize them",
        "blind": "sees no more than a blind guess",
        "undecided": "gets less",
    }[leak.plain]
    return f"; an unaware attacker {sees} ({'; '.join([weak, *_clear_readings(leak.unaware)])})"


def _clear_readings(side: Side) -> list[str]:
    """Return the readings well above chance, as ["95% [76, 100] found among 360 others, chance 0.3%", ...]."""
    return [_reading_words(name, figure(top, name, ".0%"), top) for name, top in side.clear]


def _unseen(leak: Leak) -> str:
    """Return the readings of the worst case, metric by metric."""
    worst, names = leak.worst, [name for name, _ in leak.everybody.readers]
    return ", ".join(_reading_words(name, figure(worst, name, ".0%"), worst) for name in names)


def _reading_words(name: str, share: str, record: Figured | None) -> str:
    metric = None if record is None else record.metric(name)
    chance = "" if metric is None or metric.chance is None else f", chance {metric.chance:.1%}".replace(".0%", "%")
    gallery = 0 if record is None else gallery_size(record.victims)
    by_what = " by features" if name.endswith("_features") else ""
    parts = "" if record is None else modality_of(record.config).parts
    if name.startswith("reidentified"):
        return f"{share} found among {gallery} others{by_what}{chance}"
    return f"{share} of {parts} read{by_what}{chance}"


def _clauses(leak: Leak) -> str:
    return "".join(f"; {qualifier.words}" for qualifier in leak.qualifiers)


def _scene(rows: Sequence[SettingRow], leaks: Leaks, first: str) -> Iterable[Verdict]:
    """Yield the verdict on images in larger batches, or after training, over the grid; first: first reported stage."""
    if all(leaks[row.key].worst is None for row in rows):
        return
    falling = [row for row in rows if leaks[row.key].falls] or list(rows)
    top = max(falling, key=lambda row: value(leaks[row.key].worst, "psnr_median") or 0.0)
    leak, levels = leaks[top.key], {leaks[row.key].level for row in rows}
    where = f"In batches of {top.key.batch}" if top.key.stage == first else "After training"
    whole = "" if len(rows) == 1 else " over the whole grid"
    does = {
        "rebuilt": f"images are rebuilt{whole}",
        "recognizable": f"images are recognizable{whole}",
        "blind": "the attacks tried here see no more of images than a blind guess",
        "undecided": "what becomes of images is undecided",
    }[leak.level]
    if len(levels) > 1:
        does = f"images are {leak.level} at {top.control}" if leak.falls and top.control else "images fare unlike"
    none = "" if leak.undefended is None else f"; undefended {decibels(leak.undefended.worst)}"
    blind = "" if leak.blind is None else f", blind guess {leak.blind:.1f} dB"
    at = attack_at(attack_of(leak.worst), top.control)
    sentence = f"{where}, {does}: at most {decibels(leak.worst)} ({at}{blind}{none}){_clauses(leak)}."
    yield _verdict(rows, leaks, sentence, top)
