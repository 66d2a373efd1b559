"""Centralized training: clients send their examples to the server. No defense; the upper bound of accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Params, Tree, node, tree_map
from ppbench.defenses.claims import paper
from ppbench.defenses.fedpc.parameters import CAO2022_FEDERATION
from ppbench.federation.contract import Claim, Context, Defense, Job, Server
from ppbench.federation.evidence import Evidence, Shared
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Batch, Data, Plan, all_at_once, shuffled
from ppbench.federation.view import View
from ppbench.federation.wire import Slot

CAO2022 = paper("cao2022")


@node
class Examples:
    """Client to server. x: [N, *shape] and y: [N, C] float32, all examples of the client."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Central(Defense):
    """Trains on the pool of all clients' examples, sent in every round; the optimizer's state persists."""

    name: ClassVar[str] = "central"
    paper: ClassVar[str] = CAO2022.citation
    claimed: ClassVar[tuple[Claim, ...]] = CAO2022.claims("central")
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
        shapes = ctx.plan.spec.shape, (ctx.plan.spec.classes,)
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
        shared, by_slot = Shared(view.plan), dict[Slot, Evidence]()
        if not view.threat.sees_uploads:
            return []
        for exchange in view.exchanges():
            if isinstance(exchange.answer, Examples) and exchange.slot not in by_slot:
                params, simulate = exchange.request.params, shared.at(exchange.request.params)
                with torch.no_grad():
                    observed = simulate(exchange.answer.x[None], exchange.answer.y[None])
                by_slot[exchange.slot] = Evidence((exchange.slot,), observed, simulate, params, channel="examples")
        return list(by_slot.values())
