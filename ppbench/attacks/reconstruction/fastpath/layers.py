"""The layers of a chain: activations, flattening and pooling, beside the affine ones (terms as in `passes`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppbench.attacks.reconstruction.fastpath.affine import Affine
from ppbench.attacks.reconstruction.fastpath.passes import Memo


@dataclass(frozen=True)
class Activation:
    """An elementwise function a(z): its value, and by the output a its slope and the change of its slope.

    value: z -> a.  slope: a -> da/dz.  bend: (a, slope) -> d2a/dz2; None where it is zero everywhere.
    """

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


ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Sigmoid: Activation(torch.sigmoid, lambda a: a - a * a, lambda a, slope: slope - 2 * a * slope),
    nn.Tanh: Activation(torch.tanh, lambda a: 1 - a * a, lambda a, slope: -2 * a * slope),
    nn.ReLU: Activation(torch.relu, lambda a: (a > 0).to(a.dtype)),  # slope 0 at 0, as autograd has it
}


def leaky_relu(leak: float) -> Activation:
    """Return max(z, 0) + leak * min(z, 0), with the slope `leak` at 0, as autograd has it."""
    return Activation(partial(F.leaky_relu, negative_slope=leak), lambda a: (a > 0).to(a.dtype) * (1 - leak) + leak)


class Linear:
    """A step without parameters whose map is linear, or is so near any input: tangents pass as inputs do."""

    def forward(self, a: Tensor, memo: Memo) -> Tensor:
        """Return the output."""
        raise NotImplementedError

    def backward(self, cotangent: Tensor, memo: Memo) -> Tensor:
        """Return the input's cotangent."""
        raise NotImplementedError

    def tangent(self, tangent: Tensor, memo: Memo) -> Tensor:
        """Return the output's tangent."""
        return self.forward(tangent, memo)

    def backward_tangent(self, change: Tensor, memo: Memo) -> Tensor:
        """Return the tangent of the input's cotangent."""
        return self.backward(change, memo)


class Flatten(Linear):
    """Images [N, C, H, W] to features [V, B, D]; features stay as they are. shape: of one input."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def forward(self, a: Tensor, memo: Memo) -> Tensor:
        """Return [V, B, D]."""
        return a if len(self.shape) == 1 else a.reshape(memo.victims, -1, a[0].numel())

    def backward(self, cotangent: Tensor, memo: Memo) -> Tensor:
        """Return the cotangent in the shape of the input."""
        return cotangent if len(self.shape) == 1 else cotangent.reshape(-1, *self.shape)


class AveragePool(Linear):
    """Means over windows; zero padding counts. Windows that tile the input need no sliding, which is much faster."""

    def __init__(self, module: nn.AvgPool2d, size: tuple[int, int]) -> None:
        self.kernel, self.stride, self.padding = map(_pair, (module.kernel_size, module.stride, module.padding))
        self.size, self.area = size, self.kernel[0] * self.kernel[1]
        fits = size[0] % self.kernel[0] == 0 and size[1] % self.kernel[1] == 0
        self.tiles = fits and self.kernel == self.stride and self.padding == (0, 0)

    def forward(self, a: Tensor, memo: Memo) -> Tensor:
        """Return the means [N, C, H', W']."""
        if not self.tiles:
            return F.avg_pool2d(a, self.kernel, self.stride, self.padding)
        (kh, kw), rows = self.kernel, a[..., :: self.kernel[0], :]
        for i in range(1, kh):
            rows = rows + a[..., i::kh, :]
        total = rows[..., ::kw]
        for i in range(1, kw):
            total = total + rows[..., i::kw]
        return total / self.area

    def backward(self, cotangent: Tensor, memo: Memo) -> Tensor:
        """Return each mean's cotangent shared out over its window: [N, C, H, W]."""
        if self.tiles:
            (n, c, h, w), (kh, kw) = cotangent.shape, self.kernel
            share = (cotangent / self.area).view(n, c, h, 1, w, 1)
            return share.expand(n, c, h, kh, w, kw).reshape(n, c, h * kh, w * kw)
        share = (cotangent.flatten(2) / self.area).repeat_interleave(self.area, 1)
        return F.fold(share, self.size, self.kernel, padding=self.padding, stride=self.stride)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


class MaxPool(Linear):
    """The largest of each window; where several are, the one that torch takes."""

    def __init__(self, module: nn.MaxPool2d, size: tuple[int, int]) -> None:
        self.kernel, self.stride, self.padding, self.size = module.kernel_size, module.stride, module.padding, size

    def forward(self, a: Tensor, memo: Memo) -> Tensor:
        """Return the maxima [N, C, H', W']."""
        out, memo.places = F.max_pool2d(a, self.kernel, self.stride, self.padding, return_indices=True)
        return out

    def backward(self, cotangent: Tensor, memo: Memo) -> Tensor:
        """Return each maximum's cotangent at its place: [N, C, H, W]."""
        out = cotangent.new_zeros(*cotangent.shape[:2], self.size[0] * self.size[1])
        out.scatter_add_(2, memo.places.flatten(2), cotangent.flatten(2))
        return out.view(*cotangent.shape[:2], *self.size)

    def tangent(self, tangent: Tensor, memo: Memo) -> Tensor:
        """Return the tangents at the maxima's places."""
        return tangent.flatten(2).gather(2, memo.places.flatten(2)).view(memo.places.shape)


Step = Affine | Activation | Linear
