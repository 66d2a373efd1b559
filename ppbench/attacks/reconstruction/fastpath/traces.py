"""A function of tensors run from a trace: the same operations in the same order, and no Python between them.

Four passes through a chain are some five hundred small operations. Calling them from Python takes a quarter of an
evaluation of eight 32x32 images, and half of one image's. torch has deprecated its tracer; its successor,
`torch.compile`, needs a compiler on the machine and a minute per shape, a trace a third of a second. If the tracer is
removed, this module can be too: a trace gives the same bits as the function, so no result depends on it.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

TensorFunction = Callable[..., tuple[Tensor, ...]]
TraceKey = tuple[str, tuple[tuple[torch.Size, torch.dtype], ...]]

WARM = 150
"""Calls of one shape after which a trace is made: as many as save its cost."""
MOST_TRACES = 32
"""Traces that a process keeps, the last used ones (7 MB each)."""


@dataclass
class Traces:
    """The traces of a process, and the number of calls of functions without one."""

    kept: OrderedDict[TraceKey, TensorFunction] = field(default_factory=OrderedDict)
    calls: Counter[TraceKey] = field(default_factory=Counter)

    def run(self, function: TensorFunction, about: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the (at least two) tensors that a function returns; by a trace after `WARM` calls.

        The function must do the same operations on all tensors of the same shapes, for any values (no branch, no
        numpy). It may use other tensors only as constants of `about`, which names the function and all its constants.
        """
        if tensors[0].device.type != "cpu":  # never measured elsewhere
            return function(*tensors)
        key = about, tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key](*tensors)
        self.calls[key] += 1
        if self.calls[key] >= WARM:
            self.kept[key] = make_trace(function, tensors)
            del self.calls[key]
            if len(self.kept) > MOST_TRACES:
                self.kept.popitem(last=False)
        return function(*tensors)


TRACES = Traces()


def make_trace(function: TensorFunction, tensors: Sequence[Tensor]) -> TensorFunction:
    """Return the operations of `function` on tensors of these shapes, as one function without Python.

    Not by `torch.jit.trace`, which keeps every trace until the process ends.
    """
    record: Callable[..., tuple[torch.Graph, object]] = torch.jit._get_trace_graph  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        # it warns that each length becomes a constant, which is intended
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        graph, _ = record(lambda *inputs: function(*inputs), tuple(tensors))
    traced: TensorFunction = torch._C._create_function_from_graph("traced", graph)
    return traced
