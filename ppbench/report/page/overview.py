"""The head of a page: a table for each evaluation with all its seeds, one row per defense, a verdict in a few words.

A row shows one control value: the usable one that leaks least. A setting is judged over all seeds, by the worst case at
the smallest batch, at initialization where that was attacked, over all adversaries and roles. Nothing is concluded
where controls fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from ppbench.metrics.modality import Modality, modality_of
from ppbench.questions.base import question_of
from ppbench.questions.membership import ASR, BATCH_ASR, CANARY_AUC, CANARY_TPR_1
from ppbench.records.figure import best, leakage_value
from ppbench.records.schema import Record
from ppbench.report.controls import BROKEN_SHARE, Check, nothing_to_read, probe_words, taken_share
from ppbench.report.frame import EVALUATION, TRAINED, Key
from ppbench.report.leak import SEVERITY
from ppbench.report.learning import advice, learning_of
from ppbench.report.page.costs import CostRow
from ppbench.report.page.entries import Board, Entry
from ppbench.report.page.evaluations import JudgedEvaluation, checks_of, evaluation_titles, key_differences
from ppbench.report.page.sections import weights_words
from ppbench.report.page.standing import SeedValue, Setting, Standing, standing_of, undefended
from ppbench.report.verdict.lines import listed_values

BoardRows = list[tuple[Board, Entry]]
Broken = Set[tuple[int, int | None]]
"""(id of a board, seed) pairs at which the undefended model falls."""
SEEDLESS = tuple(name for name in EVALUATION if name != "seed")
UNSPLIT = tuple(name for name in SEEDLESS if name != "digest")
_SETTING = tuple(name for name in TRAINED if name not in ("seed", "digest"))


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
        return any(v.leak is not None or any((v.members, v.batch, v.canaries, v.outputs)) for v in values)

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
    rows: dict[Key, BoardRows] = {}
    for board in boards:
        for entry in board.entries:
            rows.setdefault(entry.key.only(EVALUATION), []).append((board, entry))
    paid = {row.entry.key.only(TRAINED): row for row in costs}
    alike = _alike([one for one in evaluations if one.key in rows])
    words = evaluation_titles(alike)
    tables = [
        _overview(about, seeds, part, paid)
        for key, seeds in alike.items()
        for about, part in _probed(_with_seeds(words[key], seeds), [pair for one in seeds for pair in rows[one.key]])
    ]
    return [table for table in tables if table.compared]


def _alike(evaluations: Sequence[JudgedEvaluation]) -> dict[Key, list[JudgedEvaluation]]:
    """Return evaluations that differ only in their seeds, by their shared key.

    Where the seed also splits the data into parts, the digests differ: then data of one name and size count as the
    same, unless one seed has two.
    """
    groups: dict[tuple[Key, str], list[JudgedEvaluation]] = {}
    for one in evaluations:
        groups.setdefault((one.key.only(UNSPLIT), one.key.data), []).append(one)
    alike: dict[Key, list[JudgedEvaluation]] = {}
    for some in groups.values():
        together = len({one.key.seed for one in some}) == len(some)
        for one in some:
            alike.setdefault((some[0] if together else one).key.only(SEEDLESS), []).append(one)
    return alike


def _with_seeds(about: str, seeds: Sequence[JudgedEvaluation]) -> str:
    """Return an evaluation in words with its seeds: "..., seeds 0, 1 and 2"."""
    numbers = [str(one.key.seed) for one in seeds]
    return f"{about}, seed{'s' if len(numbers) > 1 else ''} {listed_values(numbers)}"


def _probed(about: str, rows: BoardRows) -> Iterator[tuple[str, BoardRows]]:
    """Yield words and rows of an evaluation for each probe of uploads; rows on models go with each."""
    probes = {id(b): b.setting.probing for b, _ in rows if not _of_model(b)}
    if len(set(probes.values())) < 2:
        yield about, rows
        return
    for probe in sorted(set(probes.values()), key=lambda probing: probing.order):
        some = [(board, entry) for board, entry in rows if probes.get(id(board), probe) == probe]
        yield f"{about}, {probe_words(probe)}", some


def _of_model(board: Board) -> bool:
    return question_of(board.setting.kind).source == "model"


def _overview(about: str, seeds: Sequence[JudgedEvaluation], rows: BoardRows, paid: dict[Key, CostRow]) -> Overview:
    main, broken = _main(rows), {(id(board), entry.key.seed) for board, entry in rows if _breaks(entry)}
    sound = {one.key for one in seeds if one.reliable}
    trained: dict[Key, BoardRows] = {}
    for board, entry in rows:
        if entry.defense.id != "full_noise":
            trained.setdefault(entry.key.only(TRAINED), []).append((board, entry))
    settings: dict[Key, list[SeedValue]] = {}
    for key in sorted(trained, key=Key.text):
        reliable = key.only(EVALUATION) in sound
        value = _value(trained[key], main, broken, paid.get(key), reliable)
        settings.setdefault(key.only(_SETTING), []).append(value)
    grids: dict[str, list[Key]] = {}
    for key in settings:
        grids.setdefault(key.defense, []).append(key)
    plain = next((Setting(tuple(settings[key]), None, len(seeds)) for key in grids.pop("none", [])), None)
    words = key_differences(list(settings))
    compared = [
        standing_of([Setting(tuple(settings[key]), plain, len(seeds), len(grid), words[key]) for key in grid], plain)
        for _, grid in sorted(grids.items())
    ]
    headline = next((board.headline for board, entry in rows if board in main and entry.worst is not None), "")
    setting = main[0].setting if main and headline else None
    scene = "" if setting is None else f"batch {setting.batch}, {weights_words(setting)}"
    federation = rows[0][1].sample.config.federation
    table = (*([] if plain is None else [undefended(plain)]), *compared)
    return Overview(about, checks_of(seeds), bool(sound), headline, scene, table, advice(federation))


def _main(rows: BoardRows) -> list[Board]:
    """Return the judged boards: of uploads at the smallest batch, at initialization where that was attacked."""
    uploads = [b for b, _ in rows if question_of(b.setting.kind).inputs]
    uploads = [b for b in uploads if b.setting.stage == "init"] or uploads
    smallest = min((b.setting.batch for b in uploads), default=0)
    return list({id(b): b for b in uploads if b.setting.batch == smallest}.values())


def _breaks(entry: Entry) -> bool:
    """Return whether a row is of the undefended model, and half of its victims are rebuilt or re-identified."""
    return entry.defense.id == "none" and entry.worst is not None and taken_share(entry.worst) >= BROKEN_SHARE


def _value(rows: BoardRows, main: Sequence[Board], broken: Broken, cost: CostRow | None, reliable: bool) -> SeedValue:
    """Return the results of one setting at one seed, from its rows on all boards."""
    judged = [(board, entry) for board, entry in rows if any(board is one for one in main)]
    measured = [(board, entry) for board, entry in judged if entry.worst is not None]
    _, entry = max(measured or judged or rows, key=_severity)
    members, extracted = (
        [r for b, e in rows if b.setting.kind == kind for r in e.records] for kind in ("membership", "extraction")
    )
    outputs = [r for r in extracted if r.config.stage == "iterate"]
    everything = [r for _, e in rows for r in e.records]
    return SeedValue(
        entry=entry,
        leak=entry.leak if judged else None,
        labels=best([e.labels for _, e in judged if e.labels is not None], "label_accuracy"),
        batch=best([r for r in everything if _beside(r, entry)], BATCH_ASR.name),
        members=best([r for r in members if r.config.stage != "audit"], ASR.name),
        canaries=best([r for r in members if r.config.stage == "audit"], CANARY_TPR_1.name),
        membership=tuple((m.name, top) for m in (ASR, CANARY_AUC) if (top := best(members, m.name)) is not None),
        outputs=best(outputs, "agreement") or best(outputs, "output_error"),
        tried=len(members),
        reliable=reliable and all((id(b), e.key.seed) in broken for b, e in measured),
        lacking=any(r.status != "complete" and not nothing_to_read(r) for _, e in judged or rows for r in e.records),
        cost=cost,
    )


def _beside(record: Record, entry: Entry) -> bool:
    """Return whether a cell attacks the members of a batch in a row's scene."""
    one, other = record.config, entry.sample.config
    scenes = [(c.threat_model.id, c.stage, c.batch_size, c.probing, c.role) for c in (one, other)]
    return record.metric(BATCH_ASR.name) is not None and scenes[0] == scenes[1]


def _severity(pair: tuple[Board, Entry]) -> tuple[int, float]:
    board, entry = pair
    metric = entry.worst.metric(board.headline) if entry.worst is not None else None
    level = -1 if entry.leak is None else SEVERITY[entry.leak.level]
    return level, -float("inf") if metric is None or metric.value is None else leakage_value(metric)
