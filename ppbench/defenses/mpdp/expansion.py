"""MP-DP's expanded network: its transitional layers, where their scales enter, and the law of each scale.

Yang et al., arXiv 2412.11737, Eq. 12-14. In PBPFL a weight's entry (i, j) is multiplied by r_i / r_j, and noise times a
quotient is no Gaussian. A transitional layer (one factor per channel, 1 in the true network) after every activation
begins a new scale 1/s, so that the multiplier becomes the product r_i s_j, whose law can be chosen. A shortcut without
weights needs one too, because both summands must have one scale. Laws (Theorem 3): if X_1..X_m have the law DN*(m) and
Y has DN(sigma, 1), uniform on (-sqrt(2) sigma, sqrt(2) sigma), the product of all is N(0, sigma^2). Scales have the law
|DN*(m)|, m = 1 or 2: |DN*(1)| is chi_3 / sqrt(2), and so is a product of two |DN*(2)|. Draws are float64, on the CPU.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from ppbench.base.errors import UsageError
from ppbench.base.secret_draws import SecretDraws
from ppbench.base.tree import Params
from ppbench.nets.channels import (
    FIXED_SCALE,
    NORM_LAYERS,
    TRANSITIONAL,
    Channels,
    Factor,
    LayerRefused,
    check_head,
    naming_refusals,
    refusal,
    traced_channels,
    traced_features,
)
from ppbench.nets.net import Classifier, HeldSpec, Net, NetSpec, build

# -- The transform of a network's graph (torch.fx) that inserts MP-DP's transitional layers; see `expansion.py` --

AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d)
SCALED_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU)
ACTIVATION_FUNCTIONS: set[Any] = {F.relu, torch.relu, F.leaky_relu}
ADDITIONS: set[Any] = {operator.add, operator.iadd, torch.add}


def transformed(net: Net, ahead_of_head: bool) -> tuple[Net, dict[str, tuple[int, ...]]]:
    """Return `net` with transitional layers, and their shapes by parameter."""
    surgery = _Surgery(traced_features(net))
    for node in list(surgery.module.graph.nodes):
        surgery.visit(node)
    for node in list(surgery.module.graph.nodes):
        if _is_addition(node):
            surgery.bridge(node)
        if node.op == "output" and ahead_of_head and node.args[0] in surgery.scaled:
            surgery.ahead(node.args[0], node)
    surgery.module.graph.lint()
    surgery.module.recompile()
    made = Net(net.spec, Classifier(surgery.module, net.module.head))
    return made, {f"features.{name}": shape for name, shape in surgery.shapes.items()}


class _Surgery:
    """Inserts multiplications by free-standing parameters into a graph."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.scaled: set[fx.Node] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}

    def visit(self, node: fx.Node) -> None:
        """Record whether a node's channels are scaled, and insert a transitional layer after a scaled activation."""
        inputs = set(node.all_input_nodes)
        if not (self.scaled & inputs or self._affine(node)):
            return
        self.scaled.add(node)
        if not self._activation(node):
            return
        with self.module.graph.inserting_after(node):
            factor = self._parameter(node)
        with self.module.graph.inserting_after(factor):
            made = self.module.graph.call_function(operator.mul, (node, factor))
        node.replace_all_uses_with(made, lambda user: user is not made)
        self._like(made, node)

    def bridge(self, addition: fx.Node) -> None:
        """Insert a transitional layer at the start of every shortcut that ends in `addition`."""
        for operand in list(addition.all_input_nodes):
            start, reader = operand, addition
            while len(start.users) == 1 and len(start.all_input_nodes) == 1 and not self._affine(start):
                start, reader = start.all_input_nodes[0], start
            if start in self.scaled and not self._branch(operand):
                self.ahead(start, reader)

    def ahead(self, value: fx.Node, reader: fx.Node) -> None:
        """Insert a transitional layer between `value` and one node that reads it."""
        with self.module.graph.inserting_before(reader):
            made = self.module.graph.call_function(operator.mul, (value, self._parameter(value)))
        reader.replace_input_with(value, made)
        self._like(made, value)

    def _branch(self, node: fx.Node) -> bool:
        """Return whether a layer with weights lies between `node` and the last fork before it."""
        if len(node.users) != 1:
            return False
        return self._affine(node) or any(self._branch(before) for before in node.all_input_nodes)

    def _parameter(self, node: fx.Node) -> fx.Node:
        shape = node.meta["tensor_meta"].shape
        name, size = f"{TRANSITIONAL}{len(self.shapes)}", (shape[1], *[1] * (len(shape) - 2))
        self.module.register_parameter(name, nn.Parameter(torch.empty(size, device="meta")))
        self.shapes[name] = size
        return self.module.graph.get_attr(name)

    def _like(self, made: fx.Node, node: fx.Node) -> None:
        made.meta["tensor_meta"] = node.meta["tensor_meta"]
        self.scaled.add(made)

    def _layer(self, node: fx.Node) -> Any:
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _affine(self, node: fx.Node) -> bool:
        return isinstance(self._layer(node), AFFINE)

    def _activation(self, node: fx.Node) -> bool:
        if node.op == "call_function":
            return node.target in ACTIVATION_FUNCTIONS
        return isinstance(self._layer(node), SCALED_ACTIVATIONS) or (node.op == "call_method" and node.target == "relu")


def _is_addition(node: fx.Node) -> bool:
    targets: dict[str, set[Any]] = {"call_function": ADDITIONS, "call_method": {"add"}}
    return node.target in targets.get(node.op, ()) and len(node.all_input_nodes) == 2


SECOND_MOMENT = 3 / 2  # of R, of law |DN*(1)|

TERMS = 30
# Mean and variance of -ln |DN*(1)|: -psi(3/2) / 2 and psi'(3/2) / 4.
_MEAN = -1 + (np.euler_gamma + 2 * math.log(2)) / 2
_VARIANCE = math.pi**2 / 8 - 1


def scale_alone(shape: tuple[int, ...], secret: SecretDraws) -> Tensor:
    """Return draws of |DN*(1)| (Eq. [13]), of scales that are alone in a weight's multiplier."""
    return (secret.normal((3, *shape), torch.float64).square().sum(0) / 2).sqrt()


def scale_of_two(shape: tuple[int, ...], secret: SecretDraws, terms: int = TERMS) -> Tensor:
    """Return draws of |DN*(2)| by its series (Theorem 3), with one Gaussian for the terms after the first `terms`.

    The Gaussian has their exact mean and variance; without it the product's variance is low (0.98 sigma^2 at 30 terms).
    """
    log, mean, variance = torch.zeros(shape, dtype=torch.float64), _MEAN, _VARIANCE
    for term in range(1, terms + 1):
        center = math.log1p(1 / term) / 2
        gamma = secret.normal(shape, torch.float64).square() / 2  # of shape 1/2
        log = log - gamma / (2 * term + 1) + center / 2
        mean -= 1 / (2 * term + 1) - center
        variance -= 1 / (2 * term + 1) ** 2
    rest = secret.normal(shape, torch.float64)
    return torch.exp(log - mean / 2 - math.sqrt(variance / 2) * rest)


def uniform_noise(sigma: float, shape: tuple[int, ...], secret: SecretDraws) -> Tensor:
    """Return draws of DN(sigma, 1), clients' noise (Eqs. [16], [19]): never 0, strictly within +-sqrt(2) sigma."""
    return math.sqrt(2) * sigma * (2 * secret.uniform(shape) - 1)  # exact: odd multiples of 2^-52


Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Laws:
    """The law of every free scale of an expanded network, by two flags [count].

    inverse: it is 1/s (after a transitional layer), not r (after a weight). single: it is alone in a weight's
    multiplier, of law |DN*(1)|; else two of law |DN*(2)| are multiplied.
    """

    inverse: Flags
    single: Flags

    def draw(self, secret: SecretDraws, floor: float = 0.0) -> Tensor:
        """Return scales [count], float64, > 0: 1/s for `inverse` ones, else r; r and s are at least `floor`."""
        count = len(self.single)
        one, two = scale_alone((count,), secret), scale_of_two((count,), secret)
        value = torch.where(torch.from_numpy(self.single), one, two).clamp(min=floor)
        return torch.where(torch.from_numpy(self.inverse), 1 / value, value)


@dataclass(frozen=True)
class Expansion:
    """A network with transitional layers, by name and shape [C], [C, 1] or [C, 1, 1], and the original's spec."""

    net: Net
    channels: Channels
    laws: Laws
    transitional: dict[str, tuple[int, ...]]

    def full(self, params: Params) -> Params:
        """Return the expanded network's true weights: `params`, and ones in the transitional layers."""
        like = params["head.weight"]
        ones = {n: torch.ones(s, dtype=like.dtype, device=like.device) for n, s in self.transitional.items()}
        return {**params, **ones}

    def split(self, params: Params) -> tuple[Params, Params]:
        """Return (weights of the original network, transitional layers)."""
        original = {n: value for n, value in params.items() if n not in self.transitional}
        return original, {n: params[n] for n in self.transitional}


@lru_cache
def expanded(spec: NetSpec) -> Expansion:
    """Return the expansion of the network of `spec`, made once per process (UsageError: see `expand`)."""
    return expand(build(spec))


def expand(net: Net) -> Expansion:
    """Return the expansion of `net`.

    A transitional layer follows every activation, and every shortcut starts with one. The head gets its own if its
    inputs also feed other layers (a dense net's last block), because its s has another law than theirs. UsageError: a
    layer does not commute with scales, or recovered noise would not be Gaussian.
    """
    check_head(net)
    with naming_refusals(net):
        refuse_norms(net)
        for ahead_of_head in (False, True):
            made, shapes = transformed(net, ahead_of_head)
            channels = traced_channels(made)
            refuse_biases(net, channels)
            if not _head_shares_scales(channels):
                break
        return Expansion(made, channels, _laws(channels), shapes)


@lru_cache
def unexpanded(spec: NetSpec) -> Expansion:
    """Return the network of `spec` without transitional layers and without laws of its scales (UsageError)."""
    net = build(spec)
    check_head(net)
    with naming_refusals(net):
        refuse_norms(net)
        channels = traced_channels(net)
        refuse_biases(net, channels)
        if not channels.count:
            raise _unlawful("head.weight", "reads the network's input", "a hidden layer before it")
    none = np.zeros(channels.count, dtype=bool)
    return Expansion(net, channels, Laws(none, none), {})


def refuse_norms(net: Net) -> None:
    """Refuse a normalization layer, by name (UsageError)."""
    for name, layer in net.module.features.named_modules():
        if isinstance(layer, NORM_LAYERS):
            reason = f"({type(layer).__name__}) cancels the scale of its input or mixes channels"
            raise refusal(f"features.{name}", reason, "a network without norms")


def refuse_biases(net: Net, channels: Channels) -> None:
    """Refuse a bias or a multiplier, by name (UsageError): with at most one scale, recovered noise is not Gaussian."""
    alone = ["head.bias"] if net.head_bias else []
    alone += [n for n, f in channels.factors.items() if f.inp is None and not f.diagonal]
    if alone:
        ours = "--set model.bias=false (mlp, cnn, densenet) or model.head_bias=false (resnets)"
        right = "nn.Linear(..., bias=False)" if isinstance(net.spec, HeldSpec) else ours
        raise UsageError(
            f"Model {net.spec.model!r} has the parameter {net.own_name(alone[0])!r}, whose noise would not be Gaussian "
            f"after recovery; use a network without biases, as {right}."
        )


def _weights(channels: Channels) -> dict[str, Factor]:
    return {n: f for n, f in channels.factors.items() if not f.diagonal}


def _head_shares_scales(channels: Channels) -> bool:
    """Return whether a scale at the head's input also divides another layer's weight."""
    others = [
        f.inp[f.inp != FIXED_SCALE] for n, f in _weights(channels).items() if n != "head.weight" and f.inp is not None
    ]
    return bool(others) and bool(np.isin(channels.features, np.concatenate(others)).any())


def _laws(channels: Channels) -> Laws:
    """Return the law of every scale (Eq. 13); UsageError: an entry's multiplier has no such law."""
    weights = _weights(channels)
    is_r, single, double = (np.zeros(channels.count + 1, dtype=bool) for _ in range(3))
    for factor in weights.values():
        if factor.out is not None:
            is_r[factor.out] = True
    for name, factor in weights.items():
        assert factor.inp is not None  # biases have been refused
        raw = factor.inp == FIXED_SCALE
        if is_r[factor.inp].any():
            raise _unlawful(name, "reads another layer's output without an activation between", "a ReLU between them")
        if raw.any() and not raw.all():
            raise _unlawful(name, "reads the network's input beside other activations", "a layer on the input first")
        if factor.out is None and raw.all():
            raise _unlawful(name, "reads the network's input", "a hidden layer before it")
        alone = raw.all() or factor.out is None
        for numbers in (factor.inp, factor.out):
            if numbers is not None:
                (single if alone else double)[numbers] = True
    single[FIXED_SCALE] = double[FIXED_SCALE] = False
    if (single & double).any():
        conflicting = np.flatnonzero(single & double)
        name = next(n for n, f in weights.items() if f.out is not None and np.isin(f.out, conflicting).any())
        raise _unlawful(
            name, "adds its output to that of a layer with other inputs", "an activation before the addition"
        )
    return Laws(~is_r[1:], single[1:])


def _unlawful(name: str, reason: str, instead: str) -> LayerRefused:
    return LayerRefused(name, f"{reason}, so its recovered noise would not be Gaussian; use {instead}.")


def fold(expansion: Expansion, params: Params) -> Params:
    """Return original-network weights equivalent to `params` in the expanded one: transitional layers hide nothing.

    No secret is needed: scales c with c_out = c_inp / T (PBPFL's gauge) make every transitional layer T equal to 1. The
    rest is PBPFL's perturbation; column j of a mask on the head has the known factor 1 / c_j.
    """
    steps: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for name in expansion.transitional:
        factor = expansion.channels.factors[name]
        assert factor.out is not None and factor.inp is not None  # so are diagonal factors made
        for a, b, value in zip(factor.inp.tolist(), factor.out.tolist(), params[name].flatten().tolist(), strict=True):
            steps[a].append((b, 1 / value))
            steps[b].append((a, value))
    gauge: dict[int, float] = {}
    for root in range(expansion.channels.count + 1):
        waiting = [] if root in gauge else [(root, 1.0)]
        while waiting:
            number, value = waiting.pop()
            if number not in gauge:
                gauge[number] = value
                waiting += [(other, value * ratio) for other, ratio in steps[number]]
    like = params["head.weight"]
    scales = torch.tensor([gauge[i + 1] for i in range(expansion.channels.count)], dtype=torch.float64)
    multiplier = expansion.channels.multipliers(scales.to(like.device))
    original, _ = expansion.split(params)
    return {n: value * multiplier[n].to(value.dtype) for n, value in original.items()}
