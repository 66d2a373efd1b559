"""Find object paths from what an adversary holds to secrets. For tests, ours and a defense author's.

This guards against accident, not malice: it sees neither module globals nor values derived from a secret.
"""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_OPAQUE = (type, types.ModuleType, str, bytes, int, float, bool, torch.dtype, torch.device, torch.Size, type(None))


def leaks(root: object, secrets: Iterable[Tensor]) -> list[str]:
    """Return one line for each path from `root` (a View, an Attack, ...) to a secret.

    That is a tensor that shares storage with a secret or holds a row of 4 or more of its values, or a generator, whose
    state allows its draws to be repeated.
    """
    hidden = [secret.detach().cpu() for secret in secrets]
    storages = {s.untyped_storage().data_ptr() for s in hidden if s.numel()}
    tables = [s.flatten(1) for s in hidden if s.dim() > 1 and s.numel() and s[0].numel() >= 4]
    rows = {row for table in tables for row in _rows(table, table.shape[1])}
    widths = {table.shape[1] for table in tables}
    paths = []
    for path, value in _walk(root):
        if isinstance(value, torch.Generator):
            paths.append(f"{path}: a generator")
        if isinstance(value, Tensor) and value.device.type != "meta" and value.numel():
            if value.untyped_storage().data_ptr() in storages:
                paths.append(f"{path}: shares storage with a secret")
            elif any(value.numel() % w == 0 and not rows.isdisjoint(_rows(value, w)) for w in widths):
                paths.append(f"{path}: holds a secret's values")
    return paths


def _rows(value: Tensor, width: int) -> Iterator[bytes]:
    """Return the float32 bytes of each `width` consecutive values."""
    data = value.detach().cpu().float().contiguous().numpy().tobytes()
    return (data[start : start + 4 * width] for start in range(0, len(data), 4 * width))


def _walk(root: object) -> Iterator[tuple[str, object]]:
    """Yield everything reachable from `root`, with the path to it; each object once."""
    seen: set[int] = set()
    alive: list[object] = []  # keeps temporaries, so that an id is never used twice
    queue: deque[tuple[str, object]] = deque([("view", root)])
    while queue:
        path, value = queue.popleft()
        if isinstance(value, _OPAQUE) or id(value) in seen:
            continue
        seen.add(id(value))
        alive.append(value)
        yield path, value
        queue.extend((f"{path}{step}", child) for step, child in _children(value))


def _history(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the objects that a tensor, or a node of its autograd graph (invisible to gc), refers to."""
    if isinstance(value, Tensor):
        for name in ("grad", "grad_fn", "_base"):
            yield f".{name}", getattr(value, name) if name != "grad" or value.is_leaf else None
        yield from ((f".{key}", item) for key, item in vars(value).items())
        return
    yield ".next_functions", [node for node, _ in value.next_functions]
    yield from ((f".{name}", getattr(value, name)) for name in dir(value) if name.startswith("_saved_"))
    yield ".variable", getattr(value, "variable", None)


def _children(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield f".<closure {name}>", cell.cell_contents
        for part in (value.__defaults__ or (), value.__kwdefaults__ or {}):
            yield ".<defaults>", part
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield ".__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield ".<partial>", (value.func, value.args, value.keywords)
    elif isinstance(value, Tensor) or hasattr(value, "next_functions"):
        yield from _history(value)
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from ((f".{key}", item) for key, item in vars(value).items())
    else:
        yield from ((".<referent>", item) for item in gc.get_referents(value))
