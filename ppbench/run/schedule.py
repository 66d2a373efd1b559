"""The cells to compute, and their order: each training once, then the cells that attack it.

Evaluations of a sweep share trainings and cells (mostly of the controls). The first answer of an evaluation is given
before anything is trained: its cells at random weights run first, as drafts (`group.draft_group`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ppbench.base.bars import Bars
from ppbench.base.errors import PluginError, Unwritable
from ppbench.base.machine import of_machine
from ppbench.questions.base import question_of
from ppbench.records.schema import CellConfig, Record
from ppbench.records.store import Store
from ppbench.report.controls import nothing_to_read
from ppbench.run.audit.runs import TARGET, PointAudit, Refused
from ppbench.run.cells import Cell, CellGroup, cells, groups
from ppbench.run.experiment import Experiment
from ppbench.run.group import drafts_of, keep_failed
from ppbench.run.jobs import OPEN, Done, Executor, Gate, WorkerDied, WorkItem
from ppbench.run.train import home_of, is_trained

# -- Gated searches: exact attacks come first, and the undefended model before its defended versions --
# The quick portfolio (`--attack quick`, the default) leaves two kinds of searches out; `standard` and `all` run all.
# Where an attack that computes inputs (`Attack.exact`) solved every victim, no search can do better. Attacks that know
# the defense still run: they solve first too, and show what knowledge adds.
# Where the undefended model withstood the searches of a stage and a batch size, defended uploads are not searched,
# but for the first answer: the smallest batch at the first stage. The limit: a defense may leak more than none at all,
# as `ppdl` does on trained MNIST networks (18.4 dB where `none` gives 11.8; there `none` falls too, so the search
# runs). Where the undefended model withstands, such a leak goes unseen.


def gates_searches(experiment: Experiment) -> bool:
    """Return whether an evaluation gates its searches."""
    return "quick" in experiment.config.attacks


def searches(cell: Cell) -> bool:
    """Return whether a cell searches for inputs, or follows one that does."""
    return question_of(cell.attack.kind).inputs or cell.follows is not None


def in_first_answer(experiment: Experiment, group: CellGroup) -> bool:
    """Return whether a group belongs to the first answer: the smallest batch at the first stage.

    Where that is the final model, questions about records belong to it too.
    """
    config = experiment.config
    first = "init" if "init" in config.stages else "final"
    return group.stage == first and (group.records or group.batch == min(config.attack_batch))


def gate_of(experiment: Experiment, group: CellGroup) -> frozenset[str]:
    """Return the names of the cells of `none` that decide whether a group is searched; empty if it always is."""
    names = [point.defense.name for point in experiment.points]
    probed = not group.records and group.stage != "audit"
    if (
        not gates_searches(experiment)
        or not probed
        or in_first_answer(experiment, group)
        or names[group.point] == "none"
    ):
        return frozenset()
    beside = replace(group, point=names.index("none"), role="")
    return frozenset(cell.id for cell in cells(experiment, beside) if searches(cell))


def is_redundant(experiment: Experiment, group: CellGroup) -> bool:
    """Return whether searching a group repeats another: pure noise is the same at every stage and batch size."""
    alone = experiment.points[group.point].defense.name == "full_noise" != experiment.config.defense
    return gates_searches(experiment) and alone and not group.records and not in_first_answer(experiment, group)


@dataclass(frozen=True)
class PlannedCells:
    """Cells of one group of one evaluation that are to be computed.

    gate: cells that run first, and decide whether these are skipped.
    """

    experiment: Experiment
    group: CellGroup
    cells: tuple[Cell, ...]
    gate: Gate = OPEN


def plan_cells(
    experiments: Sequence[Experiment], before: Callable[[Experiment], object] = lambda _: None
) -> list[PlannedCells]:
    """Return the cells of all `experiments`, each once; `before` is called on each experiment first, and may raise."""
    seen: set[str] = set()
    planned = []
    for experiment in experiments:
        before(experiment)
        for group in groups(experiment):
            new = [c for c in cells(experiment, group) if c.id not in seen]
            seen.update(c.id for c in new)
            planned += [part for part in _parts(experiment, group, new) if part.cells]
    return planned


def _parts(experiment: Experiment, group: CellGroup, chosen: Sequence[Cell]) -> list[PlannedCells]:
    """Return a group's cells in parts: searches may wait for a gate, and redundant searches are dropped."""
    if not gates_searches(experiment):
        return [PlannedCells(experiment, group, tuple(chosen))]
    beside = cells(experiment, group)
    exact, late = frozenset(c.id for c in beside if c.attack.exact), {c.attack.name for c in beside if is_late(c)}
    parts: dict[Gate, list[Cell]] = {OPEN: []}
    undefended, redundant = gate_of(experiment, group), is_redundant(experiment, group)
    for cell in chosen:
        gate = OPEN
        if searches(cell) and redundant:
            continue
        if searches(cell):
            gate = Gate(undefended, exact if (cell.follows or cell.attack.name) in late else frozenset())
        parts.setdefault(gate, []).append(cell)
    return [PlannedCells(experiment, group, tuple(some), gate) for gate, some in parts.items()]


def is_late(cell: Cell) -> bool:
    """Return whether a cell is left out where an exact attack solved every victim: a search without knowledge."""
    return question_of(cell.attack.kind).inputs and not cell.attack.exact and not cell.attack.adaptive


def unfinished(planned: Sequence[PlannedCells], store: Store) -> list[PlannedCells]:
    """Return the cells of `planned` that `store` does not hold finished: failed ones too, skipped ones not."""
    left = [replace(w, cells=tuple(c for c in w.cells if not store.finished(c.id))) for w in planned]
    due = {cell.id for one in left if not one.gate for cell in one.cells}
    for part in sorted((w for w in left if w.gate), key=lambda w: bool(w.gate.exact)):  # a gate's own gate comes first
        if part.gate.cells & due or not part.gate.is_closed_in(store):
            due.update(cell.id for cell in part.cells)
    return [w for w in left if any(cell.id in due for cell in w.cells)]


def ended_cells(planned: Sequence[PlannedCells], store: Store) -> list[str]:
    """Return the names of the cells of `planned` that have ended: all but the skipped ones."""
    return [cell.id for part in planned for cell in part.cells if not part.gate or store.has(cell.id)]


def count_cells(planned: Sequence[PlannedCells]) -> int:
    """Return the number of cells."""
    return sum(len(part.cells) for part in planned)


@dataclass
class Strand:
    """The work around one training (its folder is `home`): steps of jobs, each of which waits for the one before.

    first: names of cells of the first answer. planned: the cells that attack it; open: jobs of the current step that
    have not ended; lost: whether the training failed; needless: drafts that a gate left out.
    """

    home: Path
    out: Path
    first: frozenset[str] = frozenset()
    planned: list[PlannedCells] = field(default_factory=list)
    needless: set[str] = field(default_factory=set)
    open: int = 0
    lost: bool = False

    def __post_init__(self) -> None:
        self._left = self._steps()

    def step(self) -> list[WorkItem]:
        """Return the jobs of the next step that has any, [] after the last one or when the training is lost."""
        return [] if self.lost else next((jobs for jobs in self._left if jobs), [])

    def _steps(self) -> Iterator[list[WorkItem]]:
        first = self.planned[0]
        experiment, point = first.experiment, first.group.point
        if first.group.stage == "audit":
            audit = PointAudit(experiment, experiment.points[point], self.home)
            yield [WorkItem(experiment, self.out, point, runs=part) for part in audit.missing() if part == TARGET]
            # The target determines how many references run together. If it was refused, its cells say so.
            yield [WorkItem(experiment, self.out, point, runs=part) for part in audit.missing() if part != TARGET]
        elif not is_trained(self.home):
            yield from self._drafts()
            yield [WorkItem(experiment, self.out, point)]
        yield [replace(self._attack(part), gate=part.gate) for part in self.planned]

    def _drafts(self) -> Iterator[list[WorkItem]]:
        """Yield the jobs of the first answer that need no training: first those that decide on others."""
        early = [w for w in self.planned if w.group.stage == "init" and {c.id for c in w.cells} <= self.first]
        yield [replace(self._attack(part), draft=True) for part in early if not part.gate]
        late, drafts = [part for part in early if part.gate], drafts_of(self.out)
        closed = [part for part in late if part.gate.is_closed_in(drafts)]
        self.needless.update(cell.id for part in closed for cell in part.cells)
        yield [replace(self._attack(part), draft=True) for part in late if part not in closed]

    def _attack(self, part: PlannedCells) -> WorkItem:
        names = tuple(cell.id for cell in part.cells)
        return WorkItem(part.experiment, self.out, part.group.point, part.group, names)


def strands(planned: Sequence[PlannedCells], out: Path, first: Iterable[str] = ()) -> list[Strand]:
    """Return the cells grouped by the training that they need, in the order in which trainings first appear.

    first: names of the cells of the first answer; those at random weights run before the training.
    """
    early = frozenset(first)
    by_home: dict[Path, Strand] = {}
    for part in planned:
        place = part.experiment, part.experiment.points[part.group.point], out / "cache"
        home = PointAudit.of(*place).home if part.group.stage == "audit" else home_of(*place)
        by_home.setdefault(home, Strand(home, out, early)).planned.append(part)
    return list(by_home.values())


@dataclass
class Scheduler:
    """One run of an executor over strands, with a store that receives the cells.

    strict: whether an error of a training or a worker is raised; else the cells that need it are kept as failed with
    the cause, and the rest goes on. If nothing can be written, the run ends.
    first: names of the cells of the first answer, which run first and are reported, as drafts before the trainings.
    """

    store: Store
    executor: Executor
    progress: Bars
    strict: bool
    first: Sequence[str] = ()
    _open: set[str] = field(default_factory=set)
    _counted: set[str] = field(default_factory=set)
    _ready: list[tuple[tuple[int, ...], int, WorkItem]] = field(default_factory=list)
    _waiting: list[WorkItem] = field(default_factory=list)
    _due: set[str] = field(default_factory=set)
    _gates: frozenset[str] = frozenset()
    _owner: dict[WorkItem, Strand] = field(default_factory=dict)
    _lost: set[WorkItem] = field(default_factory=set)
    _order: Iterator[int] = field(default_factory=itertools.count)
    _running: int = 0

    def run(self, strands: Sequence[Strand], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Run all strands, and `meanwhile` once workers are busy.

        Raises UsageError: nothing can be written; if `strict`, what a training raised.
        """
        planned = [one for strand in strands for one in strand.planned]
        self.progress.expect("attacking", count_cells(planned))
        self._due = {cell.id for one in planned for cell in one.cells}
        self._gates = frozenset[str]().union(*(one.gate.cells for one in planned))
        self._open, first_reported = self._due & {*self.first}, not self.first
        with self.executor as executor:
            for strand in strands:
                self._next(strand)
            self._fill()
            meanwhile()
            while self._fill():
                self._running -= 1
                self._handle_end(executor.wait())
                if not first_reported and not self._open:
                    first_reported = True
                    self.progress.ready(self._first_records())

    def _first_records(self) -> list[Record]:
        """Return the records of the first answer, drafts of those that wait for a training."""
        stores = self.store, drafts_of(self.store.out)
        every = (next((store for store in stores if store.has(cell)), None) for cell in self.first)
        return [store.load(cell) for cell, store in zip(self.first, every, strict=True) if store is not None]

    def _fill(self) -> bool:
        while self._ready and self._running < self.executor.capacity:
            self.executor.submit(heapq.heappop(self._ready)[2])
            self._running += 1
        return self._running > 0

    def _next(self, strand: Strand) -> None:
        jobs = strand.step()
        self._open -= strand.needless
        self.progress.expect("training", sum(job.rounds for job in jobs))
        strand.open += len(jobs)  # before any is left out: the strand has ended when none is open
        for job in jobs:
            self._push(strand, job)

    def _push(self, strand: Strand, job: WorkItem) -> None:
        self._owner[job] = strand
        if job.gate.cells & self._due:
            self._waiting.append(job)
        elif job.gate and job.gate.is_closed_in(self.store):
            self._count(job.cells)
            self._close(self._owner.pop(job))
            self._release(job.cells)
        else:
            heapq.heappush(self._ready, (self._urgency(job), next(self._order), job))

    def _urgency(self, job: WorkItem) -> tuple[int, ...]:
        """Return the sort key of a job, the smallest first.

        Drafts come first, as they give the first answer, then trainings, since cells wait for them, then the first
        answer, then cells that others wait for, then the longest (trained models, large batches): the last job decides
        when all ends.
        """
        if job.group is None or job.draft:
            return (-1,) if job.draft else (0,)
        cells = {*job.cells}
        early = 1 if cells & {*self.first} else 2 if cells & self._gates else 3
        return early, int(job.group.stage == "init"), -job.group.batch

    def _close(self, strand: Strand) -> None:
        """Count a job of a strand as ended; start the strand's next step after the last one."""
        strand.open -= 1
        if not strand.open:
            self._next(strand)

    def _release(self, cells: Iterable[str]) -> None:
        """Record that cells have ended, and push or skip the jobs that waited for them."""
        self._due -= {*cells}
        self._open &= self._due
        free = [job for job in self._waiting if not job.gate.cells & self._due]
        self._waiting = [job for job in self._waiting if job.gate.cells & self._due]
        for job in free:
            self._push(self._owner[job], job)

    def _handle_end(self, done: Done) -> None:
        job, strand = done.job, self._owner.pop(done.job)
        if job.draft:
            self._end_draft(job, done.error)
        elif done.error is not None and not (isinstance(done.error, Refused) and job.group is None):
            self._handle_failure(strand, job, done.error)
        elif job.group is not None:
            self._report(job)
        self._close(strand)

    def _end_draft(self, job: WorkItem, error: Exception | None) -> None:
        """Count a job of drafts; one that failed is repeated, and its error reported, once its training has ended."""
        if isinstance(error, Unwritable):
            raise error
        if error is None:
            self._open -= {*job.cells}
            self._count(job.cells)

    def _count(self, cells: Iterable[str]) -> None:
        """Report that cells are done, each once."""
        new = {*cells} - self._counted
        self._counted |= new
        self.progress.advance("attacking", len(new))

    def _report(self, job: WorkItem) -> None:
        for cell in job.cells:
            record = self.store.load(cell)
            self.progress.cell("not applicable" if nothing_to_read(record) else record.status, _words(record.config))
        self._count(job.cells)
        self._release(job.cells)

    def _handle_failure(self, strand: Strand, job: WorkItem, error: Exception) -> None:
        if isinstance(error, Unwritable):
            raise error
        if isinstance(error, PluginError):  # the sentence is in the records, and the others' cells go on
            self._give_up(strand, job, error)
            return
        if self.strict and not isinstance(error, WorkerDied) and not of_machine(error):
            raise error
        if isinstance(error, WorkerDied) and len(job.cells) > 1:
            # One cell killed the worker. Finished ones stay; the others run one by one, so that only that one fails.
            self._resubmit(strand, [replace(job, cells=(cell,)) for cell in job.cells])
        elif isinstance(error, WorkerDied) and job not in self._lost:
            self._lost.add(job)
            self._resubmit(strand, [job])
        else:
            self._give_up(strand, job, error)

    def _resubmit(self, strand: Strand, jobs: Sequence[WorkItem]) -> None:
        strand.open += len(jobs)
        for job in jobs:
            self._push(strand, job)

    def _give_up(self, strand: Strand, job: WorkItem, error: Exception) -> None:
        what = "its training" if job.group is None else "the cell"
        reason = f"{what}: {error}" if isinstance(error, PluginError) else f"{what}: {type(error).__name__}: {error}"
        if strand.lost:
            return  # another job of the training failed before, and all cells with it
        strand.lost = job.group is None
        for one in strand.planned:
            gone = [c for c in one.cells if (strand.lost or c.id in job.cells) and not self.store.finished(c.id)]
            keep_failed(one.experiment, one.group, gone, self.store, reason)
            for _ in gone:
                self.progress.cell("failed")
            self._count(cell.id for cell in gone)
            self._release([cell.id for cell in gone])


def _words(config: CellConfig) -> str:
    """Return a short name of a cell: "spn, adaptive_spn, final, batch 8"."""
    batch = "" if config.stage in ("iterate", "audit") else f", batch {config.batch_size}"
    return f"{config.defense.id}, {config.attack.id}, {config.stage}{batch}"
