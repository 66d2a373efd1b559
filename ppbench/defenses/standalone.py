"""Standalone training: every client trains its own model and nothing is sent; the lower bound of accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ppbench.base.errors import Overflow
from ppbench.base.tree import Params, Tree, finite, node
from ppbench.federation.contract import Context, Defense, Job, Round, Server, Step
from ppbench.federation.messages import Model
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Data, Plan


@node
class Tick:
    """Server to client: a round begins. It has no content: a clock tick."""


@node
class Own:
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

    def init_client(self, ctx: Context, params: Params) -> Own:
        """Return the initial weights, which are public, and the optimizer's state before the first step."""
        return Own(params, ctx.plan.local.opt.init(Layout.of(params).pack(params)))

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

    def prepare(self, ctx: Context, me: Own, message: Tree, data: Data) -> Job | None:
        """Return the inputs of `compute`, with the client's own weights."""
        return super().prepare(ctx, me, Model(me.params), data) if isinstance(message, Tick) else None

    def compute(self, plan: Plan, job: Job) -> Own:
        """Return the client's model and optimizer after the local steps of a round."""
        flat, opt = self.descended(plan, job, job.own.opt)
        return Own(Layout.of(job.start).unpack(flat), opt)

    def reply(self, ctx: Context, me: Own, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Return the new state and no answer (Overflow: the model has diverged)."""
        if not finite(result):
            raise Overflow(f"Client {ctx.party}'s own model is not finite after local training.")
        return result, None
