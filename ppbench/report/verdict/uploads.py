"""What uploads give away, in sentences: pixels, table rows, labels."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.metrics.labels import multiset_chance
from ppbench.records.figure import best
from ppbench.records.schema import Record, Utility
from ppbench.report.controls import is_image, rebuilding, value
from ppbench.report.verdict.lines import STAGES, Line, figure, lines, listed, name_of, probed, utility_text
from ppbench.report.verdict.verdict import HIDDEN, Fate, Verdict, fate, rebuilt_fate, together
from ppbench.report.worst import WorstCase, attack_of


def what_uploads_tell(defense: str, records: Sequence[Record]) -> list[Verdict]:
    """Return the sentences on what each adversary rebuilds from uploads.

    Sentences about pixels are given for every control value at the smallest batch, at random weights where attacked
    there (the easiest case for an attacker and the one that the papers report); control values at which the server
    sees what it would see without the defense share one.
    """
    said: list[Verdict] = []
    everything = lines(records)
    masked = any(r.config.stage == "iterate" and r.config.defense.id == defense for r in records)
    seen = sorted({row.threat for row in everything})
    scenes = sorted({(row.threat, row.key.probe, row.key.probe_rounds) for row in everything})
    for scene in scenes:
        threat = scene[0]
        rows = [row for row in everything if (row.threat, row.key.probe, row.key.probe_rounds) == scene]
        words = [threat if seen != ["server/1"] else "", probed(rows[0], everything)]
        prefix = f"[{', '.join(word for word in words if word)}] " if any(words) else ""
        for role in sorted({row.role for row in rows if row.defense == defense}):
            some = [row for row in rows if row.defense != defense or row.role == role]
            found = _seen(defense, some, masked and threat == "server/1", role)
            said += [verdict.worded(prefix + verdict.sentence) for verdict in found]
    return said


def _seen(defense: str, rows: Sequence[Line], masked: bool, role: str) -> list[Verdict]:
    """Return the sentences on what one adversary rebuilds of victims in one role.

    masked: whether it may be told "this is FedSGD".
    """
    mine = [row for row in rows if row.defense == defense]
    stage = "init" if any(row.stage == "init" for row in mine) else "final"
    undefended = next((row.utility for row in rows if row.defense == "none"), None)
    undefended = None if defense == "none" else undefended
    smallest = min((row.batch for row in mine), default=1)
    first = [row for row in mine if (row.stage, row.batch) == (stage, smallest) and row.of("reconstruction")]
    if first and not is_image(first[0].records[0]):
        errors = [_verdict([row], row.worst, rebuilt_fate(row.worst), _row_error(row, undefended)) for row in first]
        return errors + _labels(mine, stage)
    bare = [row for row in first if masked and _as_undefended(row, rows)]
    said = [_fedsgd(bare, rows, undefended, everywhere=len(bare) == len(first))] if bare else []
    said += [_verdict([row], row.worst, fate(row.worst), _pixels(row, undefended)) for row in first if row not in bare]
    more = _larger_batches(mine, stage, smallest)
    if stage == "init":
        more += _after_training(mine, rows, smallest)
    more += _labels(mine, stage)
    if not role:
        return said + more
    return said + [v.worded(f"Of the {role}: {v.sentence[0].lower()}{v.sentence[1:]}") for v in more]


def _verdict(rows: Sequence[Line], strongest: WorstCase | None, became: Fate, sentence: str) -> Verdict:
    """Return what became of pixels, or of table rows, in the settings of `rows`."""
    metric = rebuilding(rows[0].records[0])
    what: str = "pixels" if metric == "psnr_median" else "rows"
    return Verdict(rows[0].defense, what, became, sentence, tuple(row.key for row in rows), strongest, metric)


def _row_error(row: Line, undefended: Utility | None) -> str:
    if row.worst is None:
        return _unknown(row, "table rows", utility_text(row.utility, undefended))
    error = figure(row.worst, "rmse_mean", ".2f")
    return (
        f"{name_of(row)}: table rows come back with a mean relative error of {error} ({attack_of(row.worst)}); "
        f"batch {row.batch}, {STAGES[row.stage]}; {utility_text(row.utility, undefended)}."
    )


def _unknown(row: Line, what: str, utility: str) -> str:
    where = f"batch {row.batch}, {STAGES[row.stage]}"
    head = f"{name_of(row)}: whether {what} are hidden is undecided, no attack on it gave a figure"
    return f"{head}; {where}; {utility}."


def _undefended(row: Line, rows: Sequence[Line]) -> WorstCase | None:
    same = ("none", row.stage, row.batch)
    return next((other.worst for other in rows if (other.defense, other.stage, other.batch) == same), None)


def _as_undefended(row: Line, rows: Sequence[Line]) -> bool:
    """Return whether pixels fall to an attack that takes single gradients as they are, as far as undefended ones do."""
    none, mine = _undefended(row, rows), row.plain
    if mine is None or none is None or fate(mine) != "falls" or fate(none) != "falls":
        return False
    ours, theirs = mine.metric("psnr_median"), none.metric("psnr_median")
    if ours is None or theirs is None or mine.config.federation.upload != "gradient":
        return False
    if any(end is None for end in (ours.low, ours.high, theirs.low, theirs.high)):
        return ours.value == theirs.value
    return bool(ours.low <= theirs.high and theirs.low <= ours.high)  # type: ignore[operator]  # none is None


def _fedsgd(bare: Sequence[Line], rows: Sequence[Line], undefended: Utility | None, *, everywhere: bool) -> Verdict:
    """Return the sentence on a masked defense whose server reads the very gradients, for the control values `bare`."""
    least = min(bare, key=lambda row: (value(row.plain, "psnr_median") or 0.0, row.control))
    labels = [row.control for row in bare if row.control]
    where = f" at {listed(labels)}" if labels and not everywhere else " over the whole grid" if len(bare) > 1 else ""
    at = ", ".join(word for word in (attack_of(least.plain), least.control if len(bare) > 1 else "") if word)
    few = "at least " if len(bare) > 1 else ""
    beside = figure(_undefended(least, rows), "psnr_median", ".1f", " dB")
    sentence = (
        f"To the server this is FedSGD{where}: pixels fall as they do without a defense ({at}: {few}"
        f"{figure(least.plain, 'psnr_median', '.1f', ' dB')}, undefended {beside}); batch {least.batch}, "
        f"{STAGES[least.stage]}; {utility_text(least.utility, undefended)}."
    )
    return _verdict(bare, least.plain, "falls", sentence)


def _pixels(row: Line, undefended: Utility | None) -> str:
    head, tail = name_of(row), f"; {utility_text(row.utility, undefended)}."
    where = f"batch {row.batch}, {STAGES[row.stage]}"
    plain, worst = fate(row.plain), fate(row.worst)
    if row.worst is None:
        return _unknown(row, "pixels", utility_text(row.utility, undefended))
    strong = f"{attack_of(row.worst)}: {figure(row.worst, 'psnr_median', '.1f', ' dB')}"
    if row.plain is not None and plain == "falls":
        beside = f"; who knows of it: {strong}" if row.adaptive else ""
        text = f"{attack_of(row.plain)}: {figure(row.plain, 'psnr_median', '.1f', ' dB')}{beside}"
        return f"{head} does not hide pixels, even from an attacker who does not know of it ({text}); {where}{tail}"
    if worst == "falls" and row.plain is not None and plain == "hidden":
        weak = figure(row.plain, "psnr_median", ".1f", " dB")
        return (
            f"{head} hides pixels from an attacker who does not know of it (median PSNR {weak}) "
            f"but not from one who does ({strong}); {where}{tail}"
        )
    if worst == "falls":
        return f"{head} does not hide pixels from an attacker who knows of it ({strong}); {where}{tail}"
    if worst == "undecided":
        return f"{head}: whether pixels are hidden is undecided, the interval contains 20 dB ({strong}); {where}{tail}"
    share = value(row.worst, "share_above_20db") or 0.0
    some = f", though {share:.0%} of the images still come out above 20 dB" if share > 0 else ""
    return f"{head} hides the median image from every attack tried here (best: {strong}){some}; {where}{tail}"


def _larger_batches(rows: Sequence[Line], stage: str, smallest: int) -> list[Verdict]:
    said = []
    for batch in sorted({row.batch for row in rows if row.batch != smallest and row.worst is not None}):
        some = [row for row in rows if row.batch == batch and row.stage == stage and row.of("reconstruction")]
        if all(row.worst is None for row in some):
            continue
        top = max(some, key=lambda row: value(row.worst, "psnr_median") or 0.0)
        fates = {fate(row.worst) for row in some}
        whole = "" if len(some) == 1 else " over the whole grid"
        verb = {"falls": f"fall{whole}", "hidden": f"stay hidden{whole}", "undecided": "are undecided (20 dB)"}
        said_of = verb[fates.pop()] if len(fates) == 1 else "fare unlike over the grid"
        at = ", ".join(word for word in (attack_of(top.worst), top.control) if word)
        text = figure(top.worst, "psnr_median", ".1f", " dB")
        sentence = f"In batches of {batch}, pixels {said_of}: at most {text} ({at})."
        said.append(_verdict(some, top.worst, together(fate(row.worst) for row in some), sentence))
    return said


def _after_training(mine: Sequence[Line], rows: Sequence[Line], batch: int) -> list[Verdict]:
    """Return what became of pixels after training, or that nothing can be said where `none` stands too."""
    asked = [row for row in mine if row.stage == "final" and row.batch == batch and row.of("reconstruction")]
    some = [row for row in asked if row.worst is not None]
    none = next((row for row in rows if (row.defense, row.stage, row.batch) == ("none", "final", batch)), None)
    if not some:
        return []
    top = max(some, key=lambda row: (fate(row.worst) == "falls", value(row.worst, "psnr_median") or 0.0))
    text = figure(top.worst, "psnr_median", ".1f", " dB")
    undefended = value(none.worst, "psnr_median") if none is not None else None
    beside = (
        f"undefended {figure(none.worst, 'psnr_median', '.1f', ' dB')}" if none is not None else "undefended: not run"
    )
    became = together(fate(row.worst) for row in asked if row is top or row.worst is None)
    if became == "falls":
        sentence = f"After training, pixels still fall at {top.control or top.defense}: {text}; {beside}."
    elif undefended is None or undefended < HIDDEN:
        became = "undecided"
        sentence = f"After training nothing can be said of pixels: the undefended ones stand as well ({beside})."
    elif became == "undecided":
        sentence = f"After training, whether pixels are hidden is undecided: at most {text}; {beside}."
    else:
        sentence = f"After training, pixels stay hidden from the attacks tried here: at most {text}; {beside}."
    return [_verdict(asked, top.worst, became, sentence)]


def _labels(rows: Sequence[Line], stage: str) -> list[Verdict]:
    """Return how many labels were recovered: by control value at the smallest batch of a stage, and in general."""
    found = [(row, v) for row in rows if (v := value(row.labels, "label_accuracy")) is not None and row.labels]
    if not found:
        return []
    by_batch = []
    for batch in sorted({row.batch for row, _ in found}):
        values = [v for row, v in found if row.batch == batch]
        chance = multiset_chance(_classes(found), batch)
        low, high = min(values), max(values)
        span = f"{high:.0%}" if round(low, 2) == round(high, 2) else f"{low:.0%} to {high:.0%}"
        by_batch.append(f"{span} at batch {batch} (chance {chance:.0%})")
    said = [f"Labels recovered by the strongest attack of each cell: {', '.join(by_batch)}."]
    smallest = min(row.batch for row, _ in found)
    shares: dict[str, list[str]] = {}
    for row, v in found:
        if (row.stage, row.batch) == (stage, smallest) and row.control:
            shares.setdefault(f"{v:.0%}", []).append(row.control)
    if len(shares) > 1:
        text = ", ".join(f"{share} at {listed(labels)}" for share, labels in shares.items())
        said.append(f"Labels at batch {smallest}, {STAGES[stage]}: {text}.")
    keys = tuple(row.key for row, _ in found)
    top = best([row.labels for row, _ in found if row.labels is not None], "label_accuracy")
    return [Verdict(rows[0].defense, "labels", None, sentence, keys, top, "label_accuracy") for sentence in said]


def _classes(found: Sequence[tuple[Line, float]]) -> int:
    return next(row.labels.config.model.classes for row, _ in found if row.labels is not None)
