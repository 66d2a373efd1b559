"""Jobs on a cluster of Ray, an optional package (`ppbench-fl[ray]`). Its own retries are off.

It could not tell a node that went away, whose job is submitted again, from a cell that kills its worker.
"""

from __future__ import annotations

import importlib
import math
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppbench.base.errors import UsageError
from ppbench.base.version import __version__
from ppbench.records.store import MARKER
from ppbench.run.jobs import Done, Failure, Tell, WorkerDied, WorkItem, attempt

CONNECT_S = 20.0
"""Seconds after which no cluster is expected to answer any more; it takes 3 to 5 where one does."""
POLL_S = 1.0
"""Seconds between two checks for Ctrl-C while nothing ends."""
NODES_LOST = 3
"""Times that a job is submitted again because its node went away; then it fails."""
STORE_BYTES = 100 * 2**20
"""Memory that Ray's object store may take, near the least that it accepts: results go through the folder."""
QUIET_OPTIONS = {"log_to_driver": False, "logging_level": "ERROR"}


@dataclass(frozen=True)
class Order:
    """A job as it travels to a node, its folder absolute, with the driver's version, marker and working folder."""

    job: WorkItem
    version: str
    marker: str
    cwd: str


def marker_of(out: Path) -> str:
    """Return the time and text of a folder's marker, to tell folders of one path apart. Raises OSError: no marker."""
    path = out / MARKER
    return f"{path.stat().st_mtime:.0f} {path.read_text(encoding='utf-8')}"


def unfit(order: Order) -> str | None:
    """Return why this node cannot do a job, in one sentence, or None if it can."""
    node, out = platform.node(), order.job.out
    if __version__ != order.version:
        return f"Node {node} has ppbench {__version__}, and this is {order.version}; install the same on every node."
    try:
        seen = marker_of(out)
    except OSError:
        seen = ""
    if seen != order.marker:
        return (
            f"Node {node} does not see the folder {out} of this machine (its {MARKER} differs or is missing); "
            "give an --out that all nodes share, under one path."
        )
    return None


def run_order(order: Order) -> Failure | str | None:
    """Do a job on a node; return its failure, or one sentence on why the node cannot do jobs."""
    from ppbench.base.device import set_threads

    set_threads(1)
    reason = unfit(order)
    if reason is not None:
        return reason
    if os.path.isdir(order.cwd):
        os.chdir(order.cwd)
    return attempt(order.job)


class RayExecutor:
    """Runs jobs on a Ray cluster, each on one CPU, or on its share of a GPU."""

    def __init__(
        self, workers: int | None, address: str | None = None, device: str = "cpu", tell: Tell | None = None
    ) -> None:
        """Start nothing yet. Raises UsageError: Ray is not installed.

        Args:
            workers: jobs at the same time, sharing GPUs evenly; None: as many as the cluster has CPUs, or GPUs.
            address: of a cluster that runs, HOST:PORT or "auto"; None: one of this machine's own, which ends with the
                executor. A process that is already connected stays where it is.
            device: "cpu" or "cuda". tell: called with the rounds of a training when it has ended.
        """
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as cause:
            raise UsageError("Engine 'ray' needs the package ray; install ppbench-fl[ray].") from cause
        self._workers, self._address, self._device, self._tell = workers, address, device, tell
        self._jobs: dict[Any, WorkItem] = {}
        self._lost: dict[WorkItem, int] = {}
        self._markers: dict[Path, str] = {}
        self._ours, self._remote, self.capacity = False, None, workers or 1

    def __enter__(self) -> RayExecutor:
        """Start or join the cluster. Raises UsageError: none answers, or it lacks a GPU that is asked for."""
        ray = self._ray
        if not ray.is_initialized():
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # no telemetry
            self._connect()
            self._ours = True
        try:
            resources = ray.cluster_resources()
            gpus = int(resources.get("GPU", 0)) if self._device == "cuda" else 0
            if self._device == "cuda" and not gpus:
                raise UsageError("Device 'cuda' was asked for, but the Ray cluster has no GPU; use --device cpu.")
            self.capacity = self._workers or gpus or int(resources.get("CPU", 1))
            share = gpu_share(self.capacity, gpus)
            self._remote = ray.remote(num_cpus=1, num_gpus=share, max_retries=0)(run_order)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for ref in self._jobs:
            self._ray.cancel(ref, force=True)
        self._jobs.clear()
        self._leave()

    def submit(self, job: WorkItem) -> None:
        """Have Ray run `job` on a node that is free. Raises UsageError where its folder was not prepared."""
        out = job.out.absolute()
        if out not in self._markers:
            try:
                self._markers[out] = marker_of(out)
            except OSError as cause:
                raise UsageError(f"{out} has no {MARKER}; jobs need a folder that ppbench made.") from cause
        order = Order(replace(job, out=out), __version__, self._markers[out], os.getcwd())
        assert self._remote is not None, "submit is for the inside of a with block"
        self._jobs[self._remote.remote(order)] = job

    def wait(self) -> Done:
        """Return the next job that ends. Raises UsageError: a node that cannot work would swallow all jobs."""
        while True:
            ended, _ = self._ray.wait(list(self._jobs), num_returns=1, timeout=POLL_S)
            done = self._result_of(ended[0]) if ended else None
            if done is not None:
                return done

    def _result_of(self, ref: Any) -> Done | None:
        """Return a job that ended, None if it was submitted again."""
        job, errors = self._jobs.pop(ref), self._ray.exceptions
        try:
            failure: Failure | str | None = self._ray.get(ref)
        except errors.RayTaskError as cause:  # `do` raises nothing: it could not even be loaded
            node, why = getattr(cause, "ip", "?"), str(cause).strip().splitlines()[-1]
            sentence = f"Node {node} cannot run ppbench ({why}); install ppbench-fl {__version__} on every node."
            raise UsageError(sentence) from cause
        except errors.NodeDiedError:
            self._lost[job] = self._lost.get(job, 0) + 1
            if self._lost[job] > NODES_LOST:
                return Done(job, WorkerDied(f"the node that ran it went away, {self._lost[job]} times"))
            self.submit(job)
            return None
        except errors.RayError:
            return Done(job, WorkerDied("its worker process was killed, probably for lack of memory"))
        if isinstance(failure, str):
            raise UsageError(failure)
        if failure is None and self._tell is not None and job.rounds:
            self._tell(job.rounds)
        return Done(job, None if failure is None else failure.to_exception())

    def _connect(self) -> None:
        if self._address is None:
            self._ray.init(
                address="local",
                num_cpus=self._workers,
                include_dashboard=False,
                object_store_memory=STORE_BYTES,
                **QUIET_OPTIONS,
            )
            return
        # Ray tries for minutes where nothing answers, and may abort the process; so a child tries first.
        code = f"import ray, sys; ray.init(address=sys.argv[1], **{QUIET_OPTIONS!r})"
        try:
            child = subprocess.run([sys.executable, "-c", code, self._address], capture_output=True, timeout=CONNECT_S)
            error_lines = child.stderr.decode(errors="replace").strip().splitlines() if child.returncode else None
        except subprocess.TimeoutExpired:
            error_lines = [f"nothing within {CONNECT_S:.0f} s"]
        if error_lines is not None:
            why = error_lines[-1] if error_lines else "it ended without a word"
            raise UsageError(
                f"No Ray cluster answers at {self._address!r} ({why}); give the HOST:PORT that `ray start --head` "
                "printed, or leave --address out to use this machine alone."
            )
        self._ray.init(address=self._address, **QUIET_OPTIONS)

    def _leave(self) -> None:
        if self._ours:
            self._ray.shutdown()
            self._ours = False


def gpu_share(workers: int, gpus: int) -> float:
    """Return the share of a GPU that each of `workers` jobs gets when they share `gpus` evenly; 0 without any."""
    return 1 / math.ceil(workers / gpus) if gpus else 0.0
