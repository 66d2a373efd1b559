"""Records as rows of the final tables: the worst case of each kind, and that of unaware attacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ppbench.questions.base import question_for, question_of
from ppbench.records.figure import Figured, best
from ppbench.records.schema import USUAL_PROBE, Record, Utility
from ppbench.report.controls import probe_words
from ppbench.report.frame import SETTING, Frame, Key, frame_of
from ppbench.report.worst import WorstCase, worst_of

STAGE_WORDS = {
    "init": "at random weights",
    "iterate": "of what clients train on",
    "final": "after training",
    "audit": "after a training with canaries",
}
STAGE_RANK = tuple(STAGE_WORDS)


@dataclass(frozen=True)
class Sides:
    """The worst case over settings: of plain attacks, of those that know the defense, and of all."""

    plain: WorstCase | None
    knowing: WorstCase | None
    worst: WorstCase | None
    plain_tried: int
    knowing_tried: int

    @staticmethod
    def of(records: Sequence[Record], metric: str) -> Sides:
        """Return the worst cases of `records`, cells of one kind, by `metric`."""
        frame = frame_of(records)
        measured = [r for r in frame if (m := r.metric(metric)) is not None and m.value is not None]
        plain, knowing = ([r for r in measured if r.config.attack.adaptive == knows] for knows in (False, True))

        def worst(some: Sequence[Record]) -> WorstCase | None:
            return worst_of((row.worst(metric) for row in frame.of(some).by(SETTING).values()), metric)

        return Sides(worst(plain), worst(knowing), worst(measured), len(plain), len(knowing))

    @property
    def tried(self) -> int:
        """How many cells there are."""
        return self.plain_tried + self.knowing_tried


@dataclass(frozen=True)
class SettingRow:
    """The cells of one setting, a row of a table. key: by `SETTING`; control: the control value in words."""

    key: Key
    control: str
    records: Frame

    @property
    def utility(self) -> Utility:
        """The model's utility."""
        return self.records[0].utility

    @property
    def status(self) -> str:
        """The status of the first cell that is not complete, else "complete"."""
        return next((r.status for r in self.records if r.status != "complete"), "complete")

    @property
    def name(self) -> str:
        """The defense at its control value, as "spn at alpha2=0.1"."""
        return f"{self.key.defense} at {self.control}" if self.control else self.key.defense

    def of(self, kind: str) -> Frame:
        """Return the cells of one kind of attack."""
        return self.records.of([r for r in self.records if r.config.attack.kind == kind])

    def top(self, metric: str) -> Record | None:
        """Return the cell whose `metric` leaks most, or None."""
        return best(self.records, metric)

    @cached_property
    def rebuilt(self) -> Sides:
        """Reconstructions by PSNR, the best of each victim."""
        return Sides.of(self.of("reconstruction"), "psnr_median")

    @property
    def labels(self) -> Record | None:
        """The cell with the highest label accuracy; None for numeric targets."""
        return self.top("label_accuracy") if self.records[0].config.model.classes > 1 else None

    @cached_property
    def members(self) -> Sides:
        """Membership cells by ASR."""
        return Sides.of(self.of("membership"), "asr")

    @cached_property
    def outputs(self) -> Sides:
        """Extraction cells."""
        some = self.of("extraction")
        return Sides.of(some, extraction_metric_of(some))


def extraction_metric_of(records: Iterable[Figured]) -> str:
    """Return the metric of extraction for the networks of `records`."""
    question = question_of("extraction")
    return next((question.headline(r.config) for r in records), "agreement")


def setting_labels(records: Sequence[Record]) -> dict[str, str]:
    """Return by cell id "alpha2=0.1": the control parameter, what else differs among a defense's records, the role."""
    seen: dict[tuple[str, str], set[object]] = {}

    def known(record: Record) -> dict[str, object]:
        return {**record.config.defense.parameters, "version": record.config.edition}

    for record in records:
        for name, parameter in known(record).items():
            seen.setdefault((record.config.defense.id, name), set()).add(parameter)
    labels = {}
    for record in records:
        defense = record.config.defense
        words = [] if defense.control is None else [f"{defense.control.name}={defense.control.value:g}"]
        for name, parameter in known(record).items():
            if len(seen[defense.id, name]) > 1 and (defense.control is None or name != defense.control.name):
                words.append(f"{name}={parameter}")
        words += [f"({record.config.role})"] if record.config.role else []
        labels[record.cell_id] = " ".join(words)
    return labels


def _rows(records: Sequence[Record], which: Callable[[Record], bool]) -> list[SettingRow]:
    """Return the records selected by `which` as rows: controls first, then by control value, stage and batch."""
    frame = frame_of(records)
    label = setting_labels(frame)
    groups = frame.of([r for r in frame if which(r)]).by(SETTING)
    return sorted((SettingRow(key, label[some[0].cell_id], some) for key, some in groups.items()), key=_order)


def _order(row: SettingRow) -> tuple[object, ...]:
    key = row.key
    rank = {"none": 0, "full_noise": 1}.get(key.defense, 2)
    number = 0.0 if key.value is None else key.value
    place = row.control, STAGE_RANK.index(key.stage), key.batch
    return rank, key.defense, key.threat, number, *place, *key.probing.order, key.text()


def upload_rows(records: Sequence[Record]) -> list[SettingRow]:
    """Return the rows on what uploads give away."""
    return _rows(records, lambda r: r.config.stage != "audit" and question_for(r).chapter == "uploads")


def model_rows(records: Sequence[Record]) -> list[SettingRow]:
    """Return the rows on what models give away to their holders: those trained on, and those delivered."""
    return _rows(records, lambda r: r.config.stage != "audit" and question_for(r).chapter == "models")


def audit_rows(records: Sequence[Record]) -> list[SettingRow]:
    """Return the rows of all audits: one per defense, control value, adversary and audit."""
    return _rows(records, lambda r: r.config.stage == "audit" and bool(question_for(r).chapter))


def undefended_row(rows: Iterable[SettingRow], stage: str, batch: int) -> SettingRow | None:
    """Return the undefended row of a stage and batch."""
    return next((r for r in rows if (r.key.defense, r.key.stage, r.key.batch) == ("none", stage, batch)), None)


def probe_text(row: SettingRow, beside: Iterable[SettingRow]) -> str:
    """Return a row's probe in words; "" where it and all rows in `beside` probe one gradient."""
    every = {r.key.probing for r in (row, *beside)}
    return "" if every == {USUAL_PROBE} else probe_words(row.key.probing)


def figure(record: Figured | None, name: str, form: str, unit: str = "") -> str:
    """Return "35.2 dB [31.0, 40.3]" for a metric, "71.0% [66.2, 75.4]" with the form ".1%", "-" where there is none."""
    metric = record.metric(name) if record is not None else None
    if metric is None or metric.value is None:
        return "-"
    text = f"{metric.value:{form}}{unit}"
    if metric.low is not None and metric.high is not None:
        text += f" [{metric.low:{form}}, {metric.high:{form}}]".replace("%", "")
    return text


def decibels(record: Figured | None) -> str:
    """Return a median PSNR with its interval."""
    return figure(record, "psnr_median", ".1f", " dB")


def attack_at(attack: str, control: str) -> str:
    """Return an attack with the control value, as "dlg, sigma=0.1"."""
    return f"{attack}, {control}" if control else attack


def listed_values(labels: Sequence[str]) -> str:
    """Return "kappa=1, 10 and 100": control values of one defense in words, with their common name once."""
    names = {label.partition("=")[0] for label in labels}
    plain = all("=" in label and " " not in label for label in labels)
    words = [label.partition("=")[2] for label in labels] if plain and len(names) == 1 else list(labels)
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"{names.pop()}={text}" if plain and len(names) == 1 else text


def utility_text(utility: Utility, undefended: Utility | None) -> str:
    """Return "accuracy 95.0% (96.1% undefended)", "MSE 0.059" for numbers, or "training diverged"."""
    for word, field, form in (("accuracy", "accuracy", ".1%"), ("MSE", "mse", ".3g")):
        value, beside = (None if u is None else getattr(u, field) for u in (utility, undefended))
        if value is not None:
            mark = f", {utility.collapse}" if utility.collapse else ""
            return f"{word} {value:{form}}" + (f" ({beside:{form}} undefended)" if beside is not None else "") + mark
    return "training diverged"
