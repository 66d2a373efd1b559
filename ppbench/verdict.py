"""What was found, in words: sentences computed from records, for the terminal and the head of the board."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.controls import best, value
from ppbench.metrics.labels import multiset_chance
from ppbench.records.schema import Record

HIDDEN = 20.0  # dB: below it the subject of an image is not recognized

STAGES = {"init": "at random weights", "final": "after training"}


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


def control_label(record: Record) -> str:
    """Return "alpha2=0.1", or "" for a defense without control parameter."""
    control = record.config.defense.control
    return "" if control is None else f"{control.name}={control.value:g}"


def lines(records: Sequence[Record]) -> list[Line]:
    """Return the table's rows, controls first, then by control value, stage and batch."""
    groups: dict[tuple[str, str, str, int], list[Record]] = {}
    for record in records:
        config = record.config
        if config.attack.kind != "membership":
            key = (config.defense.id, control_label(record), config.stage, config.batch_size)
            groups.setdefault(key, []).append(record)
    members: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if record.config.attack.kind == "membership":
            config = record.config
            members.setdefault((config.defense.id, control_label(record), config.stage), []).append(record)
    for key3, some in members.items():  # membership alone still gets a row
        if not any(key[:3] == key3 for key in groups):
            groups[(*key3, some[0].config.batch_size)] = []
    found = [_line(key, some, members.get(key[:3], [])) for key, some in groups.items()]
    return sorted(found, key=_order)


def _line(key: tuple[str, str, str, int], records: Sequence[Record], members: Sequence[Record]) -> Line:
    defense, control, stage, batch = key
    images = [r for r in records if r.config.attack.kind == "reconstruction"]
    plain = best([r for r in images if not r.config.attack.adaptive], "psnr_median")
    both = [*records, *members]
    return Line(
        defense,
        control,
        stage,
        batch,
        both[0].config.threat_model.id,
        both[0].utility.accuracy,
        plain,
        best(images, "psnr_median"),
        best([r for r in records if r.config.attack.kind != "tracing"], "label_accuracy"),
        best([r for r in records if r.config.attack.kind == "tracing"], "tracing_accuracy"),
        best(members, "auc"),
        next((r.status for r in both if r.status != "complete"), "complete"),
    )


def _order(line: Line) -> tuple[int, str, float, bool, int]:
    rank = {"none": 0, "full_noise": 1}.get(line.defense, 2)
    number = float(line.control.partition("=")[2] or 0)
    return rank, line.defense, number, line.stage != "init", line.batch


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
    rows = lines(records)
    mine = [row for row in rows if row.defense == defense]
    undefended = next((row.accuracy for row in rows if row.defense == "none"), None)
    said = []
    stage = "init" if any(row.stage == "init" for row in mine) else "final"
    smallest = min((row.batch for row in mine), default=1)
    for row in mine:
        if row.stage == stage and row.batch == smallest and row.worst is not None:
            said.append(_pixels(row, undefended))
    said += _larger_batches(mine, stage, smallest)
    if stage == "init":
        said += _after_training(mine, rows, smallest)
    said += _labels(mine)
    said += _membership(mine, rows)
    said += _guarantee([r for r in records if r.config.defense.id == defense])
    return said


def _name(row: Line) -> str:
    return f"{row.defense} at {row.control}" if row.control else row.defense


def _pixels(row: Line, undefended: float | None) -> str:
    head, tail = _name(row), _accuracy(row, undefended)
    where = f"batch {row.batch}, {STAGES[row.stage]}"
    worst, plain = value(row.worst, "psnr_median") or 0.0, value(row.plain, "psnr_median")
    attack = row.worst.config.attack.id if row.worst is not None else "-"
    strong = f"{attack}: {figure(row.worst, 'psnr_median', '.1f', ' dB')}"
    if plain is not None and plain < HIDDEN <= worst:
        weak = figure(row.plain, "psnr_median", ".1f", " dB")
        return (
            f"{head} hides pixels from an attacker who does not know of it (median PSNR {weak}) "
            f"but not from one who does ({strong}); {where}{tail}"
        )
    if plain is not None and plain >= HIDDEN:
        weak = row.plain.config.attack.id if row.plain is not None else "-"
        beside = f"; who knows of it: {strong}" if row.adaptive else ""
        text = f"{weak}: {figure(row.plain, 'psnr_median', '.1f', ' dB')}{beside}"
        return f"{head} does not hide pixels, even from an attacker who does not know of it ({text}); {where}{tail}"
    if worst >= HIDDEN:
        return f"{head} does not hide pixels from an attacker who knows of it ({strong}); {where}{tail}"
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
        fallen = [(value(row.worst, "psnr_median") or 0.0) >= HIDDEN for row in some]
        where = (
            "over the whole grid" if all(fallen) or not any(fallen) else f"at {top.control}, not over the whole grid"
        )
        attack = top.worst.config.attack.id if top.worst is not None else "-"
        text = figure(top.worst, "psnr_median", ".1f", " dB")
        verb = "fall" if any(fallen) else "stay hidden"
        said.append(f"In batches of {batch}, pixels {verb} {where}: at most {text} ({attack}, {top.control}).")
    return said


def _after_training(mine: Sequence[Line], rows: Sequence[Line], batch: int) -> list[str]:
    """Return what became of pixels after training, or that nothing can be said where `none` stands too."""
    some = [row for row in mine if row.stage == "final" and row.batch == batch and row.worst is not None]
    none = next((row for row in rows if (row.defense, row.stage, row.batch) == ("none", "final", batch)), None)
    if not some:
        return []
    top = max(some, key=lambda row: value(row.worst, "psnr_median") or 0.0)
    text = figure(top.worst, "psnr_median", ".1f", " dB")
    undefended = value(none.worst, "psnr_median") if none is not None else None
    beside = (
        f"undefended {figure(none.worst, 'psnr_median', '.1f', ' dB')}" if none is not None else "undefended: not run"
    )
    if (value(top.worst, "psnr_median") or 0.0) >= HIDDEN:
        return [f"After training, pixels still fall at {top.control or top.defense}: {text}; {beside}."]
    if undefended is None or undefended < HIDDEN:
        return [f"After training nothing can be said of pixels: the undefended ones stand as well ({beside})."]
    return [
        f"After training, pixels stay hidden over the whole grid from the attacks tried here: at most {text}; {beside}."
    ]


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
    low = top.membership.metric("auc") if top.membership is not None else None
    verb = "tells members from others" if low and low.low is not None and low.low > 0.5 else "finds no members"
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
