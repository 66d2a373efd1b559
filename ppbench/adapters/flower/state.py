"""What a strategy keeps between rounds, read off the object and put into a new one: a federation can then be forked."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from ppbench.adapters.flower.records import Content, content, records
from ppbench.base.errors import ProtocolError, one_line
from ppbench.base.tree import Tree, node

_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


@node
class Numpy:
    """A NumPy array."""

    values: Tensor


@node
class Pairs:
    """A dict. keys: str, int, float, bool or None; values: as they are kept."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]


@node
class Sequence:
    """A list, or a tuple. kind: its name; items: as they are kept."""

    kind: str
    items: tuple[Any, ...]


@node
class Recorded:
    """One of Flower's records. kind: its class; content: of a RecordDict that holds it."""

    kind: str
    content: Content


@node
class Thing:
    """An object of another class. kind: its class; names and values: its attributes that are no code."""

    kind: str
    names: tuple[str, ...]
    values: tuple[Any, ...]


_RECORDS = {cls.__name__: cls for cls in (ArrayRecord, ConfigRecord, MetricRecord, RecordDict)}


def kept(value: Any, where: str = "the strategy") -> Tree:
    """Return a tree of copies of all that an object holds and that is no code (ProtocolError: it cannot be copied)."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return Numpy(torch.from_numpy(np.array(value)))
    if isinstance(value, np.ndarray):
        return Numpy(torch.from_numpy(value.copy()))
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, RecordDict):
        return Recorded("RecordDict", content(value))
    if (name := type(value).__name__) in _RECORDS and isinstance(value, _RECORDS[name]):
        return Recorded(name, content({"it": value}))
    if isinstance(value, dict):
        return Pairs(tuple(value), tuple(kept(one, f"{where}[{key!r}]") for key, one in value.items()))
    if isinstance(value, list | tuple):
        return Sequence(
            "list" if isinstance(value, list) else "tuple", tuple(kept(one, f"{where}[...]") for one in value)
        )
    if not hasattr(value, "__dict__"):
        raise ProtocolError(f"{where} is a {one_line(type(value).__name__, 60)}, of which no probe can have a copy.")
    held = {n: v for n, v in vars(value).items() if not isinstance(v, _CODE)}
    return Thing(type(value).__qualname__, tuple(held), tuple(kept(v, f"{where}.{n}") for n, v in held.items()))


def restored(fresh: Any, tree: Tree, where: str = "the strategy") -> Any:
    """Return what a tree of `kept` stands for; objects are `fresh` ones, made as that was, with its attributes."""
    if isinstance(tree, Numpy):
        values = tree.values.cpu().numpy().copy()
        return values if values.ndim or not isinstance(fresh, np.generic | int | float) else values[()]
    if isinstance(tree, Recorded):
        found = records(tree.content)
        return found if tree.kind == "RecordDict" else found["it"]
    if isinstance(tree, Pairs):
        known = fresh if isinstance(fresh, dict) else {}
        held = {k: restored(known.get(k), v, where) for k, v in zip(tree.keys, tree.values, strict=True)}
        if not isinstance(fresh, dict):
            return held
        fresh.clear()
        fresh.update(held)
        return fresh
    if isinstance(tree, Sequence):
        known_ = fresh if isinstance(fresh, list | tuple) else ()
        items = [restored(known_[i] if i < len(known_) else None, one, where) for i, one in enumerate(tree.items)]
        return items if tree.kind == "list" else tuple(items)
    if isinstance(tree, Thing):
        if type(fresh).__qualname__ != tree.kind:
            told = f"a {tree.kind} that it was not made with"
            raise ProtocolError(f"{where} keeps {told}, of which no probe can have a copy; make it from the start.")
        for name, value in zip(tree.names, tree.values, strict=True):
            setattr(fresh, name, restored(getattr(fresh, name, None), value, f"{where}.{name}"))
        return fresh
    return tree.clone() if isinstance(tree, Tensor) else tree
