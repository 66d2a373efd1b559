"""FedPC's baselines: training on pooled data, weight transmission from client to client, training alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ppbench.base.errors import Overflow, ProtocolError
from ppbench.base.tree import Params, Tree, finite, node, tree_map
from ppbench.defenses.fedpc.messages import CAO2022_FEDERATION, FEDPC_PAPER
from ppbench.federation.contract import Context, Defense, Job, Round, Server, Step, client_observations
from ppbench.federation.evidence import Evidence, Shared, as_gradient
from ppbench.federation.plan import Batch, Data, Layout, Plan, all_at_once, shuffled
from ppbench.federation.view import View
from ppbench.federation.wire import Model

# -- Centralized training: clients send their examples to the server. No defense; the upper bound of accuracy --


@node(name="ppbench.defenses.central.Examples")
class Examples:
    """Client to server. x: [N, *shape] and y: [N, C] float32, all examples of the client."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Central(Defense):
    """Trains on the pool of all clients' examples, sent in every round; the optimizer's state persists."""

    name: ClassVar[str] = "central"
    paper: ClassVar[str] = (
        "Cao et al., A Federated Deep Learning Framework for Privacy Preservation and Communication "
        "Efficiency, Journal of Systems Architecture 124, 2022 (arXiv 2001.09782)"
    )
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": CAO2022_FEDERATION}
    epsilon_reason: ClassVar[str] = "clients hand their examples to the server"

    def init_server(self, ctx: Context, params: Params) -> Server:
        """Return the server's state, with the state of the optimizer that trains on the pool."""
        base = super().init_server(ctx, params)
        return Server(params, base.opt, base.counts, ctx.plan.local.opt.init(Layout.of(params).pack(params)))

    def batches(self, ctx: Context, data: Data) -> Batch:
        """Return all of `data` as one batch, the upload."""
        return all_at_once(data)

    def copies(self, plan: Plan, clients: int, examples: int) -> int:
        """Return the copies of one training, the server's."""
        return plan.local.copies

    def compute(self, plan: Plan, job: Job) -> Examples:
        """Return the client's examples; it computes nothing."""
        return Examples(job.batches.x[0], job.batches.y[0])

    def upload(self, ctx: Context, me: Tree, result: Examples) -> Examples:
        """Return the examples as they are."""
        return result

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Return the server's state after training on the pool (ProtocolError: an upload has no such examples)."""
        shapes = ctx.plan.spec.shape, ctx.plan.target_shape
        for client, upload in uploads.items():
            if not isinstance(upload, Examples) or (upload.x.shape[1:], upload.y.shape[1:]) != shapes:
                raise ProtocolError(f"Client {client} sent no examples of shapes {shapes[0]} and {shapes[1]}.")
            if len(upload.x) != len(upload.y):
                raise ProtocolError(f"Client {client} sent {len(upload.x)} examples with {len(upload.y)} labels.")
        pool = Data(torch.cat([u.x for u in uploads.values()]), torch.cat([u.y for u in uploads.values()]))
        if ctx.plan.local.upload == "gradient":
            whole = tree_map(lambda leaf: leaf[0], all_at_once(pool))
            return self.stepped(ctx, server, self.local_gradient(ctx.plan, server.params, whole, (), ()))
        return self._trained(ctx, server, pool)

    def _trained(self, ctx: Context, server: Server, pool: Data) -> Server:
        layout, opt, state = Layout.of(server.params), ctx.plan.local.opt, server.own
        flat = layout.pack(server.params)
        batches = shuffled(pool, ctx.plan.local, ctx.generator)
        for t in range(len(batches.x)):
            batch = tree_map(lambda leaf, t=t: leaf[t], batches)  # type: ignore[misc]
            step = layout.pack(self.local_gradient(ctx.plan, layout.unpack(flat), batch, (), ()))
            flat, state = opt.step(flat, step, state, opt.rate(ctx.round))
        return Server(layout.unpack(flat), server.opt, server.counts, state)

    def evidence(self, view: View) -> list[Evidence]:
        """Return the exact gradient of each victim's examples, which the adversary has; none for a client's view."""
        shared, pieces = Shared(view.plan), []
        for slot, exchange in view.first_uploads(Examples).items() if view.threat.sees_uploads else ():
            params, simulate = exchange.request.params, shared.at(exchange.request.params)
            with torch.no_grad():
                observed = simulate(exchange.answer.x[None], exchange.answer.y[None])
            pieces.append(Evidence((slot,), observed, simulate, params, channel="examples"))
        return pieces


# -- Weight transmission: the model travels from client to client through the server (Phong and Phuong 2019) --


@dataclass(frozen=True)
class Phong(Defense):
    """Sequential training: each client trains the model of the client before it, once per round.

    The server relays every model, so it sees each client's update as under FedAvg. If clients upload single gradients,
    there is no trained model to pass on; they then follow the plan's schedule.
    """

    name: ClassVar[str] = "phong"
    paper: ClassVar[str] = (
        "Phong and Phuong, Privacy-Preserving Deep Learning via Weight Transmission, IEEE Transactions on Information "
        "Forensics and Security 14(11), 2019"
    )
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {**FEDPC_PAPER, "grid": "paper", "settings": {}}}
    epsilon_reason: ClassVar[str] = "the server relays every client's model as it is"

    def copies(self, plan: Plan, clients: int, examples: int) -> int:
        """As the base class; one client at a time if models are passed on."""
        return super().copies(plan, 1 if plan.local.upload == "delta" else clients, examples)

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Run one pass over the clients, in order."""
        if ctx.plan.local.upload == "delta":
            ctx = replace(ctx, plan=replace(ctx.plan, schedule="round_robin"))
        return super().round(ctx, server, cohort)

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence; of a client, what the others made of the model that it passed_on on."""
        if view.threat.sees_uploads or view.plan.local.upload == "gradient":
            return super().evidence(view)
        shared, pieces = Shared(view.plan), []
        for others, (own_upload, *more), first, second in client_observations(view):
            if more:  # colluders stand at several places of the pass
                continue
            change, divisor = (
                self.decode(own_upload.answer, first),
                len(others) * as_gradient(view.plan, own_upload.round),
            )
            passed_on = {name: value - change[name] for name, value in first.items()}
            observed = {name: (value - second[name]) / divisor for name, value in passed_on.items()}
            pieces.append(Evidence(others, observed, shared.at(passed_on), passed_on, channel="aggregate"))
        return pieces


# -- Standalone training: every client trains its own model and nothing is sent; the lower bound of accuracy --


@node(name="ppbench.defenses.standalone.Tick")
class Tick:
    """Server to client: a round begins. It has no content: a clock tick."""


@node(name="ppbench.defenses.standalone.Own")
class ClientState:
    """A client's state. params: its model; opt: its optimizer's state, which is never reset."""

    params: Params
    opt: Tree


@dataclass(frozen=True)
class Standalone(Defense):
    """Each client trains on its own examples alone, from the public initial weights.

    Accuracy is the mean of all clients' models on the test part (Fan et al. 2020, Figures 7 and 28). A round is the
    plan's local training, or one batch if clients upload gradients.
    """

    name: ClassVar[str] = "standalone"
    paper: ClassVar[str] = "baseline: no federation"
    epsilon_reason: ClassVar[str] = "nothing is sent, and the accuracy is that of models that stay with their clients"

    def init_client(self, ctx: Context, params: Params) -> ClientState:
        """Return the initial weights, which are public, and the optimizer's state before the first step."""
        return ClientState(params, ctx.plan.local.opt.init(Layout.of(params).pack(params)))

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Exchange nothing."""
        yield from ()
        return server

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Let each client train for a round; no client answers."""
        yield Step(server, dict.fromkeys(cohort, Tick()))
        return server

    def broadcast(self, ctx: Context, server: Server) -> tuple[Server, Tree]:
        """Return the server's state, and the tick that begins a round."""
        return server, Tick()

    def deliver(self, ctx: Context, server: Server) -> Tree:
        """Return a message without content: there is no common model."""
        return Tick()

    def own_models(self, clients: Sequence[Tree]) -> list[Tree]:
        """Return each client's model."""
        return [Model(me.params) for me in clients]

    def prepare(self, ctx: Context, me: ClientState, message: Tree, data: Data) -> Job | None:
        """Return the inputs of `compute`, with the client's own weights."""
        return super().prepare(ctx, me, Model(me.params), data) if isinstance(message, Tick) else None

    def compute(self, plan: Plan, job: Job) -> ClientState:
        """Return the client's model and optimizer after the local steps of a round."""
        flat, opt = self.descended(plan, job, job.own.opt)
        return ClientState(Layout.of(job.start).unpack(flat), opt)

    def reply(self, ctx: Context, me: ClientState, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Return the new state and no answer (Overflow: the model has diverged)."""
        if not finite(result):
            raise Overflow(f"Client {ctx.party}'s own model is not finite after local training.")
        return result, None
