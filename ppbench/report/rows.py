"""Settings in one scene at one seed: the rows of the final tables and the subjects of sentences and findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from ppbench.questions.base import question_for, question_of
from ppbench.questions.exposure import EXPOSURE
from ppbench.records.figure import Figured, best, grouped
from ppbench.records.schema import USUAL_PROBE, Record, Utility
from ppbench.report.controls import easiest, probe_words
from ppbench.report.frame import SETTING, TRAINED, Frame, Key, frame_of
from ppbench.report.leak import Leak
from ppbench.report.words import STAGE_ORDER, setting_labels
from ppbench.report.worst import WorstCase, worst_of


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
    """The cells of one setting in one scene at one seed.

    key: by `SETTING`; control: the control value in words; leak: that of inputs, None where none were attacked.
    """

    key: Key
    control: str
    records: Frame
    leak: Leak | None = None

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

    @property
    def worst(self) -> WorstCase | None:
        """The worst case of reconstructions."""
        return None if self.leak is None else self.leak.worst

    @property
    def plain(self) -> WorstCase | None:
        """The worst case of reconstructions by unaware attackers."""
        return None if self.leak is None else self.leak.unaware.worst

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


def _rows(
    records: Sequence[Record], which: Callable[[Record], bool], leaks: Mapping[Key, Leak] | None = None
) -> list[SettingRow]:
    """Return the records selected by `which` as rows: controls first, then by control value, stage and batch."""
    frame = frame_of(records)
    label = setting_labels(frame)
    groups = frame.of([r for r in frame if which(r)]).by(SETTING)
    rows = [SettingRow(key, label[some[0].cell_id], some, (leaks or {}).get(key)) for key, some in groups.items()]
    return sorted(rows, key=_order)


def _order(row: SettingRow) -> tuple[object, ...]:
    key = row.key
    rank = {"none": 0, "full_noise": 1}.get(key.defense, 2)
    number = 0.0 if key.value is None else key.value
    place = row.control, STAGE_ORDER.index(key.stage), key.batch
    return rank, key.defense, key.threat, number, *place, *key.probing.order, key.text()


def upload_rows(records: Sequence[Record], leaks: Mapping[Key, Leak] | None = None) -> list[SettingRow]:
    """Return the rows on what uploads give away. leaks: those of inputs, by `leaks_of`."""
    return _rows(records, lambda r: r.config.stage != "audit" and question_for(r).chapter == "uploads", leaks)


def model_rows(records: Sequence[Record]) -> list[SettingRow]:
    """Return the rows on what models give away to their holders: those trained on, and those delivered."""
    return _rows(records, lambda r: r.config.stage != "audit" and question_for(r).chapter == "models")


def audit_rows(records: Sequence[Record]) -> list[SettingRow]:
    """Return the rows of all audits: one per defense, control value, adversary and audit."""
    return _rows(records, lambda r: r.config.stage == "audit" and bool(question_for(r).chapter))


def secret_rows(records: Sequence[Record]) -> list[SettingRow]:
    """Return the rows on secrets of texts that audits plant."""
    return _rows(records, lambda r: r.metric(EXPOSURE.name) is not None)


def judged_keys(keys: Iterable[Key], *preferred: Set[Key]) -> set[Key]:
    """Return those settings whose scene is judged for its training, adversary, probe and role: the easiest (`easiest`).

    preferred: settings whose scenes come first, if there are any, in this order: a leak in one scene counts.
    """
    groups = grouped(keys, lambda key: key.only((*TRAINED, "threat", "auxiliary", "probing", "role")))
    judged = set[Key]()
    for some in groups.values():
        first = next((own for these in preferred if (own := [key for key in some if key in these])), some)
        judged |= {*easiest(first, lambda key: (key.stage, key.batch))}
    return judged


def judged_leaks(leaks: Mapping[Key, Leak]) -> set[Key]:
    """Return the settings, by `SETTING`, in whose scene inputs are judged: where they leak, else the easiest.

    A scene in which attacks failed, and the undefended model falls, comes before the easiest: it is undecided.
    """
    falling = {key for key, leak in leaks.items() if leak.falls}
    failed = {key for key, leak in leaks.items() if leak.lacking and leak.undefended and leak.undefended.falls}
    return judged_keys(leaks, falling, failed)


def probe_text(row: SettingRow, beside: Iterable[SettingRow]) -> str:
    """Return a row's probe in words; "" where it and all rows in `beside` probe one gradient."""
    every = {r.key.probing for r in (row, *beside)}
    return "" if every == {USUAL_PROBE} else probe_words(row.key.probing)
