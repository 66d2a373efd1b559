"""A list of NVFlare's filters as a defense: ppbench supplies the network, the data and the local training.

A client trains from the server's weights; the change of its weights, in a DXO with the number of its steps, passes the
client's filters. The server sees their result, before any filter of its own, and aggregates as NVFlare's FedAvg does.
A probe is one local step, so a change is minus the rate times a gradient.
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
from ppbench.adapters.held import restored, snapshot
from ppbench.adapters.nvflare.inside import (
    SERVER,
    FilterResult,
    aggregated,
    filter_change,
    running_nvflare,
    site_name,
    start_filters,
    task_context,
)
from ppbench.adapters.nvflare.seen import Truncation, visible_evidence
from ppbench.adapters.running import as_usage_error, context_seed, description
from ppbench.base.errors import ProtocolError, UsageError, one_line, shown
from ppbench.base.tree import Params, Tree, node
from ppbench.federation.contract import Context, Defense, Job, Round, Server, Step
from ppbench.federation.evidence import Evidence
from ppbench.federation.messages import MAX_EXAMPLES, Model
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import Exchange, View


@node(name="ppbench.adapters.nvflare.mechanism.Worker")
class FilterState:
    """A client's state: a snapshot of its filters."""

    filters: Tree


@node(name="ppbench.adapters.nvflare.mechanism.Sent")
class FilteredChange:
    """Client to server. change: end minus start of the variables that passed the filters, in the filters' dtype.

    steps: int64 scalar, of local training. meta: uint8 [n], the DXO's other properties as JSON.
    """

    change: Params
    steps: Tensor
    meta: Tensor


@dataclass(frozen=True)
class NVFlareDefense(Defense):
    """A list of NVFlare's filters as a defense."""

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
        """As the base class; also refuse plans that NVFlare cannot run, and parameters that its code refuses."""
        super().check(plan)
        check_plan(self.name, plan, "changes of weights")
        self._made()

    def _made(self) -> list[Filter]:
        with as_usage_error(), running_nvflare(description(self), 0):
            filters = self.filters()
        if not isinstance(filters, list | tuple) or not all(isinstance(part, Filter) for part in filters):
            wrong = (
                next((part for part in filters if not isinstance(part, Filter)), None) if _is_list(filters) else filters
            )
            article = "a list with " if _is_list(filters) else ""
            name = one_line(type(wrong).__name__, 60)
            raise UsageError(f"Defense {self.name!r} gave {article}{name}; it must give a list of NVFlare's Filters.")
        return list(filters)

    # -- the server ----------------------------------------------------------------------------------------------
    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Exchange nothing: clients send their numbers of steps with their changes."""
        return server
        yield Step(server, {})  # makes it a coroutine

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Return the server's state after NVFlare's aggregation (ProtocolError: an upload is no change of weights)."""
        results, counts = {}, server.counts.clone()
        for client, upload in uploads.items():
            if not isinstance(upload, FilteredChange):
                raise ProtocolError(f"Client {client} sent {type(upload).__name__}, not a change of weights.")
            arrays = {name: _array(value) for name, value in upload.change.items()}
            results[client] = FilterResult(arrays, {MetaKey.NUM_STEPS_CURRENT_ROUND: int(upload.steps)})
            counts[client] = upload.steps
        weights = {name: _array(value) for name, value in server.params.items()}
        with running_nvflare("The aggregator", context_seed(ctx), 1):
            after = aggregated(weights, results, ctx.round)
        params = {n: torch.from_numpy(after[n].copy()).to(old.device, old.dtype) for n, old in server.params.items()}
        return Server(params, server.opt, counts, server.own)

    # -- a client ------------------------------------------------------------------------------------------------
    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return a snapshot of new filters after the event that a run begins."""
        filters = self._made()
        with running_nvflare(f"The filters of client {ctx.party}", context_seed(ctx), 0):
            start_filters(filters, task_context(site_name(ctx.party), SERVER, 0))
        return FilterState(snapshot(filters, "the filters"))

    def prepare(self, ctx: Context, me: FilterState, message: Tree, data: Data) -> Job | None:
        """As the base class; training does not use the filters' state."""
        return super().prepare(ctx, (), message, data)

    def reply(self, ctx: Context, me: FilterState, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Return the filters' new state, and their result for the trained change (ProtocolError)."""
        if not isinstance(message, Model):
            raise ProtocolError(f"Client {ctx.party} was sent {type(message).__name__}, not weights to train.")
        filters, who = restored(self._made(), me.filters, "the filters"), f"client {ctx.party}"
        steps = self.fewest_steps(len(data.x), ctx.plan.local.batch, ctx.plan.local.epochs)
        change = {name: -_array(value) for name, value in result.items()}
        with running_nvflare(f"The filters of {who}", context_seed(ctx), 2):
            filtered = filter_change(
                filters, change, steps, ctx.round, task_context(site_name(ctx.party), SERVER, ctx.round), who
            )
        return FilterState(snapshot(filters, "the filters")), change_message(filtered, message.params, who)

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return start minus end, float64; 0 for variables that were not sent."""
        none = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in like.items()}
        return {**none, **{name: -value.double() for name, value in upload.change.items()}}

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence, in which entries that were not sent have no weight; see `visible_evidence`."""
        return visible_evidence(view, _change, self.cut(view.plan))

    def cut(self, plan: Plan) -> Truncation | None:
        """Return how the filters truncate entries, in units of a gradient; None: not known."""
        return None


def change_message(result: FilterResult, like: Params, who: str) -> FilteredChange:
    """Return the filters' result as a message; ProtocolError: a variable is not the model's, or of another shape."""
    change: Params = {}
    for name, value in result.arrays.items():
        if name not in like:
            raise ProtocolError(f"The filters of {who} let out {one_line(str(name), 60)!r}, which the model has not.")
        try:
            array = np.array(value.detach().cpu() if isinstance(value, Tensor) else value)
            tensor = torch.from_numpy(array)
        except (TypeError, ValueError, RuntimeError) as cause:
            actual = one_line(type(value).__name__, 60)
            raise ProtocolError(f"What the filters of {who} let out of {name!r} is {actual}, no array.") from cause
        if tensor.shape != like[name].shape or not tensor.is_floating_point():
            actual, expected = (f"{tuple(part.shape)} {str(part.dtype)[6:]}" for part in (tensor, like[name]))
            raise ProtocolError(f"What the filters of {who} let out of {name!r} is {actual}; it must be {expected}.")
        change[name] = tensor.to(like[name].device)
    meta = dict(result.meta)
    steps = meta.pop(MetaKey.NUM_STEPS_CURRENT_ROUND, 1)  # none counts 1, as NVFlare has it
    if not isinstance(steps, int) or not 1 <= steps <= MAX_EXAMPLES:
        raise ProtocolError(f"The filters of {who} let out {shown(steps, 60)} steps; it must be a whole number from 1.")
    octets = json.dumps(meta, default=lambda part: type(part).__name__, sort_keys=True).encode()
    return FilteredChange(change, torch.tensor(steps), torch.frombuffer(bytearray(octets), dtype=torch.uint8))


def _array(value: Tensor) -> Any:
    return value.detach().cpu().numpy().copy()


def _change(exchange: Exchange) -> Params | None:
    return exchange.answer.change if isinstance(exchange.answer, FilteredChange) else None


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)
