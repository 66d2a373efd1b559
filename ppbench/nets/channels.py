"""Per-channel scales through a network, found by walking its graph (torch.fx), not by a table of model names.

A positively homogeneous network commutes with positive scales of its channels: multiply the rows of one layer by r,
divide the columns of the next by r, and the function is the same. `channels` finds which scales are free, which are
tied (both summands of a residual connection must have the same) and where each enters (PBPFL, Eq. 12-15, extended to
biases, residual additions and normalization layers).

Every channel of every activation carries the number of a scale variable; number 0 is the fixed scale 1 of the inputs.
Ties are unions of numbers, so that concatenation, flattening, padding and additions need no case of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppbench.base.tree import Params

Numbers = NDArray[np.int64]
Norms = Literal["refuse", "affine"]


@dataclass(frozen=True)
class Factor:
    """How scales multiply one parameter: entry (i, j, ...) by r[out_i] / r[inp_j].

    Attributes:
        shape: of the multiplied parameter; larger than the parameter where one shared bias serves many channels.
        axis: axis of `shape` along which `out` runs (0, or the channel axis of a free-standing parameter).
        out: numbers of the scales that multiply, [shape[axis]], or None.
        inp: numbers of the scales that divide, or None; [shape[1]], or [shape[axis]] for a `diagonal` layer.
        diagonal: whether the parameter is one factor a channel, so that `inp` runs along `axis` too.
    """

    shape: tuple[int, ...]
    axis: int = 0
    out: Numbers | None = None
    inp: Numbers | None = None
    diagonal: bool = False

    def multiplier(self, scales: Tensor) -> Tensor:
        """Return the multiplier [*shape] for scales [1 + count] with scales[0] = 1."""
        value = torch.ones((), dtype=scales.dtype, device=scales.device)
        if self.out is not None:
            value = value * _along(scales[torch.from_numpy(self.out)], self.axis, len(self.shape))
        if self.inp is not None:
            axis = self.axis if self.diagonal else 1
            value = value / _along(scales[torch.from_numpy(self.inp)], axis, len(self.shape))
        return value.expand(self.shape)  # a view: nothing writes to it


def _along(vector: Tensor, axis: int, dims: int) -> Tensor:
    return vector.view([-1 if d == axis else 1 for d in range(dims)])


@dataclass(frozen=True)
class Channels:
    """Where the scales of a network enter.

    Attributes:
        factors: by parameter, named as `Net` names it; the head's bias has none (it is scaled by 1).
        count: number of free scales; they are numbered 1 to count.
        features: [D] numbers at the head's input.
    """

    factors: dict[str, Factor]
    count: int
    features: Numbers

    def multipliers(self, scales: Tensor) -> Params:
        """Return the multiplier of every parameter for the free scales [count], all > 0."""
        full = torch.cat([torch.ones(1, dtype=scales.dtype, device=scales.device), scales])
        return {name: factor.multiplier(full) for name, factor in self.factors.items()}
