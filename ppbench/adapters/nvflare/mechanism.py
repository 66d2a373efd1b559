"""A list of NVFlare's filters as a defense: ppbench supplies the network, the data and the local training.

A client trains from the server's weights; the change of its weights, in a DXO with the number of its steps, passes the
client's filters. The server sees their result, before any filter of its own, and aggregates as NVFlare's FedAvg does.
A probe is one local step, so a change is minus the rate times a gradient.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.model import ModelLearnableKey, make_model_learnable
from nvflare.app_common.aggregators.dxo_aggregator import DXOAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.shareablegenerators.full_model_shareable_generator import FullModelShareableGenerator
from torch import Tensor

from ppbench.adapters.framework import check_plan
from ppbench.adapters.user_code import as_usage_error, context_seed, description, restored, seeded_run, snapshot
from ppbench.base.errors import ProtocolError, UsageError, one_line, shown
from ppbench.base.tree import Params, Tree, node
from ppbench.federation.contract import Context, Defense, Job, Round, Server, Step, plain_evidence
from ppbench.federation.evidence import Evidence, Mappable, PlainGradient
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import MAX_EXAMPLES, Model
from ppbench.nets.classifier import HEAD_NAMES

# -- Runs NVFlare's code in this process, without a network: a client's filters and the server's aggregator --

JOB, SERVER, TASK = "ppbench", "server", "train"
Arrays = dict[str, Any]
"""Weights, or their changes, by name: NumPy arrays."""
FILTERS_FORM = "it must give a list of NVFlare's Filters"
running_nvflare = partial(seeded_run, "nvflare")
"""Runs NVFlare's code in a block, see `seeded_run`."""


class _Nobody:
    """An engine that drops events: components need one while they log."""

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Do nothing."""


class FilterResult(NamedTuple):
    """The result of a client's filters. arrays: by name, in the filters' order; meta: the DXO's properties."""

    arrays: Arrays
    meta: Mapping[str, Any]


def site_name(client: int) -> str:
    """Return the name of a client."""
    return f"site-{client + 1}"


def task_context(name: str, peer: str, round_: int) -> FLContext:
    """Return the context of one task at the party `name`, which talks with `peer`."""
    here = FLContextManager(_Nobody(), name, JOB, {}, {}).new_context()
    there = FLContextManager(_Nobody(), peer, JOB, {}, {}).new_context()
    for key, value in ((FLContextKey.TASK_NAME, TASK), (AppConstants.CURRENT_ROUND, round_)):
        here.set_prop(key, value, private=True, sticky=False)
        there.set_prop(key, value, private=True, sticky=False)
    here.set_peer_context(there)
    return here


def filter_change(
    filters: Sequence[Filter], change: Arrays, steps: int, round_: int, fl_ctx: FLContext, who: str
) -> FilterResult:
    """Return the filters' result for a change of weights (ProtocolError: it is no change of weights).

    change: end minus start, by name; steps: of local training, which NVFlare sends with it.
    """
    dxo = DXO(DataKind.WEIGHT_DIFF, data=change, meta={MetaKey.NUM_STEPS_CURRENT_ROUND: steps})
    result = dxo.to_shareable()
    result.set_return_code(ReturnCode.OK)
    result.set_header(AppConstants.CURRENT_ROUND, round_)
    for filter_ in filters:
        result = filter_.process(result, fl_ctx)
        if not isinstance(result, Shareable):
            actual = one_line(type(result).__name__, 60)
            raise ProtocolError(f"Filter {type(filter_).__name__} of {who} gives {actual}, not a Shareable.")
    if (code := result.get_return_code()) != ReturnCode.OK:
        raise ProtocolError(f"The filters of {who} let out no result: return code {one_line(str(code), 60)}.")
    try:
        passed = from_shareable(result)
    except ValueError as cause:
        raise ProtocolError(f"The filters of {who} let out no DXO: {one_line(str(cause), 120)}.") from cause
    if passed.data_kind != DataKind.WEIGHT_DIFF:
        kind = one_line(str(getattr(passed.data_kind, "value", passed.data_kind)), 60)
        raise ProtocolError(f"The filters of {who} let out {kind}, not WEIGHT_DIFF, which is what they were given.")
    return FilterResult(dict(passed.data), dict(passed.get_meta_props() or {}))


def aggregated(weights: Arrays, results: Mapping[int, FilterResult], round_: int) -> Arrays:
    """Return the weights after NVFlare's FedAvg step, which weights clients by their numbers of steps.

    The mean of a variable is over the clients that sent it; a variable that nobody sent keeps its value. Clients
    without a step are left out: NVFlare would divide by 0 if no client took one.
    """
    results = {client: result for client, result in results.items() if result.meta[MetaKey.NUM_STEPS_CURRENT_ROUND]}
    if not results:
        return weights
    fl_ctx = task_context(SERVER, site_name(0), round_)
    aggregator = DXOAggregator(aggregation_weights={site_name(client): 1.0 for client in results})
    for client, result in results.items():
        dxo = DXO(DataKind.WEIGHT_DIFF, data=result.arrays, meta=dict(result.meta))
        if not aggregator.accept(dxo, site_name(client), round_, fl_ctx):
            raise ProtocolError(f"NVFlare's aggregator does not accept what client {client} sent.")
    mean = aggregator.aggregate(fl_ctx).to_shareable()
    fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable(dict(weights), {}), private=True, sticky=False)
    model = FullModelShareableGenerator().shareable_to_learnable(mean, fl_ctx)
    return {name: np.asarray(value) for name, value in model[ModelLearnableKey.WEIGHTS].items()}


@node
class FilterState:
    """A client's state: a snapshot of its filters."""

    filters: Tree


@node
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

    version: ClassVar[str] = f"1+nvflare{metadata.version('nvflare')}"
    sends: ClassVar[Literal["weights"]] = "weights"
    kin: ClassVar[str] = "ppdl"
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        preset: {"optimizer": "sgd", "lr": 0.1, "decay_at": (), "schedule": "parallel"} for preset in ("quick", "paper")
    }
    epsilon_reason: ClassVar[str] = "the bench does not know what these filters add"

    def filters(self) -> list[Filter]:
        """Return new filters of a client's task results, in order. Default: none."""
        return []

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse plans that NVFlare cannot run, and parameters that its code refuses."""
        super().check(plan)
        check_plan(self.name, plan, "changes of weights")
        self._made()

    def _made(self) -> list[Filter]:
        with as_usage_error(), running_nvflare(description(self), 0):
            filters = self.filters()
        if not isinstance(filters, list | tuple):
            kind = one_line(type(filters).__name__, 60)
            raise UsageError(f"Defense {self.name!r} gave {kind}; {FILTERS_FORM}.")
        for part in filters:
            if not isinstance(part, Filter):
                kind = one_line(type(part).__name__, 60)
                raise UsageError(f"Defense {self.name!r} gave a list with {kind}; {FILTERS_FORM}.")
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
            for filter_ in filters:
                filter_.handle_event(EventType.START_RUN, task_context(site_name(ctx.party), SERVER, 0))
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
        return visible_evidence(view, self.cut(view.plan))

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


# -- Evidence of what filters leave visible of a gradient: variables left out, entries left out, entries truncated --
# It uses what is known of the mechanism. A truncated entry is known to lie beyond the bound; one that was left out
# because it is small, below the smallest sent entry: for both, a guess's distance from the known interval is
# simulated. An entry that was left out by chance has no weight.

BOUND_WEIGHT = 0.1
"""Weight of entries of which only a bound is known; a known value has weight 1.

Searches match bounds exactly, at any weight; closed forms take the observed number for the value. They divide by a
bias's gradient, so a truncated entry of it has no weight.
"""
SIGNS_ONLY = 0.9
"""Share of truncated entries above which, under noise, only signs are used."""
BOUND_TOLERANCE = 1e-4
"""Relative distance from the bound at which an entry counts as truncated: float32 changes of float32 weights."""


@dataclass(frozen=True, eq=False)
class TruncatedGradient(Mappable):
    """The gradient of the variables `names`, entries truncated at `bound` (inf: not at all). params: the weights."""

    plan: Plan
    names: tuple[str, ...]
    bound: float

    alters: ClassVar[bool] = True

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the visible gradient of a batch x [U, B, *shape], y [U, B, C], in the dtype of x."""
        whole = PlainGradient(self.params, self.plan)(x, y)
        return {n: whole[n].clamp(-self.bound, self.bound) for n in self.names}


@dataclass(frozen=True, eq=False)
class DistanceToBounds(Mappable):
    """The observation plus the gradient's distance from its known interval.

    params: of the variables `names` "NAME", the weights; "at/NAME", the observation; "low/NAME" and "high/NAME", the
    interval's ends.
    """

    plan: Plan
    names: tuple[str, ...]

    alters: ClassVar[bool] = True

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the observation that a batch x [U, B, *shape], y [U, B, C] explains best, in the dtype of x."""
        tensors = {n: v.to(x.dtype) for n, v in self.params.items()}
        whole = PlainGradient({n: v for n, v in tensors.items() if "/" not in n}, self.plan)(x, y)
        return {
            n: tensors[f"at/{n}"] + whole[n] - whole[n].clamp(tensors[f"low/{n}"], tensors[f"high/{n}"])
            for n in self.names
        }


@dataclass(frozen=True)
class Truncation:
    """How a filter truncates the entries of a gradient; public.

    bound: the largest size of an entry.  then: which entries are sent. "largest": the largest; "noised": a random
    selection, with noise added after the truncation; "noisy": a random selection, with noise added before it.
    """

    bound: float
    then: Literal["largest", "noised", "noisy"]


def visible_evidence(view: View, cut: Truncation | None) -> list[Evidence]:
    """Return the plain evidence of `view`, in which entries that were not sent have no weight, or their bound's.

    cut: what is known of the filter.
    """
    answers = {slot: exchange.answer for slot, exchange in view.first_uploads().items()}
    pieces = []
    for piece in plain_evidence(view):
        upload = answers.get(piece.unit[0])
        if not view.threat.sees_uploads or not isinstance(upload, FilteredChange) or piece.params is None:
            pieces.append(piece)
        else:
            pieces.append(_weighted(view.plan, piece, piece.params, upload.change, cut))
    return pieces


def _weighted(plan: Plan, piece: Evidence, params: Params, variables: Params, cut: Truncation | None) -> Evidence:
    """Return evidence with the entries' weights, whose simulation does what the filter does."""
    missing = {n: torch.zeros_like(v) for n, v in piece.observed.items() if n not in variables}
    sent = {n: missing.get(n, torch.ones_like(v) if cut is None else (v != 0).to(v)) for n, v in piece.observed.items()}
    names = _reliable(sent)
    piece = replace(piece, observed={n: piece.observed[n] for n in names})
    if cut is not None and cut.then == "noisy" and _beyond(piece.observed, cut.bound) > SIGNS_ONLY:
        untruncated = TruncatedGradient(params, plan, names, math.inf)
        return replace(piece, simulate=untruncated, measure="hinge")  # entries that were not sent: 0, without weight
    if cut is not None and cut.then in ("largest", "noisy"):
        return _bounded(plan, piece, params, cut.bound, chance=cut.then == "noisy")
    whole = all(bool((sent[n] == 1).all()) for n in names)
    piece = replace(piece, weight=None if whole else {n: sent[n] for n in names})
    if cut is None and len(names) == len(sent):
        return piece
    return replace(piece, simulate=TruncatedGradient(params, plan, names, math.inf if cut is None else cut.bound))


def _beyond(observed: Params, bound: float) -> float:
    """Return the share of truncated entries among those sent."""
    sent = torch.cat([v[v != 0].abs() for v in observed.values()])
    return float((sent >= bound * (1 - BOUND_TOLERANCE)).double().mean()) if len(sent) else 0.0


def _bounded(plan: Plan, piece: Evidence, params: Params, bound: float, chance: bool) -> Evidence:
    """Return evidence whose entries are known, or beyond `bound`, or smaller than the smallest entry that was sent.

    chance: whether entries were left out at random, whatever their size.
    """
    names = tuple(piece.observed)
    least = min((float(v[v != 0].abs().min()) for v in piece.observed.values() if bool((v != 0).any())), default=bound)
    known, weight = dict(params), {}
    for n, at in piece.observed.items():
        beyond, unsent = at.abs() >= bound * (1 - BOUND_TOLERANCE), at == 0
        reach = torch.where(unsent, least, 0.0).to(at)
        known |= {f"at/{n}": at, f"low/{n}": at - reach, f"high/{n}": at + reach}
        known[f"low/{n}"] = torch.where(beyond & (at < 0), -math.inf, known[f"low/{n}"])
        known[f"high/{n}"] = torch.where(beyond & (at > 0), math.inf, known[f"high/{n}"])
        weight[n] = torch.where(beyond, BOUND_WEIGHT * (at.dim() > 1), torch.where(unsent, BOUND_WEIGHT, 1.0)).to(at)
        if chance or least >= bound * (1 - BOUND_TOLERANCE):  # what was left out may be as large
            weight[n] = torch.where(unsent, 0.0, weight[n])
    return replace(piece, weight=weight, simulate=DistanceToBounds(known, plan, names))


def _reliable(weight: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the variables to use as evidence: all except those of the head that would mislead.

    Attacks read labels off the gradient of the head's bias, else off the rows of its weight. So a bias that was sent in
    part is left out if rows are visible, and a head of which nothing was sent is left out as a whole. Signs of
    truncated entries still reveal labels.
    """
    dark = {name for name in HEAD_NAMES if name in weight and not bool(weight[name].any())}
    excluded = dark if len(dark) == sum(name in weight for name in HEAD_NAMES) else dark & {HEAD_NAMES[1]}
    bias = weight.get(HEAD_NAMES[1])
    if bias is not None and HEAD_NAMES[0] not in dark and not bool(bias.all()):
        excluded = excluded | {HEAD_NAMES[1]}
    return tuple(name for name in weight if name not in excluded)
