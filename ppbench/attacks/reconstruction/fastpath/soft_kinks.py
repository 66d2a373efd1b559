"""Rounded kinks: ReLUs are smoothed while an image is searched, less and less, and are exact in the end.

The gradient of a network with ReLUs depends on which units are active, and changes abruptly where one is switched. A
search by slopes does not see that switching a unit would help. With rounded kinks it does: a ReLU becomes a softplus
whose width is a share of the root mean square of its inputs, so one number suits all layers and networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

RELUS = frozenset({F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_})
"""What is smoothed, with `LEAKY` and `CLIPPED`, however a network calls it; kinks of max pools stay."""
LEAKY, CLIPPED = frozenset({F.leaky_relu}), frozenset({F.relu6, F.hardtanh})
SMOOTHED_FUNCTIONS = RELUS | LEAKY | CLIPPED
SMALLEST = 1e-12
"""Smallest width, where all inputs of a layer are 0."""


def soft_relu(z: Tensor, scale: Tensor | float, leak: float = 0.0) -> Tensor:
    """Return leak * z + (1 - leak) * scale * log(1 + exp(z / scale)), max(z, leak * z) in the limit of scale 0."""
    soft: Tensor = F.softplus(z / scale) * scale
    return soft if leak == 0 else leak * z + (1 - leak) * soft


def kink_scale(z: Tensor, width: Tensor | float, dim: tuple[int, ...] | None = None) -> Tensor:
    """Return `width` times the root mean square of a layer's inputs z, over `dim` (kept) or all; no slope passes it."""
    square = z.detach().square()
    mean = square.mean() if dim is None else square.mean(dim, keepdim=True)
    return (width * mean.sqrt()).clamp(min=SMALLEST)


class SoftKinks(TorchFunctionMode):
    """Within it, ReLUs are smoothed by a `width`, leaky and clipped ones too, be they modules, functions or methods."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.width = width

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what `func` does, or the smoothed ReLU."""
        named = dict(kwargs or {})
        if func not in SMOOTHED_FUNCTIONS:
            return func(*args, **named)
        z = args[0] if args else named["input"]
        scale = kink_scale(z, self.width)
        if func in CLIPPED:
            low, high = named.get("min_val", 0.0), named.get("max_val", 6.0)
            return low + soft_relu(z - low, scale) - soft_relu(z - high, scale)
        return soft_relu(z, scale, named.get("negative_slope", 0.01) if func in LEAKY else 0.0)
