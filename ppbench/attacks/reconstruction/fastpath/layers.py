"""The layers of a chain: activations, flattening and pooling, beside the affine ones (terms as in `affine`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppbench.attacks.reconstruction.fastpath.affine import Affine, Memo


@dataclass(frozen=True)
class Activation:
    """An elementwise function a(z): its value, and by the output a its slope and the change of its slope.

    about: its name.
    value: z -> a.  slope: a -> da/dz.  bend: (a, slope) -> d2a/dz2; None where it is zero everywhere.
    """

    about: str
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    bend: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, a: Tensor, memo: Memo) -> Tensor:
        """Return the output."""
        memo.output = self.value(a)
        memo.slope = self.slope(memo.output)
        return memo.output

    def backward(self, cotangent: Tensor, memo: Memo) -> Tensor:
        """Return the input's cotangent."""
        memo.cotangent = cotangent
        return cotangent * memo.slope

    def tangent(self, tangent: Tensor, memo: Memo) -> Tensor:
        """Return the output's tangent."""
        memo.tangent = tangent
        return tangent * memo.slope

    def backward_tangent(self, change: Tensor, memo: Memo) -> Tensor:
        """Return the tangent of the input's cotangent: change * a' + cotangent * a'' * tangent."""
        out = change * memo.slope
        if self.bend is None:
            return out
        return out + memo.cotangent * self.bend(memo.output, memo.slope) * memo.tangent


FAST_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Sigmoid: Activation("sigmoid", torch.sigmoid, lambda a: a - a * a, lambda a, slope: slope - 2 * a * slope),
    nn.Tanh: Activation("tanh", torch.tanh, lambda a: 1 - a * a, lambda a, slope: -2 * a * slope),
    nn.ReLU: Activation("relu", torch.relu, lambda a: (a > 0).to(a.dtype)),  # slope 0 at 0, as in autograd
}


def leaky_relu(leak: float) -> Activation:
    """Return max(z, 0) + leak * min(z, 0), with the slope `leak` at 0, as in autograd."""
    value = partial(F.leaky_relu, negative_slope=leak)
    return Activation(f"leaky {leak}", value, lambda a: (a > 0).to(a.dtype) * (1 - leak) + leak)


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


ChainStep = Affine | Activation | LinearStep
