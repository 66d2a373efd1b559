"""Runs a defense's coroutines, of several federations side by side; clients in a loop, or at once under vmap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from ppbench.base.device import memory_of
from ppbench.base.machine import check_room
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree, filled, leaves, moved, nbytes, structure
from ppbench.federation.contract import Context, Defense, Job, Round, Server
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import BEGUN, Begun, StateRecord
from ppbench.federation.wire import SERVER, Wire
from ppbench.nets.net import build

# -- A canary client, whose update is a given direction: its loss is linear in the weights --


@dataclass(frozen=True, eq=False)
class Straight(Plan):
    """The plan with the inner product of weights and `direction` as every example's loss.

    The gradient of every example at all weights is the direction, so a defense's treatment of gradients and updates
    (clipping, noise, sparsity, local steps) applies to it too. flat: the direction as one vector [P].
    """

    direction: Params = field(default_factory=dict)
    flat: Tensor = field(default_factory=lambda: torch.empty(0))

    @staticmethod
    def of(plan: Plan, direction: Params) -> Straight:
        """Return `plan` with that loss; direction: shaped as the weights."""
        flat = torch.cat([value.reshape(-1) for value in direction.values()])
        return Straight(**{f.name: getattr(plan, f.name) for f in fields(Plan)}, direction=direction, flat=flat)

    @property
    def net(self) -> Callable[[Params, Tensor], Tensor]:  # type: ignore[override]  # no modules to be walked
        """The "network": weights and x [B, *shape] to the loss [B, 1]."""
        return self._product

    def _product(self, params: Params, x: Tensor) -> Tensor:
        weights = torch.cat([params[name].reshape(-1) for name in self.direction])
        return torch.dot(weights, self.flat.to(weights)).expand(len(x), 1)

    def training_pass(self, params: Params, x: Tensor) -> tuple[Tensor, Params]:
        """Return the "outputs" [B, 1], and no statistics: the direction has these."""
        return self._product(params, x), {}

    def example_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the "outputs" [B, 1] themselves, as [B]."""
        return logits[:, 0]


STACKED_ON_CPU, STACKED_ON_GPU = 2048, 2**19
"""Numbers in a batch up to which stacked clients are faster. On an H200 a loop is 4.5 times slower for batches of 64
images of 32x32x3, and 1.15 times faster, with a seventh of the memory, for 256 (docs/benchmarks.md)."""
Backend = Literal["auto", "loop", "vmap"]
K = TypeVar("K", bound=Hashable)


def chosen_backend(backend: Backend, device: torch.device, plan: Plan) -> Literal["loop", "vmap"]:
    """Return the backend; "auto" is vmap for small steps, else the loop (benchmarks/bench_training.py)."""
    if backend != "auto":
        return backend
    values = plan.local.batch * torch.Size(plan.spec.shape).numel()
    return "vmap" if values <= (STACKED_ON_CPU if device.type == "cpu" else STACKED_ON_GPU) else "loop"


def client_map(backend: Literal["loop", "vmap"], defense: Defense, plan: Plan, jobs: Mapping[K, Job]) -> dict[K, Tree]:
    """Return each client's result, by the key of its job; equal on both backends, to float tolerance."""
    build(plan.spec)  # here, because a constructor draws, which vmap forbids
    with torch.no_grad():
        if backend == "loop":
            return {client: defense.compute(plan, channels_last(job)) for client, job in jobs.items()}
        results: dict[K, Tree] = {}
        groups: dict[object, list[K]] = defaultdict(list)
        for client, job in jobs.items():
            groups[structure(job) if len(jobs) > 1 else None].append(client)
        for clients in groups.values():
            results.update(_run_group(defense, plan, {c: jobs[c] for c in clients}))
        return {client: results[client] for client in jobs}


def channels_last(job: Job) -> Job:
    """Return `job` with image batches [T, B, C, H, W] laid out channels-last, which CPU convolutions prefer."""
    x = job.batches.x
    if x.dim() != 5 or x.shape[2] == 1:
        return job
    last = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])
    return Job(job.start, type(job.batches)(last, job.batches.y, job.batches.w), job.lr, job.own, job.noise)


def _run_group(defense: Defense, plan: Plan, jobs: Mapping[K, Job]) -> dict[K, Tree]:
    """Run jobs of equal shapes under vmap; inputs that all share (a broadcast) are not mapped, nor is a single job."""
    if len(jobs) == 1:
        return {client: defense.compute(plan, job) for client, job in jobs.items()}
    columns = list(zip(*(leaves(job) for job in jobs.values()), strict=True))
    first = next(iter(jobs.values()))
    shared = [all(leaf is column[0] for leaf in column) for column in columns]
    inputs = [c[0] if is_shared else torch.stack(list(c)) for c, is_shared in zip(columns, shared, strict=True)]

    def one(*values: Tensor) -> Tree:
        return defense.compute(plan, filled(first, values))

    out = vmap(one, in_dims=tuple(None if is_shared else 0 for is_shared in shared))(*inputs)
    rows = [leaf.unbind() for leaf in leaves(out)]
    return {client: filled(out, [row[i] for row in rows]) for i, client in enumerate(jobs)}


T = TypeVar("T")


class SparseStates(Sequence[Tree]):
    """The states of many clients, of whom few take part in a round: only those that differ from the initial ones.

    A state is the one that was set, else the `kept` one (of a checkpoint, by client), else the initial one, made by
    `draw` whenever it is read: equal each time, as `Defense.init_client` draws from its context alone.
    """

    def __init__(self, count: int, draw: Callable[[int], Tree], kept: Mapping[int, Tree] | None = None) -> None:
        self._count, self._draw, self._kept, self._changed = count, draw, kept or {}, dict[int, Tree]()
        self._last: tuple[int, Tree] = (-1, ())

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[c] for c in range(self._count)[client]]
        client = range(self._count)[client]
        if client in self._changed:
            return self._changed[client]
        if client != self._last[0]:
            self._last = client, self._kept[client] if client in self._kept else self._draw(client)
        return self._last[1]

    def __setitem__(self, client: int, state: Tree) -> None:
        self._changed[client] = state

    def __copy__(self) -> SparseStates:
        twin = SparseStates(self._count, self._draw, self._kept)
        twin._changed = dict(self._changed)
        return twin

    def changed(self) -> list[int]:
        """Return the clients whose states are not the initial ones, ascending."""
        return sorted({*self._changed, *self._kept})


@dataclass
class Parties:
    """The states of all parties at one moment."""

    server: Server
    clients: list[Tree] | SparseStates

    def fork(self) -> Parties:
        """Return a copy whose states can be replaced while these stay."""
        return Parties(self.server, copy(self.clients))


@dataclass(frozen=True)
class Work:
    """The next computation of some clients of one federation. jobs: by client, on their device."""

    backend: Literal["loop", "vmap"]
    defense: Defense
    plan: Plan
    jobs: Mapping[int, Job]


Working = Generator[Work, Mapping[int, Tree], T]
"""A part of a federation's run: it yields its clients' computations and receives the results."""


def compute_all(work_by_key: Mapping[int, Work]) -> dict[int, dict[int, Tree]]:
    """Return the results of each piece of work, by its key and client; one vmap for each defense and plan."""
    results: dict[int, dict[int, Tree]] = {}
    mapped: list[tuple[Work, dict[tuple[int, int], Job]]] = []
    for key, work in work_by_key.items():
        results[key] = {}
        if work.backend == "loop":
            results[key] = client_map("loop", work.defense, work.plan, work.jobs)
            continue
        matching = (jobs for other, jobs in mapped if other.defense == work.defense and other.plan == work.plan)
        jobs = next(matching, None)
        if jobs is None:
            jobs = {}
            mapped.append((work, jobs))
        jobs.update({(key, client): job for client, job in work.jobs.items()})
    for work, jobs in mapped:
        for (key, client), result in client_map("vmap", work.defense, work.plan, jobs).items():
            results[key][client] = result
    return results


def run_together(
    parts: Sequence[Working[T]],
    compute: Callable[[Mapping[int, Work]], Mapping[int, Mapping[int, Tree]]] = compute_all,
) -> list[T]:
    """Run several parts side by side and return their results; work that they yield together is computed at once."""
    waiting: dict[int, Work] = {}
    ended: dict[int, T] = {}

    def go_on(index: int, results: Mapping[int, Tree] | None) -> None:
        try:
            waiting[index] = parts[index].send(results)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as stop:
            ended[index] = stop.value

    for index in range(len(parts)):
        go_on(index, None)
    while waiting:
        work = dict(waiting)
        waiting.clear()
        for index, results in compute(work).items():
            go_on(index, results)
    return [ended[index] for index in range(len(parts))]


def party_context(
    seeds: Seeds, plan: Plan, session: str, round_: int, step: int, party: int, purpose: str = "step"
) -> Context:
    """Return the context of a party in one step, with draws for this party, step and purpose alone."""
    purposes = "party", purpose, session, round_, step, party
    token = seeds.token("session", session, round_)
    return Context(plan, round_, token, party, seeds.generator(*purposes), seeds.secret(*purposes))


@dataclass
class Drive:
    """Runs one coroutine of a defense: delivers each step's messages and returns the answers to it.

    canaries: by client, a direction that replaces its gradient.
    """

    defense: Defense
    plan: Plan
    seeds: Seeds
    device: torch.device
    backend: Backend
    session: str
    probe: int
    round: int
    wire: Wire
    parties: Parties
    data: Mapping[int, Data]
    canaries: Mapping[int, Params] = field(default_factory=dict)
    step: int = 0
    states: list[StateRecord] = field(default_factory=list)

    def context(self, party: int, step: int) -> Context:
        """Return the context of `party` in `step`."""
        return party_context(self.seeds, self.plan, self.session, self.round, step, party)

    def begin(self, cohort: Sequence[int]) -> Round:
        """Return the coroutine of this round; a transcript also records the server's state and draws before it."""
        if self.wire.keep:
            ctx, server = self.context(SERVER, 0), self.parties.server
            begun = Begun(server, ctx.generator.get_state(), ctx.session, ctx.secret.key)
            self.states.append(StateRecord(self.probe, self.round, BEGUN, SERVER, begun))
        return self.unrecorded(cohort)

    def unrecorded(self, cohort: Sequence[int]) -> Round:
        """Return the coroutine of this round, without recording the state before it."""
        return self.defense.round(self.context(SERVER, 0), self.parties.server, cohort)

    def run(self, coroutine: Round) -> None:
        """Run `coroutine` to its end; the parties have their new states afterwards."""
        run_together([self.working(coroutine)])

    def working(self, coroutine: Round) -> Working[None]:
        """Run `coroutine` to its end; yields its clients' work and receives the results."""
        replies: Mapping[int, Tree] | None = None
        while True:
            try:
                request = coroutine.send(replies)  # type: ignore[arg-type]  # None starts a coroutine
            except StopIteration as stop:
                self.parties.server = stop.value
                return
            if self.wire.keep:
                self.states.append(StateRecord(self.probe, self.round, self.step, SERVER, request.server))
            replies = yield from self._answers(request.server, request.out)
            self.step += 1

    def _answers(self, server: Server, out: Mapping[int, Tree]) -> Working[dict[int, Tree]]:
        received: dict[int, Tree] = {}
        receivers: dict[int, list[int]] = defaultdict(list)
        for client, message in out.items():
            receivers[id(message)].append(client)
        for clients in receivers.values():
            copy = self.wire.post(self.probe, self.round, self.step, SERVER, clients, out[clients[0]])
            received.update(dict.fromkeys(clients, copy))
        chosen = self.backend if self.defense.mappable else "loop"
        backend = chosen_backend(chosen, self.device, self.plan)
        # A loop needs one client's noise at a time, vmap everybody's.
        size = 1 if backend == "loop" else len(received)
        order = sorted(received)
        answers: dict[int, Tree] = {}
        for first in range(0, len(order), max(size, 1)):
            group = {client: received[client] for client in order[first : first + size]}
            answers.update((yield from self._group_answers(backend, server, group)))
        return answers

    def _check_room(self, job: Job, clients: int) -> None:
        """Raise UsageError if memory cannot hold the batches and noise of `clients` jobs like `job`."""
        copies = 1 if clients == 1 else 2 * clients  # each client's, and stacked for vmap
        what = f"What {clients} clients draw for a round at once, batches and noise,"
        right = "use fewer clients or local epochs, or --schedule round_robin"
        check_room(copies * nbytes((job.batches, job.noise)), what, right, memory_of(self.device))

    def _group_answers(
        self, backend: Literal["loop", "vmap"], server: Server, received: Mapping[int, Tree]
    ) -> Working[dict[int, Tree]]:
        defense, states = self.defense, self.parties.clients
        contexts = {c: self.context(c, self.step) for c in received}
        jobs: dict[int, Job | None] = {}
        before: dict[int, Tree] = {}  # of those who compute: an idle client's state may be large, and is read again
        for client, message in received.items():
            me = states[client]
            jobs[client] = job = defense.prepare(contexts[client], me, message, self.data[client])
            if job is not None:
                before[client] = me
                if len(jobs) == 1:
                    self._check_room(job, len(received))
        pending = {c: moved(job, self.device) for c, job in jobs.items() if job is not None}
        canary_plans = {c: Straight.of(self.plan, self.canaries[c]) for c in pending if c in self.canaries}
        results: dict[int, Tree] = {}
        for client, plan in canary_plans.items():
            results.update(client_map("loop", defense, plan, {client: pending.pop(client)}))
        if pending:
            results.update((yield Work(backend, defense, self.plan, pending)))
        results = {c: defense.omniscient(self.plan, server, result) for c, result in results.items()}
        answers: dict[int, Tree] = {}
        for client, message in received.items():
            me = before.pop(client) if client in before else states[client]
            if self.wire.keep and self.round:  # no view has the states of set-up
                self.states.append(StateRecord(self.probe, self.round, self.step, client, me))
            new, answer = defense.reply(contexts[client], me, message, results.get(client, ()), self.data[client])
            if new is not me:
                states[client] = new
            if answer is not None:
                answers[client] = self.wire.post(self.probe, self.round, self.step, client, [SERVER], answer)
        return answers
