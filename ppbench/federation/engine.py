"""The federation: drives a defense's rounds over the Wire, trains, checkpoints, and forks rounds for probes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from ppbench.base.errors import Overflow, UsageError, shown
from ppbench.base.precision import computing
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree, finite, leaves, load, moved, save, tree_map
from ppbench.federation.acting import Acting, acted
from ppbench.federation.contract import Context, Defense, Server
from ppbench.federation.drive import Backend, Drive, Parties, Working, context, together
from ppbench.federation.optim import Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import StateRecord, Transcript
from ppbench.federation.wire import SERVER, Slot, Wire, session_of

REAL = "real"
ProbeKind = Literal["gradient", "local"]
P = ParamSpec("P")
T = TypeVar("T")


def stored(shard: Data, device: torch.device) -> Data:
    """Return `shard` on `device`, color images channels-last: what convolutions on a CPU prefer, laid out once."""
    x = shard.x.to(device)
    if x.dim() == 4 and x.shape[1] > 1:
        x = x.contiguous(memory_format=torch.channels_last)
    return Data(x, shard.y.to(device))


def _computing(method: Callable[Concatenate[Federation, P], T]) -> Callable[Concatenate[Federation, P], T]:
    """Have a method compute as the federation's `tf32` says, whoever calls it."""

    @wraps(method)
    def inside(self: Federation, /, *args: P.args, **keywords: P.kwargs) -> T:
        with computing(self.tf32):
            return method(self, *args, **keywords)

    return inside


@dataclass
class Federation:
    """A federation under one defense.

    device: where tensors live; draws are made on CPU. round: last finished one; 0 after set-up. wire: byte counts of
    the real run (`setup_up`, `setup_down` of set-up alone); where `wire.keep` is set, mail of rounds stays in it, and
    `states` holds the parties' states of each step. seconds: in rounds, never part of a result. session: see
    `session_of`. canaries: see `Drive`. tf32: see `base.precision`; None: as whoever computes has it.
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
    _answered: tuple[Parties, Tensor, list[Tensor]] | None = field(default=None, repr=False, compare=False)

    @_computing
    def start(self, params: Params) -> None:
        """Create every party's state from initial public `params` and run set-up (UsageError: plan or shards)."""
        if sorted(self.shards) != list(range(self.plan.clients)):
            raise UsageError(f"The plan names {self.plan.clients} clients but {len(self.shards)} have data.")
        self.defense.check(self.plan)
        self.defense.check_data(self.plan, [len(self.shards[c].x) for c in range(self.plan.clients)])
        params = moved(params, self.device)
        self.shards = {client: stored(shard, self.device) for client, shard in self.shards.items()}
        server = self.defense.init_server(self.context(self.session, 0, 0, SERVER, "init"), params)
        cohort = range(self.plan.clients)
        clients = [self.defense.init_client(self.context(self.session, 0, 0, c, "init"), params) for c in cohort]
        self.parties = Parties(moved(server, self.device), [moved(c, self.device) for c in clients])
        drive = self.drive(self.plan, self.session, -1, 0, self.wire, self.parties, self.shards)
        drive.run(self.defense.setup(drive.context(SERVER, 0), self.parties.server, cohort))
        self.setup_up, self.setup_down = self.wire.up, self.wire.down

    @_computing
    def run(self, last: int, after: Callable[[int], None] | None = None) -> bool:
        """Train up to and including round `last`; call `after(round)` after each.

        UsageError: `last` is no whole number, or below 0. Up to 0 there is nothing to train.
        False as soon as the model, or what a client would send, is out of range (the run diverged), else True.
        ProtocolError: a party breaks the protocol; server and clients stay as they were before that round.
        """
        if not isinstance(last, int) or isinstance(last, bool) or last < 0:
            raise UsageError(f"Round {shown(last)} cannot be run to; give its number, as run(3).")
        return together([self.training(last, after)])[0]

    def training(self, last: int, after: Callable[[int], None] | None = None) -> Working[bool]:
        """Train as `run` does, but hand out what clients compute: see `run_many`."""
        while self.round < last:
            began = time.perf_counter()
            parties = Parties(self.parties.server, list(self.parties.clients))
            drive = self.drive(self.plan, self.session, -1, self.round + 1, self.wire, parties, self.shards)
            cohort = range(self.plan.clients)
            try:
                yield from drive.working(drive.begin(cohort))
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

    @_computing
    def deliver(self) -> Tree:
        """Return the message that hands the present model to a client."""
        return self.defense.deliver(self.context(REAL, self.round, 0, SERVER, "deliver"), self.parties.server)

    def models(self) -> list[Tree]:
        """Return what a client computes with in the end: the delivered model, or each client's own where all have."""
        return self.defense.own_models(self.parties.clients) or [self.deliver()]

    @_computing
    def outputs(self, x: Tensor, model: Tree | None = None) -> Tensor:
        """Return outputs [N, C] float64, on CPU, for inputs x [N, *shape], of one of `models`, by default the first.

        UsageError: x is no such tensor of floats.
        """
        shape = self.plan.spec.shape
        if not _is_input(x, shape):
            seen = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else shown(x, 60)
            right = f"a dense tensor of floats [N, {', '.join(map(str, shape))}]; of one input, x[None]"
            raise UsageError(f"The inputs are {seen}; give {right}.")
        message = self.models()[0] if model is None else model
        if x.dtype not in (torch.float32, *(leaf.dtype for leaf in leaves(message))):
            x = x.float()
        with torch.no_grad():
            parts = [self.defense.predict(self.plan, message, some.to(self.device)) for some in x.split(512)]
        return torch.cat(parts).cpu().double()

    def answers(self, x: Tensor) -> list[Tensor]:
        """Return the `outputs` for x of each of `models`, in the dtype of x, as who uses a model runs it.

        Protocols deliver float64 for what they cancel, and convolutions take ten times as long in it. What was asked
        for last is kept until a round has passed.
        """
        kept = self._answered
        if kept is None or kept[0] is not self.parties or kept[1] is not x:
            models = [tree_map(lambda t: t.to(x.dtype) if t.is_floating_point() else t, m) for m in self.models()]
            kept = self._answered = self.parties, x, [self.outputs(x, model) for model in models]
        return kept[2]

    def accuracy(self, data: Data) -> float:
        """Return top-1 accuracy on `data`, the mean over `models`."""
        right = [found.argmax(1) == data.y.argmax(1) for found in self.answers(data.x)]
        return float(torch.stack(right).double().mean())

    @_computing
    def probe(
        self,
        victims: Mapping[Slot, Data],
        kind: ProbeKind = "gradient",
        rounds: int = 1,
        acting: Acting | None = None,
    ) -> Transcript:
        """Fork rounds in which each client holds a victim's batch and nothing else; nothing real moves.

        Every probe runs the defense's own client code from the present states, in parallel (a gradient fed to a server
        meant for deltas would spoil what later clients see), then one more broadcast, which a client adversary needs.

        victims: batches by slot; the slots of one probe are its cohort. kind: a client uploads ONE "gradient" of its
        batch, or what its "local" part makes of it. rounds: how many it holds the batch, all of them in the transcript.
        acting: of a server that sends weights of its own; UsageError where these are of another architecture.
        """
        plan = probe_plan(self.plan, self.defense, max(len(data.x) for data in victims.values()), kind, rounds)
        wire, states = Wire(keep=True), []
        for probe in sorted({slot.probe for slot in victims}):
            data = {s.client: moved(d, self.device) for s, d in victims.items() if s.probe == probe}
            parties = Parties(self.parties.server, list(self.parties.clients))
            for round_ in range(self.round + 1, self.round + rounds + 1):
                drive = self.drive(plan, session_of(probe), probe, round_, wire, parties, data)
                cohort, draws = sorted(data), self.seeds.generator("acting", probe, round_)
                drive.run(drive.begin(cohort) if acting is None else acted(drive, cohort, acting, draws))
                states += drive.states
            _, message = self.defense.broadcast(drive.context(SERVER, drive.step), parties.server)
            wire.post(probe, self.round + rounds + 1, 0, SERVER, sorted(data), message)
        return Transcript(plan, self.defense, tuple(wire.mail), tuple(states))

    @_computing
    def observe(self) -> Transcript:
        """Fork the next round of training on the clients' own data, and return all of it; nothing real moves."""
        wire, parties = Wire(keep=True), Parties(self.parties.server, list(self.parties.clients))
        drive = self.drive(self.plan, session_of(-1), -1, self.round + 1, wire, parties, self.shards)
        drive.run(drive.begin(range(self.plan.clients)))
        return Transcript(self.plan, self.defense, tuple(wire.mail), tuple(drive.states))

    def release(self) -> Transcript:
        """Hand the present model to every client over the Wire, and return the transcript of that alone."""
        wire, clients = Wire(keep=True), range(self.plan.clients)
        wire.post(-1, self.round, 0, SERVER, clients, self.deliver())
        states = (StateRecord(-1, self.round, 0, c, self.parties.clients[c]) for c in clients)
        return Transcript(self.plan, self.defense, tuple(wire.mail), tuple(states))

    def save(self, folder: Path) -> None:
        """Write a checkpoint, one file a party, to `folder` (which must exist)."""
        counters = torch.tensor([self.round, self.wire.up, self.wire.down, self.setup_up, self.setup_down])
        save((counters, self.parties.server), folder / "server.safetensors")
        for client, state in enumerate(self.parties.clients):
            save(state, folder / f"client{client}.safetensors")

    def restore(self, folder: Path, params: Params | None = None) -> None:
        """Continue from the checkpoint in `folder`; instead of `start`. UsageError: damaged, or not of this network.

        params: what training began from; then the saved weights must have the names, shapes and types that it gives.
        """
        counters, server = self._saved(folder, params)
        self.round, self.wire.up, self.wire.down, self.setup_up, self.setup_down = counters
        self.shards = {client: stored(shard, self.device) for client, shard in self.shards.items()}
        clients = [load(folder / f"client{c}.safetensors") for c in range(self.plan.clients)]
        self.parties = Parties(moved(server, self.device), [moved(c, self.device) for c in clients])

    def _saved(self, folder: Path, params: Params | None) -> tuple[list[int], Server]:
        """Return the counters and the server's state in `folder`; UsageError: not such, or not of these `params`."""
        path = folder / "server.safetensors"
        match load(path):
            case (Tensor() as counters, Server() as server) if counters.shape == (5,):
                begun = self.context(self.session, 0, 0, SERVER, "init")
                first = server if params is None else self.defense.init_server(begun, params)
                if _forms(first.params) == _forms(server.params):
                    return [int(number) for number in counters], server
        raise UsageError(f"{path} is no state of this federation; delete its folder to have it made again.")

    def context(self, session: str, round_: int, step: int, party: int, purpose: str = "step") -> Context:
        """Return what `party` has at hand in one step under this federation's plan."""
        return context(self.seeds, self.plan, session, round_, step, party, purpose)

    def drive(
        self, plan: Plan, session: str, probe: int, round_: int, wire: Wire, parties: Parties, data: Mapping[int, Data]
    ) -> Drive:
        """Return what runs a coroutine of the defense under `plan`, on `data` by client; it moves `parties`."""
        own = (self.defense, plan, self.seeds, self.device, self.backend)
        return Drive(*own, session, probe, round_, wire, parties, data, self.canaries)


def _is_input(x: object, shape: tuple[int, ...]) -> bool:
    """Return whether x is a dense tensor of floats [N, *shape] that holds values."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta or x.is_nested:
        return False
    return x.is_floating_point() and tuple(x.shape[1:]) == shape


def _forms(params: Params) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in params.items()}


def run_many(federations: Sequence[Federation], last: int, after: Callable[[int], None] | None = None) -> list[bool]:
    """Train several started federations of one device in lockstep, and return what `Federation.run` returns of each.

    Under vmap the clients of all runs of one defense and plan are computed at once; in a loop with the same bits as
    alone.
    """
    with computing(federations[0].tf32 if federations else None):
        return together([federation.training(last, after) for federation in federations])


def probe_plan(plan: Plan, defense: Defense, batch: int, kind: ProbeKind, rounds: int, *, whole: bool = False) -> Plan:
    """Return the plan of a probe; whole: with all of the batch in every local step, whatever the plan's own."""
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
