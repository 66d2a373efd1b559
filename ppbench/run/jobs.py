"""Jobs: pieces of work for an executor, how a worker does one, and how one ends.

A job's results are renamed into the output folder, under names that are hashes: so it may run anywhere that sees the
folder, and may be repeated. An `Executor` runs jobs: two methods, `submit` and `wait`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ppbench.base.device import computing
from ppbench.base.errors import Overflow, PluginError, ProtocolError, Unwritable, UsageError
from ppbench.base.fence import guard
from ppbench.records.schema import Record
from ppbench.records.store import Store
from ppbench.report.leak import is_solved, undefended_stands
from ppbench.run.audit.runs import PointAudit, Refused
from ppbench.run.cells import CellGroup
from ppbench.run.experiment import Experiment
from ppbench.run.group import draft_group, run_group
from ppbench.run.train import train


@dataclass(frozen=True)
class Gate:
    """Names of cells that run first, and decide whether others do.

    undefended: the others are left out where the undefended model withstands these searches. exact: they are left out
    where one of these attacks computed every victim exactly. With no names the others always run.
    """

    undefended: frozenset[str] = frozenset()
    exact: frozenset[str] = frozenset()

    @property
    def cells(self) -> frozenset[str]:
        """All names."""
        return self.undefended | self.exact

    def __bool__(self) -> bool:
        """Return whether anything decides."""
        return bool(self.cells)

    def is_closed(self, records: Sequence[Record]) -> bool:
        """Return whether the others are left out, once all its cells have ended: `records` holds those that ran."""
        if any(is_solved(record) for record in records if record.cell_id in self.exact):
            return True
        return undefended_stands([record for record in records if record.cell_id in self.undefended])

    def is_closed_in(self, store: Store) -> bool:
        """As `is_closed`, with the records of a store."""
        return self.is_closed([store.load(name) for name in sorted(self.cells) if store.has(name)])


OPEN = Gate()
Tell = Callable[[int], None]
"""Called with the number of rounds of training that have finished."""


@dataclass(frozen=True)
class WorkItem:
    """One piece of work: train a point, by index (`group` None), or `runs` of its audit, or run cells of a group.

    gate: cells that run first and decide whether these do. draft: whether the cells run before the training.
    """

    experiment: Experiment
    out: Path
    point: int
    group: CellGroup | None = None
    cells: tuple[str, ...] = ()
    runs: range = range(0)
    gate: Gate = OPEN
    draft: bool = False

    @property
    def rounds(self) -> int:
        """Rounds of training in the job, 0 if it computes cells."""
        return 0 if self.group is not None else self.experiment.config.rounds * max(1, len(self.runs))


def work(job: WorkItem, tell: Tell | None = None) -> None:
    """Do a job; parts that are finished in the folder are not repeated.

    Raises Refused: a defense refuses the audit; UsageError: the folder; PluginError: a fault of another package's code.
    """
    point, cache = job.experiment.points[job.point], job.out / "cache"
    after = None if tell is None else lambda _: tell(1)
    with guard("defenses", point.defense.name), computing(job.experiment.config.tf32):
        if job.group is not None and job.draft:
            draft_group(job.experiment, job.group, job.out, job.cells)
        elif job.group is not None:
            run_group(job.experiment, job.group, job.out, job.cells)
        elif job.runs:
            PointAudit.of(job.experiment, point, cache).run(job.runs, after)
        else:
            train(job.experiment, point, cache, after)


@dataclass(frozen=True)
class Failure:
    """A job's exception, in words: a plugin's own exception class may not survive the way between two processes."""

    name: str
    text: str
    trace: str

    def to_exception(self) -> Exception:
        """Return an exception of the same name and message, of its own class if that is one of ppbench's."""
        ours = {cls.__name__: cls for cls in (UsageError, PluginError, Unwritable, Refused, ProtocolError, Overflow)}
        error: Exception = ours.get(self.name, type(self.name, (Exception,), {}))(self.text)
        error.__cause__ = Exception(f"\n{self.trace}")
        return error


def attempt(job: WorkItem, tell: Tell | None = None) -> Failure | None:
    """Do a job as `work` does; return its failure, None without one."""
    try:
        work(job, tell)
    except Exception as cause:  # noqa: BLE001 - other packages' code may raise anything; the scheduler decides
        return Failure(type(cause).__name__, str(cause), traceback.format_exc())
    return None


class WorkerDied(Exception):
    """A worker ended without an answer: killed, out of memory, or its machine went away."""


@dataclass(frozen=True)
class Done:
    """A job that ended. error: its exception, a `WorkerDied` if the worker died; None if it succeeded."""

    job: WorkItem
    error: Exception | None = None


class Executor(Protocol):
    """Runs jobs. Use it in a `with` block: at its end the workers are stopped, after an error at once."""

    @property
    def capacity(self) -> int:
        """Return how many jobs run at the same time; more may be submitted, they wait."""

    def submit(self, job: WorkItem) -> None:
        """Run `job` as soon as a worker is free; it may run again if a worker is lost."""

    def wait(self) -> Done:
        """Wait for a job to end and return it; never raises the error of a job."""

    def __enter__(self) -> Executor: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None: ...
