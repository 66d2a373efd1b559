"""A function of tensors run from a trace: the same operations in the same order, and no Python between them.

Four passes through a chain are some five hundred small operations. What calls them from Python takes a quarter of an
evaluation of eight 32x32 images, and half of one image's. torch has named its tracer deprecated; `torch.compile`, which
is to follow it, needs a compiler on the machine and a minute a shape where this needs a third of a second. Should the
tracer go, so can this module: a trace gives the bits that the function gives, so no figure depends on it.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]
Key = tuple[str, tuple[tuple[torch.Size, torch.dtype], ...]]

WARM = 150
"""Calls of one shape after which a trace is made: as many as save what it costs."""
MOST = 32
"""Traces that a process keeps, those used last (7 MB each)."""


@dataclass
class Traces:
    """The traces of a process, and how often what has none yet was called."""

    kept: OrderedDict[Key, Function] = field(default_factory=OrderedDict)
    calls: Counter[Key] = field(default_factory=Counter)

    def run(self, function: Function, about: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the two tensors or more that a function returns; by a trace once it was called `WARM` times.

        The function must do the same operations on all tensors of the same shapes, whatever numbers are in them (no
        branch, no numpy), and use no other tensor but constants of `about`, which names it with all that it depends on.
        """
        if tensors[0].device.type != "cpu":  # never measured elsewhere
            return function(*tensors)
        key = about, tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key](*tensors)
        self.calls[key] += 1
        if self.calls[key] >= WARM:
            self.kept[key] = trace(function, tensors)
            del self.calls[key]
            if len(self.kept) > MOST:
                self.kept.popitem(last=False)
        return function(*tensors)


TRACES = Traces()


def trace(function: Function, tensors: Sequence[Tensor]) -> Function:
    """Return the operations that `function` does on tensors of these shapes, as one function without Python in it.

    Not by `torch.jit.trace`, which keeps every trace until the process ends.
    """
    record: Callable[..., tuple[torch.Graph, object]] = torch.jit._get_trace_graph  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        # that each length becomes a constant, as it shall
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        graph, _ = record(lambda *inputs: function(*inputs), tuple(tensors))
    traced: Function = torch._C._create_function_from_graph("traced", graph)
    return traced
