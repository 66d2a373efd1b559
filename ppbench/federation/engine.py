"""The federation: runs a defense's rounds over the wire, trains, saves checkpoints, and forks rounds for probes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import groupby
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from ppbench.base.device import computing
from ppbench.base.errors import Overflow, UsageError, shown
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree, finite, leaves, load_tree, moved, save_tree, tree_map
from ppbench.federation.acting import Acting, acting_round
from ppbench.federation.contract import Context, Defense, Server
from ppbench.federation.drive import Backend, Drive, Parties, SparseStates, Working, party_context, run_together
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.federation.threats import ThreatModel
from ppbench.federation.view import StateRecord, Transcript
from ppbench.federation.wire import SERVER, Envelope, Slot, Wire, session_of

REAL = "real"
ProbeKind = Literal["gradient", "local"]
P = ParamSpec("P")
T = TypeVar("T")


def stored(shard: Data, device: torch.device) -> Data:
    """Return `shard` on `device`, color images channels-last, which convolutions on a CPU prefer."""
    x = shard.x.to(device)
    if x.dim() == 4 and x.shape[1] > 1:
        x = x.contiguous(memory_format=torch.channels_last)
    return Data(x, shard.y.to(device))


def _computing(method: Callable[Concatenate[Federation, P], T]) -> Callable[Concatenate[Federation, P], T]:
    """Run a method under the federation's `tf32`."""

    @wraps(method)
    def inside(self: Federation, /, *args: P.args, **keywords: P.kwargs) -> T:
        with computing(self.tf32):
            return method(self, *args, **keywords)

    return inside


CLIENTS_PER_FILE = 100
"""Clients whose states one file of a checkpoint holds: a file each takes longer to open than to read."""


@dataclass
class SavedStates(Mapping[int, Tree]):
    """The states of `clients` in the checkpoint `folder`, on `device`; the file that was read last is kept."""

    folder: Path
    clients: frozenset[int]
    device: torch.device
    _last: tuple[int, dict[int, Tree]] = (-1, {})

    def __getitem__(self, client: int) -> Tree:
        if client not in self.clients:
            raise KeyError(client)
        if (number := client // CLIENTS_PER_FILE) != self._last[0]:
            self._last = number, dict(load_tree(self.folder / f"clients{number}.safetensors"))
        return moved(self._last[1][client], self.device)

    def __contains__(self, client: object) -> bool:
        return client in self.clients

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.clients))

    def __len__(self) -> int:
        return len(self.clients)


@dataclass
class Federation:
    """A federation under one defense.

    device: of all tensors; draws are made on the CPU. round: the last finished one; 0 after set-up. wire: byte counts
    of the real run (`setup_up`, `setup_down` of set-up alone); with `wire.keep` it also has all mail, and `states` the
    parties' states of each step. seconds: in rounds, never part of a result. session: see `session_of`.
    canaries: see `Drive`. tf32: see `base.device`; None: the caller's setting.
    """

    defense: Defense
    plan: Plan
    shards: Mapping[int, Data]
    seeds: Seeds
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: Backend = "auto"
    round: int = 0
    wire: Wire = field(default_factory=Wire)
    setup_up: int = 0
    setup_down: int = 0
    seconds: float = 0.0
    session: str = REAL
    states: list[StateRecord] = field(default_factory=list)
    canaries: Mapping[int, Params] = field(default_factory=dict)
    tf32: bool | None = None
    _cached_outputs: tuple[Parties, Tensor, list[Tensor]] | None = field(default=None, repr=False, compare=False)
    _set_up: tuple[Envelope, ...] | None = field(default=None, repr=False, compare=False)

    @_computing
    def start(self, params: Params) -> None:
        """Create all parties' states from initial public `params` and run set-up (UsageError: bad plan or shards)."""
        if sorted(self.shards) != list(range(self.plan.clients)):
            raise UsageError(f"The plan names {self.plan.clients} clients but {len(self.shards)} have data.")
        self.defense.check(self.plan)
        self.defense.check_data(self.plan, [len(self.shards[c].x) for c in range(self.plan.clients)])
        params = moved(params, self.device)
        self.shards = {client: stored(shard, self.device) for client, shard in self.shards.items()}
        server = self.defense.init_server(self.context(self.session, 0, 0, SERVER, "init"), params)
        cohort, initial = range(self.plan.clients), partial(self._initial_state, params)
        clients = SparseStates(len(cohort), initial) if self.plan.sample else [initial(client) for client in cohort]
        self.parties = Parties(moved(server, self.device), clients)
        wire = Wire(keep=True)
        drive = self.drive(self.plan, self.session, -1, 0, wire, self.parties, self.shards)
        drive.run(self.defense.setup(drive.context(SERVER, 0), self.parties.server, cohort))
        self.wire.take(wire)
        self._set_up, self.setup_up, self.setup_down = tuple(wire.mail), self.wire.up, self.wire.down

    def _initial_state(self, params: Params, client: int) -> Tree:
        """Return a client's state before set-up, drawn anew; params: whose shapes count."""
        ctx = self.context(self.session, 0, 0, client, "init")
        return moved(self.defense.init_client(ctx, params), self.device)

    def set_up_mail(self) -> tuple[Envelope, ...]:
        """Return the messages of set-up; after `restore` set-up is run again, from the same draws."""
        if self._set_up is None:
            again = replace(self, round=0, wire=Wire(), states=[])
            again.start(self.parties.server.params)
            self._set_up = again._set_up
        return self._set_up or ()

    @_computing
    def run(self, last: int, after: Callable[[int], None] | None = None) -> bool:
        """Train up to and including round `last`; call `after(round)` after each round.

        Return False as soon as the model, or an upload, is out of range (the run diverged), else True.
        UsageError: `last` is no whole number, or below 0. ProtocolError: a party breaks the protocol; all states stay
        as they were before that round.
        """
        if not isinstance(last, int) or isinstance(last, bool) or last < 0:
            raise UsageError(f"Round {shown(last)} cannot be run to; give its number, as run(3).")
        return run_together([self.training(last, after)])[0]

    def training(self, last: int, after: Callable[[int], None] | None = None) -> Working[bool]:
        """Train as `run` does, but yield the clients' work: see `run_many`."""
        while self.round < last:
            began = time.perf_counter()
            parties = self.parties.fork()
            drive = self.drive(self.plan, self.session, -1, self.round + 1, self.wire, parties, self.shards)
            try:
                yield from drive.working(drive.begin(self.cohort(self.round + 1)))
            except Overflow:
                return False
            self.parties = parties
            self.states += drive.states
            self.round += 1
            self.seconds += time.perf_counter() - began
            if not finite(self.parties.server.params):
                return False
            if after is not None:
                after(self.round)
        return True

    def cohort(self, round_: int) -> Sequence[int]:
        """Return the clients that take part in a round, in order: all, or `Plan.sample` that are drawn at random."""
        if not self.plan.sample:
            return range(self.plan.clients)
        drawn = torch.randperm(self.plan.clients, generator=self.seeds.generator("cohort", round_))
        return sorted(drawn[: self.plan.sample].tolist())

    @_computing
    def deliver(self) -> Tree:
        """Return the message that delivers the current model to a client."""
        return self.defense.deliver(self.context(REAL, self.round, 0, SERVER, "deliver"), self.parties.server)

    def models(self) -> list[Tree]:
        """Return the clients' final models, as messages: the delivered one, or each client's own if they have such."""
        return self.defense.own_models(self.parties.clients) or [self.deliver()]

    @_computing
    def outputs(self, x: Tensor, model: Tree | None = None) -> Tensor:
        """Return outputs [N, C] float64, on the CPU, of one of `models` (default: the first) for x [N, *shape].

        UsageError: x is no such tensor of floats.
        """
        shape = self.plan.spec.shape
        if not _is_input(x, shape):
            described = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else shown(x, 60)
            right = f"a dense tensor of floats [N, {', '.join(map(str, shape))}]; of one input, x[None]"
            raise UsageError(f"The inputs are {described}; give {right}.")
        message = self.models()[0] if model is None else model
        if x.dtype not in (torch.float32, *(leaf.dtype for leaf in leaves(message))):
            x = x.float()
        with torch.no_grad():
            outputs = [self.defense.predict(self.plan, message, chunk.to(self.device)) for chunk in x.split(512)]
        return torch.cat(outputs).cpu().double()

    def answers(self, x: Tensor) -> list[Tensor]:
        """Return the `outputs` of each of `models` for x, computed in the dtype of x, as a user runs a model.

        Protocols deliver float64, so that masks cancel, but convolutions take ten times as long in it. The last result
        is cached until the next round.
        """
        cached = self._cached_outputs
        if cached is None or cached[0] is not self.parties or cached[1] is not x:
            models = [tree_map(lambda t: t.to(x.dtype) if t.is_floating_point() else t, m) for m in self.models()]
            cached = self._cached_outputs = self.parties, x, [self.outputs(x, model) for model in models]
        return cached[2]

    def accuracy(self, data: Data) -> float:
        """Return top-1 accuracy on `data`, the mean over `models`."""
        right = [output.argmax(1) == data.y.argmax(1) for output in self.answers(data.x)]
        return float(torch.stack(right).double().mean())

    @_computing
    def probe(
        self,
        victims: Mapping[Slot, Data],
        kind: ProbeKind = "gradient",
        rounds: int = 1,
        acting: Acting | None = None,
    ) -> Transcript:
        """Return the transcript of forked rounds in which each client has only a victim's batch; no real state changes.

        Every probe runs the defense's own client code from the current states, in parallel (a gradient sent to a server
        that expects deltas would spoil later clients' weights), then one more broadcast, for client adversaries.

        victims: batches by slot; the slots of one probe are its cohort. kind: a client uploads ONE "gradient" of its
        batch, or the result of its "local" training. rounds: how many rounds each probe has.
        acting: an active server; UsageError if its weights are of another architecture.
        """
        plan = probe_plan(self.plan, self.defense, max(len(data.x) for data in victims.values()), kind, rounds)
        return self.forked(plan, victims, rounds, acting)

    @_computing
    def forked(
        self, plan: Plan, victims: Mapping[Slot, Data], rounds: int = 1, acting: Acting | None = None
    ) -> Transcript:
        """Return the transcript of `probe` under a given plan."""
        wire, states = Wire(keep=True), list[StateRecord]()
        for probe in sorted({slot.probe for slot in victims}):
            data = {s.client: moved(d, self.device) for s, d in victims.items() if s.probe == probe}
            parties = self.parties.fork()
            for round_ in range(self.round + 1, self.round + rounds + 1):
                drive = self.drive(plan, session_of(probe), probe, round_, wire, parties, data)
                cohort, draws = sorted(data), self.seeds.generator("acting", probe, round_)
                drive.run(drive.begin(cohort) if acting is None else acting_round(drive, cohort, acting, draws))
                states += drive.states
            _, message = self.defense.broadcast(drive.context(SERVER, drive.step), parties.server)
            wire.post(probe, self.round + rounds + 1, 0, SERVER, sorted(data), message)
        return Transcript(plan, self.defense, tuple(wire.mail), tuple(states), self.set_up_mail())

    @_computing
    def observe(self) -> Transcript:
        """Return the transcript of a fork of the next round, on the clients' own data; no real state changes."""
        wire, parties = Wire(keep=True), self.parties.fork()
        drive = self.drive(self.plan, session_of(-1), -1, self.round + 1, wire, parties, self.shards)
        drive.run(drive.begin(self.cohort(self.round + 1)))
        return Transcript(self.plan, self.defense, tuple(wire.mail), tuple(drive.states), self.set_up_mail())

    def release(self, threat: ThreatModel | None = None) -> Transcript:
        """Return the transcript of delivering the current model to every client.

        threat: whose view is taken; None: any. Without it, the states of all clients are in memory at once.
        """
        wire, clients = Wire(keep=True), range(self.plan.clients)
        wire.post(-1, self.round, 0, SERVER, clients, self.deliver())
        seen = [c for c in clients if threat is None or c == threat.client or threat.has(c)]
        states = (StateRecord(-1, self.round, 0, c, self.parties.clients[c]) for c in seen)
        return Transcript(self.plan, self.defense, tuple(wire.mail), tuple(states))

    def save(self, folder: Path) -> None:
        """Write a checkpoint to `folder` (which must exist): the server, and clients by `CLIENTS_PER_FILE`.

        Where clients are sampled, only states that differ from the initial ones are written.
        """
        states = self.parties.clients
        kept = states.changed() if isinstance(states, SparseStates) else list(range(len(states)))
        counters = torch.tensor([self.round, self.wire.up, self.wire.down, self.setup_up, self.setup_down])
        listed = torch.tensor(kept, dtype=torch.int64)
        save_tree((counters, self.parties.server, listed), folder / "server.safetensors")
        for number, block in groupby(kept, lambda client: client // CLIENTS_PER_FILE):
            save_tree({client: states[client] for client in block}, folder / f"clients{number}.safetensors")

    def restore(self, folder: Path, params: Params | None = None) -> None:
        """Continue from the checkpoint in `folder`, instead of `start`. UsageError: damaged, or of another network.

        Where clients are sampled, their states are read from `folder` when they are needed.
        params: initial weights, whose names, shapes and dtypes the saved weights must have; None: not checked.
        """
        counters, server, kept = self._saved(folder, params)
        self.round, self.wire.up, self.wire.down, self.setup_up, self.setup_down = counters
        self.shards = {client: stored(shard, self.device) for client, shard in self.shards.items()}
        server, saved = moved(server, self.device), SavedStates(folder, frozenset(kept), self.device)
        if self.plan.sample:
            initial = partial(self._initial_state, server.params)
            self.parties = Parties(server, SparseStates(self.plan.clients, initial, saved))
        else:
            self.parties = Parties(server, [saved[client] for client in range(self.plan.clients)])

    def _saved(self, folder: Path, params: Params | None) -> tuple[list[int], Server, list[int]]:
        """Return the counters, the server's state and the clients whose states are in `folder`.

        UsageError: none are there, or other weights than `params`.
        """
        path = folder / "server.safetensors"
        match load_tree(path):
            case (Tensor() as counters, Server() as server, Tensor() as listed) if counters.shape == (5,):
                ctx, kept = self.context(self.session, 0, 0, SERVER, "init"), [int(client) for client in listed]
                initial_server = server if params is None else self.defense.init_server(ctx, params)
                whole = self.plan.sample or kept == list(range(self.plan.clients))
                if whole and _forms(initial_server.params) == _forms(server.params):
                    return [int(number) for number in counters], server, kept
        raise UsageError(f"{path} is no state of this federation; delete its folder to have it made again.")

    def context(self, session: str, round_: int, step: int, party: int, purpose: str = "step") -> Context:
        """Return the context of `party` in one step, under this federation's plan."""
        return party_context(self.seeds, self.plan, session, round_, step, party, purpose)

    def drive(
        self, plan: Plan, session: str, probe: int, round_: int, wire: Wire, parties: Parties, data: Mapping[int, Data]
    ) -> Drive:
        """Return a `Drive` under `plan`, on `data` by client; it updates `parties`."""
        own = (self.defense, plan, self.seeds, self.device, self.backend)
        return Drive(*own, session, probe, round_, wire, parties, data, self.canaries)


def _is_input(x: object, shape: tuple[int, ...]) -> bool:
    """Return whether x is a dense tensor of floats [N, *shape] with values."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta or x.is_nested:
        return False
    return x.is_floating_point() and tuple(x.shape[1:]) == shape


def _forms(params: Params) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in params.items()}


def run_many(federations: Sequence[Federation], last: int, after: Callable[[int], None] | None = None) -> list[bool]:
    """Train several started federations of one device in lockstep; return the results of `Federation.run`.

    Under vmap the clients of all runs of one defense and plan are computed at once; in a loop the results are
    bit-identical to separate runs.
    """
    with computing(federations[0].tf32 if federations else None):
        return run_together([federation.training(last, after) for federation in federations])


def probe_plan(plan: Plan, defense: Defense, batch: int, kind: ProbeKind, rounds: int, *, whole: bool = False) -> Plan:
    """Return the plan of a probe. whole: every local step takes the whole batch, whatever the plan's batch size."""
    own, server_opt = plan.local, plan.server_opt
    if kind == "local":
        size = batch if whole else min(own.batch, batch)
        return replace(plan, local=replace(own, batch=size), schedule="parallel")
    if defense.sends == "weights":
        return replace(plan, local=Local("delta", 1, batch, own.opt), schedule="parallel")
    if rounds > 1 and own.upload == "delta":  # later rounds must not start from a model that a gradient spoiled
        server_opt = Opt(lr=own.opt.lr)
    local = Local("gradient", batch=batch, opt=own.opt)
    return replace(plan, local=local, schedule="parallel", server_opt=server_opt)
