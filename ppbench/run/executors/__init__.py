"""Engines: where jobs run. Two methods, `submit` and `wait`; order, retries, failures are `ppbench.run.schedule`'s.

`local` runs them on processes of this machine, `inline` in this process, `ray` on a cluster. Another cluster (SLURM
through submitit, say) is one more class with these two methods.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

from ppbench.base.errors import UsageError
from ppbench.run.jobs import Job

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
    return 1 if device != "cpu" else os.cpu_count() or 1


def check_workers(workers: int | None) -> None:
    """Refuse fewer than one worker (UsageError)."""
    if workers is not None and workers < 1:
        raise UsageError(f"Option workers={workers} cannot be used; give 1 or more.")
