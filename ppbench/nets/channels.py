"""Per-channel scales of a network, determined by walking its graph (torch.fx), not by a table of model names.

A positively homogeneous network commutes with positive scales of its channels: multiply the rows of one layer by r,
divide the columns of the next by r, and the function is the same (PBPFL, Eq. 12-15, extended). Every channel of every
activation has the number of a scale; 0 is the inputs' fixed scale 1; tied scales are unions of numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from ppbench.base.errors import UsageError
from ppbench.base.tree import Params

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
        one = torch.ones((), dtype=scales.dtype, device=scales.device)
        out, inp = self._places
        value = one if out is None else _along(scales[out], self.axis, len(self.shape))
        if inp is not None:
            value = value / _along(scales[inp], self.axis if self.diagonal else 1, len(self.shape))
        return value.expand(self.shape)  # a view: nothing writes to it

    @cached_property
    def _places(self) -> tuple[Tensor | None, Tensor | None]:
        """`out` and `inp` as index tensors, made once: multipliers are needed in every round."""
        return _index(self.out), _index(self.inp)


def _index(numbers: Numbers | None) -> Tensor | None:
    return None if numbers is None else torch.from_numpy(numbers)


def _along(vector: Tensor, axis: int, dims: int) -> Tensor:
    return vector.view([-1 if d == axis else 1 for d in range(dims)])


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
