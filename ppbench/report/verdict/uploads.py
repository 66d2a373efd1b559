"""Sentences on what uploads give away of inputs, images or rows of a table, of labels, and of who was in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ppbench.federation.threats import recorded_threat
from ppbench.metrics.labels import multiset_chance
from ppbench.metrics.modality import modality_of
from ppbench.questions.image_metrics import IN_ANY_ORDER
from ppbench.questions.membership import BATCH_ASR
from ppbench.questions.recognition import gallery_size
from ppbench.records.figure import Figured, best, grouped
from ppbench.records.schema import ProbeInfo, Record, Utility
from ppbench.report.controls import easiest, rebuilding, value
from ppbench.report.findings import Finding, Verdict, fate_of, joint_fate
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import Leak, Side, leaks_of
from ppbench.report.rows import SettingRow, judged_leaks, probe_text, upload_rows
from ppbench.report.words import STAGES, attack_at, decibels, figure_text, listed_values, utility_text
from ppbench.report.worst import attack_of

# -- Sentences on what uploads give away beside inputs: the labels of a batch, and its members --


def batch_member_verdicts(findings: Sequence[Finding]) -> list[Verdict]:
    """Return whether uploads reveal who was in a batch, one verdict per batch size, and group of one outcome."""
    groups = grouped(findings, lambda one: (one.row.key.batch, one.row.key.stage, one.fate))
    verdicts = []
    for (batch, stage, became), some in groups.items():
        top = max(some, key=lambda one: value(one.top, BATCH_ASR.name) or 0.0)
        labels = [one.row.control for one in some if one.row.control]
        where = f" at {listed_values(labels)}" if labels and len(groups) > 1 else ""
        head = f"who was in a batch of {batch}{'' if stage == 'init' else f' {STAGES[stage].when}'}"
        does = {
            "falls": f"An upload{where} reveals {head}",
            "stands": f"An upload{where} does not reveal {head} to an unaware attack",
            "undecided": f"Whether an upload{where} reveals {head} is undecided",
        }[became]
        none = top.undefended.figure
        beside = "" if none is None else f", undefended {figure_text(none, BATCH_ASR.name, '.0%')}"
        at, asr = attack_at(attack_of(top.top), top.row.control), figure_text(top.top, BATCH_ASR.name, ".0%")
        sentence = f"{does} ({at}: ASR at most {asr}{beside}, chance 50%)."
        keys = tuple(one.row.key for one in some)
        verdicts.append(Verdict(top.row.key.defense, "members", became, sentence, keys, top.top, BATCH_ASR.name))
    return verdicts


def label_verdicts(rows: Sequence[SettingRow]) -> list[Verdict]:
    """Return how many labels were recovered: by batch size, and by control value in the easiest scene."""
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
    shares: dict[str, list[str]] = {}
    easy = easiest(recovered, lambda one: (one[0].key.stage, one[0].key.batch))
    for row, v, _ in easy:
        if row.control:
            shares.setdefault(f"{v:.0%}", []).append(row.control)
    if len(shares) > 1:
        text = ", ".join(f"{share} at {listed_values(labels)}" for share, labels in shares.items())
        sentences.append(f"Labels at {_where(easy[0][0])}: {text}.")
    keys = tuple(row.key for row, _, _ in recovered)
    return [
        Verdict(rows[0].key.defense, "labels", None, sentence, keys, top, "label_accuracy") for sentence in sentences
    ]


def upload_verdicts(
    defense: str, records: Sequence[Record], known: Knowledge, findings: Sequence[Finding]
) -> list[Verdict]:
    """Return the verdicts on uploads, by adversary.

    On inputs there is one per control value, in the setting's judged scene; values at which the server sees what it
    would see without the defense share one. known: which attacks know a defense; findings: those of `defense`.
    """
    verdicts = list[Verdict]()
    everything = upload_rows(records, leaks_of(records, known))
    masked = any(r.config.stage == "iterate" and r.config.defense.id == defense for r in records)
    seen = sorted({row.key.threat for row in everything})
    usual = [recorded_threat(threat).lone_server for threat in seen] == [True]
    scenes = {_view(row) for row in everything}
    undefended = next((row.utility for row in everything if row.key.defense == "none" != defense), None)
    for scene in sorted(scenes, key=lambda one: (one[0], one[1].order)):
        threat = scene[0]
        mine = [row for row in everything if row.key.defense == defense and _view(row) == scene]
        words = ["" if usual else threat, probe_text(next(r for r in everything if _view(r) == scene), everything)]
        prefix = f"[{', '.join(word for word in words if word)}] " if any(words) else ""
        for role in sorted({row.key.role for row in mine}):
            some = [row for row in mine if row.key.role == role]
            members = [f for f in findings if f.subject == "batch members" and f.row.key in {r.key for r in some}]
            results = _seen(some, members, undefended, masked and recorded_threat(threat).lone_server)
            verdicts += [verdict.worded(prefix + verdict.sentence) for verdict in results]
    return verdicts


def _view(row: SettingRow) -> tuple[str, ProbeInfo]:
    return row.key.threat, row.key.probing


def _seen(
    mine: Sequence[SettingRow], members: Sequence[Finding], undefended: Utility | None, masked: bool
) -> list[Verdict]:
    """Return one adversary's verdicts on victims in one role. masked: whether one may say "this is FedSGD"."""
    attacked = [row for row in mine if row.leak is not None]
    judged = judged_leaks({row.key: _leak(row) for row in attacked})
    first = [row for row in attacked if row.key in judged]
    if first and not modality_of(first[0].records[0].config).decibels:
        errors = [_verdict([row], _row_error(row, _leak(row), undefended)) for row in first]
        return [*errors, *label_verdicts(mine), *batch_member_verdicts(members)]
    bare = [row for row in first if masked and _as_undefended(row)]
    verdicts = [_fedsgd(bare, undefended, everywhere=len(bare) == len(first))] if bare else []
    verdicts += [_verdict([row], _images(row, _leak(row), undefended)) for row in first if row not in bare]
    more = [verdict for where, some in _other_scenes(attacked, first) for verdict in _scene(some, where)]
    more += [*label_verdicts(mine), *batch_member_verdicts(members)]
    role = mine[0].key.role
    if not role:
        return verdicts + more
    return verdicts + [v.worded(f"Of the {role}: {v.sentence[0].lower()}{v.sentence[1:]}") for v in more]


def _other_scenes(attacked: Sequence[SettingRow], first: Sequence[SettingRow]) -> list[tuple[str, list[SettingRow]]]:
    """Return the rows before training where leaks are judged after it, those in other batches, and those after training
    at the smallest batch, with words.
    """
    stage = "init" if any(row.key.stage == "init" for row in first) else "final"
    smallest = min((row.key.batch for row in first), default=1)
    batches = sorted({row.key.batch for row in attacked} - {smallest})
    scenes = [("init", smallest, "Before training")]
    scenes += [(stage, batch, f"In batches of {batch}") for batch in batches]
    scenes += [("final", smallest, "After training")] if stage == "init" else []
    rest = [row for row in attacked if row not in first]
    rows = [(w, [row for row in rest if (row.key.stage, row.key.batch) == (s, b)]) for s, b, w in scenes]
    return [(where, some) for where, some in rows if some]


def _leak(row: SettingRow) -> Leak:
    """Return the leak of inputs in a row where inputs were attacked."""
    assert row.leak is not None
    return row.leak


def _verdict(rows: Sequence[SettingRow], sentence: str, of: SettingRow | None = None, plain: bool = False) -> Verdict:
    """Return the verdict on inputs in the settings of `rows`; of: row of the figures; plain: of unaware attacks."""
    metric = rebuilding(rows[0].records[0])
    what = modality_of(rows[0].records[0].config).content
    leak = _leak(of or rows[0])
    strongest = leak.unaware.worst if plain else leak.worst
    became = joint_fate(fate_of(_leak(row).level) for row in rows)
    return Verdict(rows[0].key.defense, what, became, sentence, tuple(r.key for r in rows), strongest, metric, leak)


def _where(row: SettingRow) -> str:
    return f"batch {row.key.batch}, {STAGES[row.key.stage].when}"


def _row_error(row: SettingRow, leak: Leak, undefended: Utility | None) -> str:
    utility, worst = utility_text(row.utility, undefended), leak.worst
    modality = modality_of(row.records[0].config)
    if worst is None:
        return _unattacked(row, modality.inputs, utility)
    most = f"{modality.figure} {figure_text(worst, modality.headline, modality.form)} ({attack_of(worst)})"
    became = {
        "rebuilt": f"{modality.inputs} are rebuilt",
        "recognizable": f"{modality.inputs} are rebuilt in part",
        "blind": f"{modality.inputs} come out no better than blind",
        "undecided": f"whether {modality.inputs} leak is undecided",
    }[leak.level]
    return f"{row.name}: {became}, {most}{_clauses(leak)}; {_where(row)}; {utility}."


def _unattacked(row: SettingRow, what: str, utility: str) -> str:
    return f"{row.name}: whether {what} leak is undecided, because no attack gave a figure; {_where(row)}; {utility}."


def _as_undefended(row: SettingRow) -> bool:
    """Return whether an unaware attack rebuilds images from single gradients as well as without the defense."""
    mine, none = _leak(row), _leak(row).undefended
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


def _fedsgd(bare: Sequence[SettingRow], undefended: Utility | None, *, everywhere: bool) -> Verdict:
    """Return the verdict on a masked defense whose server reads plain gradients at the control values `bare`."""
    least = min(bare, key=lambda row: (value(_leak(row).unaware.worst, "psnr_median") or 0.0, row.control))
    labels = [row.control for row in bare if row.control]
    where = (
        f" at {listed_values(labels)}" if labels and not everywhere else " over the whole grid" if len(bare) > 1 else ""
    )
    several, plain, none = len(bare) > 1, _leak(least).unaware.worst, _leak(least).undefended
    at, few = attack_at(attack_of(plain), least.control if several else ""), "at least " if several else ""
    sentence = (
        f"To the server this is FedSGD{where}: images are rebuilt as they are without a defense ({at}: {few}"
        f"{decibels(plain)}, undefended {decibels(None if none is None else none.worst)}); {_where(least)}; "
        f"{utility_text(least.utility, undefended)}."
    )
    return _verdict(bare, sentence, least, plain=True)


def _images(row: SettingRow, leak: Leak, undefended: Utility | None) -> str:
    """Return the sentence on images at one control value, for unaware and aware attackers."""
    utility = utility_text(row.utility, undefended)
    if leak.worst is None:
        return _unattacked(row, "images", utility)
    blind = "" if leak.blind is None else f", blind guess {leak.blind:.1f} dB"
    strong = f"{attack_of(leak.worst)}: {decibels(leak.worst)}{blind}"
    weak = "" if leak.unaware.worst is None else f"{attack_of(leak.unaware.worst)}: {decibels(leak.unaware.worst)}"
    if leak.plain == "rebuilt":
        beside = f"; an aware attacker: {strong}" if leak.aware else blind
        words = f"images are rebuilt, even by an unaware attacker ({weak}{beside})"
    elif leak.level == "rebuilt":
        words = f"images are rebuilt by an aware attacker ({strong}){_to_the_unaware(leak, weak)}"
    elif leak.level == "recognizable":
        words = f"images are recognizable ({'; '.join([*_clear_readings(leak.everybody), strong])})"
    elif leak.level == "blind":
        words = f"the attacks tried here see no more of images than a blind guess (best: {strong}; {_unseen(leak)})"
    else:
        words = f"whether images leak is undecided (best: {strong})"
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
    return [_reading_words(name, figure_text(top, name, ".0%"), top) for name, top in side.clear]


def _unseen(leak: Leak) -> str:
    """Return the readings of the worst case, metric by metric."""
    worst, names = leak.worst, [name for name, _ in leak.everybody.readers]
    return ", ".join(_reading_words(name, figure_text(worst, name, ".0%"), worst) for name in names)


def _reading_words(name: str, share: str, record: Figured | None) -> str:
    metric = None if record is None else record.metric(name)
    chance = "" if metric is None or metric.chance is None else f", chance {metric.chance:.1%}".replace(".0%", "%")
    gallery = 0 if record is None else gallery_size(record.victims)
    by_what = " by features" if name.endswith("_features") else ""
    parts = "" if record is None else modality_of(record.config).parts
    if name.startswith("reidentified"):
        return f"{share} found among {gallery} others{by_what}{chance}"
    return f"{share} of {parts} read{' in any order' if name == IN_ANY_ORDER else by_what}{chance}"


def _clauses(leak: Leak) -> str:
    return "".join(f"; {qualifier.words}" for qualifier in leak.qualifiers)


def _scene(rows: Sequence[SettingRow], where: str) -> Iterable[Verdict]:
    """Yield the verdict on images over the grid in another scene than the first; where: the scene in words."""
    if all(_leak(row).worst is None for row in rows):
        return
    falling = [row for row in rows if _leak(row).falls] or list(rows)
    top = max(falling, key=lambda row: value(_leak(row).worst, "psnr_median") or 0.0)
    leak, levels = _leak(top), {_leak(row).level for row in rows}
    whole = "" if len(rows) == 1 else " over the whole grid"
    does = {
        "rebuilt": f"images are rebuilt{whole}",
        "recognizable": f"images are recognizable{whole}",
        "blind": "the attacks tried here see no more of images than a blind guess",
        "undecided": "whether images leak is undecided",
    }[leak.level]
    if len(levels) > 1:
        does = f"images are {leak.level} at {top.control}" if leak.falls and top.control else "images fare unlike"
    none = "" if leak.undefended is None else f"; undefended {decibels(leak.undefended.worst)}"
    blind = "" if leak.blind is None else f", blind guess {leak.blind:.1f} dB"
    at = attack_at(attack_of(leak.worst), top.control)
    sentence = f"{where}, {does}: at most {decibels(leak.worst)} ({at}{blind}{none}){_clauses(leak)}."
    yield _verdict(rows, sentence, top)
