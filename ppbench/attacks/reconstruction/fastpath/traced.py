"""A function of tensors run from a trace: the same operations in the same order, and no Python between them.

Four passes through a chain are some five hundred small operations. What calls them from Python takes a quarter of an
evaluation of eight 32x32 images, and half of one image's. torch has named its tracer deprecated; `torch.compile`, which
is to follow it, needs a compiler on the machine and a minute a shape where this needs a third of a second. Should the
tracer go, so can this module: a trace gives the bits that the function gives, so no figure depends on it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]
Key = tuple[tuple[torch.Size, torch.dtype], ...]

WARM = 150
"""Calls with tensors of the same shapes after which a trace is made: as many as save what it costs."""


class Traced:
    """`function` of tensors, which must do the same operations whatever numbers are in them: no branch, no numpy.

    Traces live as long as this object. Other tensors that the function uses are constants in them.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.calls: Counter[Key] = Counter()
        self.traces: dict[Key, Function] = {}

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return what the function returns of these tensors."""
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key in self.traces:
            return self.traces[key](*tensors)
        self.calls[key] += 1
        if self.calls[key] == WARM and tensors[0].device.type == "cpu":  # elsewhere it was never measured
            self.traces[key] = trace(self.function, tensors)
        return self.function(*tensors)


def trace(function: Function, tensors: tuple[Tensor, ...]) -> Function:
    """Return the operations that `function` does on tensors of these shapes, as one function without Python in it.

    Not by `torch.jit.trace`, which keeps every trace and its constants until the process ends (7 MB each here).
    """
    record: Callable[..., tuple[torch.Graph, object]] = torch.jit._get_trace_graph  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        # that each length becomes a constant, as it shall
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        graph, _ = record(lambda *inputs: function(*inputs), tensors)
    traced: Function = torch._C._create_function_from_graph("traced", graph)
    return traced
