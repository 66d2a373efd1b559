"""The layers of a chain: activations, flattening and pooling, beside the affine ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppbench.attacks.reconstruction.fastpath.soft_kinks import kink_scale, soft_relu
from ppbench.base.tree import node

# -- Affine layers as four passes: forward, backward, and the same two differentiated along a weight direction --
# V victims share the weights, each with a batch of B examples, N = V * B; a direction has one value per victim.
# Images are [N, C, H, W], flat features [V, B, D]. `tangent`: derivative of an activation along the direction;
# `cotangent`: of the loss by an activation (the R-operator of Pearlmutter, Neural Computation 6, 1994).


@node
class Full:
    """A dense weight or direction: rows [V, O, K] (V = 1: the network's), columns [V, K, O] as `fold` needs them."""

    rows: Tensor
    columns: Tensor


@node
class Outer:
    """A direction of low rank, left @ right, never made dense. left: [V, O, R]; right: [V, R, K]."""

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Direction:
    """A direction in the weight space of one affine layer; bias: [V, O], or None if the layer has none."""

    weight: Full | Outer
    bias: Tensor | None


@dataclass
class Memo:
    """One layer's values between passes: set by forward, except cotangent (of the output) and tangent (of the input).

    cut: the cotangent as `drop` takes it.
    """

    victims: int
    inputs: Tensor = field(init=False)
    output: Tensor = field(init=False)
    slope: Tensor = field(init=False)
    bend: Tensor = field(init=False)
    places: Tensor = field(init=False)
    cotangent: Tensor = field(init=False)
    cut: Tensor = field(init=False)
    tangent: Tensor = field(init=False)


class Affine:
    """z = W a + b on flat features [V, B, D]: a linear layer, or a `Convolution` on patches.

    name: prefix of the parameters, e.g. "features.0".  first: whether no layer before it has parameters, so that the
    cotangent of its input is not needed, and its input's tangent is zero.
    """

    def __init__(self, name: str, weight: Tensor, bias: Tensor | None, first: bool) -> None:
        self.name, self.first = name, first
        self.weight, self.bias = self.direction(self.pack(weight[None])), bias

    @property
    def about(self) -> str:
        """What the layer does, apart from its weights and their shapes."""
        return f"affine, first: {self.first}"

    def with_parameters(self, weight: Full, bias: Tensor | None) -> Affine:
        """Return a copy with other parameters."""
        copied = copy.copy(self)
        copied.weight, copied.bias = weight, bias
        return copied

    def pack(self, weight: Tensor) -> Tensor:
        """Return weights [V, *shape] as rows [V, O, K]."""
        return weight

    def direction(self, rows: Tensor) -> Full:
        """Return rows [V, O, K] with their columns."""
        return Full(rows, rows.transpose(1, 2))

    def lift(self, a: Tensor) -> Tensor:
        """Return the input arranged for the products."""
        return a

    def apply(self, weight: Full | Outer, lifted: Tensor) -> Tensor:
        """Return W a."""
        if isinstance(weight, Outer):
            return lifted @ weight.right.transpose(1, 2) @ weight.left.transpose(1, 2)
        return lifted @ (weight.columns if len(weight.rows) > 1 else weight.columns[0])

    def cut(self, cotangent: Tensor) -> Tensor:
        """Return the output's cotangent arranged for the products of `drop`."""
        return cotangent

    def drop(self, weight: Full | Outer, cut: Tensor) -> Tensor:
        """Return W^T cotangent, not yet folded."""
        if isinstance(weight, Outer):
            return cut @ weight.left @ weight.right
        return cut @ (weight.rows if len(weight.rows) > 1 else weight.rows[0])

    def fold(self, dropped: Tensor) -> Tensor:
        """Return the result of `drop`, or a sum of results, in the shape of the input."""
        return dropped

    def add(self, z: Tensor, bias: Tensor) -> Tensor:
        """Return z plus a bias [V, O] or [1, O]."""
        return z + bias[:, None]

    def weight_gradient(self, memo: Memo) -> Tensor:
        """Return the weight's gradient of each victim, as rows [V, O, K]."""
        return memo.cotangent.transpose(1, 2) @ memo.inputs

    def bias_gradient(self, memo: Memo) -> Tensor:
        """Return the bias's gradient of each victim [V, O]."""
        return memo.cotangent.sum(1)

    def forward(self, a: Tensor, memo: Memo) -> Tensor:
        """Return z."""
        memo.inputs = self.lift(a)
        z = self.apply(self.weight, memo.inputs)
        return z if self.bias is None else self.add(z, self.bias[None])

    def backward(self, cotangent: Tensor, memo: Memo) -> Tensor | None:
        """Return the input's cotangent; None for the first layer."""
        memo.cotangent, memo.cut = cotangent, self.cut(cotangent)
        return None if self.first else self.fold(self.drop(self.weight, memo.cut))

    def tangent(self, tangent: Tensor | None, memo: Memo, r: Direction) -> Tensor:
        """Return the tangent of z along `r` for the input's tangent (None: zero)."""
        out = self.apply(r.weight, memo.inputs)
        if tangent is not None:
            out = out + self.apply(self.weight, self.lift(tangent))
        return out if r.bias is None else self.add(out, r.bias)

    def backward_tangent(self, change: Tensor, memo: Memo, r: Direction) -> Tensor:
        """Return the tangent of the input's cotangent for `change`, that of the output's cotangent."""
        return self.fold(self.drop(self.weight, self.cut(change)) + self.drop(r.weight, memo.cut))


def summed(each: Tensor, victims: int) -> Tensor:
    """Return values of each example [N, ...] summed over each victim, [V, ...]."""
    return each if len(each) == victims else each.unflatten(0, (victims, -1)).sum(1)


def per_example(per_victim: Tensor, examples: int) -> Tensor:
    """Return [V, ...] or [1, ...] repeated for each example, [N, ...]."""
    victims = len(per_victim)
    if victims == examples:
        return per_victim
    if victims == 1:
        return per_victim.expand(examples, *per_victim.shape[1:])
    return per_victim.repeat_interleave(examples // victims, 0)


class ElementwiseStep:
    """What elementwise functions share once `forward` has kept their slopes."""

    def backward(self, cotangent: Tensor, memo: Memo) -> Tensor:
        """Return the input's cotangent."""
        memo.cotangent = cotangent
        return cotangent * memo.slope

    def tangent(self, tangent: Tensor, memo: Memo) -> Tensor:
        """Return the output's tangent."""
        memo.tangent = tangent
        return tangent * memo.slope


@dataclass(frozen=True)
class Activation(ElementwiseStep):
    """An elementwise function a(z): its value, and by the output a its slope and the change of its slope.

    about: its name.
    value: z -> a.  slope: a -> da/dz.  bend: (a, slope) -> d2a/dz2; None where it is zero everywhere.
    leak: the slope below the kink at 0; None without one.
    """

    about: str
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    bend: Callable[[Tensor, Tensor], Tensor] | None = None
    leak: float | None = None

    def forward(self, a: Tensor, memo: Memo) -> Tensor:
        """Return the output."""
        memo.output = self.value(a)
        memo.slope = self.slope(memo.output)
        return memo.output

    def backward_tangent(self, change: Tensor, memo: Memo) -> Tensor:
        """Return the tangent of the input's cotangent: change * a' + cotangent * a'' * tangent."""
        out = change * memo.slope
        if self.bend is None:
            return out
        return out + memo.cotangent * self.bend(memo.output, memo.slope) * memo.tangent


FAST_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Sigmoid: Activation("sigmoid", torch.sigmoid, lambda a: a - a * a, lambda a, slope: slope - 2 * a * slope),
    nn.Tanh: Activation("tanh", torch.tanh, lambda a: 1 - a * a, lambda a, slope: -2 * a * slope),
    nn.ReLU: Activation("relu", torch.relu, lambda a: (a > 0).to(a.dtype), leak=0.0),  # slope 0 at 0, as in autograd
}


def leaky_relu(leak: float) -> Activation:
    """Return max(z, 0) + leak * min(z, 0), with the slope `leak` at 0, as in autograd."""
    value = partial(F.leaky_relu, negative_slope=leak)
    return Activation(f"leaky {leak}", value, lambda a: (a > 0).to(a.dtype) * (1 - leak) + leak, leak=leak)


@dataclass(frozen=True)
class SoftKink(ElementwiseStep):
    """A smoothed ReLU, or leaky ReLU, of a `width` (no axes): see `soft_kinks`."""

    leak: float
    width: Tensor

    @property
    def about(self) -> str:
        """Its name."""
        return f"soft {self.leak}"

    def forward(self, a: Tensor, memo: Memo) -> Tensor:
        """Return the output; each victim's inputs have a scale of their own."""
        whole = a.reshape(memo.victims, -1)
        scale = per_example(kink_scale(whole, self.width, (1,)), len(a)).view(-1, *[1] * (a.dim() - 1))
        share = torch.sigmoid(a / scale)
        memo.slope = self.leak + (1 - self.leak) * share
        memo.bend = (1 - self.leak) * share * (1 - share) / scale
        memo.output = soft_relu(a, scale, self.leak)
        return memo.output

    def backward_tangent(self, change: Tensor, memo: Memo) -> Tensor:
        """Return the tangent of the input's cotangent, see `Activation.backward_tangent`."""
        return change * memo.slope + memo.cotangent * memo.bend * memo.tangent


@dataclass(frozen=True)
class LinearStep:
    """A step without parameters whose map is linear, or locally linear: tangents pass as inputs do.

    about: its name.
    forward: (input, memo) -> output.  backward: (output's cotangent, memo) -> input's.
    along: (input's tangent, memo) -> output's, if `forward` itself is not linear.
    """

    about: str
    forward: Callable[[Tensor, Memo], Tensor]
    backward: Callable[[Tensor, Memo], Tensor]
    along: Callable[[Tensor, Memo], Tensor] | None = None

    def tangent(self, tangent: Tensor, memo: Memo) -> Tensor:
        """Return the output's tangent."""
        return (self.along or self.forward)(tangent, memo)

    def backward_tangent(self, change: Tensor, memo: Memo) -> Tensor:
        """Return the tangent of the input's cotangent."""
        return self.backward(change, memo)


def flatten(shape: tuple[int, ...]) -> LinearStep:
    """Return the step from images [N, C, H, W] of a shape to features [V, B, D]; features stay as they are."""
    if len(shape) == 1:
        return LinearStep("flat", lambda a, memo: a, lambda cotangent, memo: cotangent)
    return LinearStep(
        f"flatten {shape}",
        lambda a, memo: a.reshape(memo.victims, -1, a[0].numel()),
        lambda cotangent, memo: cotangent.reshape(-1, *shape),
    )


def average_pool(module: nn.AvgPool2d, size: tuple[int, int]) -> LinearStep:
    """Return the means over windows of images of a size, zero padding counted; tiles are summed faster."""
    kernel, stride, padding = map(_pair, (module.kernel_size, module.stride, module.padding))
    (kh, kw), area, about = kernel, kernel[0] * kernel[1], f"{module} of {size}"
    if size[0] % kh == 0 and size[1] % kw == 0 and kernel == stride and padding == (0, 0):
        return LinearStep(about, lambda a, _: _tiles(a, kh, kw), lambda cotangent, _: _shared(cotangent / area, kh, kw))

    def backward(cotangent: Tensor, memo: Memo) -> Tensor:
        share = (cotangent.flatten(2) / area).repeat_interleave(area, 1)
        return F.fold(share, size, kernel, padding=padding, stride=stride)

    return LinearStep(about, lambda a, _: F.avg_pool2d(a, kernel, stride, padding), backward)


def _tiles(a: Tensor, kh: int, kw: int) -> Tensor:
    """Return the means over tiles [N, C, H / kh, W / kw] of images [N, C, H, W]."""
    rows = a[..., ::kh, :]
    for i in range(1, kh):
        rows = rows + a[..., i::kh, :]
    total = rows[..., ::kw]
    for i in range(1, kw):
        total = total + rows[..., i::kw]
    return total / (kh * kw)


def _shared(share: Tensor, kh: int, kw: int) -> Tensor:
    """Return the shares [N, C, H, W] repeated over their tiles, [N, C, H kh, W kw]."""
    n, c, h, w = share.shape
    return share.view(n, c, h, 1, w, 1).expand(n, c, h, kh, w, kw).reshape(n, c, h * kh, w * kw)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def max_pool(module: nn.MaxPool2d, size: tuple[int, int]) -> LinearStep:
    """Return the maximum of each window of images of a size; of equal ones, the one that torch takes."""

    def forward(a: Tensor, memo: Memo) -> Tensor:
        out, memo.places = F.max_pool2d(a, module.kernel_size, module.stride, module.padding, return_indices=True)
        return out

    def backward(cotangent: Tensor, memo: Memo) -> Tensor:
        out = cotangent.new_zeros(*cotangent.shape[:2], size[0] * size[1])
        out.scatter_add_(2, memo.places.flatten(2), cotangent.flatten(2))
        return out.view(*cotangent.shape[:2], *size)

    def along(tangent: Tensor, memo: Memo) -> Tensor:
        return tangent.flatten(2).gather(2, memo.places.flatten(2)).view(memo.places.shape)

    return LinearStep(f"{module} of {size}", forward, backward, along)


ChainStep = Affine | Activation | SoftKink | LinearStep
