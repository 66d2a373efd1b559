"""What was found, in words: sentences computed from records, for the terminal and the head of the board."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy import stats

from ppbench.controls import best, is_image, value
from ppbench.metrics.labels import multiset_chance
from ppbench.records.schema import Record

HIDDEN = 20.0  # dB: below it the subject of an image is not recognized

STAGES = {"init": "at random weights", "final": "after training"}


class Key(NamedTuple):
    """What the cells of one row share."""

    defense: str
    control: str
    stage: str
    batch: int
    threat: str


@dataclass(frozen=True)
class Line:
    """One row of the final table: a defense at one control value, stage and batch size, over all its attacks.

    plain, worst: the reconstruction cells of the largest median PSNR among attacks that do not know the defense, and
    among all; labels, tracing, membership: the strongest cell of each kind.
    """

    defense: str
    control: str
    stage: str
    batch: int
    threat: str
    accuracy: float | None
    plain: Record | None
    worst: Record | None
    labels: Record | None
    tracing: Record | None
    membership: Record | None
    status: str

    @property
    def adaptive(self) -> bool:
        """Whether an attack that knows the defense was among those tried."""
        return self.worst is not None and self.worst is not self.plain


def labels_of(records: Sequence[Record]) -> dict[str, str]:
    """Return "alpha2=0.1" by cell: the control parameter, and others that differ among a defense's records."""
    seen: dict[tuple[str, str], set[object]] = {}
    for record in records:
        for name, parameter in record.config.defense.parameters.items():
            seen.setdefault((record.config.defense.id, name), set()).add(parameter)
    found = {}
    for record in records:
        defense = record.config.defense
        words = [] if defense.control is None else [f"{defense.control.name}={defense.control.value:g}"]
        for name, parameter in defense.parameters.items():
            if len(seen[defense.id, name]) > 1 and (defense.control is None or name != defense.control.name):
                words.append(f"{name}={parameter}")
        found[record.cell_id] = " ".join(words)
    return found


def lines(records: Sequence[Record]) -> list[Line]:
    """Return the table's rows, controls first, then by control value, stage and batch."""
    label = labels_of(records)
    groups: dict[Key, list[Record]] = {}
    members: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        config = record.config
        if config.attack.kind == "membership":
            members.setdefault((config.defense.id, label[record.cell_id], config.stage), []).append(record)
        else:
            key = Key(config.defense.id, label[record.cell_id], config.stage, config.batch_size, config.threat_model.id)
            groups.setdefault(key, []).append(record)
    for about, some in members.items():  # membership alone still gets a row
        if not any(key[:3] == about for key in groups):
            groups[Key(*about, some[0].config.batch_size, some[0].config.threat_model.id)] = []
    return sorted((_line(key, some, members.get(key[:3], [])) for key, some in groups.items()), key=_order)


def _line(key: Key, records: Sequence[Record], members: Sequence[Record]) -> Line:
    images = [r for r in records if r.config.attack.kind == "reconstruction"]
    plain = best([r for r in images if not r.config.attack.adaptive], "psnr_median")
    both = [*records, *members]
    return Line(
        *key,
        both[0].utility.accuracy,
        plain,
        best(images, "psnr_median"),
        best([r for r in records if r.config.attack.kind != "tracing"], "label_accuracy"),
        best([r for r in records if r.config.attack.kind == "tracing"], "tracing_accuracy"),
        best(members, "auc"),
        next((r.status for r in both if r.status != "complete"), "complete"),
    )


def _order(line: Line) -> tuple[int, str, str, float, str, bool, int]:
    rank = {"none": 0, "full_noise": 1}.get(line.defense, 2)
    word = line.control.partition(" ")[0].partition("=")[2]
    number = float(word) if word.replace(".", "", 1).replace("e-", "", 1).isdigit() else 0.0
    return rank, line.defense, line.threat, number, line.control, line.stage != "init", line.batch


def figure(record: Record | None, name: str, form: str, unit: str = "") -> str:
    """Return "35.2 dB [31.0, 40.3]" for a metric, or "-" where there is none."""
    metric = record.metric(name) if record is not None else None
    if metric is None or metric.value is None:
        return "-"
    text = f"{metric.value:{form}}{unit}"
    if metric.low is not None and metric.high is not None:
        text += f" [{metric.low:{form}}, {metric.high:{form}}]"
    return text


def sentences(defense: str, records: Sequence[Record]) -> list[str]:
    """Return what was found about `defense`, a sentence each: pixels, labels, tracing, membership, guarantee.

    Sentences about pixels are given for every control value at the smallest batch, at random weights where attacked
    there (the easiest case for an attacker and the one that the papers report).
    """
    said: list[str] = []
    seen = sorted({r.config.threat_model.id for r in records if r.config.attack.kind != "membership"})
    for threat in seen:
        rows = [row for row in lines(records) if row.threat == threat]
        prefix = f"[{threat}] " if seen != ["server/1"] else ""
        said += [f"{prefix}{sentence}" for sentence in _seen(defense, rows)]
    everything = lines(records)
    said += _membership([row for row in everything if row.defense == defense], everything)
    return said + _guarantee([r for r in records if r.config.defense.id == defense])


def _seen(defense: str, rows: Sequence[Line]) -> list[str]:
    """Return the sentences on what one adversary rebuilds."""
    mine = [row for row in rows if row.defense == defense]
    stage = "init" if any(row.stage == "init" for row in mine) else "final"
    undefended = next((row.accuracy for row in rows if row.defense == "none"), None)
    smallest = min((row.batch for row in mine), default=1)
    first = [row for row in mine if (row.stage, row.batch) == (stage, smallest) and row.worst is not None]
    if any(row.worst is not None and not is_image(row.worst) for row in first):
        return [_row_error(row, undefended) for row in first] + _labels(mine)
    said = [_pixels(row, undefended) for row in first] + _larger_batches(mine, stage, smallest)
    if stage == "init":
        said += _after_training(mine, rows, smallest)
    return said + _labels(mine)


def _row_error(row: Line, undefended: float | None) -> str:
    error, attack = figure(row.worst, "rmse_mean", ".2f"), row.worst.config.attack.id if row.worst is not None else "-"
    where = f"batch {row.batch}, {STAGES[row.stage]}{_accuracy(row, undefended)}"
    return f"{_name(row)}: table rows come back with a mean relative error of {error} ({attack}); {where}"


def _fate(record: Record | None) -> str:
    """Return "falls" or "hidden" by where the interval of the median PSNR lies about 20 dB, else "undecided"."""
    metric = record.metric("psnr_median") if record is not None else None
    if metric is None or metric.value is None:
        return "hidden"
    low = metric.value if metric.low is None else metric.low
    high = metric.value if metric.high is None else metric.high
    return "falls" if low >= HIDDEN else "hidden" if high < HIDDEN else "undecided"


def _name(row: Line) -> str:
    return f"{row.defense} at {row.control}" if row.control else row.defense


def _pixels(row: Line, undefended: float | None) -> str:
    head, tail = _name(row), _accuracy(row, undefended)
    where = f"batch {row.batch}, {STAGES[row.stage]}"
    plain, worst = _fate(row.plain), _fate(row.worst)
    attack = row.worst.config.attack.id if row.worst is not None else "-"
    strong = f"{attack}: {figure(row.worst, 'psnr_median', '.1f', ' dB')}"
    if row.plain is not None and plain == "falls":
        beside = f"; who knows of it: {strong}" if row.adaptive else ""
        text = f"{row.plain.config.attack.id}: {figure(row.plain, 'psnr_median', '.1f', ' dB')}{beside}"
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


def _accuracy(row: Line, undefended: float | None) -> str:
    if row.accuracy is None:
        return "; training diverged."
    beside = f" ({undefended:.1%} undefended)" if undefended is not None and row.defense != "none" else ""
    return f"; accuracy {row.accuracy:.1%}{beside}."


def _larger_batches(rows: Sequence[Line], stage: str, smallest: int) -> list[str]:
    said = []
    for batch in sorted({row.batch for row in rows if row.batch != smallest and row.worst is not None}):
        some = [row for row in rows if row.batch == batch and row.stage == stage and row.worst is not None]
        if not some:
            continue
        top = max(some, key=lambda row: value(row.worst, "psnr_median") or 0.0)
        fates = {_fate(row.worst) for row in some}
        whole = "" if len(some) == 1 else " over the whole grid"
        verb = {"falls": f"fall{whole}", "hidden": f"stay hidden{whole}", "undecided": "are undecided (20 dB)"}
        said_of = verb[fates.pop()] if len(fates) == 1 else "fare unlike over the grid"
        attack = top.worst.config.attack.id if top.worst is not None else "-"
        at = ", ".join(word for word in (attack, top.control) if word)
        text = figure(top.worst, "psnr_median", ".1f", " dB")
        said.append(f"In batches of {batch}, pixels {said_of}: at most {text} ({at}).")
    return said


def _after_training(mine: Sequence[Line], rows: Sequence[Line], batch: int) -> list[str]:
    """Return what became of pixels after training, or that nothing can be said where `none` stands too."""
    some = [row for row in mine if row.stage == "final" and row.batch == batch and row.worst is not None]
    none = next((row for row in rows if (row.defense, row.stage, row.batch) == ("none", "final", batch)), None)
    if not some:
        return []
    top = max(some, key=lambda row: (_fate(row.worst) == "falls", value(row.worst, "psnr_median") or 0.0))
    text = figure(top.worst, "psnr_median", ".1f", " dB")
    undefended = value(none.worst, "psnr_median") if none is not None else None
    beside = (
        f"undefended {figure(none.worst, 'psnr_median', '.1f', ' dB')}" if none is not None else "undefended: not run"
    )
    if _fate(top.worst) == "falls":
        return [f"After training, pixels still fall at {top.control or top.defense}: {text}; {beside}."]
    if undefended is None or undefended < HIDDEN:
        return [f"After training nothing can be said of pixels: the undefended ones stand as well ({beside})."]
    if _fate(top.worst) == "undecided":
        return [f"After training, whether pixels are hidden is undecided: at most {text}; {beside}."]
    return [f"After training, pixels stay hidden from the attacks tried here: at most {text}; {beside}."]


def _labels(rows: Sequence[Line]) -> list[str]:
    found = [(row, v) for row in rows if (v := value(row.labels, "label_accuracy")) is not None and row.labels]
    if not found:
        return []
    by_batch = []
    for batch in sorted({row.batch for row, _ in found}):
        values = [v for row, v in found if row.batch == batch]
        record = next(row.labels for row, _ in found if row.batch == batch and row.labels is not None)
        chance = multiset_chance(record.config.model.classes, batch)
        low, high = min(values), max(values)
        span = f"{high:.0%}" if round(low, 2) == round(high, 2) else f"{low:.0%} to {high:.0%}"
        by_batch.append(f"{span} at batch {batch} (chance {chance:.0%})")
    return [f"Labels recovered by the strongest attack of each cell: {', '.join(by_batch)}."]


def _membership(mine: Sequence[Line], rows: Sequence[Line]) -> list[str]:
    found = [row for row in mine if row.membership is not None]
    if not found:
        return []
    top = max(found, key=lambda row: value(row.membership, "auc") or 0.0)
    plain = next((row.membership for row in rows if row.defense == "none" and row.membership is not None), None)
    beside = f", undefended {figure(plain, 'auc', '.2f')}" if plain is not None and top.defense != "none" else ""
    text = figure(top.membership, "auc", ".2f")
    metric = top.membership.metric("auc") if top.membership is not None else None
    shown = False
    if metric is not None and metric.value is not None and metric.low is not None:
        # The largest of several control values is judged at the level of all of them (Bonferroni).
        widen = float(stats.norm.ppf(1 - 0.025 / len(found)) / stats.norm.ppf(0.975))
        shown = metric.value - (metric.value - metric.low) * widen > 0.5
    verb = "tells members from others" if shown else "is not shown to find members"
    attack = top.membership.config.attack.id if top.membership is not None else "-"
    return [f"A client who queries the released model {verb} ({attack}: AUC at most {text}{beside})."]


def _guarantee(records: Sequence[Record]) -> list[str]:
    privacy = [r.privacy for r in records]
    values = [p.epsilon for p in privacy if p.epsilon is not None]
    if values:
        span = f"{min(values):.3g}" if min(values) == max(values) else f"{min(values):.3g} to {max(values):.3g}"
        return [f"Formal guarantee over the whole training: epsilon {span} for a single example."]
    reason = next((p.reason for p in privacy if p.reason), None)
    return [f"No epsilon can be given: {reason}."] if reason else []
