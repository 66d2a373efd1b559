"""Run `Defense.compute` for a cohort: one client after another, or all at once under vmap. One interface."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from ppbench.base.tree import Tree, leaves, tree_map
from ppbench.federation.contract import Defense, Job
from ppbench.federation.plan import Plan
from ppbench.nets.net import build

Backend = Literal["auto", "loop", "vmap"]
K = TypeVar("K", bound=Hashable)


def choose(backend: Backend, device: torch.device, plan: Plan) -> Literal["loop", "vmap"]:
    """Return the backend that "auto" stands for.

    Measured (benchmarks/bench_training.py): vmap pays where a step is too small to fill a core, or on a GPU; a loop
    where convolutions do.
    """
    if backend != "auto":
        return backend
    values = plan.local.batch * torch.Size(plan.spec.shape).numel()
    return "vmap" if device.type != "cpu" or values <= 2048 else "loop"


def client_map(backend: Literal["loop", "vmap"], defense: Defense, plan: Plan, jobs: Mapping[K, Job]) -> dict[K, Tree]:
    """Return what each client computes, by client, or by run and client; equal on both backends, to float tolerance."""
    build(plan.spec)  # here, because a constructor draws, which vmap forbids
    with torch.no_grad():
        if backend == "loop":
            return {client: defense.compute(plan, channels_last(job)) for client, job in jobs.items()}
        results: dict[K, Tree] = {}
        groups: dict[object, list[K]] = defaultdict(list)
        for client, job in jobs.items():
            groups[_signature(job)].append(client)
        for clients in groups.values():
            results.update(_mapped(defense, plan, {c: jobs[c] for c in clients}))
        return {client: results[client] for client in jobs}


def channels_last(job: Job) -> Job:
    """Return `job` with image batches [T, B, C, H, W] laid out channels-last, which CPU convolutions prefer."""
    x = job.batches.x
    if x.dim() != 5 or x.shape[2] == 1:
        return job
    last = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])
    return Job(job.start, type(job.batches)(last, job.batches.y, job.batches.w), job.lr, job.own, job.noise)


def _signature(job: Job) -> object:
    values, spec = pytree.tree_flatten(job)
    return str(spec), tuple((tuple(v.shape), v.dtype) for v in values)


def _mapped(defense: Defense, plan: Plan, jobs: Mapping[K, Job]) -> dict[K, Tree]:
    """Run a group of jobs of one shape. What all share (a broadcast) is mapped once; a group of one takes the loop."""
    if len(jobs) == 1:
        return {client: defense.compute(plan, job) for client, job in jobs.items()}
    columns = list(zip(*(leaves(job) for job in jobs.values()), strict=True))
    spec = pytree.tree_flatten(next(iter(jobs.values())))[1]
    shared = [all(leaf is column[0] for leaf in column) for column in columns]
    inputs = [c[0] if same else torch.stack(list(c)) for c, same in zip(columns, shared, strict=True)]

    def one(*values: Tensor) -> Tree:
        return defense.compute(plan, pytree.tree_unflatten(list(values), spec))

    out = vmap(one, in_dims=tuple(None if same else 0 for same in shared))(*inputs)
    return {client: tree_map(lambda leaf, i=i: leaf[i], out) for i, client in enumerate(jobs)}  # type: ignore[misc]
