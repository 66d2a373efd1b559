"""NVFlare's code run in this process: a client's filters, the server's aggregator, and with nobody to talk to."""

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

from ppbench.adapters.running import running as seeded
from ppbench.base.errors import ProtocolError, one_line

JOB, SERVER, TASK = "ppbench", "server", "train"
Arrays = dict[str, Any]
"""Weights, or their changes, by name: NumPy arrays."""


class _Nobody:
    """An engine that no event leaves: all that components ask of one while they log."""

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Tell nobody."""


class Passed(NamedTuple):
    """What a client's filters let out. arrays: by name, in the order in which they came; meta: the DXO's."""

    arrays: Arrays
    meta: Mapping[str, Any]


def running(who: str, *seed: int) -> AbstractContextManager[None]:
    """Run `who`'s code as `ppbench.adapters.running` does."""
    return seeded("nvflare", who, *seed)


def site(client: int) -> str:
    """Return the name of a client."""
    return f"site-{client + 1}"


def context(name: str, peer: str, round_: int) -> FLContext:
    """Return the context of one task, as it is at a party that talks with `peer`."""
    here = FLContextManager(_Nobody(), name, JOB, {}, {}).new_context()
    there = FLContextManager(_Nobody(), peer, JOB, {}, {}).new_context()
    for key, value in ((FLContextKey.TASK_NAME, TASK), (AppConstants.CURRENT_ROUND, round_)):
        here.set_prop(key, value, private=True, sticky=False)
        there.set_prop(key, value, private=True, sticky=False)
    here.set_peer_context(there)
    return here


def started(filters: Sequence[Filter], fl_ctx: FLContext) -> None:
    """Tell filters that a run begins, as a job does."""
    for one in filters:
        one.handle_event(EventType.START_RUN, fl_ctx)


def filtered(filters: Sequence[Filter], change: Arrays, steps: int, round_: int, fl_ctx: FLContext, who: str) -> Passed:
    """Return what filters leave of a change of weights; ProtocolError: of something else than such a change, or none.

    change: end minus start, by name; steps: of local training, which NVFlare tells with it.
    """
    dxo = DXO(DataKind.WEIGHT_DIFF, data=change, meta={MetaKey.NUM_STEPS_CURRENT_ROUND: steps})
    result = dxo.to_shareable()
    result.set_return_code(ReturnCode.OK)
    result.set_header(AppConstants.CURRENT_ROUND, round_)
    for one in filters:
        result = one.process(result, fl_ctx)
        if not isinstance(result, Shareable):
            found = one_line(type(result).__name__, 60)
            raise ProtocolError(f"Filter {type(one).__name__} of {who} gives {found}, not a Shareable.")
    if (code := result.get_return_code()) != ReturnCode.OK:
        raise ProtocolError(f"The filters of {who} let out no result: return code {one_line(str(code), 60)}.")
    try:
        left = from_shareable(result)
    except ValueError as cause:
        raise ProtocolError(f"The filters of {who} let out no DXO: {one_line(str(cause), 120)}.") from cause
    if left.data_kind != DataKind.WEIGHT_DIFF:
        kind = one_line(str(getattr(left.data_kind, "value", left.data_kind)), 60)
        raise ProtocolError(f"The filters of {who} let out {kind}, not WEIGHT_DIFF, which is what they were given.")
    return Passed(dict(left.data), dict(left.get_meta_props() or {}))


def aggregated(weights: Arrays, told: Mapping[int, Passed], round_: int) -> Arrays:
    """Return the weights after FedAvg's step: NVFlare's aggregator by numbers of steps, and its model's update.

    The mean of a variable is over the clients that sent it; one that nobody sent keeps its value. Who took no step
    has no weight; NVFlare divides by 0 where nobody has any.
    """
    told = {client: passed for client, passed in told.items() if passed.meta[MetaKey.NUM_STEPS_CURRENT_ROUND]}
    if not told:
        return weights
    fl_ctx = context(SERVER, site(0), round_)
    aggregator = DXOAggregator(aggregation_weights={site(client): 1.0 for client in told})
    for client, passed in told.items():
        dxo = DXO(DataKind.WEIGHT_DIFF, data=passed.arrays, meta=dict(passed.meta))
        if not aggregator.accept(dxo, site(client), round_, fl_ctx):
            raise ProtocolError(f"NVFlare's aggregator does not accept what client {client} sent.")
    mean = aggregator.aggregate(fl_ctx).to_shareable()
    fl_ctx.set_prop(AppConstants.GLOBAL_MODEL, make_model_learnable(dict(weights), {}), private=True, sticky=False)
    model = FullModelShareableGenerator().shareable_to_learnable(mean, fl_ctx)
    return {name: np.asarray(value) for name, value in model[ModelLearnableKey.WEIGHTS].items()}
