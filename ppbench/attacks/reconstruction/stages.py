"""Stages of a network before its first linear layer: a convolution, an activation and an average pooling each.

Also the operations of a network, of which stages are read, and activations, with slopes and inverses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ppbench.base.tree import Params
from ppbench.federation.plan import Plan
from ppbench.metrics.intervals import Floats

# -- The operations that a network applies to its input one after another, recorded as it runs, for any modules --

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

    Calls that only reshape are left out. Empty for a network that takes no single input, or where two calls share a
    parameter (tied weights): its gradient is a sum, and no layer's own.
    """
    if plan.net.fewest > 1:
        return []
    x = next(iter(params.values())).new_zeros(1, *plan.spec.shape)
    copies = {name: value.detach().clone() for name, value in params.items()}
    recorder = _Recorder(x, {id(value): name for name, value in copies.items()})
    with torch.no_grad(), recorder:
        plan.net(copies, x)
    used = [name for call in recorder.calls for name in call.parameters.values()]
    return [call for call in recorder.calls if call.name not in _SAME] if len({*used}) == len(used) else []


def pair(value: Any) -> IntPair | None:
    """Return a setting of a layer for both directions, None if it is no number."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, tuple | list) and all(isinstance(one, int) for one in value):
        return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])
    return None


# -- Elementwise activations: their values, slopes and inverses, by bisection --
# Nothing is known of a function but its calls. One that falls and then rises (GELU, SiLU) has two inverses.

Function = Callable[[Tensor], Tensor]

ELEMENTWISE = frozenset(
    [
        *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "hardtanh", "softplus", "sigmoid", "tanh"),
        *("log_sigmoid", "gelu", "silu", "mish", "hardswish"),
    ]
)
"""Names of functions that act on each number alone."""
FAR = 50.0
"""Inputs at least this small show the level where a function is flat."""
LARGEST_INPUT = 2.0**40
"""Largest input that an inverse may have."""
HALVINGS = 100
TRIED_INPUTS = 4001
"""Inputs among which a function's least value is looked for, from -10 to 10."""


@dataclass(frozen=True)
class Elementwise:
    """An elementwise function; None is the identity."""

    function: Function | None = None

    def __call__(self, z: Tensor) -> Tensor:
        """Return the function's values."""
        return z if self.function is None else self.function(z.clone())

    def slope(self, z: Tensor) -> Tensor:
        """Return the function's derivative."""
        if self.function is None:
            return torch.ones_like(z)
        with torch.enable_grad():
            leaf = z.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.function(leaf.clone()).sum(), leaf)
        return slope

    @cached_property
    def bottom(self) -> float:
        """The input of the least value if the function falls before it, else -inf."""
        grid = torch.linspace(-10, 10, TRIED_INPUTS, dtype=torch.float64)
        values = self(grid)
        least = int(values.argmin())
        if not float(values[least]) < float(values[0]) - 1e-9:
            return -torch.inf
        low, high = grid[max(least - 1, 0)].item(), grid[min(least + 1, TRIED_INPUTS - 1)].item()
        for _ in range(HALVINGS):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            at = self(torch.tensor([a, b], dtype=torch.float64))
            low, high = (a, high) if at[0] > at[1] else (low, b)
        return (low + high) / 2

    @cached_property
    def flat(self) -> float | None:
        """The level of small inputs if the function is flat there, so that it has no inverse; else None."""
        far = torch.tensor([-FAR], dtype=torch.float64)
        return float(self(far)) if float(self.slope(far)) == 0 else None

    @cached_property
    def rises(self) -> bool:
        """Whether the function grows everywhere, so that the largest input has the largest value."""
        return bool((self.slope(torch.linspace(-5, 5, TRIED_INPUTS, dtype=torch.float64)) > 0).all())

    @cached_property
    def ends(self) -> tuple[float, float] | None:
        """Least and greatest value of a bounded function, None of others."""
        values = self(torch.tensor([-1e6, 1e6], dtype=torch.float64))
        low, high = float(values[0]), float(values[1])
        return (low, high) if -1e3 < low < high < 1e3 else None

    def inverse(self, values: Tensor, near: Tensor | None = None, slack: float = 0.0) -> Tensor:
        """Return inputs with these values: of two the one next to `near`, without it the greater.

        Values out of range have an input at which the function is flat. Within `slack` of the level of a flat part, the
        input lies in it, unless `near` says otherwise.
        """
        if self.function is None:
            return values
        z = self._bisected(values, max(self.bottom, -LARGEST_INPUT), LARGEST_INPUT)
        if near is not None and self.bottom > -torch.inf:
            other = self._bisected(values, self.bottom, -LARGEST_INPUT)
            z = torch.where((other - near).abs() < (z - near).abs(), other, z)
        if self.flat is not None:
            level = (values - self.flat).abs() <= slack
            if near is not None:
                z = torch.where(level & (self.slope(near) == 0), near, z)
            elif self.bottom == -torch.inf:
                z = torch.where(level, -FAR, z)
        return z

    def _bisected(self, values: Tensor, start: float, end: float) -> Tensor:
        """Return z between `start` and `end`, towards which the function grows, where it has these values."""
        near, far = torch.full_like(values, start), torch.full_like(values, end)
        for _ in range(HALVINGS):
            middle = (near + far) / 2
            beyond = self(middle) >= values
            near, far = torch.where(beyond, near, middle), torch.where(beyond, middle, far)
        return far


def activation_of(call: Call) -> Elementwise | None:
    """Return the activation that a call applies; None if it is none, or has trained parameters."""
    if call.name not in ELEMENTWISE or call.parameters:
        return None
    if any(name.isdigit() for name in call.arguments):
        return None  # settings whose names are unknown
    settings = {name: value for name, value in call.arguments.items() if name != "inplace"}
    return Elementwise(lambda z: call.function(z, **settings))


# -- Stages: a convolution, an activation and a pooling each --

Places = NDArray[np.int64]
MapShape = tuple[int, int, int]


@dataclass(frozen=True)
class Window:
    """How a window of `kernel` slides over maps; padding is with zeros."""

    kernel: IntPair
    stride: IntPair
    padding: IntPair = (0, 0)
    dilation: IntPair = (1, 1)

    def places(self, high: int, wide: int) -> Places:
        """Return which place [K, L] of a map each entry of the window sees at each position; -1 for padding."""
        numbers = torch.arange(1, high * wide + 1, dtype=torch.float64).view(1, 1, high, wide)
        seen = F.unfold(numbers, self.kernel, self.dilation, self.padding, self.stride)[0]
        return np.asarray(seen.long().numpy() - 1, dtype=np.int64)


@dataclass(frozen=True)
class ConvolutionStage:
    """A convolution, an activation, and a pooling by means before or after it.

    weight, bias: names of the convolution's parameters. inputs, outputs: shapes [C, H, W] of one example, outputs those
    of the whole stage. places: number of positions of the convolution's window.
    """

    weight: str
    bias: str | None
    window: Window
    activation: Elementwise
    pool: Window | None
    pools_first: bool
    inputs: MapShape
    convolved: MapShape
    outputs: MapShape

    @cached_property
    def taps(self) -> Places:
        """[K, L]: which input place each entry of the kernel sees at each position; -1 for padding."""
        return self.window.places(*self.inputs[1:])

    @cached_property
    def tiles(self) -> Places:
        """[T, M]: the positions whose mean is the output at each of T places; M is 1 without pooling."""
        high, wide = self.convolved[1:]
        if self.pool is None:
            return np.arange(high * wide, dtype=np.int64)[:, None]
        return np.ascontiguousarray(self.pool.places(high, wide).T)

    def pooled(self, values: Floats) -> Floats:
        """Return the means [O, T] of values [O, L] over tiles."""
        return np.asarray(values[:, self.tiles].mean(2))

    def spread(self, values: Floats) -> Floats:
        """Return the transpose of `pooled`: [O, L] for values [O, T]."""
        out = np.zeros((len(values), self.taps.shape[1]))
        for member in self.tiles.T:  # one position of every tile: no position twice
            out[:, member] += values / self.tiles.shape[1]
        return out


S = TypeVar("S")


@dataclass(frozen=True)
class Stages(Generic[S]):
    """Stages, first to last, and the linear layer (weight and bias) that their flat output enters."""

    stages: tuple[S, ...]
    weight: str
    bias: str


def stages_of(plan: Plan, params: Params) -> Stages[ConvolutionStage] | None:
    """Return the stages that a network begins with, maybe none, up to a linear layer; None for another network."""
    return read_stages(plan, params, _stage)


def read_stages(plan: Plan, params: Params, read: Callable[[Call, Sequence[Call]], S | None]) -> Stages[S] | None:
    """Return what `read` makes of each convolution that a network begins with and of the calls up to the next layer.

    None if it makes None of one, or no linear layer with a bias follows.
    """
    calls, stages, shape = walk(plan, params), list[S](), plan.spec.shape
    while calls and calls[0].name == "conv2d":
        used = next((i for i, call in enumerate(calls) if i and call.name in ("conv2d", "linear")), len(calls))
        stage = read(calls[0], calls[1:used])
        if stage is None:
            return None
        stages.append(stage)
        shape, calls = calls[used - 1].outputs, calls[used:]
    if not calls or calls[0].name != "linear" or calls[0].parameters.keys() != {"weight", "bias"}:
        return None
    return Stages(tuple(stages), **calls[0].parameters) if calls[0].inputs == (math.prod(shape),) else None


def _stage(conv: Call, after: Sequence[Call]) -> ConvolutionStage | None:
    """Return the stage of a convolution and the calls up to the next layer; None if these are others."""
    window, activation, pool, pools_first = convolution_window(conv), Elementwise(), None, False
    if "weight" not in conv.parameters or conv.is_frozen("bias") or window is None:
        return None
    for call in after:
        own = activation_of(call)
        if own is not None and activation.function is None:
            activation = own
            pools_first = pool is not None
        elif own is None and pool is None:
            pool = _mean_window(call)
            if pool is None:
                return None
        else:
            return None
    shapes = conv.inputs, conv.outputs, after[-1].outputs if after else conv.outputs
    names = conv.parameters["weight"], conv.parameters.get("bias")
    return ConvolutionStage(*names, window, activation, pool, pools_first, *shapes)  # type: ignore[arg-type]  # of three axes


def convolution_window(conv: Call) -> Window | None:
    """Return the window of a convolution, None if its settings are others than numbers, or of groups."""
    named = conv.arguments
    stride, padding, dilation = (pair(named.get(n, d)) for n, d in (("stride", 1), ("padding", 0), ("dilation", 1)))
    weight = named.get("weight")
    if stride is None or padding is None or dilation is None or weight is None or named.get("groups", 1) != 1:
        return None
    return Window(tuple(weight.shape[2:]), stride, padding, dilation)


def _mean_window(call: Call) -> Window | None:
    """Return the window of a pooling by means; None for another call, and for padded or cut windows."""
    named = call.arguments
    if call.name == "adaptive_avg_pool2d":
        sizes = list(zip(call.inputs[1:], call.outputs[1:], strict=True))
        if any(size % count for size, count in sizes):
            return None
        (high, wide) = (size // count for size, count in sizes)
        return Window((high, wide), (high, wide))
    return pooling_window(named) if call.name == "avg_pool2d" and not named.get("divisor_override") else None


def pooling_window(named: Mapping[str, Any]) -> Window | None:
    """Return the window of a pooling with these arguments; None if it is padded, dilated or cut."""
    kernel, stride = pair(named.get("kernel_size")), pair(named.get("stride") or named.get("kernel_size"))
    plain = pair(named.get("padding", 0)) == (0, 0) and pair(named.get("dilation", 1)) == (1, 1)
    whole = plain and not named.get("ceil_mode", False)
    return Window(kernel, stride) if kernel is not None and stride is not None and whole else None
