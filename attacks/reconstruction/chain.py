"""The gradient-matching loss and its gradient without a double-backward graph, for plain chains of layers.

D(x, y) = sum_l w_l (g_l(x, y) - g*_l)^2 has the gradient of the scalar <g(x, y), r> with r = 2 w (g - g*) held fixed.
That scalar is the derivative of the training loss along r in weight space, so one forward, one backward and the two
passes of the R-operator (Pearlmutter 1994) give it: about four passes, for many victims in one set of matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppbench.attacks.reconstruction.layers import (
    Activation,
    Affine,
    AveragePool,
    Convolution,
    Dense,
    Direction,
    Flatten,
    Memo,
    Outer,
    ReLU,
    Sigmoid,
    Step,
    Tanh,
    kept,
)
from ppbench.federation.plan import Plan
from ppbench.federation.tree import Params

ACTIVATIONS: dict[type[nn.Module], type[Activation]] = {nn.Sigmoid: Sigmoid, nn.Tanh: Tanh, nn.ReLU: ReLU}
RANK_ONE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Relative distance up to which an observed dense gradient counts as one outer product: rounding, not noise."""


@dataclass(frozen=True)
class Output:
    """The last cotangent and its derivatives, for one loss (mean over a batch of B, soft targets).

    cotangent: (logits, y) -> dL/dlogits.  change: (logits, y, tangent) -> its tangent.
    y_gradient: (logits, tangent) -> d(tangent of L)/dy. All [V, B, C].
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


def compile_chain(plan: Plan, params: Params, dtype: torch.dtype) -> list[Step] | None:
    """Return the network's layers with `params` in `dtype`, or None where it has a layer that has no fast form.

    Known are Conv2d (groups 1, dilation 1, zero padding), Linear, Sigmoid, Tanh, ReLU, AvgPool2d and Flatten in an
    `nn.Sequential`, cross-entropy and squared loss.
    """
    features = plan.net.module.features
    if not isinstance(features, nn.Sequential) or plan.loss not in OUTPUTS:
        return None
    steps: list[Step] = []
    shape, known = plan.spec.shape, {name: value.detach().to(dtype) for name, value in params.items()}
    for key, module in [*((f"features.{k}", m) for k, m in features.named_children()), ("head", plan.net.module.head)]:
        first = not any(isinstance(step, Affine) for step in steps)
        step = _step(key, module, known, first, shape)
        if step is None or (first and isinstance(step, Activation)):
            return None
        steps.append(step)
        shape = tuple(module.to("meta")(torch.empty(1, *shape, device="meta")).shape[1:])
    return steps


def _step(key: str, module: nn.Module, params: Params, first: bool, shape: tuple[int, ...]) -> Step | None:
    if type(module) in ACTIVATIONS:
        return ACTIVATIONS[type(module)]()
    weight, bias = params.get(f"{key}.weight"), params.get(f"{key}.bias")
    if type(module) is nn.Linear and weight is not None and len(shape) == 1:
        return Dense(key, weight, bias, first)
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return Flatten(shape)
    if len(shape) != 3:
        return None
    size = (shape[1], shape[2])
    if type(module) is nn.AvgPool2d and not module.ceil_mode and module.count_include_pad:
        return AveragePool(module, size) if module.divisor_override is None else None
    if not isinstance(module, nn.Conv2d) or weight is None or isinstance(module.padding, str):
        return None
    if (module.groups, module.dilation, module.padding_mode) == (1, (1, 1), "zeros"):
        return Convolution(module, key, weight, bias, first, size)
    return None


@dataclass(frozen=True)
class Target:
    """What one layer's gradient is compared with, for V victims.

    rows: [V, O, K] observed weight gradient, or None where it is `left @ right` up to rounding.
    left, right: [V, O, 1] and [V, 1, K], or None.
    bias: [V, O] or None.  weight, bias_weight: entries' precisions in the same shapes, or None for 1.
    """

    rows: Tensor | None
    left: Tensor | None
    right: Tensor | None
    bias: Tensor | None
    weight: Tensor | None
    bias_weight: Tensor | None

    def at(self, index: Tensor) -> Target:
        """Return the targets of the victims `index` [S]."""
        parts = (self.rows, self.left, self.right, self.bias, self.weight, self.bias_weight)
        return Target(*(None if part is None else part[index] for part in parts))


def target(layer: Affine, observed: Sequence[Params], weights: Sequence[Params] | None, batch: int) -> Target:
    """Return the observed gradients of `layer`, stacked, in the dtype of its weight.

    A dense layer's gradient on one example is an outer product, cotangent x input; compared as such (an identity, no
    approximation) it costs O + K instead of O K.
    """
    dtype = layer.weight.rows.dtype

    def stack(parts: Sequence[Params], name: str) -> Tensor:
        return torch.stack([part[name] for part in parts]).detach().to(dtype)

    rows = layer.pack(stack(observed, f"{layer.name}.weight"))
    bias = None if layer.bias is None else stack(observed, f"{layer.name}.bias")
    if weights is not None:
        weight = layer.pack(stack(weights, f"{layer.name}.weight"))
        return Target(rows, None, None, bias, weight, None if bias is None else stack(weights, f"{layer.name}.bias"))
    if batch == 1 and isinstance(layer, Dense) and bias is not None:
        left = bias[:, :, None]
        right = left.transpose(1, 2) @ rows / (bias * bias).sum(1).clamp(min=1e-30)[:, None, None]
        if bool(((rows - left @ right).norm(dim=(1, 2)) <= RANK_ONE[dtype] * rows.norm(dim=(1, 2))).all()):
            return Target(None, left, right, bias, None, None)
    return Target(rows, None, None, bias, None, None)


def residual(layer: Affine, memo: Memo, goal: Target) -> tuple[Direction, Tensor]:
    """Return r = 2 w (g - g*) of one layer and its part of D [V], after the backward pass."""
    loss: Tensor | float = 0.0
    r_bias = None
    if goal.bias is not None:
        gap = layer.bias_gradient(memo) - goal.bias
        r_bias, loss = _weighted(gap, goal.bias_weight)
    if goal.rows is not None:
        rows, part = _weighted(layer.weight_gradient(memo) - goal.rows, goal.weight)
        return Direction(layer.direction(rows), r_bias), loss + part
    cotangent, inputs = kept(memo.cotangent).transpose(1, 2), kept(memo.inputs)
    # cot in - left right = (cot - left) in + left (in - right): no cancellation near the solution
    left = torch.cat([cotangent - kept(goal.left), kept(goal.left)], 2)
    right = torch.cat([inputs, inputs - kept(goal.right)], 1)
    part = ((left.transpose(1, 2) @ left) * (right @ right.transpose(1, 2))).sum((1, 2))
    return Direction(Outer(2 * left, right), r_bias), loss + part


def _weighted(gap: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return 2 w gap and sum w gap^2 [V]."""
    r = 2 * (gap if weight is None else gap * weight)
    return r, 0.5 * (r * gap).flatten(1).sum(1)


class ChainObjective:
    """D and its gradient for V victims that share the network's weights.

    Args:
        steps: what `compile_chain` returned.
        loss: name of the training loss.
        observed: the victims' observed gradients, V of them.
        weights: precisions of their entries, V of them, or None.
        batch: examples B of each victim.
    """

    def __init__(
        self, steps: list[Step], loss: str, observed: Sequence[Params], weights: Sequence[Params] | None, batch: int
    ) -> None:
        self.steps, self.output = steps, OUTPUTS[loss]
        self.layers = [step for step in steps if isinstance(step, Affine)]
        self.targets = [target(layer, observed, weights, batch) for layer in self.layers]
        self.chosen: tuple[Tensor, list[Target]] | None = None

    def select(self, index: Tensor) -> list[Target]:
        """Return the targets of the victims `index` [S]; kept, because an optimizer asks for the same ones again."""
        if self.chosen is None or not torch.equal(self.chosen[0], index):
            self.chosen = (index.clone(), [goal.at(index) for goal in self.targets])
        return self.chosen[1]

    def __call__(self, x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return D [S], dD/dx [S, B, *shape] and dD/dy [S, B, C].

        Args:
            x: guesses [S, B, *shape].
            y: soft targets [S, B, C].
            index: [S] int64, which victim each row is matched with.
        """
        memos = [Memo(len(x)) for _ in self.steps]
        a = x if x.dim() == 3 else x.flatten(0, 1)
        for step, memo in zip(self.steps, memos, strict=True):
            a = step.forward(a, memo)
        cotangent: Tensor | None = self.output.cotangent(a, y)
        for step, memo in zip(reversed(self.steps), reversed(memos), strict=True):
            if cotangent is not None:
                cotangent = step.backward(cotangent, memo)
        total, directions = torch.zeros(len(x), dtype=x.dtype), []
        pairs = [(s, m) for s, m in zip(self.steps, memos, strict=True) if isinstance(s, Affine)]
        for (layer, memo), goal in zip(pairs, self.select(index), strict=True):
            direction, part = residual(layer, memo, goal)
            directions.append(direction)
            total = total + part
        x_gradient, y_gradient = self._derivative(a, y, memos, directions)
        return total, x_gradient.reshape(x.shape), y_gradient

    def _derivative(
        self, logits: Tensor, y: Tensor, memos: list[Memo], directions: list[Direction]
    ) -> tuple[Tensor, Tensor]:
        """Return the derivative of <g, r> by the input and by y: the R-operator's two passes."""
        tangent = forward_tangent(self.steps, memos, directions)
        change = self.output.change(logits, y, tangent)
        change = backward_tangent(self.steps, memos, directions, change)
        return change, self.output.y_gradient(logits, tangent)


def forward_tangent(steps: Sequence[Step], memos: Sequence[Memo], directions: Sequence[Direction]) -> Tensor:
    """Return the derivative by the cotangent after the last layer: the pass that runs forward through the layers."""
    tangent: Tensor | None = None
    along = iter(directions)
    for step, memo in zip(steps, memos, strict=True):
        if isinstance(step, Affine):
            tangent = step.tangent(tangent, memo, next(along))
        elif tangent is not None:
            tangent = step.tangent(tangent, memo) if isinstance(step, Activation) else step.forward(tangent, memo)
    return kept(tangent)


def backward_tangent(
    steps: Sequence[Step], memos: Sequence[Memo], directions: Sequence[Direction], change: Tensor
) -> Tensor:
    """Return the derivative by the input, from a change fed in after the last layer: the pass that runs backward."""
    back = iter(reversed(directions))
    for step, memo in zip(reversed(steps), reversed(memos), strict=True):
        if isinstance(step, Affine):
            change = step.backward_tangent(change, memo, next(back))
        elif isinstance(step, Activation):
            change = step.backward_tangent(change, memo)
        else:
            change = step.backward(change, memo)
    return change
