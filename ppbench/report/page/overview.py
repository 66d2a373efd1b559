"""The head of a page: a table for each evaluation with all its seeds, one row per defense, a verdict in a few words.

A row tells of one control value: of the usable ones, which lose few points of accuracy, the one that leaks least. A
setting is judged over all seeds.
Judged is the worst case at the smallest batch, at initialization where that was attacked, over all adversaries and
roles. Nothing is concluded where controls fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from ppbench.metrics.modalities import modality_of
from ppbench.metrics.modality import Modality
from ppbench.questions.base import question_of
from ppbench.records.figure import best, leak
from ppbench.records.schema import Record
from ppbench.report.controls import BROKEN, Check, probe_words, taken_share, unread
from ppbench.report.frame import EVALUATION, TRAINED, Key
from ppbench.report.leak import SEVERITY
from ppbench.report.learning import advice, learning_of
from ppbench.report.page.costs import CostRow
from ppbench.report.page.entries import Board, Entry
from ppbench.report.page.evaluations import Judged, abouts, checks_of, differences
from ppbench.report.page.sections import weights
from ppbench.report.page.standing import Setting, Standing, Value, standing, undefended
from ppbench.report.verdict.lines import listed

Rows = list[tuple[Board, Entry]]
Broken = Set[tuple[int, int | None]]
"""Boards, by identity, and seeds at which the undefended model falls."""
SEEDLESS = tuple(name for name in EVALUATION if name != "seed")
UNSPLIT = tuple(name for name in SEEDLESS if name != "digest")
_SETTING = tuple(name for name in TRAINED if name not in ("seed", "digest"))
BATCH = "batch_asr"
AUC, ASR, TPR = "canary_auc", "asr", "canary_tpr_at_1pct_fpr"


@dataclass(frozen=True)
class Overview:
    """One evaluation with all its seeds.

    about: what it is of, in words; checks: those of all its seeds; reliable: whether something may be concluded from
    some seed; headline: metric of the worst case, "" for none; scene: batch size and weights that are judged; rows:
    `none` first; advice: what to change where the undefended model learned too little.
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
        """With how many seeds it was done."""
        return self.rows[0].value.seeds

    @property
    def questions(self) -> bool:
        """Whether something was attacked that a defense could fall to; else what is told is what it costs."""
        values = [row.value for row in self.compared]
        return any(v.leak is not None or any((v.members, v.batch, v.canaries, v.outputs)) for v in values)

    @property
    def unlearned(self) -> str:
        """What the undefended model learned, as a clause, where that is too little to judge usability by; else ""."""
        none = self.compared[0].none if self.compared else None
        if none is None or not self.questions or none.learning.suffices:
            return ""
        count = sum(not learning_of(v.entry.sample.utility).suffices for v in none.values)
        return none.learning.clause + ("" if self.seeds == 1 else f" in {count} of {self.seeds} seeds")

    def tells(self, name: str) -> bool:
        """Return whether some row has that figure of a setting, or "reidentified": the table has a column of it."""
        if name == "reidentified":
            return any(v.found_again is not None for row in self.rows for v in row.grid)
        return any(getattr(row.value, name) is not None for row in self.rows)


def overviews(found: Sequence[Board], evaluations: Sequence[Judged], costs: Sequence[CostRow]) -> list[Overview]:
    """Return a table for each evaluation that has a defense, all its seeds in one; boards and costs: of its records."""
    rows: dict[Key, Rows] = {}
    for board in found:
        for entry in board.entries:
            rows.setdefault(entry.key.only(EVALUATION), []).append((board, entry))
    paid = {row.entry.key.only(TRAINED): row for row in costs}
    alike = _alike([one for one in evaluations if one.key in rows])
    words = abouts(alike)
    tables = [
        _overview(about, seeds, part, paid)
        for key, seeds in alike.items()
        for about, part in _probed(_with_seeds(words[key], seeds), [pair for one in seeds for pair in rows[one.key]])
    ]
    return [table for table in tables if table.compared]


def _alike(evaluations: Sequence[Judged]) -> dict[Key, list[Judged]]:
    """Return evaluations that differ in their seeds alone, by what they share.

    Where the seed also splits a user's data into parts, the digests differ: those of one name and size are the same
    data, unless one seed has two.
    """
    groups: dict[tuple[Key, str], list[Judged]] = {}
    for one in evaluations:
        groups.setdefault((one.key.only(UNSPLIT), one.key.data), []).append(one)
    alike: dict[Key, list[Judged]] = {}
    for some in groups.values():
        together = len({one.key.seed for one in some}) == len(some)
        for one in some:
            alike.setdefault((some[0] if together else one).key.only(SEEDLESS), []).append(one)
    return alike


def _with_seeds(about: str, seeds: Sequence[Judged]) -> str:
    """Return an evaluation in words with its seeds: "..., seeds 0, 1 and 2"."""
    numbers = [str(one.key.seed) for one in seeds]
    return f"{about}, seed{'s' if len(numbers) > 1 else ''} {listed(numbers)}"


def _probed(about: str, rows: Rows) -> Iterator[tuple[str, Rows]]:
    """Yield an evaluation's rows in words, one probe's uploads at a time; what asks about models goes with each."""
    probes = {id(b): (b.setting.probe, b.setting.probe_rounds) for b, _ in rows if not _of_model(b)}
    if len(set(probes.values())) < 2:
        yield about, rows
        return
    for probe in sorted(set(probes.values())):
        some = [(board, entry) for board, entry in rows if probes.get(id(board), probe) == probe]
        yield f"{about}, {probe_words(*probe)}", some


def _of_model(board: Board) -> bool:
    return question_of(board.setting.kind).source == "model"


def _overview(about: str, seeds: Sequence[Judged], rows: Rows, paid: dict[Key, CostRow]) -> Overview:
    main, broken = _main(rows), {(id(board), entry.key.seed) for board, entry in rows if _breaks(entry)}
    sound = {one.key for one in seeds if one.reliable}
    trained: dict[Key, Rows] = {}
    for board, entry in rows:
        if entry.defense.id != "full_noise":
            trained.setdefault(entry.key.only(TRAINED), []).append((board, entry))
    settings: dict[Key, list[Value]] = {}
    for key in sorted(trained, key=Key.text):
        reliable = key.only(EVALUATION) in sound
        value = _value(trained[key], main, broken, paid.get(key), reliable)
        settings.setdefault(key.only(_SETTING), []).append(value)
    grids: dict[str, list[Key]] = {}
    for key in settings:
        grids.setdefault(key.defense, []).append(key)
    plain = next((Setting(tuple(settings[key]), None, len(seeds)) for key in grids.pop("none", [])), None)
    words = differences(list(settings))
    compared = [
        standing([Setting(tuple(settings[key]), plain, len(seeds), len(grid), words[key]) for key in grid], plain)
        for _, grid in sorted(grids.items())
    ]
    headline = next((board.headline for board, entry in rows if board in main and entry.worst is not None), "")
    setting = main[0].setting if main and headline else None
    scene = "" if setting is None else f"batch {setting.batch}, {weights(setting)}"
    federation = rows[0][1].sample.config.federation
    table = (*([] if plain is None else [undefended(plain)]), *compared)
    return Overview(about, checks_of(seeds), bool(sound), headline, scene, table, advice(federation))


def _main(rows: Rows) -> list[Board]:
    """Return the boards that are judged: uploads at the smallest batch, at initialization where that was attacked."""
    uploads = [b for b, _ in rows if question_of(b.setting.kind).inputs]
    uploads = [b for b in uploads if b.setting.stage == "init"] or uploads
    smallest = min((b.setting.batch for b in uploads), default=0)
    return list({id(b): b for b in uploads if b.setting.batch == smallest}.values())


def _breaks(entry: Entry) -> bool:
    """Return whether a row is of the undefended model, and half of its victims are rebuilt or found again."""
    return entry.defense.id == "none" and entry.worst is not None and taken_share(entry.worst) >= BROKEN


def _value(rows: Rows, main: Sequence[Board], broken: Broken, cost: CostRow | None, reliable: bool) -> Value:
    """Return what all questions gave of one setting at one seed, by its rows."""
    judged = [(board, entry) for board, entry in rows if any(board is one for one in main)]
    told = [(board, entry) for board, entry in judged if entry.worst is not None]
    _, entry = max(told or judged or rows, key=_severity)
    members, extracted = (
        [r for b, e in rows if b.setting.kind == kind for r in e.records] for kind in ("membership", "extraction")
    )
    outputs = [r for r in extracted if r.config.stage == "iterate"]
    everything = [r for _, e in rows for r in e.records]
    return Value(
        entry=entry,
        leak=entry.leak if judged else None,
        labels=best([e.labels for _, e in judged if e.labels is not None], "label_accuracy"),
        batch=best([r for r in everything if _beside(r, entry)], BATCH),
        members=best([r for r in members if r.config.stage != "audit"], ASR),
        canaries=best([r for r in members if r.config.stage == "audit"], TPR),
        found=tuple((name, top) for name in (ASR, AUC) if (top := best(members, name)) is not None),
        outputs=best(outputs, "agreement") or best(outputs, "output_error"),
        tried=len(members),
        reliable=reliable and all((id(b), e.key.seed) in broken for b, e in told),
        lacking=any(r.status != "complete" and not unread(r) for _, e in judged or rows for r in e.records),
        cost=cost,
    )


def _beside(record: Record, entry: Entry) -> bool:
    """Return whether a cell asks who was in a batch, in the scene of a row: its adversary, stage, batch and role."""
    one, other = record.config, entry.sample.config
    scenes = [(c.threat_model.id, c.stage, c.batch_size, c.probe, c.probe_rounds, c.role) for c in (one, other)]
    return record.metric(BATCH) is not None and scenes[0] == scenes[1]


def _severity(pair: tuple[Board, Entry]) -> tuple[int, float]:
    board, entry = pair
    metric = entry.worst.metric(board.headline) if entry.worst is not None else None
    level = -1 if entry.leak is None else SEVERITY[entry.leak.level]
    return level, -float("inf") if metric is None or metric.value is None else leak(metric)
