"""Snapshots of a user's object between rounds, restored into a new object. Nothing is pickled."""

from __future__ import annotations

import logging
import random
import re
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError, one_line
from ppbench.base.tree import Tree, node

_CODE = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    *(logging.Logger, re.Pattern, type(threading.Lock()), type(threading.RLock())),
)
"""Attributes that a snapshot leaves out: a new object has them too."""


@node
class Numpy:
    """A NumPy array."""

    values: Tensor


@node
class Pairs:
    """A dict. keys: str, int, float, bool or None; values: their snapshots."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]


@node
class Sequence:
    """A list or a tuple. kind: which of them; items: their snapshots."""

    kind: str
    items: tuple[Any, ...]


@node
class Thing:
    """An object of another class. kind: its qualified name; names, values: its attributes except code."""

    kind: str
    names: tuple[str, ...]
    values: tuple[Any, ...]


Converter = Callable[[Any], Any]
"""Converts a framework's own values to trees, or back; None for all others."""


def no_conversion(_: Any) -> None:
    """Convert nothing: every value is of a general type."""


def snapshot(value: Any, where: str, convert: Converter = no_conversion) -> Tree:
    """Return a tree of copies of all that an object holds, except code (ProtocolError: a value cannot be copied)."""
    if (tree := convert(value)) is not None:
        return tree
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return Numpy(torch.from_numpy(np.array(value)))
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        values = tuple(snapshot(item, f"{where}[{key!r}]", convert) for key, item in value.items())
        return Pairs(tuple(value), values)
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return Sequence(kind, tuple(snapshot(item, f"{where}[{i}]", convert) for i, item in enumerate(value)))
    if not hasattr(value, "__dict__") or isinstance(value, random.Random):
        raise ProtocolError(f"{where} is a {one_line(type(value).__name__, 60)}, of which no probe can have a copy.")
    attributes = {n: v for n, v in vars(value).items() if not isinstance(v, _CODE)}
    return Thing(
        type(value).__qualname__,
        tuple(attributes),
        tuple(snapshot(v, f"{where}.{n}", convert) for n, v in attributes.items()),
    )


def restored(fresh: Any, tree: Tree, where: str, convert: Converter = no_conversion) -> Any:
    """Return the value of a snapshot; the attributes of an object are set on `fresh`, a new object of its class."""
    if (converted := convert(tree)) is not None:
        return converted
    if isinstance(tree, Numpy):
        values = tree.values.cpu().numpy().copy()
        return values if values.ndim or not isinstance(fresh, np.generic | int | float) else values[()]
    if isinstance(tree, Pairs):
        known = fresh if isinstance(fresh, dict) else {}
        updated = {k: restored(known.get(k), v, where, convert) for k, v in zip(tree.keys, tree.values, strict=True)}
        known.clear()  # a dict of a class of its own stays one
        known.update(updated)
        return known
    if isinstance(tree, Sequence):
        before = fresh if isinstance(fresh, list | tuple) else ()
        items = [
            restored(before[i] if i < len(before) else None, item, where, convert) for i, item in enumerate(tree.items)
        ]
        return items if tree.kind == "list" else tuple(items)
    if isinstance(tree, Thing):
        if type(fresh).__qualname__ != tree.kind:
            problem = f"a {tree.kind} that it was not made with"
            raise ProtocolError(f"{where} keeps {problem}, of which no probe can have a copy; make it from the start.")
        for name, value in zip(tree.names, tree.values, strict=True):
            setattr(fresh, name, restored(getattr(fresh, name, None), value, f"{where}.{name}", convert))
        return fresh
    return tree.clone() if isinstance(tree, Tensor) else tree
