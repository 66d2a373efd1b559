"""The contract of a defense. Every default is FedAvg: a defense overrides what differs.

Parties hold the state. The server's part of a round is a coroutine that yields `Step`s and receives clients' answers. A
client's part is `prepare` (decode, draw all noise), `compute` (pure tensors, mapped over clients), `reply` (encode).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.autodiff import gradient
from ppbench.base.declarations import class_faults, contract_faults, field_faults, word_faults
from ppbench.base.errors import ProtocolError, UsageError, shown
from ppbench.base.secret_draws import at_step
from ppbench.base.tree import Params, Tree, node, tree_map
from ppbench.federation.bounds import bounds_of
from ppbench.federation.evidence import Evidence, Shared, as_gradients, units_of
from ppbench.federation.plan import Batch, Data, Layout, Noise, Plan, all_at_once, shuffled
from ppbench.federation.plan import Context as Context
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import SERVER, Hello, Join, Model, Slot, Update, checked_count

# -- The encryption of a round, in counts that a defense states; `run/cost.py` times one of each operation --

CipherScheme = Literal["paillier", "mife"]


@dataclass(frozen=True)
class Ciphering:
    """The encryption of one round.

    Attributes:
        scheme: "paillier": threshold Paillier (Damgard and Jurik 2001); "mife": multi-input functional encryption of
            inner products (Abdalla et al. 2018, from Agrawal, Libert and Stehle).
        bits: of Paillier's modulus, or of the group's order.
        slots: numbers in one ciphertext.  size: bytes of one ciphertext.
        clients, threshold: how many encrypt, and how many must decrypt (0 if the server's key decrypts).
        values: numbers that a client encrypts.
    """

    scheme: CipherScheme
    bits: int
    slots: int
    size: int
    clients: int
    threshold: int
    values: int

    def blocks(self, values: int) -> int:
        """Return the number of ciphertexts for `values` numbers."""
        return -(-values // self.slots)

    def nbytes(self, values: int) -> int:
        """Return the bytes of the ciphertexts of `values` numbers."""
        return self.blocks(values) * self.size


SLOT_BITS = 64
"""Bits of a number in a packed Paillier ciphertext."""
POINT_BYTES = 32
"""Bytes of an element of the group of functional encryption, a point of Curve25519."""


def paillier(bits: int, clients: int, threshold: int, values: int) -> Ciphering:
    """Return threshold Paillier: a ciphertext is a number modulo n^2 with as many slots as fit into n."""
    return Ciphering("paillier", bits, (bits - 1) // SLOT_BITS, 2 * bits // 8, clients, threshold, values)


def functional(clients: int, values: int) -> Ciphering:
    """Return functional encryption of each number: three points, (r, r a, x + u + r W a)."""
    return Ciphering("mife", 8 * POINT_BYTES, 1, 3 * POINT_BYTES, clients, 0, values)


# -- The evidence of an attacker that takes every upload for an undefended one: the default of `Defense.evidence` --


def plain_evidence(view: View) -> list[Evidence]:
    """Return evidence for an attacker that takes every update for the undefended gradient of one batch.

    Server and eavesdropper use each client's first upload (other rounds: `View.by_round`); a weight change, divided by
    the learning rate and the epochs, is taken for a gradient. A client sees only the others' mean, as the difference of
    two broadcasts.
    """
    if not view.threat.sees_uploads:
        return others_evidence(view, lambda e, params: view.defense.decode(e.answer, params))  # their N_k are secret
    shared, by_slot = Shared(view.plan), dict[Slot, Evidence]()
    for exchange in view.exchanges():
        if not isinstance(exchange.request, Model) or exchange.slot in by_slot:
            continue
        params = shared.same(exchange.request.params)
        change = _update(view, exchange, params)
        if not _fits(change, params):  # only the server can decode it
            continue
        observed = as_gradients(view.plan, exchange.round, change)
        statistics = units_of(view.plan, params, observed)
        by_slot[exchange.slot] = Evidence((exchange.slot,), observed, shared.at(params), params, statistics=statistics)
    return list(by_slot.values())


def _update(view: View, exchange: Exchange, params: Params) -> Params:
    """Return the decoded update of an upload; the server decodes with its secrets of that step."""
    server = view.state_at(exchange) if view.party == SERVER else None
    if server is None:
        return view.defense.decode(exchange.answer, params)
    ctx = Context(view.plan, exchange.round, view.session(exchange), SERVER, torch.Generator())
    return view.defense.decoded(ctx, server, exchange.slot.client, exchange.answer)


def _fits(update: Params, like: Params) -> bool:
    """Return whether an update has the model's names and shapes."""
    return update.keys() == like.keys() and all(update[name].shape == value.shape for name, value in like.items())


def client_observations(view: View) -> Iterator[tuple[tuple[Slot, ...], list[Exchange], Params, Params]]:
    """Yield by probe what curious clients saw of a round: all others' slots, their own uploads, two models in a row."""
    first = view.first_uploads()
    for probe, _ in view.data:
        sent = [m.params for m in view.broadcasts(probe) if isinstance(m, Model)]
        inside = [Slot(probe, c) for c in range(view.plan.clients) if view.inside(c)]
        own_uploads = [first[slot] for slot in inside if slot in first]
        others = tuple(Slot(probe, c) for c in range(view.plan.clients) if not view.inside(c))
        if len(sent) > 1 and own_uploads and len(own_uploads) == len(inside) and others:
            yield others, own_uploads, sent[0], sent[1]


def others_evidence(
    view: View, own: Callable[[Exchange, Params], Params], weights: Sequence[float] = ()
) -> list[Evidence]:
    """Return the others' mean gradient, which curious clients learn from two broadcasts and their own uploads.

    own: returns what an upload of theirs, at these broadcast weights, adds to N times the mean of all updates.
    weights: of each client's update in N times the mean, as far as they know it; 1 each by default.
    """
    opt, shared, pieces = view.plan.server_opt, Shared(view.plan), []
    if opt.name != "sgd" or opt.momentum:
        return []
    weights = weights or [1.0] * view.plan.clients
    for others, own_uploads, first, second in client_observations(view):
        parts = [own(e, first) for e in own_uploads]
        size, theirs = len(others) + len(own_uploads), [weights[slot.client] for slot in others]
        rates = view.plan.net.statistics if view.plan.local.upload == "gradient" else {}
        total = {n: (first[n].double() - second[n].double()) / rates.get(n, opt.lr) * size for n in first}
        rest = {n: total[n] - sum(part[n].double() for part in parts) for n in first}
        observed = as_gradients(view.plan, own_uploads[0].round, rest, sum(theirs))
        pieces.append(shared.mean(others, observed, first, [w / sum(theirs) for w in theirs], "aggregate"))
    return pieces


@node
class Server:
    """The server's state. params: public weights; opt: server optimizer; counts: [N] int64; own: the defense's."""

    params: Params
    opt: Tree
    counts: Tensor
    own: Tree


@node
class Job:
    """Inputs of `compute`. start: decoded weights; own: the client's tree; batches, noise: [T, ...], by local step."""

    start: Tree
    batches: Batch
    lr: Tensor
    own: Tree
    noise: Tree


@dataclass(frozen=True)
class Step:
    """One step of the server's coroutine. server: its state; out: messages by client."""

    server: Server
    out: Mapping[int, Tree]


Round = Generator[Step, Mapping[int, Tree], Server]


@dataclass(frozen=True)
class Defense:
    """A federated protocol with public parameters as its fields; it holds no state and no secret.

    Class attributes a defense sets:
        name: as on the command line.  version: raise it when results may change.
        control: the field that is the x-axis of its trade-off.  grids: values of it, "quick" and "paper".
        paper: citation.  epsilon_reason: why there is no epsilon.
        setting: by preset, defaults of fields of `EvaluateConfig`: the loss, network and federation of the paper's
            protocol. Controls run in the same setting.
        masked: whether clients train another model than the delivered one; then membership is tested on both.
        roles: the roles of clients in a round, if not all send the same; victims are attacked in each role.
        kin: the defense whose attacks also apply to this one, through `noise` and `clipping`; "" for none.
        sends: what clients send, an "update" or "weights"; with "weights" a probe is one local step.
        mappable: whether `compute` may run under vmap over clients; False if it draws.
        everybody: whether every client must take part in every round: masks or noise cancel only in the sum of all.
        tracks: whether running statistics of norms may be among the parameters (`Net.statistics`): clients train by
            `Plan.objective`, step by `Plan.stepped`, and its evidence reads them.
    """

    name: ClassVar[str]
    contract: ClassVar[int] = 0
    version: ClassVar[str] = "1"
    control: ClassVar[str | None] = None
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (), "paper": ()}
    paper: ClassVar[str] = ""
    epsilon_reason: ClassVar[str] = "the mechanism gives no differential-privacy guarantee"
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    masked: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = ("",)
    kin: ClassVar[str] = ""
    sends: ClassVar[Literal["update", "weights"]] = "update"
    mappable: ClassVar[bool] = True
    everybody: ClassVar[bool] = False
    tracks: ClassVar[bool] = False

    # -- public checks -------------------------------------------------------------------------------------------
    def check(self, plan: Plan) -> None:
        """Raise UsageError, before anything runs, for a parameter out of bounds or a plan that does not fit."""
        self.check_bounds()
        if plan.net.statistics and not self.tracks:
            raise UsageError(
                f"Defense {self.name!r} cannot be used with running statistics that travel; take another value of the "
                "model's option norms (norm of our ResNets)."
            )
        if plan.sample and self.everybody:
            needs = f"Defense {self.name!r} needs all clients in every round, not {plan.sample} of {plan.clients}"
            raise UsageError(f"{needs}; leave out --sample.")

    def check_bounds(self) -> None:
        """Raise UsageError for a parameter out of the bounds in its annotation; needs no plan."""
        for name, bound in bounds_of(type(self)).items():  # type: ignore[arg-type]  # a class is hashable
            self.require(bound.holds(getattr(self, name)), name, bound.right)

    def check_data(self, plan: Plan, counts: Sequence[int]) -> None:
        """Raise UsageError, before anything runs, for clients' numbers of examples that the defense cannot use."""

    def require(self, condition: bool, field: str, right: str) -> None:
        """Raise UsageError unless `condition`: `field` of this defense must be `right`."""
        if not condition:
            value = getattr(self, field)
            raise UsageError(f"Defense {self.name!r}: {field}={shown(value)} cannot be used; it must be {right}.")

    def guarantee(self, plan: Plan, examples: int, rounds: int) -> tuple[float, float] | None:
        """Return (epsilon, delta) of an example for all that its client, with `examples`, sends in all rounds, or None.

        Attacks on uploads are compared with it, so a guarantee of the released model alone does not count.
        """
        return None

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why `guarantee` is None, as a clause; `server` is the state after the run, None before it."""
        return self.epsilon_reason

    def noise(self, plan: Plan) -> Noise | None:
        """Return the public law of the noise on each coordinate of an upload, in units of a gradient, or None."""
        return None

    def clipping(self, plan: Plan) -> float | None:
        """Return the public L2 norm to which gradients (of examples or of an upload) are clipped, or None."""
        return None

    def fewest_batches(self, count: int, batch: int) -> int:
        """Return the least number of mini-batches into which a client divides `count` examples."""
        return -(-count // batch)

    def fewest_steps(self, count: int, batch: int, epochs: int) -> int:
        """Return the least number of local steps of a client with `count` examples in one round."""
        return epochs * self.fewest_batches(count, batch)

    def copies(self, plan: Plan, clients: int, examples: int) -> int:
        """Return the least number of model-sized arrays that `clients` clients of `examples` each hold in one step."""
        return clients * plan.local.copies

    def ciphering(self, plan: Plan) -> Ciphering | None:
        """Return the encryption of one round, which is simulated here and timed separately; None: no encryption."""
        return None

    # -- the server ----------------------------------------------------------------------------------------------
    def init_server(self, ctx: Context, params: Params) -> Server:
        """Return the server's state before set-up, from initial public weights."""
        flat = Layout.of(params).pack(params)
        return Server(params, ctx.plan.server_opt.init(flat), torch.zeros(ctx.plan.clients, dtype=torch.int64), ())

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Run once before the first round. Default: each client sends its number of examples."""
        answers = yield Step(server, dict.fromkeys(cohort, Hello()))
        counts = server.counts.clone()
        for client, answer in answers.items():
            if not isinstance(answer, Join):
                raise ProtocolError(f"Client {client} answered set-up with {type(answer).__name__}, not Join.")
            counts[client] = checked_count(client, answer.count)
        return Server(server.params, server.opt, counts, server.own)

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Run one round (broadcast, collect, aggregate): for all clients at once, or for one after another."""
        groups = [[c] for c in cohort] if ctx.plan.schedule == "round_robin" else [list(cohort)]
        for group in groups:
            server, message = self.broadcast(ctx, server)
            uploads = yield Step(server, dict.fromkeys(group, message))
            server = self.aggregate(ctx, server, uploads)
        return server

    def broadcast(self, ctx: Context, server: Server) -> tuple[Server, Tree]:
        """Return the server's state and what it sends. Default: the public weights."""
        return server, Model(server.params)

    def weights(self, server: Server, clients: Sequence[int]) -> list[float]:
        """Return the aggregation weights of `clients`, summing to 1. Default: proportional to N_k."""
        counts = [float(server.counts[c]) for c in clients]
        return [count / sum(counts) for count in counts]

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Return the server's state after a step on the weighted mean of the decoded uploads."""
        layout = Layout.of(server.params)
        mean = torch.zeros_like(layout.pack(server.params))
        for weight, (client, upload) in zip(self.weights(server, list(uploads)), uploads.items(), strict=True):
            try:
                mean = mean + weight * layout.pack(self.decoded(ctx, server, client, upload))
            except (AttributeError, KeyError, IndexError, ValueError, RuntimeError) as cause:
                raise ProtocolError(f"Client {client} sent an upload that cannot be decoded: {cause}") from cause
        return self.stepped(ctx, server, layout.unpack(mean))

    def decoded(self, ctx: Context, server: Server, client: int, upload: Tree) -> Params:
        """Return the update that the server decodes from `client`'s upload, also for evidence. Default: `decode`."""
        return self.decode(upload, server.params)

    def stepped(self, ctx: Context, server: Server, update: Params) -> Server:
        """Return the server's state after its optimizer's step on an aggregated update; weights keep their dtype."""
        layout, server_opt = Layout.of(server.params), ctx.plan.server_opt
        flat = layout.pack(server.params)
        step, rate = layout.pack(update).to(flat.dtype), server_opt.rate(ctx.round)
        if ctx.plan.local.upload == "gradient":
            flat, opt = ctx.plan.stepped(server_opt, layout, flat, step, server.opt, rate)
        else:
            flat, opt = server_opt.step(flat, step, server.opt, rate)
        return Server(layout.unpack(flat), opt, server.counts, server.own)

    def deliver(self, ctx: Context, server: Server) -> Tree:
        """Return the message that delivers the final model to a client."""
        return Model(server.params)

    def predict(self, plan: Plan, message: Tree, x: Tensor) -> Tensor:
        """Return logits [B, C] as a client computes them from a delivered or broadcast message."""
        return plan.net.in_use(message.params, x)

    def own_models(self, clients: Sequence[Tree]) -> list[Tree]:
        """Return each client's own model, as `predict` takes it, from the clients' states; empty if they have none."""
        return []

    # -- a client ------------------------------------------------------------------------------------------------
    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return a client's state before set-up: its secrets. `params` gives public shapes only.

        Equal draws must give an equal state: where clients are sampled, an unchanged state is made again when needed.
        """
        return ()

    def batches(self, ctx: Context, data: Data) -> Batch:
        """Return the batches of a client's round: epochs of shuffled batches, or one batch in gradient mode."""
        local = ctx.plan.local
        if local.upload == "gradient" and len(data.x) <= local.batch:
            return all_at_once(data)
        return shuffled(data, local, ctx.generator)

    def draw(self, ctx: Context, params: Params, steps: int) -> Tree:
        """Return the noise of a round: a tree with leading axis `steps`, or made by `draws.noise`. Default: none."""
        return ()

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        """Return the inputs of `compute`, or None if `message` needs no computation."""
        if not isinstance(message, Model):
            return None
        batches = self.batches(ctx, data)
        noise = self.draw(ctx, message.params, len(batches.x))
        lr = torch.tensor(ctx.plan.local.opt.rate(ctx.round), dtype=batches.x.dtype, device=batches.x.device)
        return Job(message.params, batches, lr, me, noise)

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return one gradient, or start minus end of local training; changes nothing in place."""
        if plan.local.upload == "gradient":
            return self.local_gradient(plan, job.start, *step_inputs(job, 0))
        layout = Layout.of(job.start)
        start = layout.pack(job.start)
        end, _ = self.descended(plan, job, plan.local.opt.init(start))
        return layout.unpack(start - end)

    def descended(self, plan: Plan, job: Job, state: Tree) -> tuple[Tensor, Tree]:
        """Return the flat weights [P] and the optimizer's state after the job's local steps; `state`: before them."""
        layout = Layout.of(job.start)
        flat = layout.pack(job.start)
        for t in range(job.batches.x.shape[0]):
            step = self.local_gradient(plan, layout.unpack(flat), *step_inputs(job, t))
            flat, state = plan.stepped(plan.local.opt, layout, flat, layout.pack(step), state, job.lr)
        return flat, state

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        """Return the gradient of one local step, on a batch without the axis T."""
        return gradient(lambda p: plan.objective(p, batch.x, batch.y, batch.w), params)

    def omniscient(self, plan: Plan, server: Server, result: Tree) -> Tree:
        """Return a client's `result`, changed by the server's secrets without any message. Default: unchanged.

        It simulates what no protocol allows: nothing of it is in a message, a state, a view or a count of bytes.
        """
        return result

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Return the client's new state and its answer (None for no answer)."""
        if isinstance(message, Hello):
            return me, Join(torch.tensor(len(data.x)))
        return me, self.upload(ctx, me, result)

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Return the message that encodes the `result` of `compute`: sparsify, pack, mask."""
        return Update(result)

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return the upload as parameters shaped as `like`: public, for the server and for attackers."""
        return upload.params  # type: ignore[no-any-return]

    # -- the adversary -------------------------------------------------------------------------------------------
    @property
    def sums(self) -> bool:
        """Whether the server can read only sums over the cohort; then whole cohorts are probed."""
        return False

    def role_of(self, uploads: Sequence[Tree]) -> str:
        """Return the role, one of `roles`, of a client that sent `uploads` in the observed rounds."""
        return self.roles[0]

    def played(self, plan: Plan, server: Server) -> Tensor | None:
        """Return the number of rounds of each client in each of `roles`, int64 [roles, N]; None with a single role."""
        return None

    def evidence(self, view: View) -> list[Evidence]:
        """Return the evidence about each victim in `view` for an attacker that takes uploads for undefended ones."""
        return plain_evidence(view)


def step_inputs(job: Job, t: int) -> tuple[Batch, Tree, Tree]:
    """Return the batch, the client's tree and the noise of local step `t`."""
    return tree_map(lambda leaf: leaf[t], job.batches), job.own, at_step(job.noise, t)


# -- Checks of every defense before it is used: what it declares, and what its public methods return --


def defense_faults(plugin: Any, name: str) -> Iterator[str]:
    """Yield the faults of a class as the defense `name`; after the first one, others may be meaningless."""
    yield from class_faults(plugin, Defense, name)
    yield from contract_faults(plugin, Defense)
    yield from field_faults(plugin)
    yield from word_faults(plugin, ("roles", "version"))
    for grid, values in plugin.grids.items():
        if bad := [value for value in values if isinstance(value, bool) or not math.isfinite(value)]:
            yield f"has {bad[0]!r} in its {grid!r} grid; give finite numbers"
    if plugin.control is None:
        return
    defaults = {field.name: field.default for field in dataclasses.fields(plugin)}
    default = defaults.get(plugin.control, "")
    if default is not dataclasses.MISSING and (isinstance(default, bool) or not isinstance(default, int | float)):
        yield f"declares control = {plugin.control!r}; it must be a field whose default is a number"


def answer_faults(defense: Defense, plan: Plan, sizes: Sequence[int], rounds: int) -> Iterator[str]:
    """Yield the faults of what a defense's public methods return before training."""
    if not isinstance(defense.sums, bool):
        yield f"answers {shown(defense.sums, 60)} to sums; it must be True or False"
    noise = defense.noise(plan)
    if noise is not None and not isinstance(noise, Noise):
        yield f"answers {shown(noise, 60)} to noise(plan); it must be a Noise or None"
    for size in sorted(set(sizes)):
        yield from guarantee_faults(defense.guarantee(plan, size, rounds))
    reason = defense.why_no_epsilon(plan, None, rounds)
    if not isinstance(reason, str):
        yield f"answers {shown(reason, 60)} to why_no_epsilon(plan); it must be a text"


def guarantee_faults(answer: object) -> Iterator[str]:
    """Yield a fault unless `guarantee` returned None, or epsilon >= 0 and delta in [0, 1]."""
    if answer is None:
        return
    pair = answer if isinstance(answer, tuple) and len(answer) == 2 else ()
    numbers = [float(v) for v in pair if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < 2 or not (numbers[0] >= 0 and 0 <= numbers[1] <= 1 and math.isfinite(numbers[0])):
        shown_answer = shown(answer, 60)
        yield f"answers {shown_answer} to guarantee(...); it must be None, or epsilon >= 0 and delta in [0, 1]"


def evidence_faults(answer: object) -> Iterator[str]:
    """Yield a fault unless `evidence` returned a list of Evidence."""
    if not isinstance(answer, list | tuple) or not all(isinstance(one, Evidence) for one in answer):
        yield f"answers {shown(answer, 60)} to evidence(view); it must be a list of Evidence"
