"""Per-channel scales of a network, determined by walking its graph (torch.fx), not by a table of model names.

A positively homogeneous network commutes with positive scales of its channels: multiply the rows of one layer by r,
divide the columns of the next by r, and the function is the same (PBPFL, Eq. 12-15, extended). Every channel of every
activation has the number of a scale; 0 is the inputs' fixed scale 1; tied scales are unions of numbers.
"""

from __future__ import annotations

import contextlib
import io
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.modules.dropout import _DropoutNd

from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.nets.classifier import UserNetwork
from ppbench.nets.net import Net, NetSpec, build

Numbers = NDArray[np.int64]
Norms = Literal["refuse", "affine"]
FIXED_SCALE = 0
"""The number of the scale that is fixed at 1."""


@dataclass(frozen=True)
class Factor:
    """How scales multiply one parameter: entry (i, j, ...) by r[out_i] / r[inp_j].

    shape: of the multiplied parameter; larger than the parameter if many channels share one bias. out: numbers of the
    multiplying scales [shape[axis]] along `axis`, or None. inp: numbers of the dividing scales, or None; [shape[1]], or
    [shape[axis]] for a `diagonal` layer: one factor per channel.
    """

    shape: tuple[int, ...]
    axis: int = 0
    out: Numbers | None = None
    inp: Numbers | None = None
    diagonal: bool = False

    def multiplier(self, scales: Tensor) -> Tensor:
        """Return the multiplier [*shape] for scales [1 + count] with scales[0] = 1."""
        value = torch.ones((), dtype=scales.dtype, device=scales.device)
        if self.out is not None:
            value = _along(scales, self.out, self.axis, len(self.shape))
        if self.inp is not None:
            value = value / _along(scales, self.inp, self.axis if self.diagonal else 1, len(self.shape))
        return value.expand(self.shape)  # a view: nothing writes to it


def _along(scales: Tensor, numbers: Numbers, axis: int, dims: int) -> Tensor:
    return scales[torch.from_numpy(numbers)].view([-1 if d == axis else 1 for d in range(dims)])


@dataclass(frozen=True)
class Channels:
    """Where the scales of a network enter: one factor per parameter, except for the head's bias, with scale 1.

    count: number of free scales; they are numbered 1 to count. features: [D] numbers at the head's input.
    """

    factors: dict[str, Factor]
    count: int
    features: Numbers

    def multipliers(self, scales: Tensor) -> Params:
        """Return the multiplier of every parameter for the free scales [count], all > 0."""
        full = torch.cat([torch.ones(1, dtype=scales.dtype, device=scales.device), scales])
        return {name: factor.multiplier(full) for name, factor in self.factors.items()}


@dataclass(frozen=True)
class ScaledActivation:
    """An activation during the walk: its numbers [C] along axis 1, and its shape with the batch axis."""

    ids: Numbers
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """A free-standing parameter: its name and shape."""

    name: str
    shape: tuple[int, ...]


@dataclass
class Walk:
    """State of one walk: unions of numbers, and the factors so far."""

    module: fx.GraphModule
    norms: Norms
    parent: list[int] = field(default_factory=lambda: [FIXED_SCALE])
    factors: dict[str, Factor] = field(default_factory=dict)

    def fresh(self, count: int) -> Numbers:
        """Return `count` new numbers."""
        first = len(self.parent)
        self.parent += range(first, first + count)
        return np.arange(first, first + count)

    def root(self, number: int) -> int:
        """Return the representative of all numbers tied to `number`."""
        while self.parent[number] != number:
            number = self.parent[number]
        return number

    def tie(self, a: Numbers, b: Numbers) -> None:
        """Tie the scales `a` and `b`, entry by entry; the smaller number represents both."""
        for x, y in zip(a.tolist(), b.tolist(), strict=True):
            low, high = sorted((self.root(x), self.root(y)))
            self.parent[high] = low

    def fixed(self, ids: Numbers) -> bool:
        """Return whether any of the scales is fixed at 1."""
        return any(self.root(i) == FIXED_SCALE for i in ids.tolist())

    def put(self, name: str, factor: Factor) -> None:
        """Record the factor of a parameter (LayerRefused: its layer is used twice)."""
        if name in self.factors:
            raise refusal(name, "is used more than once", "a layer of its own for each use")
        self.factors[name] = factor


class LayerRefused(UsageError):
    """A layer that a defense cannot perturb. layer: its name; reason: the rest of the sentence."""

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(f"Layer {layer!r} {reason}")
        self.layer, self.reason = layer, reason


def refusal(layer: str, reason: str, instead: str) -> LayerRefused:
    """Return the error for a layer that cannot be perturbed exactly, with what to use `instead`."""
    return LayerRefused(layer, f"{reason}, so it cannot be perturbed exactly; use {instead}.")


# -- Channel scales through each kind of layer and function; what does not commute with scales is refused by name --

TRANSITIONAL = "transitional_"
"""Prefix of free-standing parameters, one factor per channel, after which a new scale begins (MP-DP, Eq. 12)."""

SAME_MODULES: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.Identity,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
)
SAME_MODULES += (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d)
SAME_FUNCTIONS = {F.relu, torch.relu, F.leaky_relu, F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d}
SAME_METHODS = {"relu", "contiguous", "clone"}
NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)
INSTEAD = {
    "Tanh": "ReLU or LeakyReLU",
    "Sigmoid": "ReLU or LeakyReLU",
    "GELU": "ReLU",
    "SiLU": "ReLU",
    "ELU": "LeakyReLU",
    "Hardswish": "ReLU",
    "Dropout": "no dropout",
}
INSTEAD_FUNCTIONS = "ReLU, LeakyReLU, pooling, torch.cat, additions and slices of space"


def flat_entries(args: Any) -> list[Any]:
    """Return the entries of nested tuples and lists."""
    entries: list[Any] = []
    for arg in args:
        entries += flat_entries(arg) if isinstance(arg, tuple | list) else [arg]
    return entries


def check_rank(label: str, kind: str, x: ScaledActivation) -> None:
    """Refuse a layer for d spatial axes on another rank than [B, C, d axes]: torch would take channels for space."""
    if kind[-2:] in ("1d", "2d") and len(x.shape) != 2 + int(kind[-2]):
        raise refusal(label, f"({kind}) is applied to activations of shape {x.shape[1:]}", f"it on {kind[-2:]} maps")


def layer_output(
    state: Walk, name: str, layer: nn.Module, x: ScaledActivation, shape: tuple[int, ...]
) -> ScaledActivation:
    """Return a layer's output for `x` (UsageError: it does not commute with scales)."""
    kind, label = type(layer).__name__, f"features.{name}"
    if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
        return _affine(state, label, layer, x, shape)
    if isinstance(layer, SAME_MODULES):
        check_rank(label, kind, x)
        return ScaledActivation(x.ids, shape)
    if isinstance(layer, nn.Flatten) and layer.start_dim == 1:
        return _flattened(x, shape)
    if isinstance(layer, NORM_LAYERS):
        return _norm(state, label, layer, x, shape)
    if isinstance(layer, _DropoutNd) and layer.p == 0:
        return ScaledActivation(x.ids, shape)
    raise refusal(label, f"({kind}) does not commute with scales", INSTEAD.get(kind, "ReLU networks without it"))


def _affine(
    state: Walk, label: str, layer: nn.Linear | nn.Conv1d | nn.Conv2d, x: ScaledActivation, shape: Any
) -> ScaledActivation:
    if isinstance(layer, nn.Linear) and len(x.shape) != 2:
        raise refusal(label, "is applied to more than one axis", "Flatten before it")
    if not isinstance(layer, nn.Linear) and layer.groups != 1:
        raise refusal(label, "is a grouped convolution", "groups=1")
    check_rank(label, type(layer).__name__, x)
    out = state.fresh(layer.weight.shape[0])
    state.put(f"{label}.weight", Factor(tuple(layer.weight.shape), out=out, inp=x.ids))
    if layer.bias is not None:
        state.put(f"{label}.bias", Factor(tuple(layer.bias.shape), out=out))
    return ScaledActivation(out, shape)


def _norm(state: Walk, label: str, layer: Any, x: ScaledActivation, shape: tuple[int, ...]) -> ScaledActivation:
    kind = type(layer).__name__
    if state.norms == "refuse":
        instead = "a network without norms, or norms=affine, which perturbs its weight and bias only"
        raise refusal(label, f"({kind}) cancels the scale of its input or mixes channels", instead)
    if getattr(layer, "track_running_stats", False):
        raise refusal(label, f"({kind}) keeps running statistics", "track_running_stats=False")
    if layer.weight is None:
        raise refusal(label, f"({kind}) has no affine part", "affine=True")
    state.tie(x.ids, np.full(len(x.ids), FIXED_SCALE))
    out = state.fresh(len(x.ids))
    state.put(f"{label}.weight", Factor(tuple(layer.weight.shape), out=out))
    state.put(f"{label}.bias", Factor(tuple(layer.bias.shape), out=out))
    return ScaledActivation(out, shape)


def _flattened(x: ScaledActivation, shape: tuple[int, ...]) -> ScaledActivation:
    return ScaledActivation(np.repeat(x.ids, shape[1] // len(x.ids)), shape)


def _reshape(state: Walk, node: fx.Node, args: Any, kwargs: Any, shape: tuple[int, ...]) -> ScaledActivation:
    x = args[0]
    if len(shape) != 2 or shape[0] != x.shape[0]:
        raise refusal(node.name, f"reshapes {x.shape[1:]} to {shape[1:]}", "nn.Flatten")
    return _flattened(x, shape)


def _cat(state: Walk, node: fx.Node, args: Any, kwargs: Any, shape: tuple[int, ...]) -> ScaledActivation:
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if dim not in (1, 1 - len(shape)):
        raise refusal(node.name, f"concatenates along axis {dim}", "torch.cat along channels, axis 1")
    if not all(isinstance(part, ScaledActivation) for part in args[0]):
        raise refusal(node.name, "concatenates a parameter or a constant", "torch.cat of activations")
    return ScaledActivation(np.concatenate([part.ids for part in args[0]]), shape)


def _add(state: Walk, node: fx.Node, args: Any, kwargs: Any, shape: tuple[int, ...]) -> ScaledActivation:
    x, other = (args[0], args[1]) if isinstance(args[0], ScaledActivation) else (args[1], args[0])
    if isinstance(other, Parameter):
        return _shared(state, node, x, other, shape, x.ids)
    if not isinstance(other, ScaledActivation):
        raise refusal(node.name, "adds a constant", "a bias parameter")
    if other.shape != x.shape:
        raise refusal(node.name, f"adds tensors of unlike shapes {x.shape[1:]} and {other.shape[1:]}", "equal shapes")
    if state.fixed(x.ids) or state.fixed(other.ids):
        raise refusal(node.name, "adds the unscaled input to a layer's output", "a layer on the shortcut too")
    state.tie(x.ids, other.ids)
    return ScaledActivation(x.ids, shape)


def _multiply(state: Walk, node: fx.Node, args: Any, kwargs: Any, shape: tuple[int, ...]) -> ScaledActivation:
    x, other = (args[0], args[1]) if isinstance(args[0], ScaledActivation) else (args[1], args[0])
    if isinstance(other, int | float):
        return ScaledActivation(x.ids, shape)
    if isinstance(other, Parameter):
        if other.name.startswith(f"features.{TRANSITIONAL}"):
            out = state.fresh(len(x.ids))
            state.put(other.name, Factor(other.shape, out=out, inp=x.ids, diagonal=True))
            return ScaledActivation(out, shape)
        return _shared(state, node, x, other, shape, None)
    raise refusal(node.name, "multiplies two activations", "additions or concatenation")


def _shared(
    state: Walk, node: fx.Node, x: ScaledActivation, parameter: Parameter, shape: tuple[int, ...], out: Numbers | None
) -> ScaledActivation:
    """Record a free-standing bias (out: the scales of `x`), one per channel, or a multiplier (None: scale 1)."""
    target = (len(x.ids), *[1] * (len(x.shape) - 2))
    sizes = (1,) * (len(target) - len(parameter.shape)) + parameter.shape
    if len(sizes) != len(target) or any(size not in (1, full) for size, full in zip(sizes, target, strict=True)):
        raise refusal(parameter.name, f"of shape {parameter.shape} is not one value a channel", f"shape {target}")
    state.put(parameter.name, Factor(parameter.shape if out is None else target, out=out))
    return ScaledActivation(x.ids, shape)


def _pad(state: Walk, node: fx.Node, args: Any, kwargs: Any, shape: tuple[int, ...]) -> ScaledActivation:
    x, widths = args[0], args[1]
    mode = args[2] if len(args) > 2 else kwargs.get("mode", "constant")
    value = args[3] if len(args) > 3 else kwargs.get("value", 0)
    if mode == "constant" and value not in (0, None):
        raise refusal(node.name, f"pads with {value}", "zero padding")
    axis = 2 * (len(x.shape) - 2)  # F.pad counts from the last axis
    before, after = (list(widths) + [0] * (axis + 2))[axis : axis + 2]
    if len(widths) > axis + 2:
        raise refusal(node.name, "pads the batch", "padding of channels and space")
    if mode != "constant" and (before or after):
        raise refusal(node.name, f"pads channels in mode {mode!r}", "zero padding")
    if before < 0 or after < 0:
        raise refusal(node.name, "cuts channels off", "padding of zero or more channels")
    return ScaledActivation(np.concatenate([state.fresh(before), x.ids, state.fresh(after)]), shape)


def _slice(state: Walk, node: fx.Node, args: Any, kwargs: Any, shape: tuple[int, ...]) -> ScaledActivation:
    x, index = args[0], args[1]
    index = index if isinstance(index, tuple) else (index,)
    if index[0] != slice(None) or any(not isinstance(part, slice) for part in index):
        raise refusal(node.name, f"takes the part {index}", "slices of channels and space")
    return ScaledActivation(x.ids[index[1]] if len(index) > 1 else x.ids, shape)


def _mean(state: Walk, node: fx.Node, args: Any, kwargs: Any, shape: tuple[int, ...]) -> ScaledActivation:
    x = args[0]
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    axes = {d % len(x.shape) for d in ([dims] if isinstance(dims, int) else dims or [0])}
    if axes & {0, 1}:
        raise refusal(node.name, "averages over examples or channels", "means over space")
    return ScaledActivation(x.ids, shape)


Handler = Callable[[Walk, fx.Node, Sequence[Any], Any, tuple[int, ...]], ScaledActivation]
FUNCTIONS: dict[Any, Handler] = {
    torch.cat: _cat,
    torch.flatten: _reshape,
    torch.add: _add,
    operator.add: _add,
    operator.iadd: _add,
    torch.mul: _multiply,
    operator.mul: _multiply,
    F.pad: _pad,
    operator.getitem: _slice,
    torch.mean: _mean,
}
METHODS: dict[str, Handler] = {
    "contiguous": _reshape,
    "flatten": _reshape,
    "view": _reshape,
    "reshape": _reshape,
    "add": _add,
    "mul": _multiply,
    "mean": _mean,
}


# -- The walk over a network's graph that determines its channel scales; see `channels` --


def traced_features(net: Net) -> fx.GraphModule:
    """Return the graph of the net's features, with shapes of a batch of two in `node.meta` (UsageError: no graph)."""
    try:
        graph = fx.symbolic_trace(net.module.features)
        with contextlib.redirect_stderr(io.StringIO()):  # ShapeProp prints the traceback of what it raises
            ShapeProp(graph).propagate(torch.empty(2, *net.spec.shape, device="meta"))
    except Exception as cause:  # fx raises whatever the model's forward raises on a symbol
        reason = str(cause.__cause__ or cause).strip().split("\n")[0].rstrip(".")
        raise UsageError(
            f"Model {net.spec.model!r} cannot be traced by torch.fx ({reason}), so it cannot be perturbed; write its "
            "forward without control flow on tensors."
        ) from cause
    return graph


def traced_channels(net: Net, norms: Norms = "refuse") -> Channels:
    """Return where channel scales enter `net`, whose features torch.fx must be able to trace.

    norms: "refuse" normalization layers, or perturb only their affine part ("affine"), exact for any eps and mode; then
    the activations before a norm are the true ones.

    UsageError: a layer does not commute with scales; the error names it, and what to use instead.
    """
    with naming_refusals(net):
        check_head(net)
        return _walked(net, norms)


def check_head(net: Net) -> None:
    """Refuse a network whose logits are no linear layer's output (UsageError)."""
    if isinstance(net.module, UserNetwork) and net.module.head_name is None:
        reason = "has no linear head: its logits are not the output of an nn.Linear"
        raise UsageError(
            f"Model {net.spec.model!r} {reason}, so it cannot be perturbed exactly; use one that ends in nn.Linear."
        )


@contextlib.contextmanager
def naming_refusals(net: Net) -> Iterator[None]:
    """Name layers that are refused in the block by the user's own names."""
    try:
        yield
    except LayerRefused as refused:
        if not isinstance(net.module, UserNetwork):
            raise  # the names are its own, or an outer block, for the original network, translates them
        raise UsageError(f"Layer {net.own_name(refused.layer)!r} {refused.reason}") from refused


def _walked(net: Net, norms: Norms) -> Channels:
    if net.frozen_parameters:
        raise refusal(net.frozen_parameters[0], "is frozen", "a network all of whose parameters are trained")
    graph = traced_features(net)
    state = Walk(graph, norms)
    values: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            features = values[node.args[0]]
        else:
            values[node] = _visit(state, node, values)
            if isinstance(values[node], ScaledActivation) and values[node].shape[1:2] != values[node].ids.shape:
                raise refusal(node.name, "does not keep its channels on axis 1", "layers that return [B, C, ...]")
    if not isinstance(features, ScaledActivation) or len(features.shape) != 2:
        raise UsageError(f"The features of model {net.spec.model!r} are not flat, so it cannot be perturbed.")
    head = net.module.head.weight
    state.put("head.weight", Factor(tuple(head.shape), inp=features.ids))
    foreign = [name for name in state.factors if name not in net.names]
    if foreign:  # a scale put there would reach no layer, or two
        raise refusal(
            foreign[0], "is a buffer, a constant, or a weight made of others", "a parameter of its own in each layer"
        )
    return _compressed(state, features.ids)


def _compressed(state: Walk, features: Numbers) -> Channels:
    parts = [ids for f in state.factors.values() for ids in (f.out, f.inp) if ids is not None]
    used = sorted({state.root(i) for ids in parts for i in ids.tolist()} | {FIXED_SCALE})
    place = {number: rank for rank, number in enumerate(used)}

    def numbers(ids: Numbers | None) -> Numbers | None:
        return None if ids is None else np.array([place[state.root(i)] for i in ids.tolist()], dtype=np.int64)

    factors = {n: replace(f, out=numbers(f.out), inp=numbers(f.inp)) for n, f in state.factors.items()}
    final = numbers(features)
    assert final is not None
    return Channels(factors, len(used) - 1, final)


def _visit(state: Walk, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args: Any = fx.map_arg(node.args, lambda n: values[n])
    kwargs: Any = fx.map_arg(node.kwargs, lambda n: values[n])
    meta: Any = node.meta.get("tensor_meta")
    shape = tuple(meta.shape) if hasattr(meta, "shape") else ()
    if node.op == "placeholder":
        if not shape:
            return None  # an optional argument of forward, left at its default
        return ScaledActivation(np.full(shape[1], FIXED_SCALE), shape)
    if node.op == "get_attr":
        return Parameter(f"features.{node.target}", shape)
    if node.op == "call_module":
        if len(args) != 1 or kwargs or not isinstance(args[0], ScaledActivation):
            raise refusal(f"features.{node.target}", "is called on something else than one activation", "layer(x)")
        return layer_output(state, str(node.target), state.module.get_submodule(str(node.target)), args[0], shape)
    return _called(state, node, args, kwargs, shape)


def _called(state: Walk, node: fx.Node, args: Any, kwargs: Any, shape: tuple[int, ...]) -> Any:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    if any(isinstance(a, ScaledActivation | Parameter) for a in flat_entries(kwargs.values())):
        raise refusal(node.name, f"names its operands in calling {name}", "operands by position")
    if not any(isinstance(a, ScaledActivation) for a in flat_entries(args)):
        return None if any(a is None for a in flat_entries(args)) else shape  # arithmetic on sizes
    called = node.op == "call_function"
    if name in ("size", "dim") if not called else args[1:] == ("shape",):
        return shape  # a size; what is done with it shows in the shapes
    if node.target in SAME_FUNCTIONS if called else name in SAME_METHODS:
        check_rank(node.name, name, args[0])
        return ScaledActivation(args[0].ids, shape)
    handler = FUNCTIONS.get(node.target) if called else METHODS.get(name)
    if handler is None:
        raise refusal(node.name, f"calls {name}, which is not known to commute with scales", INSTEAD_FUNCTIONS)
    return handler(state, node, args, kwargs, shape)


@lru_cache
def channels_of(spec: NetSpec, norms: Norms = "refuse") -> Channels:
    """Return `traced_channels` of the network of `spec`, made once per process."""
    return traced_channels(build(spec), norms)


# -- Networks whose gradient jumps, which searches by second derivatives take for smooth --

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
KINKED = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Hardtanh, nn.Threshold)
"""Activations whose slope jumps, and with it the gradient that L-BFGS takes for smooth."""
KINKS = {F.relu, F.relu_, F.relu6, F.leaky_relu, F.hardtanh, F.threshold, torch.relu, torch.relu_, "relu", "relu_"}
"""The same as functions, and by their names as methods of a tensor."""


def has_kinks(net: Net) -> bool:
    """Return whether a network convolves and has kinked activations, as layers or as functions that fx can see."""
    layers = list(net.module.modules())
    if not any(isinstance(layer, CONVOLUTIONS) for layer in layers):
        return False
    if any(isinstance(layer, KINKED) for layer in layers):
        return True
    try:
        graph = traced_features(net).graph
    except UsageError:  # fx cannot trace it
        return False
    return any(node.op in ("call_function", "call_method") and node.target in KINKS for node in graph.nodes)
