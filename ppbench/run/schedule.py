"""Which cells are wanted, and in which order: trainings first, once each, then what attacks them.

What two evaluations of a sweep share (the controls, mostly) is one training and one set of cells.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ppbench.base.errors import Unwritable, UsageError
from ppbench.records.store import Store
from ppbench.run.audit.runs import TARGET, Audit, Refused
from ppbench.run.cells import Cell, Group, cells, finished, groups
from ppbench.run.experiment import Experiment
from ppbench.run.group import keep_failed
from ppbench.run.jobs import Done, Executor, Job, WorkerDied
from ppbench.run.train import home_of, is_trained


class Progress(Protocol):
    """Told how far the work is. phase: "training" (steps are rounds) or "attacking" (steps are cells)."""

    def expect(self, phase: str, steps: int) -> None:
        """Learn of so many more steps of a phase."""

    def advance(self, phase: str, steps: int) -> None:
        """Hear that `steps` more steps of a phase are done."""

    def cell(self, status: str) -> None:
        """Hear how a cell ended: "complete", "diverged" or "failed"."""


@dataclass(frozen=True)
class Wanted:
    """Cells of one group of one evaluation that are asked for."""

    experiment: Experiment
    group: Group
    cells: tuple[Cell, ...]


def wanted(experiments: Sequence[Experiment], before: Callable[[Experiment], object] = lambda _: None) -> list[Wanted]:
    """Return the cells of all `experiments`, each once; `before` meets each experiment first, and may raise."""
    seen: set[str] = set()
    found = []
    for experiment in experiments:
        before(experiment)
        for group in groups(experiment):
            new = [c for c in cells(experiment, group) if c.id not in seen]
            seen.update(c.id for c in new)
            if new:
                found.append(Wanted(experiment, group, tuple(new)))
    return found


def missing(asked: Sequence[Wanted], store: Store) -> list[Wanted]:
    """Return what of `asked` the store does not hold finished; a failed cell is missing."""
    left = [replace(w, cells=tuple(c for c in w.cells if not finished(store, c))) for w in asked]
    return [w for w in left if w.cells]


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
        yield [Job(w.experiment, self.out, w.group.point, w.group, tuple(c.id for c in w.cells)) for w in self.asked]


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
    """

    store: Store
    executor: Executor
    progress: Progress
    strict: bool
    _ready: list[tuple[int, int, Job]] = field(default_factory=list)
    _owner: dict[Job, Strand] = field(default_factory=dict)
    _lost: set[Job] = field(default_factory=set)
    _order: Iterator[int] = field(default_factory=itertools.count)
    _running: int = 0

    def run(self, asked: Sequence[Strand]) -> None:
        """Do all that is asked for. Raises UsageError: nothing can be written; if `strict`, what a training raised."""
        self.progress.expect("attacking", sum(len(w.cells) for strand in asked for w in strand.asked))
        with self.executor as executor:
            for strand in asked:
                self._next(strand)
            while self._fill():
                self._running -= 1
                self._ended(executor.wait())

    def _fill(self) -> bool:
        while self._ready and self._running < self.executor.capacity:
            self.executor.submit(heapq.heappop(self._ready)[2])
            self._running += 1
        return self._running > 0

    def _next(self, strand: Strand) -> None:
        jobs = strand.step()
        self.progress.expect("training", sum(job.rounds for job in jobs))
        for job in jobs:
            self._push(strand, job)

    def _push(self, strand: Strand, job: Job) -> None:
        # Trainings first: cells wait for them. Then large batches: they take longest, and the last job decides.
        urgency = 0 if job.group is None else 1_000_000 - job.group.batch
        heapq.heappush(self._ready, (urgency, next(self._order), job))
        self._owner[job] = strand
        strand.open += 1

    def _ended(self, done: Done) -> None:
        job, strand = done.job, self._owner.pop(done.job)
        strand.open -= 1
        if done.error is not None and not (isinstance(done.error, Refused) and job.group is None):
            self._failed(strand, job, done.error)
        elif job.group is not None:
            self._told(job)
        if not strand.open:
            self._next(strand)

    def _told(self, job: Job) -> None:
        for cell in job.cells:
            self.progress.cell(self.store.load(cell).status)
        self.progress.advance("attacking", len(job.cells))

    def _failed(self, strand: Strand, job: Job, error: Exception) -> None:
        if isinstance(error, Unwritable):
            raise error
        if self.strict and isinstance(error, WorkerDied):
            raise UsageError(
                "A worker process was killed, probably for lack of memory; use fewer --workers: the same command "
                "goes on from what is finished."
            ) from error
        if self.strict:
            raise error
        if isinstance(error, WorkerDied) and len(job.cells) > 1:
            # One of them did it. What was finished before stays, the others run one by one, so that only it fails.
            for cell in job.cells:
                self._push(strand, replace(job, cells=(cell,)))
        elif isinstance(error, WorkerDied) and job not in self._lost:
            self._lost.add(job)
            self._push(strand, job)
        else:
            self._give_up(strand, job, error)

    def _give_up(self, strand: Strand, job: Job, error: Exception) -> None:
        what = "its training" if job.group is None else "the cell"
        reason = f"{what}: {type(error).__name__}: {error}"
        if strand.lost:
            return  # another job of the training failed before, and all cells with it
        strand.lost = job.group is None
        for one in strand.asked:
            gone = [c for c in one.cells if (strand.lost or c.id in job.cells) and not finished(self.store, c)]
            keep_failed(one.experiment, one.group, gone, self.store, reason)
            for _ in gone:
                self.progress.cell("failed")
            self.progress.advance("attacking", len(gone))
