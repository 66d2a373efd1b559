"""Channel scales through each kind of layer and function; those that do not commute with scales are refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from ppbench.nets.channels import FIXED_SCALE, Factor, Numbers, Parameter, ScaledActivation, Walk, refusal

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
