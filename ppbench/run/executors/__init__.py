"""Where jobs run: in processes of this machine (`local`), in this one (`inline`), on a cluster (`ray`)."""

from __future__ import annotations

import os

from ppbench.base.errors import UsageError, shown, unknown
from ppbench.run.executors.local import InlineExecutor, LocalExecutor
from ppbench.run.executors.ray import RayExecutor
from ppbench.run.jobs import Executor, Tell

WORKERS = 1024
"""Most jobs at the same time: each is a process that imports torch."""


def make_executor(
    name: str, workers: int | None, tell: Tell, address: str | None = None, device: str = "cpu"
) -> Executor:
    """Return the executor called `name` ("local", "inline" or "ray"), not yet started.

    Args:
        workers: jobs at the same time; None: `default_workers`, and of Ray as many as the cluster has room for.
        tell: called in this process with finished rounds of training, if the executor receives them.
        address: Ray's: of the cluster's head, None for one of this machine's own.
        device: "cpu", or "cuda"; Ray then shares each GPU among workers.

    Raises UsageError: an unknown name, fewer than one worker, what the executor does not have, or Ray is not installed.
    """
    check_workers(workers)
    if address is not None and name != "ray":
        raise UsageError(f"Engine {name!r} has no address; leave --address out, or use --engine ray.")
    if name == "inline":
        return InlineExecutor(tell)
    if name == "local":
        return LocalExecutor(workers or default_workers(device), tell)
    if name == "ray":
        if device.startswith("cuda:"):
            raise UsageError(f"Engine 'ray' deals GPUs out itself; use --device cuda, not {device!r}.")
        return RayExecutor(workers, address, device, tell)
    raise unknown("engine", name, ("local", "inline", "ray"))


def default_workers(device: str) -> int:
    """Return the default number of jobs at once on this machine: one per core, one with a GPU."""
    return 1 if device != "cpu" else os.cpu_count() or 1


def check_workers(workers: int | None) -> None:
    """Refuse fewer than one worker, and more than `WORKERS` (UsageError)."""
    if workers is not None and not 1 <= workers <= WORKERS:
        raise UsageError(f"Option workers={shown(workers)} cannot be used; give from 1 to {WORKERS}.")
