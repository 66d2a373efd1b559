"""Which cells are wanted, and in which order: trainings first, once each, then what attacks them.

What two evaluations of a sweep share (the controls, mostly) is one training and one set of cells.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ppbench.base.errors import PluginError, Unwritable
from ppbench.base.machine import of_machine
from ppbench.records.schema import CellConfig, Record
from ppbench.records.store import Store
from ppbench.report.controls import nothing_to_read
from ppbench.run.audit.runs import TARGET, Audit, Refused
from ppbench.run.cells import Cell, Group, cells, finished, groups
from ppbench.run.experiment import Experiment
from ppbench.run.group import keep_failed
from ppbench.run.jobs import Done, Executor, Job, WorkerDied
from ppbench.run.looks import gate_of, idle, searches, stands
from ppbench.run.train import home_of, is_trained


class Progress(Protocol):
    """Told how far the work is. phase: "training" (steps are rounds) or "attacking" (steps are cells)."""

    def expect(self, phase: str, steps: int) -> None:
        """Learn of so many more steps of a phase."""

    def advance(self, phase: str, steps: int) -> None:
        """Hear that `steps` more steps of a phase are done."""

    def cell(self, status: str, about: str = "") -> None:
        """Hear how a cell ended: "complete", "diverged" or "failed"; about: defense, attack, stage and batch."""

    def ready(self, records: Sequence[Record]) -> None:
        """Hear that the cells of the first answer have ended, while others still run; not called in a sweep."""

    def say(self, line: str) -> None:
        """Hear a line for people: how a data set was read."""


@dataclass(frozen=True)
class Wanted:
    """Cells of one group of one evaluation that are asked for.

    gate: names of the cells of `none` that are looked at first: where it stands these are not asked about.
    """

    experiment: Experiment
    group: Group
    cells: tuple[Cell, ...]
    gate: frozenset[str] = frozenset()


def wanted(experiments: Sequence[Experiment], before: Callable[[Experiment], object] = lambda _: None) -> list[Wanted]:
    """Return the cells of all `experiments`, each once; `before` meets each experiment first, and may raise."""
    seen: set[str] = set()
    found = []
    for experiment in experiments:
        before(experiment)
        for group in groups(experiment):
            new = [c for c in cells(experiment, group) if c.id not in seen]
            seen.update(c.id for c in new)
            found += [part for part in _parts(experiment, group, new) if part.cells]
    return found


def _parts(experiment: Experiment, group: Group, asked: Sequence[Cell]) -> list[Wanted]:
    """Return cells of a group by what they wait for: those that search may have to wait, or tell nothing new."""
    gate, rest = gate_of(experiment, group), tuple(cell for cell in asked if not searches(cell))
    if idle(experiment, group):
        return [Wanted(experiment, group, rest)]
    if not gate:
        return [Wanted(experiment, group, tuple(asked))]
    return [Wanted(experiment, group, rest), Wanted(experiment, group, tuple(c for c in asked if searches(c)), gate)]


def missing(asked: Sequence[Wanted], store: Store) -> list[Wanted]:
    """Return what of `asked` the store does not hold finished; a failed cell is missing, one left out is not."""
    left = [replace(w, cells=tuple(c for c in w.cells if not finished(store, c))) for w in asked]
    due = {cell.id for one in left if not one.gate for cell in one.cells}
    return [w for w in left if w.cells and (w.gate & due or not stands(store, w.gate))]


def answered(asked: Sequence[Wanted], store: Store) -> list[str]:
    """Return the names of the cells of `asked` that have ended: all but those that were left out."""
    return [cell.id for one in asked for cell in one.cells if not one.gate or store.has(cell.id)]


def size(asked: Sequence[Wanted]) -> int:
    """Return how many cells are asked for."""
    return sum(len(one.cells) for one in asked)


@dataclass
class Strand:
    """The work around one training (its folder is `home`): steps of jobs, each of which waits for the one before.

    asked: the cells that attack it; open: jobs of the current step that have not ended; lost: whether the training
    failed.
    """

    home: Path
    out: Path
    asked: list[Wanted] = field(default_factory=list)
    open: int = 0
    lost: bool = False

    def __post_init__(self) -> None:
        self._left = self._steps()

    def step(self) -> list[Job]:
        """Return the jobs of the next step that has any, [] after the last one or when the training is lost."""
        return [] if self.lost else next((jobs for jobs in self._left if jobs), [])

    def _steps(self) -> Iterator[list[Job]]:
        first = self.asked[0]
        experiment, point = first.experiment, first.group.point
        if first.group.stage == "audit":
            audit = Audit(experiment, experiment.points[point], self.home)
            yield [Job(experiment, self.out, point, runs=part) for part in audit.missing() if part == TARGET]
            # How many references go together is known by their target; one that was refused says so in its cells.
            yield [Job(experiment, self.out, point, runs=part) for part in audit.missing() if part != TARGET]
        elif not is_trained(self.home):
            yield [Job(experiment, self.out, point)]
        yield [
            Job(w.experiment, self.out, w.group.point, w.group, tuple(c.id for c in w.cells), gate=w.gate)
            for w in self.asked
        ]


def strands(asked: Sequence[Wanted], out: Path) -> list[Strand]:
    """Return what is asked by the training that it needs, in the order in which trainings are first asked for."""
    found: dict[Path, Strand] = {}
    for one in asked:
        place = one.experiment, one.experiment.points[one.group.point], out / "cache"
        home = Audit.of(*place).home if one.group.stage == "audit" else home_of(*place)
        found.setdefault(home, Strand(home, out)).asked.append(one)
    return list(found.values())


@dataclass
class Schedule:
    """One run of an executor over strands, with a store where cells land.

    strict: whether an error of a training or a worker is raised; else the cells that need it are kept as failed with
    the cause, and the rest goes on. Where nothing can be written, all ends.
    first: names of the cells of the first answer, which are done first and told of.
    """

    store: Store
    executor: Executor
    progress: Progress
    strict: bool
    first: Sequence[str] = ()
    _ready: list[tuple[tuple[int, ...], int, Job]] = field(default_factory=list)
    _held: list[Job] = field(default_factory=list)
    _due: set[str] = field(default_factory=set)
    _looked: frozenset[str] = frozenset()
    _owner: dict[Job, Strand] = field(default_factory=dict)
    _lost: set[Job] = field(default_factory=set)
    _order: Iterator[int] = field(default_factory=itertools.count)
    _running: int = 0

    def run(self, asked: Sequence[Strand], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Do all that is asked for, and `meanwhile` when workers are busy.

        Raises UsageError: nothing can be written; if `strict`, what a training raised.
        """
        every = [one for strand in asked for one in strand.asked]
        self.progress.expect("attacking", size(every))
        self._due = {cell.id for one in every if not one.gate for cell in one.cells}
        self._looked = frozenset[str]().union(*(one.gate for one in every))
        told = not self.first
        with self.executor as executor:
            for strand in asked:
                self._next(strand)
            self._fill()
            meanwhile()
            while self._fill():
                self._running -= 1
                self._ended(executor.wait())
                if not told and not self._due & {*self.first}:
                    told = True
                    self.progress.ready([self.store.load(cell) for cell in self.first])

    def _fill(self) -> bool:
        while self._ready and self._running < self.executor.capacity:
            self.executor.submit(heapq.heappop(self._ready)[2])
            self._running += 1
        return self._running > 0

    def _next(self, strand: Strand) -> None:
        jobs = strand.step()
        self.progress.expect("training", sum(job.rounds for job in jobs))
        strand.open += len(jobs)  # before any is left out: the strand has ended when none is open
        for job in jobs:
            self._push(strand, job)

    def _push(self, strand: Strand, job: Job) -> None:
        self._owner[job] = strand
        if job.gate & self._due:
            self._held.append(job)
        elif job.gate and stands(self.store, job.gate):
            self.progress.advance("attacking", len(job.cells))
            self._closed(self._owner.pop(job))
        else:
            heapq.heappush(self._ready, (self._urgency(job), next(self._order), job))

    def _urgency(self, job: Job) -> tuple[int, ...]:
        """Return when a job is due, the smallest first.

        Trainings: cells wait for them. The first answer. Cells that others wait for. Then what takes longest, trained
        models and large batches: the last job decides when all ends.
        """
        if job.group is None:
            return (0,)
        cells = {*job.cells}
        early = 1 if cells & {*self.first} else 2 if cells & self._looked else 3
        return early, int(job.group.stage == "init"), -job.group.batch

    def _closed(self, strand: Strand) -> None:
        """Take note that a job of a strand needs nothing more."""
        strand.open -= 1
        if not strand.open:
            self._next(strand)

    def _looked_at(self, cells: Iterable[str]) -> None:
        """Take note that cells have ended, and decide on those that waited for them."""
        self._due -= {*cells}
        free = [job for job in self._held if not job.gate & self._due]
        self._held = [job for job in self._held if job.gate & self._due]
        for job in free:
            self._push(self._owner[job], job)

    def _ended(self, done: Done) -> None:
        job, strand = done.job, self._owner.pop(done.job)
        if done.error is not None and not (isinstance(done.error, Refused) and job.group is None):
            self._failed(strand, job, done.error)
        elif job.group is not None:
            self._told(job)
        self._closed(strand)

    def _told(self, job: Job) -> None:
        for cell in job.cells:
            record = self.store.load(cell)
            self.progress.cell("not applicable" if nothing_to_read(record) else record.status, _words(record.config))
        self.progress.advance("attacking", len(job.cells))
        self._looked_at(job.cells)

    def _failed(self, strand: Strand, job: Job, error: Exception) -> None:
        if isinstance(error, Unwritable):
            raise error
        if isinstance(error, PluginError):  # the sentence is in the records, and the others' cells go on
            self._give_up(strand, job, error)
            return
        if self.strict and not isinstance(error, WorkerDied) and not of_machine(error):
            raise error
        if isinstance(error, WorkerDied) and len(job.cells) > 1:
            # One of them did it. What was finished before stays, the others run one by one, so that only it fails.
            self._again(strand, [replace(job, cells=(cell,)) for cell in job.cells])
        elif isinstance(error, WorkerDied) and job not in self._lost:
            self._lost.add(job)
            self._again(strand, [job])
        else:
            self._give_up(strand, job, error)

    def _again(self, strand: Strand, jobs: Sequence[Job]) -> None:
        strand.open += len(jobs)
        for job in jobs:
            self._push(strand, job)

    def _give_up(self, strand: Strand, job: Job, error: Exception) -> None:
        what = "its training" if job.group is None else "the cell"
        reason = f"{what}: {error}" if isinstance(error, PluginError) else f"{what}: {type(error).__name__}: {error}"
        if strand.lost:
            return  # another job of the training failed before, and all cells with it
        strand.lost = job.group is None
        for one in strand.asked:
            gone = [c for c in one.cells if (strand.lost or c.id in job.cells) and not finished(self.store, c)]
            keep_failed(one.experiment, one.group, gone, self.store, reason)
            for _ in gone:
                self.progress.cell("failed")
            self.progress.advance("attacking", len(gone))
            self._looked_at(cell.id for cell in gone)


def _words(config: CellConfig) -> str:
    """Return a cell in few words: "spn, adaptive_spn, final, batch 8"."""
    batch = "" if config.stage in ("iterate", "audit") else f", batch {config.batch_size}"
    return f"{config.defense.id}, {config.attack.id}, {config.stage}{batch}"
