"""What an object of somebody's keeps between rounds, read off it and put into one made anew: nothing is pickled."""

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
"""What an object holds and does not keep: one made anew has it too."""


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
class Thing:
    """An object of another class. kind: its class; names and values: its attributes that are no code."""

    kind: str
    names: tuple[str, ...]
    values: tuple[Any, ...]


Own = Callable[[Any], Any]
"""Of a framework's own values: a tree, None for other values; and back: a value, None for other trees."""


def nothing(_: Any) -> None:
    """Know no values of one's own."""


def kept(value: Any, where: str, own: Own = nothing) -> Tree:
    """Return a tree of copies of all that an object holds and that is no code (ProtocolError: it cannot be copied)."""
    if (found := own(value)) is not None:
        return found
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return Numpy(torch.from_numpy(np.array(value)))
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        told = tuple(kept(one, f"{where}[{key!r}]", own) for key, one in value.items())
        return Pairs(tuple(value), told)
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return Sequence(kind, tuple(kept(one, f"{where}[{i}]", own) for i, one in enumerate(value)))
    if not hasattr(value, "__dict__") or isinstance(value, random.Random):
        raise ProtocolError(f"{where} is a {one_line(type(value).__name__, 60)}, of which no probe can have a copy.")
    held = {n: v for n, v in vars(value).items() if not isinstance(v, _CODE)}
    return Thing(type(value).__qualname__, tuple(held), tuple(kept(v, f"{where}.{n}", own) for n, v in held.items()))


def restored(fresh: Any, tree: Tree, where: str, own: Own = nothing) -> Any:
    """Return what a tree of `kept` stands for; objects are `fresh` ones, made as that was, with its attributes."""
    if (found := own(tree)) is not None:
        return found
    if isinstance(tree, Numpy):
        values = tree.values.cpu().numpy().copy()
        return values if values.ndim or not isinstance(fresh, np.generic | int | float) else values[()]
    if isinstance(tree, Pairs):
        known = fresh if isinstance(fresh, dict) else {}
        held = {k: restored(known.get(k), v, where, own) for k, v in zip(tree.keys, tree.values, strict=True)}
        known.clear()  # a dict of a class of its own stays one
        known.update(held)
        return known
    if isinstance(tree, Sequence):
        before = fresh if isinstance(fresh, list | tuple) else ()
        items = [restored(before[i] if i < len(before) else None, one, where, own) for i, one in enumerate(tree.items)]
        return items if tree.kind == "list" else tuple(items)
    if isinstance(tree, Thing):
        if type(fresh).__qualname__ != tree.kind:
            told = f"a {tree.kind} that it was not made with"
            raise ProtocolError(f"{where} keeps {told}, of which no probe can have a copy; make it from the start.")
        for name, value in zip(tree.names, tree.values, strict=True):
            setattr(fresh, name, restored(getattr(fresh, name, None), value, f"{where}.{name}", own))
        return fresh
    return tree.clone() if isinstance(tree, Tensor) else tree
