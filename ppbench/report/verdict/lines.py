"""Records as rows of the final tables: the strongest cell of each kind, those that know the defense apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ppbench.questions.base import asked
from ppbench.records.schema import Record, Utility
from ppbench.report.controls import best
from ppbench.report.portfolio import worst_case

STAGES = {
    "init": "at random weights",
    "iterate": "of what clients train on",
    "final": "after training",
    "audit": "after a training with canaries",
}
ORDER = ("init", "iterate", "final", "audit")


class Key(NamedTuple):
    """What the cells of one row share."""

    defense: str
    control: str
    stage: str
    batch: int
    threat: str


@dataclass(frozen=True)
class Strongest:
    """The strongest cells of one kind.

    Attributes:
        plain: of the attacks that take things as they are, or None.
        knowing: of the attacks that know the defense, or None.
        plain_tried, knowing_tried: how many cells each is the strongest of.
    """

    plain: Record | None = None
    knowing: Record | None = None
    plain_tried: int = 0
    knowing_tried: int = 0

    @staticmethod
    def of(records: Iterable[Record], metric: str) -> Strongest:
        """Return the strongest of `records` by `metric`."""
        told = [r for r in records if (m := r.metric(metric)) is not None and m.value is not None]
        plain = [r for r in told if not r.config.attack.adaptive]
        knowing = [r for r in told if r.config.attack.adaptive]
        return Strongest(best(plain, metric), best(knowing, metric), len(plain), len(knowing))

    @property
    def tried(self) -> int:
        """How many cells there are."""
        return self.plain_tried + self.knowing_tried

    def worst(self, metric: str) -> Record | None:
        """Return the stronger of both."""
        return best([r for r in (self.plain, self.knowing) if r is not None], metric)


@dataclass(frozen=True)
class Line:
    """What uploads give away: a defense at one control value, stage and batch size, over all attacks on it.

    plain, worst: what attacks that do not know the defense, and all, rebuild of each victim at best (`worst_case`);
    labels, tracing: the strongest cell of each kind; targets that are numbers have no labels. role: the part that the
    victims played.
    """

    defense: str
    control: str
    stage: str
    batch: int
    threat: str
    utility: Utility
    plain: Record | None
    worst: Record | None
    labels: Record | None
    tracing: Record | None
    status: str
    role: str

    @property
    def adaptive(self) -> bool:
        """Whether an attack that knows the defense was the strongest of those tried."""
        return self.worst is not None and self.worst.config.attack.adaptive


@dataclass(frozen=True)
class Held:
    """What a model gives away to who holds it: the one that clients train on ("iterate") or the delivered ("final").

    members: membership cells by ASR; outputs: extraction cells by `extraction_metric`.
    """

    defense: str
    control: str
    stage: str
    threat: str
    utility: Utility
    members: Strongest
    outputs: Strongest
    status: str


def extraction_metric(records: Iterable[Record]) -> str:
    """Return the metric of extraction: agreement of decisions, or where there are no classes the relative error."""
    classes = next((r.config.model.classes for r in records), 2)
    return "agreement" if classes > 1 else "output_error"


def labels_of(records: Sequence[Record]) -> dict[str, str]:
    """Return "alpha2=0.1" by cell: the control parameter, others that differ among a defense's records, the role."""
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
        words += [f"({record.config.role})"] if record.config.role else []
        found[record.cell_id] = " ".join(words)
    return found


def grouped(records: Sequence[Record], which: Callable[[Record], bool]) -> list[tuple[Key, list[Record]]]:
    """Return those of `records` that `which` takes by the rows that they belong to, controls first, then by control."""
    label = labels_of(records)
    groups: dict[Key, list[Record]] = {}
    for record in records:
        config = record.config
        if which(record):
            key = Key(config.defense.id, label[record.cell_id], config.stage, config.batch_size, config.threat_model.id)
            groups.setdefault(key, []).append(record)
    return sorted(groups.items(), key=lambda pair: (*_order(pair[0]), pair[0].batch))


def _asks(about_records: bool) -> Callable[[Record], bool]:
    """Return what takes cells that ask about records, or about probes; audits have rows of their own."""

    def which(record: Record) -> bool:
        config = record.config
        return config.stage != "audit" and asked(record).chapter == ("models" if about_records else "uploads")

    return which


def lines(records: Sequence[Record]) -> list[Line]:
    """Return the rows on what uploads give away, controls first, then by control value, stage and batch."""
    return [_line(key, some) for key, some in grouped(records, _asks(False))]


def held(records: Sequence[Record]) -> list[Held]:
    """Return the rows on what models give away to who holds them, in the same order."""
    return [_held(key, some) for key, some in grouped(records, _asks(True))]


def _line(key: Key, records: Sequence[Record]) -> Line:
    images = [r for r in records if r.config.attack.kind == "reconstruction"]
    labelled = [r for r in records if r.config.attack.kind != "tracing" and r.config.model.classes > 1]
    return Line(
        *key,
        records[0].utility,
        worst_case([r for r in images if not r.config.attack.adaptive]),
        worst_case(images),
        best(labelled, "label_accuracy"),
        best([r for r in records if r.config.attack.kind == "tracing"], "tracing_accuracy"),
        _status(records),
        records[0].config.role,
    )


def _held(key: Key, records: Sequence[Record]) -> Held:
    members = [r for r in records if r.config.attack.kind == "membership"]
    outputs = [r for r in records if r.config.attack.kind == "extraction"]
    return Held(
        key.defense,
        key.control,
        key.stage,
        key.threat,
        records[0].utility,
        Strongest.of(members, "asr"),
        Strongest.of(outputs, extraction_metric(outputs)),
        _status(records),
    )


def _status(records: Sequence[Record]) -> str:
    return next((r.status for r in records if r.status != "complete"), "complete")


def _order(row: Key) -> tuple[int, str, str, float, str, int]:
    rank = {"none": 0, "full_noise": 1}.get(row.defense, 2)
    word = row.control.partition(" ")[0].partition("=")[2]
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    return rank, row.defense, row.threat, number, row.control, ORDER.index(row.stage)


def figure(record: Record | None, name: str, form: str, unit: str = "") -> str:
    """Return "35.2 dB [31.0, 40.3]" for a metric, "71.0% [66.2, 75.4]" with the form ".1%", "-" where there is none."""
    metric = record.metric(name) if record is not None else None
    if metric is None or metric.value is None:
        return "-"
    text = f"{metric.value:{form}}{unit}"
    if metric.low is not None and metric.high is not None:
        text += f" [{metric.low:{form}}, {metric.high:{form}}]".replace("%", "")
    return text


def name_of(row: Line | Held) -> str:
    """Return "spn at alpha2=0.1"."""
    return f"{row.defense} at {row.control}" if row.control else row.defense


def listed(labels: Sequence[str]) -> str:
    """Return "kappa=1, 10 and 100": control values of one defense in words, their common name said once."""
    names = {label.partition("=")[0] for label in labels}
    plain = all("=" in label and " " not in label for label in labels)
    words = [label.partition("=")[2] for label in labels] if plain and len(names) == 1 else list(labels)
    text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
    return f"{names.pop()}={text}" if plain and len(names) == 1 else text


def attack_of(record: Record | None) -> str:
    """Return the name of a cell's attack, "-" for none."""
    return "-" if record is None else record.config.attack.id


def utility_text(utility: Utility, undefended: Utility | None) -> str:
    """Return "accuracy 95.0% (96.1% undefended)", "MSE 0.059" for numbers, or "training diverged"."""
    if utility.accuracy is not None:
        beside = undefended.accuracy if undefended is not None else None
        return f"accuracy {utility.accuracy:.1%}" + (f" ({beside:.1%} undefended)" if beside is not None else "")
    if utility.mse is not None:
        beside = undefended.mse if undefended is not None else None
        return f"MSE {utility.mse:.3g}" + (f" ({beside:.3g} undefended)" if beside is not None else "")
    return "training diverged"
