"""Many trainings and cells at once on one machine: spawned processes of one torch thread each, with progress."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from ppbench.audit.runs import Audit, Refused
from ppbench.bench import run_group
from ppbench.cells import Group
from ppbench.choice import points
from ppbench.config import EvaluateConfig
from ppbench.errors import UsageError
from ppbench.task.task import make_task
from ppbench.train import train


class Progress(Protocol):
    """Told how far the work is. phase: "training" (steps are rounds) or "attacking" (steps are cells)."""

    def begin(self, phase: str, total: int) -> None:
        """A phase of `total` steps starts."""

    def advance(self, phase: str, steps: int) -> None:
        """`steps` more steps of a phase are done."""


@dataclass(frozen=True)
class Silent:
    """Progress that nobody watches."""

    def begin(self, phase: str, total: int) -> None:
        """Ignore."""

    def advance(self, phase: str, steps: int) -> None:
        """Ignore."""


@dataclass(frozen=True)
class Job:
    """One piece of work: train a point (`group` None), some runs of its audit, or a group of `cells` missing cells."""

    point: int
    group: Group | None
    cells: int = 0
    runs: range = range(0)


_rounds: SimpleQueue[int] | None = None


def _enter(queue: SimpleQueue[int], halt: Event, parent: int) -> None:
    """Set up a worker: one thread, a place to report rounds, and an end when the parent has gone or says so."""
    global _rounds
    torch.set_num_threads(1)
    _rounds = queue

    def watch() -> None:
        while os.getppid() == parent and not halt.is_set():
            time.sleep(0.5)
        os._exit(1)  # nobody waits for this worker any more; what it has finished is on disk

    threading.Thread(target=watch, daemon=True).start()


def _work(config_json: str, job: Job, out: Path, report: Callable[[int], None] | None = None) -> Job:
    config = EvaluateConfig.model_validate_json(config_json)
    if job.group is not None:
        run_group(config, job.group, out)
        return job
    task, point, cache = make_task(config), points(config)[job.point], out / "cache"
    tell = report or (lambda _: _rounds.put(1) if _rounds is not None else None)
    if not job.runs:
        train(task, point, config, cache, after=tell)
        return job
    with suppress(Refused):  # its cells will say why
        Audit.of(task, point, config, cache).run(job.runs, after=tell)
    return job


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body with one torch thread: the number of threads may change the last bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Workers:
    """Works through phases of jobs, on spawned processes or in this one; results land in `out`.

    The processes start with the first phase that has more than one job, and stay for the later ones. To be used in a
    `with` block: at its end they are gone.
    """

    def __init__(self, config: EvaluateConfig, out: Path, count: int, progress: Progress) -> None:
        """Start nothing yet; `count` processes at most."""
        self._config, self._text, self._out = config, config.model_dump_json(), out
        self._count, self._progress, self._phase = count, progress, ""
        self._pool: ProcessPoolExecutor | None = None
        context = multiprocessing.get_context("spawn")
        self._context, self._queue, self._halt = context, context.SimpleQueue(), context.Event()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._halt.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, jobs: Sequence[Job]) -> None:
        """Run `jobs` to their end, with progress.

        An error of any job ends the run and is raised here; what was finished before stays.
        """
        self._phase = "training" if all(job.group is None for job in jobs) else "attacking"
        rounds = self._config.rounds
        self._progress.begin(
            self._phase, sum(job.cells if job.group else rounds * max(1, len(job.runs)) for job in jobs)
        )
        if self._count > 1 and len(jobs) > 1:
            return self._together(jobs)
        with one_thread():
            for job in jobs:
                _work(self._text, job, self._out, report=lambda _: self._advance(1))
                self._advance(job.cells if job.group else 0)

    def _advance(self, steps: int) -> None:
        self._progress.advance(self._phase, steps)

    def _together(self, jobs: Sequence[Job]) -> None:
        """Run `jobs` on the processes, while a thread listens for rounds."""
        stop = threading.Event()

        def listen() -> None:
            while not (stop.is_set() and self._queue.empty()):
                while not self._queue.empty():
                    self._advance(self._queue.get())
                stop.wait(0.1)

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            futures = [self._started().submit(_work, self._text, job, self._out) for job in jobs]
            for future in as_completed(futures):
                job = future.result()
                self._advance(job.cells if job.group else 0)
        except BrokenProcessPool as cause:
            raise UsageError(
                "A worker process was killed, probably for lack of memory; use fewer --workers: the same command "
                "goes on from what is finished."
            ) from cause
        finally:
            stop.set()
            listener.join()

    def _started(self) -> ProcessPoolExecutor:
        """Return the pool of processes, started when first asked for."""
        if self._pool is None:
            given = (self._queue, self._halt, os.getpid())
            self._pool = ProcessPoolExecutor(self._count, mp_context=self._context, initializer=_enter, initargs=given)
        return self._pool
