"""Flower's records as trees of tensors, and back: what travels, what clients keep, what a view holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Params, Tree, node
from ppbench.federation.messages import Model


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
    """What a message carries, or a client keeps: by record and name arrays, numbers and settings."""

    arrays: dict[str, Params]
    metrics: dict[str, dict[str, Tree]]
    configs: dict[str, dict[str, Tree]]


@node
class Asked(Model):
    """Server to client, to train these weights. key: of their record; rest: all other records; kind: message type."""

    key: Text
    rest: Content
    kind: Text


@node
class Note:
    """Server to client, without weights: settings, and whatever a protocol exchanges besides. kind: message type."""

    rest: Content
    kind: Text


@node
class Told:
    """Client to server. params: the weights that it ended with, in the record `key`; rest: all other records."""

    params: Params
    key: Text
    rest: Content


def text(words: str) -> Text:
    """Return a string as a tree."""
    return Text(_octets(words.encode()))


def words(tree: Text) -> str:
    """Return the string of a tree."""
    return tree.utf8.cpu().numpy().tobytes().decode()


def _octets(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def _grown(value: Any) -> Tree:
    """Return a value of a record as a tree: every leaf a tensor, so that its bytes count."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bytes):
        return Blob(_octets(value))
    if isinstance(value, list | tuple):
        return [_grown(one) for one in value]
    return torch.tensor(value, dtype={bool: torch.bool, int: torch.int64}.get(type(value), torch.float64))


def _value(tree: Tree) -> Any:
    if isinstance(tree, Text):
        return words(tree)
    if isinstance(tree, Blob):
        return tree.bytes.cpu().numpy().tobytes()
    return [_value(one) for one in tree] if isinstance(tree, list) else tree.item()


def content(records: Mapping[str, Any]) -> Content:
    """Return a RecordDict as a tree of copies (ProtocolError: an array that is none)."""
    found = Content({}, {}, {})
    for key, record in records.items():
        if isinstance(record, ArrayRecord):
            found.arrays[key] = {name: tensor_of(array) for name, array in record.items()}
        elif isinstance(record, MetricRecord):
            found.metrics[key] = {name: _grown(value) for name, value in record.items()}
        elif isinstance(record, ConfigRecord):
            found.configs[key] = {name: _grown(value) for name, value in record.items()}
        else:
            raise ProtocolError(f"A message has the record {key!r}, which is a {type(record).__name__}.")
    return found


def tensor_of(array: Array) -> Tensor:
    """Return a copy of one of Flower's arrays (ProtocolError: it cannot be read)."""
    try:
        return torch.from_numpy(np.array(array.numpy()))
    except (TypeError, ValueError) as cause:
        raise ProtocolError(f"An array of type {array.dtype} cannot be read: {cause}.") from cause


def array_record(params: Params) -> ArrayRecord:
    """Return weights as a record, by name, in their dtypes."""
    return ArrayRecord({name: Array(value.detach().cpu().numpy().copy()) for name, value in params.items()})


def records(tree: Content) -> RecordDict:
    """Return a RecordDict of what a tree holds: copies."""
    found: dict[str, Any] = {key: array_record(arrays) for key, arrays in tree.arrays.items()}
    found |= {key: MetricRecord({n: _value(v) for n, v in values.items()}) for key, values in tree.metrics.items()}
    found |= {key: ConfigRecord({n: _value(v) for n, v in values.items()}) for key, values in tree.configs.items()}
    return RecordDict(found)


def split(tree: Content, like: Params, who: str) -> tuple[str, Params, Content]:
    """Return the record that holds a model's weights, these, and the other records; ProtocolError: there is none.

    like: the model's weights; more than one record may have arrays, one alone the model's.
    """
    forms = {name: value.shape for name, value in like.items()}
    found = [key for key, arrays in tree.arrays.items() if {n: a.shape for n, a in arrays.items()} == forms]
    if len(found) != 1:
        held = {key: len(arrays) for key, arrays in tree.arrays.items()} or "no arrays"
        raise ProtocolError(f"{who} holds {held}; it must hold the model's {len(like)} arrays, in their shapes, once.")
    rest = Content({k: v for k, v in tree.arrays.items() if k != found[0]}, tree.metrics, tree.configs)
    return found[0], tree.arrays[found[0]], rest


def joined(key: str, params: Params, rest: Content) -> RecordDict:
    """Return the records of a message whose weights were split off."""
    return records(Content({key: params, **rest.arrays}, rest.metrics, rest.configs))


def asked_records(message: Asked | Note) -> RecordDict:
    """Return the records that a client is sent."""
    if isinstance(message, Note):
        return records(message.rest)
    return joined(words(message.key), message.params, message.rest)
