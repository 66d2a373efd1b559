"""What uploads give away, in sentences: pixels, table rows, labels."""

from __future__ import annotations

from collections.abc import Container, Sequence

from ppbench.metrics.labels import multiset_chance
from ppbench.records.figure import best
from ppbench.records.schema import Record, Utility
from ppbench.report.controls import BELIED, above_chance, is_image, rebuilding, value
from ppbench.report.frame import Key
from ppbench.report.knowing import Knowledge
from ppbench.report.verdict.lines import STAGES, Row, by, decibels, figure, lines, listed, probed, utility_text
from ppbench.report.verdict.verdict import (
    HIDDEN,
    Fate,
    Verdict,
    fate,
    members_fate,
    rebuilt_fate,
    together,
    unless_belied,
)
from ppbench.report.worst import WorstCase, attack_of


def what_uploads_tell(defense: str, records: Sequence[Record]) -> list[Verdict]:
    """Return the sentences on what each adversary rebuilds from uploads.

    Of pixels one a control value, at the smallest batch, at random weights where attacked there; values at which the
    server sees what it would see without the defense share one.
    """
    said, known = list[Verdict](), Knowledge.of(records)
    everything = lines(records)
    masked = any(r.config.stage == "iterate" and r.config.defense.id == defense for r in records)
    seen = sorted({row.key.threat for row in everything})
    scenes = sorted({(row.key.threat, row.key.probe, row.key.probe_rounds) for row in everything})
    for scene in scenes:
        threat = scene[0]
        rows = [row for row in everything if (row.key.threat, row.key.probe, row.key.probe_rounds) == scene]
        words = [threat if seen != ["server/1"] else "", probed(rows[0], everything)]
        prefix = f"[{', '.join(word for word in words if word)}] " if any(words) else ""
        for role in sorted({row.key.role for row in rows if row.key.defense == defense}):
            some = [row for row in rows if row.key.defense != defense or row.key.role == role]
            found = _seen(defense, some, masked and threat == "server/1", role)
            informed = {row.key for row in some if known.vouches(row.of("reconstruction") or row.records)}
            said += [verdict.worded(prefix + _qualified(verdict, informed)) for verdict in found]
    return said


def _qualified(verdict: Verdict, informed: Container[Key]) -> str:
    """Return a verdict's sentence; that something is hidden says so where nobody who knows of the defense tried."""
    if verdict.fate != "hidden" or all(key in informed for key in verdict.settings):
        return verdict.sentence
    return f"{verdict.sentence[:-1]}; no attack here is shown to know of it."


def _seen(defense: str, rows: Sequence[Row], masked: bool, role: str) -> list[Verdict]:
    """Return what one adversary rebuilds of victims in one role. masked: whether it may be told "this is FedSGD"."""
    mine = [row for row in rows if row.key.defense == defense]
    stage = "init" if any(row.key.stage == "init" for row in mine) else "final"
    undefended = next((row.utility for row in rows if row.key.defense == "none"), None)
    undefended = None if defense == "none" else undefended
    smallest = min((row.key.batch for row in mine), default=1)
    first = _attacked(mine, stage, smallest)
    if first and not is_image(first[0].records[0]):
        errors = [_verdict([row], rebuilt_fate(row.rebuilt.worst), _row_error(row, undefended)) for row in first]
        return errors + _labels(mine, stage)
    bare = [row for row in first if masked and _as_undefended(row, rows)]
    said = [_fedsgd(bare, rows, undefended, everywhere=len(bare) == len(first))] if bare else []
    said += [_verdict([row], _fate(row), _pixels(row, undefended)) for row in first if row not in bare]
    more = _larger_batches(mine, stage, smallest)
    if stage == "init":
        more += _after_training(mine, rows, smallest)
    more += [*_labels(mine, stage), *_batch_members(mine, rows, stage, smallest)]
    if not role:
        return said + more
    return said + [v.worded(f"Of the {role}: {v.sentence[0].lower()}{v.sentence[1:]}") for v in more]


def _attacked(rows: Sequence[Row], stage: str, batch: int) -> list[Row]:
    return [row for row in rows if (row.key.stage, row.key.batch) == (stage, batch) and row.of("reconstruction")]


def _none(rows: Sequence[Row], stage: str, batch: int) -> Row | None:
    """Return the undefended row of a stage and batch."""
    return next((r for r in rows if (r.key.defense, r.key.stage, r.key.batch) == ("none", stage, batch)), None)


def _verdict(rows: Sequence[Row], became: Fate, sentence: str, of: Row | None = None, plain: bool = False) -> Verdict:
    """Return what became of pixels, or of table rows, in the settings of `rows`; the figures are those of one row."""
    metric = rebuilding(rows[0].records[0])
    what: str = "pixels" if metric == "psnr_median" else "rows"
    sides = (of or rows[0]).rebuilt
    strongest = sides.plain if plain else sides.worst
    return Verdict(rows[0].key.defense, what, became, sentence, tuple(row.key for row in rows), strongest, metric)


def _belied(row: Row) -> str:
    """Return what cells remark against the defense's own account of what it sends, a clause; "" for nothing."""
    found = [flag.detail for record in row.records for flag in record.flags if flag.code in BELIED]
    return "; ".join(dict.fromkeys(found))


def _fate(row: Row) -> Fate:
    """Return what became of pixels; who gives a false account of himself hides nothing that can be told."""
    return unless_belied(fate(row.rebuilt.worst), [flag for record in row.records for flag in record.flags])


def _where(row: Row) -> str:
    return f"batch {row.key.batch}, {STAGES[row.key.stage]}"


def _unknown(row: Row, what: str, utility: str) -> str:
    head = f"{row.name}: whether {what} are hidden is undecided, no attack on it gave a figure"
    return f"{head}; {_where(row)}; {utility}."


def _row_error(row: Row, undefended: Utility | None) -> str:
    utility, worst = utility_text(row.utility, undefended), row.rebuilt.worst
    if worst is None:
        return _unknown(row, "table rows", utility)
    error = f"{figure(worst, 'rmse_mean', '.2f')} ({attack_of(worst)})"
    return f"{row.name}: table rows come back with a mean relative error of {error}; {_where(row)}; {utility}."


def _undefended(row: Row, rows: Sequence[Row]) -> WorstCase | None:
    none = _none(rows, row.key.stage, row.key.batch)
    return None if none is None else none.rebuilt.worst


def _as_undefended(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether pixels fall to an attack that takes single gradients as they are, as far as undefended ones do."""
    none, mine = _undefended(row, rows), row.rebuilt.plain
    if mine is None or none is None or fate(mine) != "falls" or fate(none) != "falls":
        return False
    ours, theirs = mine.metric("psnr_median"), none.metric("psnr_median")
    if ours is None or theirs is None or mine.config.federation.upload != "gradient":
        return False
    if any(end is None for end in (ours.low, ours.high, theirs.low, theirs.high)):
        return ours.value == theirs.value
    return bool(ours.low <= theirs.high and theirs.low <= ours.high)  # type: ignore[operator]  # none is None


def _fedsgd(bare: Sequence[Row], rows: Sequence[Row], undefended: Utility | None, *, everywhere: bool) -> Verdict:
    """Return the sentence on a masked defense whose server reads the very gradients, for the control values `bare`."""
    least = min(bare, key=lambda row: (value(row.rebuilt.plain, "psnr_median") or 0.0, row.control))
    labels = [row.control for row in bare if row.control]
    where = f" at {listed(labels)}" if labels and not everywhere else " over the whole grid" if len(bare) > 1 else ""
    several = len(bare) > 1
    at, few = by(attack_of(least.rebuilt.plain), least.control if several else ""), "at least " if several else ""
    sentence = (
        f"To the server this is FedSGD{where}: pixels fall as they do without a defense ({at}: {few}"
        f"{decibels(least.rebuilt.plain)}, undefended {decibels(_undefended(least, rows))}); {_where(least)}; "
        f"{utility_text(least.utility, undefended)}."
    )
    return _verdict(bare, "falls", sentence, least, plain=True)


def _pixels(row: Row, undefended: Utility | None) -> str:
    """Return what becomes of pixels at one control value: to who does not know the defense, and to who does."""
    utility, sides, belied = utility_text(row.utility, undefended), row.rebuilt, _belied(row)
    if sides.worst is None:
        return _unknown(row, "pixels", utility)
    plain, worst = fate(sides.plain), fate(sides.worst)
    strong, weak = (f"{attack_of(case)}: {decibels(case)}" for case in (sides.worst, sides.plain))
    if plain == "falls":
        beside = f"; who knows of it: {strong}" if sides.worst.knows else ""
        found = f" does not hide pixels, even from an attacker who does not know of it ({weak}{beside})"
    elif worst == "falls" and plain == "hidden":
        weak = decibels(sides.plain)
        found = f" hides pixels from an attacker who does not know of it (median PSNR {weak}) but not from one who does"
        found += f" ({strong})"
    elif worst == "falls":
        found = f" does not hide pixels from an attacker who knows of it ({strong})"
    elif worst == "undecided":
        found = f": whether pixels are hidden is undecided, the interval contains 20 dB ({strong})"
    elif belied:
        found = f": whether pixels are hidden cannot be told (at most {strong})"
    else:
        share = value(sides.worst, "share_above_20db") or 0.0
        some = f", though {share:.0%} of the images still come out above 20 dB" if share > 0 else ""
        found = f" hides the median image from every attack tried here (best: {strong}){some}"
    return f"{row.name}{found}; {_where(row)}; {utility}{belied and f'; {belied}'}."


def _larger_batches(rows: Sequence[Row], stage: str, smallest: int) -> list[Verdict]:
    said = []
    for batch in sorted({row.key.batch for row in rows} - {smallest}):
        some = _attacked(rows, stage, batch)
        if all(row.rebuilt.worst is None for row in some):
            continue
        top = max(some, key=lambda row: value(row.rebuilt.worst, "psnr_median") or 0.0)
        fates = {_fate(row) for row in some}
        whole = "" if len(some) == 1 else " over the whole grid"
        verb = {"falls": f"fall{whole}", "hidden": f"stay hidden{whole}", "undecided": "are undecided (20 dB)"}
        does = verb[min(fates)] if len(fates) == 1 else "fare unlike over the grid"
        at = by(attack_of(top.rebuilt.worst), top.control)
        share = max(value(row.rebuilt.worst, "share_above_20db") or 0.0 for row in some)
        still = f", though {share:.0%} of the images come out above 20 dB" if share > 0 and fates == {"hidden"} else ""
        sentence = f"In batches of {batch}, pixels {does}: at most {decibels(top.rebuilt.worst)} ({at}){still}."
        said.append(_verdict(some, together(fates), sentence, top))
    return said


def _after_training(mine: Sequence[Row], rows: Sequence[Row], batch: int) -> list[Verdict]:
    """Return what became of pixels after training, or that nothing can be said where `none` stands too."""
    asked = _attacked(mine, "final", batch)
    some = [row for row in asked if row.rebuilt.worst is not None]
    if not some:
        return []
    top = max(some, key=lambda row: (fate(row.rebuilt.worst) == "falls", value(row.rebuilt.worst, "psnr_median") or 0))
    none = _none(rows, "final", batch)
    undefended = None if none is None else value(none.rebuilt.worst, "psnr_median")
    text = decibels(top.rebuilt.worst)
    beside = "undefended: not run" if none is None else f"undefended {decibels(none.rebuilt.worst)}"
    became = together(_fate(row) for row in asked if row is top or row.rebuilt.worst is None)
    if became == "falls":
        sentence = f"After training, pixels still fall at {top.control or top.key.defense}: {text}; {beside}."
    elif undefended is None or undefended < HIDDEN:
        became = "undecided"
        sentence = f"After training nothing can be said of pixels: the undefended ones stand as well ({beside})."
    elif became == "undecided":
        sentence = f"After training, whether pixels are hidden is undecided: at most {text}; {beside}."
    else:
        sentence = f"After training, pixels stay hidden from the attacks tried here: at most {text}; {beside}."
    return [_verdict(asked, became, sentence, top)]


MEMBERS = "batch_asr"


def _batch_members(mine: Sequence[Row], rows: Sequence[Row], stage: str, batch: int) -> list[Verdict]:
    """Return whether uploads tell who was in a batch: a sentence for each set of control values that fare alike."""
    asked = [row for row in mine if (row.key.stage, row.key.batch) == (stage, batch) and row.top(MEMBERS)]
    none = None if mine and mine[0].key.defense == "none" else _none(rows, stage, batch)
    undefended = None if none is None else none.top(MEMBERS)
    known = undefended if above_chance(undefended, MEMBERS) else None
    tried = sum(value(record, MEMBERS) is not None for row in asked for record in row.records)
    groups: dict[Fate, list[Row]] = {}
    for row in asked:
        became = members_fate(row.top(MEMBERS), tried, known, MEMBERS)  # type: ignore[arg-type]  # asked: it has one
        groups.setdefault(unless_belied(became, [f for r in row.records for f in r.flags]), []).append(row)
    beside = "" if undefended is None else f", undefended {figure(undefended, MEMBERS, '.0%')}"
    said = []
    for became, some in groups.items():
        top = max(some, key=lambda row: value(row.top(MEMBERS), MEMBERS) or 0.0)
        labels = [row.control for row in some if row.control]
        where = f" at {listed(labels)}" if labels and len(groups) > 1 else ""
        head = f"Who was in a batch of {batch}"
        does = {
            "falls": f"{head} is told from others by its upload{where}",
            "hidden": f"{head} is not told by its upload{where} to an attack that does not know of the defense",
            "undecided": f"Whether an upload{where} hides who was in a batch of {batch} cannot be told",
        }[became]
        found = top.top(MEMBERS)
        text = f"{by(attack_of(found), top.control)}: ASR at most {figure(found, MEMBERS, '.0%')}{beside}, chance 50%"
        keys = tuple(row.key for row in some)
        said.append(Verdict(top.key.defense, "members", became, f"{does} ({text}).", keys, found, MEMBERS))
    return said


def _labels(rows: Sequence[Row], stage: str) -> list[Verdict]:
    """Return how many labels were recovered: by control value at the smallest batch of a stage, and in general."""
    found = [(row, value(cell, "label_accuracy") or 0.0, cell) for row in rows if (cell := row.labels) is not None]
    if not found:
        return []
    top = best([cell for _, _, cell in found], "label_accuracy")
    classes, by_batch = found[0][2].config.model.classes, []
    for batch in sorted({row.key.batch for row, _, _ in found}):
        ends = [end(v for row, v, _ in found if row.key.batch == batch) for end in (min, max)]
        span = " to ".join(dict.fromkeys(f"{end:.0%}" for end in ends))
        by_batch.append(f"{span} at batch {batch} (chance {multiset_chance(classes, batch):.0%})")
    said = [f"Labels recovered by the strongest attack of each cell: {', '.join(by_batch)}."]
    smallest = min(row.key.batch for row, _, _ in found)
    shares: dict[str, list[str]] = {}
    for row, v, _ in found:
        if (row.key.stage, row.key.batch) == (stage, smallest) and row.control:
            shares.setdefault(f"{v:.0%}", []).append(row.control)
    if len(shares) > 1:
        text = ", ".join(f"{share} at {listed(labels)}" for share, labels in shares.items())
        said.append(f"Labels at batch {smallest}, {STAGES[stage]}: {text}.")
    keys = tuple(row.key for row, _, _ in found)
    return [Verdict(rows[0].key.defense, "labels", None, sentence, keys, top, "label_accuracy") for sentence in said]
