"""Mechanisms as somebody has them who runs Flower: `flower:flower_apps:NAME` in tests/test_flower.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Error, Message
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAdam, FedAvg


def mine(clients: int, multiplier: float = 0.1, clip: float = 1.0) -> Any:
    """Central DP whose clients clip."""
    return DifferentialPrivacyClientSideFixedClipping(FedAvg(), multiplier, clip, clients), [fixedclipping_mod]


def local(std: float = 0.02) -> Any:
    """Local DP by its standard deviation."""
    return FedAvg(), [LocalDpMod(1.0, std, np.sqrt(2 * np.log(1.25e5)), 1e-5)]


def weakened(std: float = 0.02) -> Any:
    """A copy of the mod that divides its noise by ten."""
    return local(std / 10)


def adam() -> Any:
    return FedAdam(eta=0.01), []


def counting() -> Any:
    """Its mod keeps in the client's context how often it was called, and sends it along."""

    def count(msg: Message, ctxt: Any, call_next: Any) -> Message:
        seen = int(ctxt.state.metric_records["seen"]["n"]) if "seen" in ctxt.state.metric_records else 0
        from flwr.app import MetricRecord

        ctxt.state.metric_records["seen"] = MetricRecord({"n": seen + 1})
        reply = call_next(msg, ctxt)
        reply.content.metric_records["metrics"]["calls"] = seen + 1
        return reply

    return FedAvg(), [count]


def halving() -> Any:
    """Its mod lets clients train from half of the weights."""

    def half(msg: Message, ctxt: Any, call_next: Any) -> Message:
        arrays = msg.content.array_records["arrays"]
        msg.content["arrays"] = ArrayRecord([array.numpy() / 2 for array in arrays.values()])
        msg.content["arrays"] = ArrayRecord(dict(zip(arrays, msg.content["arrays"].values(), strict=True)))
        return call_next(msg, ctxt)

    return FedAvg(), [half]


def secure(num_shares: int = 3) -> Any:
    """Secure aggregation among three neighbours."""
    return SecAggPlusWorkflow(num_shares, 2), [secaggplus_mod]


def secure_raises() -> Any:
    def broken(msg: Message, ctxt: Any, call_next: Any) -> Message:
        raise ValueError("no key")

    return SecAggPlusWorkflow(3, 2), [broken]


def secure_without_mod() -> Any:
    return SecAggPlusWorkflow(3, 2), []


def samples() -> Any:
    return FedAvg(fraction_train=0.4, min_train_nodes=1), []


def waits() -> Any:
    return FedAvg(min_available_nodes=9), []


def nobody() -> Any:
    return FedAvg(fraction_train=0.0), []


def raises() -> Any:
    def mod(msg: Message, ctxt: Any, call_next: Any) -> Message:
        call_next(msg, ctxt)
        raise KeyError("no such key")

    return FedAvg(), [mod]


def errs() -> Any:
    def mod(msg: Message, ctxt: Any, call_next: Any) -> Message:
        return Message(Error(0, "out of memory"), reply_to=call_next(msg, ctxt))

    return FedAvg(), [mod]


def _changed(change: Any) -> Any:
    def mod(msg: Message, ctxt: Any, call_next: Any) -> Message:
        reply = call_next(msg, ctxt)
        change(reply.content)
        return reply

    return FedAvg(), [mod]


def shapes() -> Any:
    def flat(content: Any) -> None:
        arrays = content["arrays"]
        flat_ = ArrayRecord([array.numpy().reshape(-1) for array in arrays.values()])
        content["arrays"] = ArrayRecord(dict(zip(arrays, flat_.values(), strict=True)))

    return _changed(flat)


def no_arrays() -> Any:
    return _changed(lambda content: content.pop("arrays"))


def aggregates_nothing() -> Any:
    return _changed(lambda content: content.pop("metrics"))


def not_a_strategy() -> Any:
    return object(), []


def alone() -> Any:
    return FedAvg()


def no_default(scale: float) -> Any:
    return FedAvg(), []


def refuses(multiplier: float = -1.0) -> Any:
    return DifferentialPrivacyClientSideFixedClipping(FedAvg(), multiplier, 1.0, 2), [fixedclipping_mod]


class Generator(FedAvg):
    """Keeps what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(0)


def uncopied() -> Any:
    return Generator(), []


number = 3
