"""A list of NVFlare's filters as a defense: the bench brings network, data and the local training.

A client trains from the server's weights; the change of its weights is wrapped in a DXO with the number of its steps,
passes the client's filters, and is what the server sees, before any filter of its own. The server aggregates as
NVFlare's FedAvg does. A probe is one local step, so that a change is minus the rate times a gradient.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from nvflare.apis.dxo import MetaKey
from nvflare.apis.filter import Filter
from torch import Tensor

from ppbench.adapters.framework import check_plan
from ppbench.adapters.held import kept, restored
from ppbench.adapters.nvflare.inside import SERVER, Passed, aggregated, context, filtered, running, site, started
from ppbench.adapters.nvflare.seen import Cut, seen
from ppbench.adapters.running import refused, seed_of, words_of
from ppbench.base.errors import ProtocolError, UsageError, one_line, shown
from ppbench.base.tree import Params, Tree, node
from ppbench.federation.contract import Context, Defense, Job, Round, Server, Step
from ppbench.federation.evidence import Evidence
from ppbench.federation.messages import MOST, Model
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import Exchange, View


@node
class Worker:
    """A client's state: what its filters keep."""

    filters: Tree


@node
class Sent:
    """Client to server. change: end minus start of the variables that were let out, in the dtype that filters gave.

    steps: int64 scalar, of local training. meta: uint8 [n], the DXO's other properties as JSON.
    """

    change: Params
    steps: Tensor
    meta: Tensor


@dataclass(frozen=True)
class Mechanism(Defense):
    """What a function of filters gives, as a defense; its parameters are those of the function."""

    sends: ClassVar[Literal["weights"]] = "weights"
    kin: ClassVar[str] = "ppdl"
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        preset: {"optimizer": "sgd", "lr": 0.1, "decay_at": (), "schedule": "parallel"} for preset in ("quick", "paper")
    }
    epsilon_reason: ClassVar[str] = "the bench does not know what these filters add"

    def filters(self) -> list[Filter]:
        """Return new filters of a client's task results, in order."""
        raise NotImplementedError

    def check(self, plan: Plan) -> None:
        """As its base; also refuse what NVFlare's rounds have no place for, and parameters that the code refuses."""
        super().check(plan)
        check_plan(self.name, plan, "changes of weights")
        self._made()

    def _made(self) -> list[Filter]:
        with refused(), running(words_of(self), 0):
            filters = self.filters()
        if not isinstance(filters, list | tuple) or not all(isinstance(one, Filter) for one in filters):
            found = next((one for one in filters if not isinstance(one, Filter)), None) if _listed(filters) else filters
            held = "a list with " if _listed(filters) else ""
            name = one_line(type(found).__name__, 60)
            raise UsageError(f"Defense {self.name!r} gave {held}{name}; it must give a list of NVFlare's Filters.")
        return list(filters)

    # -- the server ----------------------------------------------------------------------------------------------
    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Ask nobody anything: clients tell their numbers of steps with their changes."""
        return server
        yield Step(server, {})  # makes it a coroutine

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Return the server's state after NVFlare's aggregation (ProtocolError: an upload is none)."""
        told, counts = {}, server.counts.clone()
        for client, upload in uploads.items():
            if not isinstance(upload, Sent):
                raise ProtocolError(f"Client {client} sent {type(upload).__name__}, not a change of weights.")
            arrays = {name: _array(value) for name, value in upload.change.items()}
            told[client] = Passed(arrays, {MetaKey.NUM_STEPS_CURRENT_ROUND: int(upload.steps)})
            counts[client] = upload.steps
        weights = {name: _array(value) for name, value in server.params.items()}
        with running("The aggregator", seed_of(ctx), 1):
            found = aggregated(weights, told, ctx.round)
        params = {n: torch.from_numpy(found[n].copy()).to(old.device, old.dtype) for n, old in server.params.items()}
        return Server(params, server.opt, counts, server.own)

    # -- a client ------------------------------------------------------------------------------------------------
    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return what filters keep that were made and told that a run begins."""
        filters = self._made()
        with running(f"The filters of client {ctx.party}", seed_of(ctx), 0):
            started(filters, context(site(ctx.party), SERVER, 0))
        return Worker(kept(filters, "the filters"))

    def prepare(self, ctx: Context, me: Worker, message: Tree, data: Data) -> Job | None:
        """As its base; what filters keep has no part in training."""
        return super().prepare(ctx, (), message, data)

    def reply(self, ctx: Context, me: Worker, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Return what filters keep, and let out of the change that was trained (ProtocolError: of no such thing)."""
        if not isinstance(message, Model):
            raise ProtocolError(f"Client {ctx.party} was sent {type(message).__name__}, not weights to train.")
        filters, who = restored(self._made(), me.filters, "the filters"), f"client {ctx.party}"
        steps = self.fewest_steps(len(data.x), ctx.plan.local.batch, ctx.plan.local.epochs)
        change = {name: -_array(value) for name, value in result.items()}
        with running(f"The filters of {who}", seed_of(ctx), 2):
            passed = filtered(filters, change, steps, ctx.round, context(site(ctx.party), SERVER, ctx.round), who)
        return Worker(kept(filters, "the filters")), sent(passed, message.params, who)

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return start minus end, float64; 0 for variables that were not let out."""
        none = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in like.items()}
        return {**none, **{name: -value.double() for name, value in upload.change.items()}}

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence, in which what was not let out has no weight; see `seen`."""
        return seen(view, _change, self.cut(view.plan))

    def cut(self, plan: Plan) -> Cut | None:
        """Return what filters do to entries of an update that is taken for a gradient; None: nothing that is known."""
        return None


def sent(passed: Passed, like: Params, who: str) -> Sent:
    """Return what was let out as a message; ProtocolError: a variable is no array of the model's, in its shape."""
    change: Params = {}
    for name, value in passed.arrays.items():
        if name not in like:
            raise ProtocolError(f"The filters of {who} let out {one_line(str(name), 60)!r}, which the model has not.")
        try:
            array = np.array(value.detach().cpu() if isinstance(value, Tensor) else value)
            tensor = torch.from_numpy(array)
        except (TypeError, ValueError, RuntimeError) as cause:
            found = one_line(type(value).__name__, 60)
            raise ProtocolError(f"What the filters of {who} let out of {name!r} is {found}, no array.") from cause
        if tensor.shape != like[name].shape or not tensor.is_floating_point():
            found, right = (f"{tuple(one.shape)} {str(one.dtype)[6:]}" for one in (tensor, like[name]))
            raise ProtocolError(f"What the filters of {who} let out of {name!r} is {found}; it must be {right}.")
        change[name] = tensor.to(like[name].device)
    meta = dict(passed.meta)
    steps = meta.pop(MetaKey.NUM_STEPS_CURRENT_ROUND, 1)  # none counts 1, as NVFlare has it
    if not isinstance(steps, int) or not 1 <= steps <= MOST:
        raise ProtocolError(f"The filters of {who} let out {shown(steps, 60)} steps; it must be a whole number from 1.")
    octets = json.dumps(meta, default=lambda one: type(one).__name__, sort_keys=True).encode()
    return Sent(change, torch.tensor(steps), torch.frombuffer(bytearray(octets), dtype=torch.uint8))


def _array(value: Tensor) -> Any:
    return value.detach().cpu().numpy().copy()


def _change(exchange: Exchange) -> Params | None:
    return exchange.answer.change if isinstance(exchange.answer, Sent) else None


def _listed(value: object) -> bool:
    return isinstance(value, list | tuple)
