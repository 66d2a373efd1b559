"""Jobs on this machine: spawned processes of one thread each, or this process itself."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as first_of
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue

from ppbench.base.device import one_thread, set_threads
from ppbench.base.errors import UsageError, held_back
from ppbench.base.machine import of_machine
from ppbench.federation.threats import THREATS, ThreatModel, register
from ppbench.run.jobs import Done, Failure, Tell, WorkerDied, WorkItem, attempt, work

_rounds: SimpleQueue[int] | None = None
PR_SET_PDEATHSIG = 1  # Linux's prctl: have the kernel end this process when its parent dies


def _enter(queue: SimpleQueue[int], parent: int, threats: Iterable[ThreatModel]) -> None:
    """Set up a worker: one thread, a place to report rounds, an end when the parent has gone, its threat models."""
    global _rounds
    for threat in threats:  # those that a script registered are not in the worker's modules
        register(threat)
    set_threads(1)
    for name in ("SIGINT", "SIGHUP"):  # the terminal sends them to all processes: the parent ends this one
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # see `held_back`
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _rounds = queue

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # the parent is gone; finished work is on disk

    threading.Thread(target=watch, daemon=True).start()


def _run(job: WorkItem) -> Failure | None:
    queue = _rounds
    return attempt(job, None if queue is None else queue.put)


class InlineExecutor:
    """Runs jobs in this process, one after another: for one worker, and to debug. A crash takes the run with it."""

    capacity = 1

    def __init__(self, tell: Tell) -> None:
        self._tell, self._jobs = tell, deque[WorkItem]()

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._jobs.clear()

    def submit(self, job: WorkItem) -> None:
        """Queue `job`; it runs in `wait`."""
        self._jobs.append(job)

    def wait(self) -> Done:
        """Run the job that was submitted first, and return it."""
        job = self._jobs.popleft()
        try:
            with one_thread():
                work(job, self._tell)
        except Exception as cause:  # noqa: BLE001 - other packages' code may raise anything; the scheduler decides
            return Done(job, cause)
        return Done(job)


def _end_of(process: BaseProcess | None) -> str:
    """Return how a worker ended, in words."""
    end = time.monotonic() + 1
    while process is not None and process.exitcode is None and time.monotonic() < end:
        time.sleep(0.01)  # the pool's own thread takes the code, and keeps it a moment later
    code = None if process is None else process.exitcode
    if code is None:
        return "ended for an unknown reason"
    if code >= 0:
        return f"ended with exit code {code}: code of a plugin, or of a library, ended it"
    why = ", probably for lack of memory" if -code == getattr(signal, "SIGKILL", 9) else ""
    return f"was killed (signal {-code}){why}"


class LocalExecutor:
    """Runs jobs on processes of this machine, each a pool of its own with one process, and a queue.

    In a common pool a process that dies takes all others' jobs with it, or a lock that it held.
    """

    def __init__(self, workers: int, tell: Tell) -> None:
        """Start nothing yet; a process starts with the first job that it gets."""
        self._free: list[ProcessPoolExecutor | None] = [None] * workers
        self._busy: dict[Future[Failure | None], tuple[WorkItem, ProcessPoolExecutor]] = {}
        self._lines: dict[ProcessPoolExecutor, SimpleQueue[int]] = {}
        self._processes: dict[ProcessPoolExecutor, BaseProcess] = {}
        self._waiting = deque[WorkItem]()
        self._tell, self.capacity = tell, workers
        self._context = multiprocessing.get_context("spawn")
        self._stop = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> LocalExecutor:
        self._listener.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for process in self._processes.values() if error is not None else ():
            process.kill()  # what it has finished is on disk, and what it writes appears whole or not at all
        for pool in [*self._free, *(pool for _, pool in self._busy.values())]:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        self._stop.set()
        self._listener.join(timeout=1)  # half a message of a killed worker would keep it for ever

    def submit(self, job: WorkItem) -> None:
        """Give `job` to a free worker, else to the next that becomes free."""
        if not self._free:
            self._waiting.append(job)
            return
        started = [pool for pool in self._free if pool is not None]
        pool = started[0] if started else None
        self._free.remove(pool)
        try:
            self._give(job, pool or self._start())
        except (OSError, RuntimeError) as cause:  # no more processes, open files or threads
            if not of_machine(cause):
                raise
            self.capacity -= 1
            why = getattr(cause, "strerror", None) or str(cause)
            if not self.capacity:
                raise UsageError(
                    f"No worker process can be started ({why}); end other programs, or use --workers 1."
                ) from cause
            warnings.warn(f"One worker less: it cannot be started ({why}).", stacklevel=2)
            self.submit(job)

    def _give(self, job: WorkItem, pool: ProcessPoolExecutor) -> None:
        before = {*multiprocessing.active_children()}
        with held_back():
            try:
                future = pool.submit(_run, job)
            except BrokenProcessPool:  # it was killed while it had nothing to do
                pool = self._replace(pool)
                future = pool.submit(_run, job)
            except (OSError, RuntimeError):  # started, but without the thread that would feed it
                for process in {*multiprocessing.active_children()} - before:
                    process.kill()
                raise
        self._busy[future] = (job, pool)
        for process in {*multiprocessing.active_children()} - before:
            self._processes[pool] = process

    def wait(self) -> Done:
        """Return the next job that ends. A worker that dies is replaced."""
        ended, _ = first_of(self._busy, return_when=FIRST_COMPLETED)
        future = next(iter(ended))
        job, pool = self._busy.pop(future)
        raised = future.exception()
        error: Exception | None = None
        if isinstance(raised, BrokenProcessPool):
            error = WorkerDied(f"its worker process {_end_of(self._processes.get(pool))}")
            pool = self._replace(pool)
        elif raised is not None:  # an exit of a plugin's own
            error = WorkerDied(f"its worker raised {type(raised).__name__}: {raised}")
        elif (failure := future.result()) is not None:
            error = failure.to_exception()
        self._free.append(pool)
        while self._waiting and self._free:
            self.submit(self._waiting.popleft())
        return Done(job, error)

    def _start(self) -> ProcessPoolExecutor:
        with held_back():  # it may start the process that keeps track of what is shared
            line = self._context.SimpleQueue()
        known = line, os.getpid(), tuple(THREATS.values())
        pool = ProcessPoolExecutor(1, mp_context=self._context, initializer=_enter, initargs=known)
        self._lines[pool] = line
        return pool

    def _replace(self, pool: ProcessPoolExecutor) -> ProcessPoolExecutor:
        pool.shutdown(wait=False)
        del self._lines[pool]
        self._processes.pop(pool, None)
        return self._start()

    def _listen(self) -> None:
        ending = False
        while not ending:
            ending = self._stop.wait(0.1)  # once more after the end, for the last rounds
            for queue in list(self._lines.values()):
                while not queue.empty():
                    self._tell(queue.get())
