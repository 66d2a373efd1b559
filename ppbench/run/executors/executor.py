"""What the schedule asks of whoever runs its jobs: two methods, `submit` and `wait`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ppbench.run.jobs import Job


class WorkerDied(Exception):
    """A worker ended without an answer: killed, out of memory, or its machine went away."""


@dataclass(frozen=True)
class Done:
    """A job that ended. error: what it raised, a `WorkerDied` where it could not even do that; None if it succeeded."""

    job: Job
    error: Exception | None = None


class Executor(Protocol):
    """Runs jobs. To be used in a `with` block: at its end the workers are gone, after an error at once."""

    @property
    def capacity(self) -> int:
        """Return how many jobs run at the same time; more may be submitted, they wait."""

    def submit(self, job: Job) -> None:
        """Have `job` run as soon as a worker is free; it may be run again where a worker is lost."""

    def wait(self) -> Done:
        """Return a job that has ended, waiting for one; raises nothing that a job raised."""

    def __enter__(self) -> Executor: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None: ...
