"""Engines: where jobs run. Two methods, `submit` and `wait`; the order, retries and failures are `ppbench.schedule`'s.

`local` runs them on processes of this machine, `inline` in this process, `ray` on a cluster. Another cluster (SLURM
through submitit, say) is one more class with these two methods.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

from ppbench.errors import UsageError, unknown
from ppbench.jobs import Job, Tell

EngineName = Literal["local", "inline", "ray"]


class WorkerDied(Exception):
    """A worker ended without an answer: killed, out of memory, or its machine went away."""


@dataclass(frozen=True)
class Done:
    """A job that ended. error: what it raised, a `WorkerDied` where it could not even do that; None if it succeeded."""

    job: Job
    error: Exception | None = None


class Engine(Protocol):
    """Runs jobs. To be used in a `with` block: at its end the workers are gone, after an error at once.

    Attributes:
        capacity: jobs that run at the same time; more may be submitted, they wait.
    """

    @property
    def capacity(self) -> int:
        """Return how many jobs run at the same time."""

    def submit(self, job: Job) -> None:
        """Have `job` run as soon as a worker is free; it may be run again where a worker is lost."""

    def wait(self) -> Done:
        """Return a job that has ended, waiting for one; raises nothing that a job raised."""

    def __enter__(self) -> Engine: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def default_workers(device: str) -> int:
    """Return how many jobs run at once on this machine if nothing is said: one a core, one where a GPU is used."""
    return 1 if device == "cuda" else os.cpu_count() or 1


def check_workers(workers: int | None) -> None:
    """Refuse fewer than one worker (UsageError)."""
    if workers is not None and workers < 1:
        raise UsageError(f"Option workers={workers} cannot be used; give 1 or more.")


def make_engine(name: str, workers: int | None, tell: Tell, address: str | None = None, device: str = "cpu") -> Engine:
    """Return an engine that is not yet started.

    Args:
        name: "local", "inline" or "ray".
        workers: jobs at the same time; None: `default_workers`, and of Ray as many as the cluster has room for.
        tell: called in this process with rounds of training, where the engine can hear of them.
        address: Ray's: of the cluster's head, None for one of this machine's own.
        device: "cpu" or "cuda"; Ray then shares each GPU among workers.

    Raises:
        UsageError: an unknown name, fewer than one worker, an address without a cluster, or Ray is not installed.
    """
    check_workers(workers)
    if address is not None and name != "ray":
        raise UsageError(f"Engine {name!r} has no address; leave --address out, or use --engine ray.")
    if name == "inline":
        from ppbench.engines.local import Inline

        return Inline(tell)
    if name == "local":
        from ppbench.engines.local import Local

        return Local(workers or default_workers(device), tell)
    if name == "ray":
        from ppbench.engines.ray import RayEngine

        return RayEngine(workers, address, device, tell)
    raise unknown("engine", name, ("local", "inline", "ray"))
