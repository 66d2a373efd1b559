"""The gradient-matching loss and its gradient without a double-backward graph, for plain chains of layers.

D(g(x, y)) of a simulated gradient g has the gradient of <g(x, y), r> with r = dD/dg held fixed (`distances`). That is
the derivative of the training loss along r in weight space, so one forward, one backward and the two passes of the
R-operator (Pearlmutter 1994) give it: about four passes, for many victims in one set of matrix products.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ppbench.attacks.reconstruction.fastpath.convolution import convolution
from ppbench.attacks.reconstruction.fastpath.distances import (
    LayerTarget,
    absolute,
    cosine_distance,
    gap,
    layer_target,
    residual,
    tensor_angles,
)
from ppbench.attacks.reconstruction.fastpath.layers import (
    FAST_ACTIVATIONS,
    Activation,
    Affine,
    ChainStep,
    Direction,
    Full,
    Memo,
    SoftKink,
    average_pool,
    flatten,
    leaky_relu,
    max_pool,
)
from ppbench.attacks.reconstruction.stages import Call, walk
from ppbench.base.tree import Params, filled, leaves
from ppbench.federation.evidence import EXPLAINED_FLOOR, POWERS, Measure
from ppbench.federation.plan import Plan
from ppbench.nets.classifier import UserNetwork

# -- A function of tensors run from a trace: the same operations in the same order, and no Python between them --
# Four passes through a chain are some five hundred small operations. Calling them from Python takes a quarter of an
# evaluation of eight 32x32 images, and half of one image's. torch has deprecated its tracer; its successor,
# `torch.compile`, needs a compiler on the machine and a minute per shape, a trace a third of a second. If the tracer
# is removed, this module can be too: a trace gives the same bits as the function, so no result depends on it.

TensorFunction = Callable[..., tuple[Tensor, ...]]
TraceKey = tuple[str, tuple[tuple[torch.Size, torch.dtype], ...]]

WARM = {"cpu": 150, "cuda": 3}
"""Calls of one shape after which it is recorded, by type of device. CPU: as many as save the cost of a trace; GPU: the
first calls choose algorithms and workspaces. On other devices nothing is recorded."""
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
        device = tensors[0].device
        if device.type not in WARM:
            return function(*tensors)
        key = f"{device} {about}", tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key](*tensors)
        self.calls[key] += 1
        if self.calls[key] >= WARM[device.type]:
            self.kept[key] = (make_trace if device.type == "cpu" else make_cuda_graph)(function, tensors)
            del self.calls[key]
            if len(self.kept) > MOST_TRACES:
                self.kept.popitem(last=False)
        return function(*tensors)


TRACES = Traces()


def make_cuda_graph(function: TensorFunction, tensors: Sequence[Tensor]) -> TensorFunction:
    """Return the kernels of `function` on CUDA tensors of these shapes as one graph, which is launched at once.

    An evaluation of one LeNet is some three hundred kernels of 3 microseconds, and launching each from Python takes
    30 (an H200; `benchmarks/bench_device.py`). The graph reads and writes fixed memory: inputs are copied in, results
    out, and `function` is kept, because its constants are part of that memory.
    """
    inputs = [tensor.detach().clone() for tensor in tensors]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*inputs)

    def replayed(*others: Tensor, _owner: TensorFunction = function) -> tuple[Tensor, ...]:
        for place, value in zip(inputs, others, strict=True):
            place.copy_(value)
        graph.replay()
        return tuple(output.clone() for output in outputs)

    return replayed


def make_trace(function: TensorFunction, tensors: Sequence[Tensor]) -> TensorFunction:
    """Return the operations of `function` on tensors of these shapes, as one function without Python.

    Not by `torch.jit.trace`, which keeps every trace until the process ends.
    """
    record: Callable[..., tuple[torch.Graph, object]] = torch.jit._get_trace_graph  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        # it warns that each length becomes a constant, which is intended
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        graph, _ = record(lambda *inputs: function(*inputs), tuple(tensors))
    return torch._C._create_function_from_graph("traced", graph)


@dataclass(frozen=True)
class Output:
    """The cotangent of the outputs and its derivatives, for one loss (mean over a batch of B, soft targets).

    All are [V, B, C].

    cotangent: (logits, y) -> dL/dlogits.  change: (logits, y, tangent) -> its tangent.
    y_gradient: (logits, tangent) -> d(tangent of L)/dy.
    """

    cotangent: Callable[[Tensor, Tensor], Tensor]
    change: Callable[[Tensor, Tensor, Tensor], Tensor]
    y_gradient: Callable[[Tensor, Tensor], Tensor]


def _softmax_change(z: Tensor, y: Tensor, t: Tensor) -> Tensor:
    p = torch.softmax(z, -1)
    return y.sum(-1, keepdim=True) * p * (t - (p * t).sum(-1, keepdim=True)) / z.shape[1]


def _softmax_y(z: Tensor, t: Tensor) -> Tensor:
    return ((torch.softmax(z, -1) * t).sum(-1, keepdim=True) - t) / z.shape[1]


OUTPUTS = {
    "cross_entropy": Output(
        lambda z, y: (y.sum(-1, keepdim=True) * torch.softmax(z, -1) - y) / z.shape[1], _softmax_change, _softmax_y
    ),
    "squared": Output(lambda z, y: (z - y) / z.shape[1], lambda z, y, t: t / z.shape[1], lambda z, t: -t / z.shape[1]),
}


CALLED: dict[str, type[nn.Module]] = {
    "conv2d": nn.Conv2d,
    "linear": nn.Linear,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "max_pool2d": nn.MaxPool2d,
    "avg_pool2d": nn.AvgPool2d,
}
"""Layers by the function that they call."""


def compile_chain(plan: Plan, params: Params, dtype: torch.dtype) -> list[ChainStep] | None:
    """Return the network's layers with `params` in `dtype`, or None if one of them, or the loss, has no fast form.

    Supported are sequences, nested or written out in a forward pass, of Conv2d (groups 1, dilation 1, zero padding),
    Linear, Sigmoid, Tanh, ReLU, LeakyReLU, AvgPool2d, MaxPool2d and Flatten, all of whose parameters are trained.
    """
    if plan.loss not in OUTPUTS or plan.net.frozen_parameters:
        return None
    network, layers = plan.net.module, None
    if network.layers is not None:
        layers = [*_flat_layers("features", network.layers), ("head", network.head)]
    elif isinstance(network, UserNetwork):
        layers = _called_layers(plan, params)
    if layers is None:
        return None
    steps: list[ChainStep] = []
    shape, known = plan.spec.shape, {name: value.detach().to(dtype) for name, value in params.items()}
    for key, module in layers:
        first = not any(isinstance(step, Affine) for step in steps)
        step = _step(key, module, known, first, shape)
        if step is None or (first and isinstance(step, Activation)):
            return None
        steps.append(step)
        shape = tuple(module.to("meta")(torch.empty(1, *shape, device="meta")).shape[1:])
    return steps


NamedLayer = tuple[str, nn.Module]
"""A layer, and the prefix of its parameters."""


def _flat_layers(prefix: str, layers: nn.Sequential) -> Iterator[NamedLayer]:
    """Yield the layers of a sequence, those of plain sequences in it one by one."""
    for name, layer in layers.named_children():
        if type(layer) is nn.Sequential:
            yield from _flat_layers(f"{prefix}.{name}", layer)
        else:
            yield f"{prefix}.{name}", layer


def _called_layers(plan: Plan, params: Params) -> list[NamedLayer] | None:
    """Return layers that do what the calls of a user's forward pass do; None if that is no sequence of known calls.

    A layer that draws, which a walk passes over (dropout), is refused before any attack on a user's network.
    """
    if plan.net.mixes or plan.net.pixelwise:
        return None
    layers, shape, used = list[NamedLayer](), plan.spec.shape, list[str]()
    for call in walk(plan, params):
        if len(shape) == 3 and call.inputs == (math.prod(shape),):
            layers.append(("", nn.Flatten()))
        elif call.inputs != shape:
            return None
        layer = _layer_of(call, params)
        if layer is None:
            return None
        layers.append(layer)
        used += call.parameters.values()
        shape = call.outputs
    whole = bool(layers) and layers[-1][0] == "head" and sorted(used) == sorted(params)
    return layers if whole and _agree(layers, plan, params) else None


def _layer_of(call: Call, params: Params) -> NamedLayer | None:
    """Return the layer, without weights, that does what a call does; None for a call or a setting without one."""
    if call.name not in CALLED or call.is_frozen("weight") or call.is_frozen("bias"):
        return None
    passed_over = ("weight", "bias", "inplace", "return_indices")
    settings: dict[str, Any] = {key: value for key, value in call.arguments.items() if key not in passed_over}
    kind: Callable[..., nn.Module] = CALLED[call.name]
    try:
        if call.name not in ("conv2d", "linear"):
            return "", kind(**settings)
        name, bias = call.parameters["weight"], call.parameters.get("bias")
        key, shape = name.removesuffix(".weight"), params[name].shape
        if name != f"{key}.weight" or bias not in (None, f"{key}.bias"):
            return None
        widths = shape[1] * settings.get("groups", 1), shape[0], *([tuple(shape[2:])] if len(shape) > 2 else [])
        return key, kind(*widths, **settings, bias=bias is not None, device="meta")
    except (KeyError, TypeError, ValueError):  # arguments that no layer has
        return None


def _agree(layers: Sequence[NamedLayer], plan: Plan, params: Params) -> bool:
    """Return whether layers answer as the network does on noise: a forward pass may branch on what it is given."""
    low, high = plan.data_range
    noise = torch.rand(1, *plan.spec.shape, generator=torch.Generator().manual_seed(0))
    out = x = (low + (high - low) * noise).to(next(iter(params.values())))
    with torch.no_grad():
        for key, layer in layers:
            own = {end: params[f"{key}.{end}"] for end in ("weight", "bias") if f"{key}.{end}" in params}
            out = torch.func.functional_call(layer, own, (out,))
        return torch.allclose(out, plan.net(params, x), rtol=1e-4, atol=1e-5)


def _step(key: str, module: nn.Module, params: Params, first: bool, shape: tuple[int, ...]) -> ChainStep | None:
    if type(module) in FAST_ACTIVATIONS:
        return FAST_ACTIVATIONS[type(module)]
    if type(module) is nn.LeakyReLU:
        return leaky_relu(module.negative_slope)
    weight, bias = params.get(f"{key}.weight"), params.get(f"{key}.bias")
    if type(module) is nn.Linear and weight is not None and len(shape) == 1:
        return Affine(key, weight, bias, first)
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return flatten(shape)
    if len(shape) != 3:
        return None
    size = (shape[1], shape[2])
    if type(module) is nn.MaxPool2d and not module.ceil_mode and module.dilation in (1, (1, 1)):
        return max_pool(module, size)
    if type(module) is nn.AvgPool2d and not module.ceil_mode and module.count_include_pad:
        return average_pool(module, size) if module.divisor_override is None else None
    if type(module) is not nn.Conv2d or weight is None or isinstance(module.padding, str):
        return None
    if (module.groups, module.dilation, module.padding_mode) == (1, (1, 1), "zeros"):
        return convolution(module, key, weight, bias, first, size)
    return None


@contextmanager
def untracked(device: torch.device) -> Iterator[None]:
    """Compute explicit slopes without autograd.

    In inference mode on a CPU, which saves a tenth of the time; not every backend supports it.
    """
    with torch.inference_mode() if device.type == "cpu" else torch.no_grad():
        yield


@dataclass(frozen=True)
class ChainMatch:
    """The layers of a chain, and the targets of the affine layers' gradients."""

    steps: Sequence[ChainStep]
    targets: Sequence[LayerTarget]

    @property
    def about(self) -> str:
        """Layers and targets, apart from their tensors."""
        return str([part.about for part in (*self.steps, *self.targets)])

    @property
    def _parts(self) -> tuple[list[tuple[Full, Tensor | None]], list[Tensor], list[LayerTarget]]:
        """What has tensors: the parameters of affine layers, the widths of smoothed kinks, and the targets."""
        parameters = [(step.weight, step.bias) for step in self.steps if isinstance(step, Affine)]
        return parameters, [step.width for step in self.steps if isinstance(step, SoftKink)], list(self.targets)

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in order."""
        return leaves(self._parts)

    def of(self, tensors: Sequence[Tensor]) -> ChainMatch:
        """Return a copy with other `tensors`."""
        parameters, widths, targets = filled(self._parts, tensors)
        each, width = iter(parameters), iter(widths)
        steps: list[ChainStep] = []
        for step in self.steps:
            if isinstance(step, Affine):
                step = step.with_parameters(*next(each))
            elif isinstance(step, SoftKink):
                step = replace(step, width=next(width))
            steps.append(step)
        return ChainMatch(steps, targets)

    def softened(self, width: float) -> ChainMatch:
        """Return a copy with kinks smoothed by `width`."""
        like = self.tensors()[0]
        steps = [
            SoftKink(step.leak, like.new_tensor(width))
            if isinstance(step, Activation) and step.leak is not None
            else step
            for step in self.steps
        ]
        return ChainMatch(steps, self.targets)

    def paired(self, memos: Sequence[Memo], cotangent: Tensor, index: Tensor) -> list[tuple[Affine, Memo, LayerTarget]]:
        """Return each affine layer, its memo after the backward pass of `cotangent`, and the targets of `index` [S]."""
        pairs = zip(backward(self.steps, memos, cotangent), self.targets, strict=True)
        return [(layer, memo, goal.at(index)) for (layer, memo), goal in pairs]


class ChainObjective:
    """D and its gradient for V victims of `batch` examples that share the weights of `steps` (see `layer_target`)."""

    def __init__(
        self,
        steps: list[ChainStep],
        loss: str,
        observed: Sequence[Params],
        weights: Sequence[Params] | None,
        batch: int,
        measure: Measure = "squares",
        floor: float = EXPLAINED_FLOOR,
    ) -> None:
        self.output, self.measure, self.floor = OUTPUTS[loss], measure, floor
        factor, layers = measure in ("squares", "cosine"), [step for step in steps if isinstance(step, Affine)]
        targets = [layer_target(layer, observed, weights, batch, factor) for layer in layers]
        self.loss = loss
        self._set_match(ChainMatch(steps, [goal.bounded() for goal in targets] if measure == "bounded" else targets))

    def _set_match(self, match: ChainMatch) -> None:
        self.match, self.tensors = match, match.tensors()
        self.about = f"{self.loss} {self.measure} {self.floor} {match.about}"

    def softened(self, width: float) -> ChainObjective:
        """Return the objective with ReLUs smoothed by `width`, see `soft_kinks`."""
        other = copy.copy(self)
        other._set_match(self.match.softened(width))
        return other

    def __call__(self, x: Tensor, y: Tensor, nuisance: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return D [S], dD/dx, dD/dy and an empty dD/dnuisance [S, 0]: see `problem.Objective`."""
        with untracked(x.device):
            if self.measure == "bounded":  # uses numpy, which a trace cannot
                total, by_x, by_y = self.slopes(x, y, index, *self.tensors)
            else:
                total, by_x, by_y = TRACES.run(self.slopes, self.about, (x, y, index, *self.tensors))
        return total, by_x, by_y, nuisance

    def slopes(self, x: Tensor, y: Tensor, index: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return D [S], dD/dx and dD/dy of the same match with other `tensors`."""
        match = self.match.of(tensors)
        a, memos = forward(match.steps, x)
        layers = match.paired(memos, self.output.cotangent(a, y), index)
        if self.measure == "cosine":
            total, directions = cosine_distance([gap(*layer) for layer in layers])
        elif self.measure in POWERS:
            gaps = [gap(*layer) for layer in layers]
            total, directions = tensor_angles(gaps, POWERS[self.measure], self.measure == "bounded", self.floor)
        else:
            parts = [(absolute if self.measure == "absolute" else residual)(*layer) for layer in layers]
            total, directions = torch.stack([part for _, part in parts]).sum(0), [r for r, _ in parts]
        tangent = forward_tangent(match.steps, memos, directions)
        change = backward_tangent(match.steps, memos, directions, self.output.change(a, y, tangent))
        return total, change.reshape(x.shape), self.output.y_gradient(a, tangent)


def forward(steps: Sequence[ChainStep], x: Tensor) -> tuple[Tensor, list[Memo]]:
    """Return the chain's output on x [S, B, *shape], and each layer's memo."""
    memos = [Memo(len(x)) for _ in steps]
    a = x if x.dim() == 3 else x.flatten(0, 1)
    for step, memo in zip(steps, memos, strict=True):
        a = step.forward(a, memo)
    return a, memos


def backward(steps: Sequence[ChainStep], memos: Sequence[Memo], cotangent: Tensor | None) -> list[tuple[Affine, Memo]]:
    """Return the affine layers with their memos, after a backward pass of the last layer's cotangent."""
    for step, memo in zip(reversed(steps), reversed(memos), strict=True):
        if cotangent is not None:
            cotangent = step.backward(cotangent, memo)
    return [(s, m) for s, m in zip(steps, memos, strict=True) if isinstance(s, Affine)]


def forward_tangent(steps: Sequence[ChainStep], memos: Sequence[Memo], directions: Sequence[Direction]) -> Tensor:
    """Return the derivative by the cotangent after the last layer, by a forward pass."""
    tangent: Tensor | None = None
    along = iter(directions)
    for step, memo in zip(steps, memos, strict=True):
        if isinstance(step, Affine):
            tangent = step.tangent(tangent, memo, next(along))
        elif tangent is not None:
            tangent = step.tangent(tangent, memo)
    assert tangent is not None  # a chain has an affine layer
    return tangent


def backward_tangent(
    steps: Sequence[ChainStep], memos: Sequence[Memo], directions: Sequence[Direction], change: Tensor
) -> Tensor:
    """Return the derivative by the input, from a `change` after the last layer, by a backward pass."""
    back = iter(reversed(directions))
    for step, memo in zip(reversed(steps), reversed(memos), strict=True):
        if isinstance(step, Affine):
            change = step.backward_tangent(change, memo, next(back))
        else:
            change = step.backward_tangent(change, memo)
    return change
