"""Runs NVFlare's code in this process, without a network: a client's filters and the server's aggregator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
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

from ppbench.adapters.running import seeded_run
from ppbench.base.errors import ProtocolError, one_line

JOB, SERVER, TASK = "ppbench", "server", "train"
Arrays = dict[str, Any]
"""Weights, or their changes, by name: NumPy arrays."""


class _Nobody:
    """An engine that drops events: components need one while they log."""

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Do nothing."""


class FilterResult(NamedTuple):
    """The result of a client's filters. arrays: by name, in the filters' order; meta: the DXO's properties."""

    arrays: Arrays
    meta: Mapping[str, Any]


def running_nvflare(who: str, *seed: int) -> AbstractContextManager[None]:
    """Run NVFlare's code as `seeded_run` does."""
    return seeded_run("nvflare", who, *seed)


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


def start_filters(filters: Sequence[Filter], fl_ctx: FLContext) -> None:
    """Send filters the event that a run begins, as a job does."""
    for filter_ in filters:
        filter_.handle_event(EventType.START_RUN, fl_ctx)


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
