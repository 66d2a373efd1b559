"""The operations that a network applies to its input one after another, recorded as it runs, for any modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ppbench.base.tree import Params
from ppbench.federation.plan import Plan

IntPair = tuple[int, int]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One call of a torch function on the output of the call before.

    name: of the function, without underscores at its ends. arguments: by name where the order is known, the first one
    left out. parameters: names of the trained parameters among them, by argument. inputs, outputs: shapes of one
    example.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    parameters: Mapping[str, str]
    inputs: Shape
    outputs: Shape

    def is_frozen(self, argument: str) -> bool:
        """Return whether an argument is a tensor that is not trained."""
        return self.arguments.get(argument) is not None and argument not in self.parameters


_SAME = {"flatten", "view", "reshape", "contiguous", "clone", "to", "squeeze", "dropout"}
_ORDER: Mapping[str, tuple[str, ...]] = {
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "linear": ("input", "weight", "bias"),
    "max_pool2d": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "avg_pool2d": ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    "adaptive_avg_pool2d": ("input", "output_size"),
    "leaky_relu": ("input", "negative_slope", "inplace"),
    "elu": ("input", "alpha", "inplace"),
    "celu": ("input", "alpha", "inplace"),
    "softplus": ("input", "beta", "threshold"),
}


class _Recorder(TorchFunctionMode):
    """Records each function whose first argument is the output of the last recorded one."""

    def __init__(self, start: Tensor, names: Mapping[int, str]) -> None:
        super().__init__()
        self.last, self.names, self.calls = start, names, list[Call]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        name = getattr(func, "__name__", "").strip("_")
        if first is self.last and isinstance(out, Tensor) and name not in ("get", "detach"):  # an attribute, a copy
            order = _ORDER.get(name) or ("input", *(str(place) for place in range(1, len(args))))
            named = dict(zip(order, args, strict=False)) | dict(kwargs)
            named.pop("input", None)
            parameters = {key: self.names[id(value)] for key, value in named.items() if id(value) in self.names}
            shapes = tuple(first.shape[1:]), tuple(out.shape[1:])
            self.calls.append(Call(name, func, named, parameters, *shapes))
            self.last = out
        return out


def walk(plan: Plan, params: Params) -> list[Call]:
    """Return the calls of a network on its input, as far as each takes the output of the one before.

    Calls that only reshape are left out. Empty for a network that takes no single input.
    """
    if plan.net.fewest > 1:
        return []
    x = next(iter(params.values())).new_zeros(1, *plan.spec.shape)
    copies = {name: value.detach().clone() for name, value in params.items()}
    recorder = _Recorder(x, {id(value): name for name, value in copies.items()})
    with torch.no_grad(), recorder:
        plan.net(copies, x)
    return [call for call in recorder.calls if call.name not in _SAME]


def pair(value: Any) -> IntPair | None:
    """Return a setting of a layer for both directions, None if it is no number."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, tuple | list) and all(isinstance(one, int) for one in value):
        return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])
    return None
