"""An engine by its name."""

from __future__ import annotations

from ppbench.base.errors import UsageError, unknown
from ppbench.run.executors import Engine, check_workers, default_workers
from ppbench.run.executors.local import Inline, Local
from ppbench.run.executors.ray import RayEngine
from ppbench.run.jobs import Tell


def make_engine(name: str, workers: int | None, tell: Tell, address: str | None = None, device: str = "cpu") -> Engine:
    """Return an engine that is not yet started.

    Args:
        name: "local", "inline" or "ray".
        workers: jobs at the same time; None: `default_workers`, and of Ray as many as the cluster has room for.
        tell: called in this process with rounds of training, where the engine can hear of them.
        address: Ray's: of the cluster's head, None for one of this machine's own.
        device: "cpu", or "cuda"; Ray then shares each GPU among workers.

    Raises:
        UsageError: an unknown name, fewer than one worker, an address without a cluster, one GPU of many for Ray, or
            Ray is not installed.
    """
    check_workers(workers)
    if address is not None and name != "ray":
        raise UsageError(f"Engine {name!r} has no address; leave --address out, or use --engine ray.")
    if name == "inline":
        return Inline(tell)
    if name == "local":
        return Local(workers or default_workers(device), tell)
    if name == "ray":
        if device.startswith("cuda:"):
            raise UsageError(f"Engine 'ray' deals GPUs out itself; use --device cuda, not {device!r}.")
        return RayEngine(workers, address, device, tell)
    raise unknown("engine", name, ("local", "inline", "ray"))
