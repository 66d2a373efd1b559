"""Records as rows of the final tables: the worst case of each kind, and of attacks that do not know the defense."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from ppbench.questions.base import question_for, question_of
from ppbench.records.figure import Figured, best
from ppbench.records.schema import Record, Utility
from ppbench.report.controls import probe_words
from ppbench.report.frame import SETTING, Frame, Key, frame_of
from ppbench.report.worst import WorstCase, worst_of

STAGES = {
    "init": "at random weights",
    "iterate": "of what clients train on",
    "final": "after training",
    "audit": "after a training with canaries",
}
ORDER = ("init", "iterate", "final", "audit")


@dataclass(frozen=True)
class Sides:
    """The worst case over cells of one or several settings of a defense, each setting for itself.

    Attributes:
        plain: of the attacks that take things as they are, or None.
        knowing: of the attacks that know the defense, or None.
        worst: of all attacks, or None.
        plain_tried, knowing_tried: how many cells have a figure.
    """

    plain: WorstCase | None
    knowing: WorstCase | None
    worst: WorstCase | None
    plain_tried: int
    knowing_tried: int

    @staticmethod
    def of(records: Sequence[Record], metric: str) -> Sides:
        """Return the worst cases of `records`, cells of one kind, by `metric`."""
        frame = frame_of(records)
        told = [r for r in frame if (m := r.metric(metric)) is not None and m.value is not None]
        plain, knowing = ([r for r in told if r.config.attack.adaptive == knows] for knows in (False, True))

        def worst(some: Sequence[Record]) -> WorstCase | None:
            return worst_of((row.worst(metric) for row in frame.of(some).by(SETTING).values()), metric)

        return Sides(worst(plain), worst(knowing), worst(told), len(plain), len(knowing))

    @property
    def tried(self) -> int:
        """How many cells there are."""
        return self.plain_tried + self.knowing_tried


@dataclass(frozen=True)
class Row:
    """The cells of one setting that a table has in a row. key: by `SETTING`; control: its control value, as words."""

    key: Key
    control: str
    records: Frame

    @property
    def defense(self) -> str:
        """The defense's name."""
        return self.key.defense

    @property
    def stage(self) -> str:
        """Which model is attacked."""
        return self.key.stage

    @property
    def batch(self) -> int:
        """Examples in a victim's batch."""
        return self.key.batch

    @property
    def threat(self) -> str:
        """Whose view is attacked."""
        return self.key.threat

    @property
    def role(self) -> str:
        """The part that the victims played."""
        return self.key.role

    @property
    def utility(self) -> Utility:
        """What the model is good for."""
        return self.records[0].utility

    @property
    def status(self) -> str:
        """Of the first cell that is not complete, else "complete"."""
        return next((r.status for r in self.records if r.status != "complete"), "complete")

    def of(self, kind: str) -> Frame:
        """Return the cells of one kind of attack."""
        return self.records.of([r for r in self.records if r.config.attack.kind == kind])


@dataclass(frozen=True)
class Line(Row):
    """What uploads give away: a defense at one control value, stage and batch size, over all attacks on it."""

    @cached_property
    def sides(self) -> Sides:
        """What attacks that do not know the defense, and all, rebuild of each victim at best."""
        return Sides.of(self.of("reconstruction"), "psnr_median")

    @property
    def plain(self) -> WorstCase | None:
        """What attacks that do not know the defense rebuild."""
        return self.sides.plain

    @property
    def worst(self) -> WorstCase | None:
        """What all attacks rebuild."""
        return self.sides.worst

    @cached_property
    def labels(self) -> Record | None:
        """The strongest recovery of labels; targets that are numbers have none."""
        some = [r for r in self.records if r.config.model.classes > 1]
        return best(some, "label_accuracy")

    @cached_property
    def tracing(self) -> Record | None:
        """The strongest tracing."""
        return best(self.of("tracing"), "tracing_accuracy")

    @property
    def adaptive(self) -> bool:
        """Whether an attack that knows the defense was the strongest of those tried on some victim."""
        return self.worst is not None and self.worst.knows


@dataclass(frozen=True)
class Held(Row):
    """What a model gives away to who holds it: the one that clients train on ("iterate") or the delivered ("final")."""

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


def labels_of(records: Sequence[Record]) -> dict[str, str]:
    """Return "alpha2=0.1" by cell: the control parameter, what else differs among a defense's records, the role."""
    seen: dict[tuple[str, str], set[object]] = {}

    def known(record: Record) -> dict[str, object]:
        return {**record.config.defense.parameters, "version": record.config.defense.version}

    for record in records:
        for name, parameter in known(record).items():
            seen.setdefault((record.config.defense.id, name), set()).add(parameter)
    found = {}
    for record in records:
        defense = record.config.defense
        words = [] if defense.control is None else [f"{defense.control.name}={defense.control.value:g}"]
        for name, parameter in known(record).items():
            if len(seen[defense.id, name]) > 1 and (defense.control is None or name != defense.control.name):
                words.append(f"{name}={parameter}")
        words += [f"({record.config.role})"] if record.config.role else []
        found[record.cell_id] = " ".join(words)
    return found


Made = TypeVar("Made", bound=Row)


def rows(make: type[Made], records: Sequence[Record], which: Callable[[Record], bool]) -> list[Made]:
    """Return those of `records` that `which` takes as rows, controls first."""
    frame = frame_of(records)
    label = labels_of(frame)
    groups = frame.of([r for r in frame if which(r)]).by(SETTING)
    return sorted((make(key, label[some[0].cell_id], some) for key, some in groups.items()), key=_order)


def lines(records: Sequence[Record]) -> list[Line]:
    """Return the rows on what uploads give away, controls first, then by control value, stage, batch and probe."""
    return rows(Line, records, lambda r: r.config.stage != "audit" and question_for(r).chapter == "uploads")


def held(records: Sequence[Record]) -> list[Held]:
    """Return the rows on what models give away to who holds them, in the same order."""
    return rows(Held, records, lambda r: r.config.stage != "audit" and question_for(r).chapter == "models")


def _order(row: Row) -> tuple[object, ...]:
    rank = {"none": 0, "full_noise": 1}.get(row.defense, 2)
    number = 0.0 if row.key.value is None else row.key.value
    place = row.control, ORDER.index(row.stage), row.batch
    return rank, row.defense, row.threat, number, *place, row.key.probe, row.key.probe_rounds, row.key.text()


def probed(row: Row, beside: Iterable[Row]) -> str:
    """Return what was probed, in words: where it is not one gradient, or where other rows stand beside of another."""
    here = row.key.probe, row.key.probe_rounds
    alone = here == ("gradient", 1) and all((r.key.probe, r.key.probe_rounds) == here for r in beside)
    return "" if alone else probe_words(*here)


def figure(record: Figured | None, name: str, form: str, unit: str = "") -> str:
    """Return "35.2 dB [31.0, 40.3]" for a metric, "71.0% [66.2, 75.4]" with the form ".1%", "-" where there is none."""
    metric = record.metric(name) if record is not None else None
    if metric is None or metric.value is None:
        return "-"
    text = f"{metric.value:{form}}{unit}"
    if metric.low is not None and metric.high is not None:
        text += f" [{metric.low:{form}}, {metric.high:{form}}]".replace("%", "")
    return text


def name_of(row: Row) -> str:
    """Return "spn at alpha2=0.1"."""
    return f"{row.defense} at {row.control}" if row.control else row.defense


def listed(labels: Sequence[str]) -> str:
    """Return "kappa=1, 10 and 100": control values of one defense in words, their common name said once."""
    names = {label.partition("=")[0] for label in labels}
    plain = all("=" in label and " " not in label for label in labels)
    words = [label.partition("=")[2] for label in labels] if plain and len(names) == 1 else list(labels)
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"{names.pop()}={text}" if plain and len(names) == 1 else text


def utility_text(utility: Utility, undefended: Utility | None) -> str:
    """Return "accuracy 95.0% (96.1% undefended)", "MSE 0.059" for numbers, or "training diverged"."""
    if utility.accuracy is not None:
        beside = undefended.accuracy if undefended is not None else None
        return f"accuracy {utility.accuracy:.1%}" + (f" ({beside:.1%} undefended)" if beside is not None else "")
    if utility.mse is not None:
        beside = undefended.mse if undefended is not None else None
        return f"MSE {utility.mse:.3g}" + (f" ({beside:.3g} undefended)" if beside is not None else "")
    return "training diverged"
