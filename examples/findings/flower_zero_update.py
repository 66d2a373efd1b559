"""Flower's clipping divides by the length of the update: a client that returns the model as it came ends the run.

Run: PYTHONPATH=FOLDER python examples/findings/flower_zero_update.py
where `pip install --target FOLDER flwr` has made FOLDER; seen with Flower 1.23, 1.26, 1.29 and 1.42; seconds. Reported
to Flower by somebody else: https://github.com/flwrlabs/flower/pull/7631, of July 2026, of 1.42 not a part.

`clip_inputs_inplace` and `adaptive_clip_inputs_inplace` take min(1, clipping norm / length of the update). A length of
0 (no local step, a rate of 0, a layer that is all there is and frozen) raises ZeroDivisionError. Three rounds of three
clients follow, of which one returns the model unchanged in the second. Where the server clips, its process stops; where
a mod clips, the client answers by an error, as Flower's nodes answer what an app raises, and the strategies for
central DP leave that round out for everybody. Nothing is divided where the length is above 0, however small.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as strategies

CLIENTS, ROUNDS = 3, 3


def rounds(strategy: Any, mods: list[Any], least: float) -> str:
    """Return in words what becomes of three rounds, in the second of which a client's update is `least` long."""
    moved, errors = list[int](), list[str]()

    def train(request: Message, context: Context) -> Message:
        weights = request.content.array_records["arrays"]["w"].numpy().copy()
        second = request.content.config_records["config"]["server-round"] == 2
        weights[0] += least if second and context.node_id == 1 else 1.0
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": ArrayRecord({"w": Array(weights)}), "metrics": metrics}), reply_to=request)

    app = ClientApp(mods=mods)
    app.train()(train)

    def answered(request: Message) -> Message:
        try:
            return app(request, Context(1, request.metadata.dst_node_id, {}, RecordDict(), {}))
        except ZeroDivisionError as cause:
            errors.append(f"client {request.metadata.dst_node_id} raises ZeroDivisionError, {cause}")
            return Message(Error(2, str(cause)), reply_to=request)

    def sent(messages: Iterable[Message], **_: Any) -> list[Message]:
        return [answered(message) for message in messages]

    aggregate = strategy.aggregate_train

    def noted(number: int, replies: Iterable[Message]) -> Any:
        arrays, metrics = aggregate(number, replies)
        moved.extend([number] if arrays is not None else [])
        return arrays, metrics

    strategy.aggregate_train = noted
    grid: Any = SimpleNamespace(get_node_ids=lambda: range(1, CLIENTS + 1), send_and_receive=sent)
    try:
        strategy.start(grid=grid, initial_arrays=ArrayRecord({"w": Array(np.zeros(4))}), num_rounds=ROUNDS)
    except ZeroDivisionError as cause:
        errors.append(f"the server raises ZeroDivisionError, {cause}")
    return "; ".join([*errors, f"rounds with a new model: {moved}"])


def known() -> None:
    """Tell Flower who sends, which newer versions want to know before a message is made."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def main() -> None:
    """Print what each mechanism makes of an update of zeros, and of one that is next to nothing."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    known()
    print(f"flwr {metadata.version('flwr')}")
    name, adaptive = "DifferentialPrivacy{}SideFixedClipping", "DifferentialPrivacy{}SideAdaptiveClipping"
    local = LocalDpMod(1.0, 1.0, 10.0, 1e-5)
    for least in (0.0, 1e-9):
        for title, wrapper, own, mods in (
            ("server clips", name.format("Server"), (0.1, 1.0, CLIENTS), []),
            ("server clips, adaptive", adaptive.format("Server"), (0.1, CLIENTS), []),
            ("clients clip", name.format("Client"), (0.1, 1.0, CLIENTS), [fixedclipping_mod]),
            ("clients clip, adaptive", adaptive.format("Client"), (0.1, CLIENTS), [adaptiveclipping_mod]),
            ("LocalDpMod", None, (), [local]),
        ):
            inner = strategies.FedAvg(fraction_evaluate=0.0)
            strategy = getattr(strategies, wrapper)(inner, *own) if wrapper else inner
            print(f"{title}, an update of {least:g}: {rounds(strategy, mods, least)}")


if __name__ == "__main__":
    main()
