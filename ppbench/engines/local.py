"""Jobs on this machine: spawned processes of one torch thread each, or this process itself."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as first_of
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from types import TracebackType

import torch

from ppbench.engines import Done, WorkerDied
from ppbench.jobs import Job, Tell, work

_rounds: SimpleQueue[int] | None = None
PR_SET_PDEATHSIG = 1  # Linux's prctl: have the kernel end this process when its parent dies


def _enter(queue: SimpleQueue[int], halt: Event, parent: int) -> None:
    """Set up a worker: one thread, a place to report rounds, and an end when the parent has gone or says so.

    A worker that outlived its parent would write cells that the next run computes too. Linux ends it with its parent;
    elsewhere it looks twice a second. An interrupt is the parent's business: it says halt.
    """
    global _rounds
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _rounds = queue

    def watch() -> None:
        while os.getppid() == parent and not halt.is_set():
            time.sleep(0.5)
        os._exit(1)  # nobody waits for this worker any more; what it has finished is on disk

    threading.Thread(target=watch, daemon=True).start()


def _run(job: Job) -> None:
    """Do a job in a worker."""
    queue = _rounds
    work(job, None if queue is None else queue.put)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body with one torch thread: the number of threads may change the last bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Inline:
    """Runs jobs in this process, one after another: for one worker, and to debug. A crash takes the run with it."""

    capacity = 1

    def __init__(self, tell: Tell) -> None:
        self._tell, self._jobs = tell, deque[Job]()

    def __enter__(self) -> Inline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.clear()

    def submit(self, job: Job) -> None:
        """Remember `job`; it runs when it is waited for."""
        self._jobs.append(job)

    def wait(self) -> Done:
        """Do the job that was submitted first."""
        job = self._jobs.popleft()
        try:
            with one_thread():
                work(job, self._tell)
        except Exception as cause:  # noqa: BLE001 - a stranger's code may raise anything; the scheduler decides
            return Done(job, cause)
        return Done(job)


class Local:
    """Runs jobs on processes of this machine.

    Each worker is a pool of its own with one process: in a common pool one process that dies takes the jobs of all
    others with it.
    """

    def __init__(self, workers: int, tell: Tell) -> None:
        """Start nothing yet; a process starts with the first job that it gets."""
        self._free: list[ProcessPoolExecutor | None] = [None] * workers
        self._busy: dict[Future[None], tuple[Job, ProcessPoolExecutor]] = {}
        self._waiting = deque[Job]()
        self._tell, self.capacity = tell, workers
        context = multiprocessing.get_context("spawn")
        self._context, self._queue, self._halt = context, context.SimpleQueue(), context.Event()
        self._stop = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Local:
        self._listener.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._halt.set()
        for pool in [*self._free, *(pool for _, pool in self._busy.values())]:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        self._stop.set()
        self._listener.join()

    def submit(self, job: Job) -> None:
        """Have a free worker do `job`, else the next that becomes free."""
        if not self._free:
            self._waiting.append(job)
            return
        started = [pool for pool in self._free if pool is not None]
        pool = started[0] if started else None
        self._free.remove(pool)
        pool = pool or self._start()
        self._busy[pool.submit(_run, job)] = (job, pool)

    def wait(self) -> Done:
        """Return the next job that ends. A worker that dies is replaced."""
        ended, _ = first_of(self._busy, return_when=FIRST_COMPLETED)
        future = next(iter(ended))
        job, pool = self._busy.pop(future)
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            pool.shutdown(wait=False)
            self._free.append(None)
            error = WorkerDied("its worker process was killed, probably for lack of memory")
        else:
            self._free.append(pool)
        while self._waiting and self._free:
            self.submit(self._waiting.popleft())
        if error is not None and not isinstance(error, Exception):  # an exit of a plugin's own
            error = WorkerDied(f"its worker raised {type(error).__name__}: {error}")
        return Done(job, error)

    def _start(self) -> ProcessPoolExecutor:
        given = (self._queue, self._halt, os.getpid())
        return ProcessPoolExecutor(1, mp_context=self._context, initializer=_enter, initargs=given)

    def _listen(self) -> None:
        """Hear of rounds until the end."""
        while not (self._stop.is_set() and self._queue.empty()):
            while not self._queue.empty():
                self._tell(self._queue.get())
            self._stop.wait(0.1)
