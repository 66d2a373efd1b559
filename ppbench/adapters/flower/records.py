"""Converts Flower's records to trees of tensors, and back: messages and clients' states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from ppbench.adapters import user_code
from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Params, Tree, node
from ppbench.federation.wire import Model


@node
class Text:
    """A string. utf8: uint8 [n]."""

    utf8: Tensor


@node
class Blob:
    """Bytes. bytes: uint8 [n]."""

    bytes: Tensor


@node
class Content:
    """The content of a message or a client's state: arrays, metrics and settings, by record and name."""

    arrays: dict[str, Params]
    metrics: dict[str, dict[str, Tree]]
    configs: dict[str, dict[str, Tree]]


@node
class TrainRequest(Model):
    """Server to client: weights to train. key: of their record; rest: all other records; kind: message type."""

    key: Text
    rest: Content
    kind: Text


@node
class StageRequest:
    """Server to client: a protocol's message without weights. rest: its records; kind: message type."""

    rest: Content
    kind: Text


@node
class TrainReply:
    """Client to server. params: its trained weights, of the record `key`; rest: all other records."""

    params: Params
    key: Text
    rest: Content


def text_tree(string: str) -> Text:
    """Return a string as a tree."""
    return Text(_octets(string.encode()))


def string_of(tree: Text) -> str:
    """Return the string of a tree."""
    return tree.utf8.cpu().numpy().tobytes().decode()


def _octets(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def _grown(value: Any) -> Tree:
    """Return a value of a record as a tree: every leaf a tensor, so that its bytes count."""
    if isinstance(value, str):
        return text_tree(value)
    if isinstance(value, bytes):
        return Blob(_octets(value))
    if isinstance(value, list | tuple):
        return [_grown(one) for one in value]
    return torch.tensor(value, dtype={bool: torch.bool, int: torch.int64}.get(type(value), torch.float64))


def _value(tree: Tree) -> Any:
    if isinstance(tree, Text):
        return string_of(tree)
    if isinstance(tree, Blob):
        return tree.bytes.cpu().numpy().tobytes()
    return [_value(one) for one in tree] if isinstance(tree, list) else tree.item()


def content_tree(records: Mapping[str, Any]) -> Content:
    """Return a RecordDict as a tree of copies (ProtocolError: an unreadable array, or an unknown kind of record)."""
    tree = Content({}, {}, {})
    for key, record in records.items():
        if isinstance(record, ArrayRecord):
            tree.arrays[key] = {name: array_tensor(array) for name, array in record.items()}
        elif isinstance(record, MetricRecord):
            tree.metrics[key] = {name: _grown(value) for name, value in record.items()}
        elif isinstance(record, ConfigRecord):
            tree.configs[key] = {name: _grown(value) for name, value in record.items()}
        else:
            raise ProtocolError(f"A message has the record {key!r}, which is a {type(record).__name__}.")
    return tree


def array_tensor(array: Array) -> Tensor:
    """Return a copy of one of Flower's arrays (ProtocolError: it cannot be read)."""
    try:
        return torch.from_numpy(np.array(array.numpy()))
    except (TypeError, ValueError) as cause:
        raise ProtocolError(f"An array of type {array.dtype} cannot be read: {cause}.") from cause


def array_record(params: Params) -> ArrayRecord:
    """Return weights as a record, by name, in their dtypes."""
    return ArrayRecord({name: Array(value.detach().cpu().numpy().copy()) for name, value in params.items()})


def record_dict(tree: Content) -> RecordDict:
    """Return a tree as a RecordDict of copies."""
    records: dict[str, Any] = {key: array_record(arrays) for key, arrays in tree.arrays.items()}
    records |= {key: MetricRecord({n: _value(v) for n, v in values.items()}) for key, values in tree.metrics.items()}
    records |= {key: ConfigRecord({n: _value(v) for n, v in values.items()}) for key, values in tree.configs.items()}
    return RecordDict(records)


def split_weights(tree: Content, like: Params, who: str) -> tuple[str, Params, Content]:
    """Return the key of the record with a model's weights, the weights, and the other records.

    like: the model's weights. ProtocolError: no record, or more than one, has arrays of these names and shapes.
    """
    forms = {name: value.shape for name, value in like.items()}
    keys = [key for key, arrays in tree.arrays.items() if {n: a.shape for n, a in arrays.items()} == forms]
    if len(keys) != 1:
        counts = {key: len(arrays) for key, arrays in tree.arrays.items()} or "no arrays"
        raise ProtocolError(
            f"{who} holds {counts}; it must hold the model's {len(like)} arrays, in their shapes, once."
        )
    rest = Content({k: v for k, v in tree.arrays.items() if k != keys[0]}, tree.metrics, tree.configs)
    return keys[0], tree.arrays[keys[0]], rest


def joined_weights(key: str, params: Params, rest: Content) -> RecordDict:
    """Return the records of a message: its weights under `key`, and the rest."""
    return record_dict(Content({key: params, **rest.arrays}, rest.metrics, rest.configs))


def request_records(message: TrainRequest | StageRequest) -> RecordDict:
    """Return the records of a message to a client."""
    if isinstance(message, StageRequest):
        return record_dict(message.rest)
    return joined_weights(string_of(message.key), message.params, message.rest)


# -- Snapshots of a strategy between rounds, as in `held`, with Flower's records --

WHERE = "the strategy"
_RECORDS = {cls.__name__: cls for cls in (ArrayRecord, ConfigRecord, MetricRecord)}


@node(name="ppbench.adapters.flower.state.Recorded")
class Recorded:
    """One of Flower's records. kind: its class; content: of a RecordDict that holds it alone."""

    kind: str
    content: Content


def strategy_snapshot(strategy: Any) -> Tree:
    """Return a tree of copies of all that a strategy holds, except code (ProtocolError: a value cannot be copied)."""
    return user_code.snapshot(strategy, WHERE, _recorded)


def restored_strategy(fresh: Any, tree: Tree) -> Any:
    """Return the `fresh` strategy with the attributes of a snapshot."""
    return user_code.restored(fresh, tree, WHERE, _record)


def _recorded(value: Any) -> Recorded | None:
    if isinstance(value, RecordDict):
        return Recorded("RecordDict", content_tree(value))
    name = type(value).__name__
    return Recorded(name, content_tree({"it": value})) if isinstance(value, _RECORDS.get(name, ())) else None


def _record(tree: Any) -> Any:
    if not isinstance(tree, Recorded):
        return None
    restored = record_dict(tree.content)
    return restored if tree.kind == "RecordDict" else restored["it"]
