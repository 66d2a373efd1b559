"""The walk over a network's graph that determines its channel scales; see `channels`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.passes.shape_prop import ShapeProp

from ppbench.base.errors import UsageError
from ppbench.nets.channels import (
    FIXED_SCALE,
    Channels,
    Factor,
    LayerRefused,
    Norms,
    Numbers,
    Parameter,
    ScaledActivation,
    Walk,
    refusal,
)
from ppbench.nets.classifier import UserNetwork
from ppbench.nets.commuting import (
    FUNCTIONS,
    INSTEAD_FUNCTIONS,
    METHODS,
    SAME_FUNCTIONS,
    SAME_METHODS,
    check_rank,
    flat_entries,
    layer_output,
)
from ppbench.nets.net import Net, NetSpec, build


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


def walk(net: Net, norms: Norms = "refuse") -> Channels:
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
    """Return `walk` of the network of `spec`, made once per process."""
    return walk(build(spec), norms)
