"""The head of a page: a table for each evaluation with all its seeds, one row per defense, a verdict in a few words.

A row shows one control value: the usable one that leaks least. How a setting is judged: `ppbench.report.setting`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ppbench.metrics.modality import Modality, modality_of
from ppbench.questions.base import question_of
from ppbench.records.figure import grouped, leakage_value
from ppbench.report.controls import Check, probe_words, rebuilding
from ppbench.report.costs import CostRow
from ppbench.report.entries import Board, Entry
from ppbench.report.findings import Finding, findings_of
from ppbench.report.frame import EVALUATION, TRAINED, Key, key_of
from ppbench.report.leak import SEVERITY
from ppbench.report.learning import advice, learning_of
from ppbench.report.page.boards import JudgedEvaluation, checks_of
from ppbench.report.page.sections import weights_words
from ppbench.report.setting import SeedValue, Setting, Tone, settings_of
from ppbench.report.words import evaluation_titles, listed_values

SEEDLESS = tuple(name for name in EVALUATION if name != "seed")
UNSPLIT = tuple(name for name in SEEDLESS if name != "digest")


@dataclass(frozen=True)
class Standing:
    """One row. value: the setting shown; grid: all settings, best models first; none: the undefended model, or None."""

    value: Setting
    grid: tuple[Setting, ...]
    none: Setting | None
    verdict: str
    tone: Tone

    @property
    def by_control(self) -> tuple[Setting, ...]:
        """All settings, by role and control value."""
        return tuple(sorted(self.grid, key=lambda v: (v.differs, v.entry.key.role, v.entry.key.value or 0.0)))

    @property
    def leaking(self) -> tuple[Setting, ...]:
        """The settings that are shown to leak."""
        return tuple(v for v in self.grid if v.judgement.fate == "falls")

    @property
    def usable(self) -> tuple[Setting, ...]:
        """The settings that are not shown to be unusable."""
        return tuple(v for v in self.grid if v.usable is not False)


def standing_of(grid: Sequence[Setting], none: Setting | None) -> Standing:
    """Return a defense's row beside the undefended.

    The row shows the usable setting that leaks least; of equals, the one that resists unaware attackers best.
    """
    ordered = sorted(grid, key=lambda v: (-v.use, v.entry.name))
    usable = [v for v in ordered if v.usable is not False]
    value = min(usable or ordered, key=_leaking)
    verdict, tone = value.judgement.verdict, value.judgement.tone
    if not usable and value.judgement.fate is not None:
        verdict, tone = f"no usable setting; {verdict}", "warning"
    if value.collapse and value.judgement.fate is not None:
        verdict = f"{verdict}; {value.collapse}"
    return Standing(value, tuple(ordered), none, verdict, tone)


def undefended(none: Setting) -> Standing:
    """Return the row of the undefended model."""
    return Standing(none, (none,), None, "undefended", "info")


def _leaking(setting: Setting) -> tuple[int, int, bool, int, float]:
    order = ("stands", "undecided", None, "falls").index(setting.judgement.fate)
    if setting.leak is None:
        return order, 0, setting.lacking, len(setting.recovered), 0.0
    level = setting.leak.level
    plainly = 0.0 if level == "blind" else _plainly(setting.shown)
    return order, SEVERITY[level], setting.lacking, len(setting.recovered), plainly


def _plainly(value: SeedValue) -> float:
    """Return how much unaware attackers find, larger is more."""
    plain = value.entry.plain
    return leakage_value(None if plain is None else plain.metric(rebuilding(plain)), float("inf"))


@dataclass(frozen=True)
class Overview:
    """One evaluation with all its seeds.

    about: the evaluation in words; checks: those of all its seeds; reliable: whether conclusions may be drawn from some
    seed; headline: metric of the worst case, or ""; scene: judged batch size and weights; rows: `none` first; advice:
    what to change where the undefended model learned too little.
    """

    about: str
    checks: tuple[Check, ...]
    reliable: bool
    headline: str
    scene: str
    rows: tuple[Standing, ...]
    advice: str

    @property
    def compared(self) -> tuple[Standing, ...]:
        """The rows of defenses, without the undefended model's."""
        return tuple(row for row in self.rows if row.value.entry.role == "compared")

    @property
    def modality(self) -> Modality:
        """What kind of data it is of."""
        return modality_of(self.rows[0].value.entry.sample.config)

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return self.rows[0].value.seeds

    @property
    def questions(self) -> bool:
        """Whether anything was attacked; else only costs are reported."""
        values = [row.value for row in self.compared]
        return any(v.leak is not None or any(one.findings for one in v.values) for v in values)

    @property
    def unlearned(self) -> str:
        """A clause where the undefended model learned too little to judge usability; else ""."""
        none = self.compared[0].none if self.compared else None
        if none is None or not self.questions or none.learning.suffices:
            return ""
        count = sum(not learning_of(v.entry.sample.utility).suffices for v in none.values)
        return none.learning.clause + ("" if self.seeds == 1 else f" in {count} of {self.seeds} seeds")

    def has_column(self, name: str) -> bool:
        """Return whether the table needs a column: whether some row has the figure `name`, or "reidentified"."""
        if name == "reidentified":
            return any(v.reidentified is not None for row in self.rows for v in row.grid)
        return any(getattr(row.value, name) is not None for row in self.rows)


def overviews(
    boards: Sequence[Board], evaluations: Sequence[JudgedEvaluation], costs: Sequence[CostRow]
) -> list[Overview]:
    """Return one table per evaluation that has a defense, with all its seeds."""
    rows = grouped((entry for board in boards for entry in board.entries), lambda entry: entry.key.only(EVALUATION))
    paid = {row.entry.key.only(TRAINED): row for row in costs}
    alike = _alike([one for one in evaluations if one.key in rows])
    words = evaluation_titles(alike)
    tables = [
        _overview(about, seeds, part, [one for seed in seeds for one in findings_of(seed.records)], paid)
        for key, seeds in alike.items()
        for about, part in _probed(_with_seeds(words[key], seeds), [entry for one in seeds for entry in rows[one.key]])
    ]
    return [table for table in tables if table.compared]


def _alike(evaluations: Sequence[JudgedEvaluation]) -> dict[Key, list[JudgedEvaluation]]:
    """Return evaluations that differ only in their seeds, by their shared key.

    Where the seed also splits the data into parts, the digests differ: then data of one name and size count as the
    same, unless one seed has two.
    """
    alike: dict[Key, list[JudgedEvaluation]] = {}
    for some in grouped(evaluations, lambda one: (one.key.only(UNSPLIT), one.key.data)).values():
        together = len({one.key.seed for one in some}) == len(some)
        for one in some:
            alike.setdefault((some[0] if together else one).key.only(SEEDLESS), []).append(one)
    return alike


def _with_seeds(about: str, seeds: Sequence[JudgedEvaluation]) -> str:
    """Return an evaluation in words with its seeds: "..., seeds 0, 1 and 2"."""
    numbers = [str(one.key.seed) for one in seeds]
    return f"{about}, seed{'s' if len(numbers) > 1 else ''} {listed_values(numbers)}"


def _probed(about: str, rows: Sequence[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """Yield words and rows of an evaluation for each probe of uploads; rows on models go with each."""
    probes = [None if question_of(entry.key.kind).source == "model" else entry.key.probing for entry in rows]
    several = sorted({probe for probe in probes if probe is not None}, key=lambda probing: probing.order)
    if len(several) < 2:
        yield about, list(rows)
        return
    for one in several:
        some = [entry for entry, probe in zip(rows, probes, strict=True) if probe in (one, None)]
        yield f"{about}, {probe_words(one)}", some


def _overview(
    about: str,
    seeds: Sequence[JudgedEvaluation],
    rows: Sequence[Entry],
    findings: Sequence[Finding],
    paid: Mapping[Key, CostRow],
) -> Overview:
    sound = {one.key for one in seeds if one.reliable}
    grids = settings_of(rows, findings, paid, sound, len(seeds))
    none = next(iter(grids.pop("none", [])), None)
    table = (*([] if none is None else [undefended(none)]), *(standing_of(grid, none) for grid in grids.values()))
    worst = [v.worst for row in table for setting in row.grid for v in setting.values if v.worst is not None]
    scenes = dict.fromkeys(f"batch {case.config.batch_size}, {weights_words(key_of(case.config))}" for case in worst)
    headline = rebuilding(worst[0]) if worst else ""
    federation = rows[0].sample.config.federation
    return Overview(about, checks_of(seeds), bool(sound), headline, " or ".join(scenes), table, advice(federation))
