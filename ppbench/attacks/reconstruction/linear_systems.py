"""A layer's input from two linear systems: its known output, and its weights' gradient (Zhu and Blaschko, ICLR 2021).

With z = conv(u) + b at the positions of a convolution and delta = dL/dz, the known output gives rows of the forward
system, weighted by the activation's slope, and dW = sum over positions of delta times the patch of u. Each row counts
by its precision, and a wide prior decides what no row does: least squares is then the most probable input. Normal
equations in float64 with iterative refinement; `Solution` says what was determined, and how well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.linalg.lapack import dpocon

from ppbench.attacks.reconstruction.stages import ConvolutionStage, Places
from ppbench.metrics.intervals import Floats

PROBES = 8
"""Random vectors that estimate the mean variance of a solution."""
REFINEMENTS = 3
"""Steps of iterative refinement."""
CERTAIN = 0.01
"""Share of the prior's variance up to which a number counts as determined."""
FINITE = 1e150
"""Largest condition number that is reported."""


@dataclass(frozen=True)
class Prior:
    """What is known of a layer's input beforehand: its middle, how far numbers lie from it, and from neighbors.

    step: typical difference of two neighbors, None if they are unrelated.
    """

    middle: float
    width: float
    step: float | None = None

    def precision(self, stage_inputs: tuple[int, int, int]) -> Floats:
        """Return the precision [HW, HW] of one channel."""
        _, high, wide = stage_inputs
        matrix = np.eye(high * wide) / self.width**2
        if self.step is not None:
            numbers = np.arange(high * wide).reshape(high, wide)
            for a, b in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
                first, second = a.ravel(), b.ravel()
                np.add.at(matrix, (first, first), self.step**-2)
                np.add.at(matrix, (second, second), self.step**-2)
                np.add.at(matrix, (first, second), -(self.step**-2))
                np.add.at(matrix, (second, first), -(self.step**-2))
        return matrix


@dataclass(frozen=True)
class LinearConvolution:
    """A convolution without its bias, and its transposes, by the places that its window sees.

    weight: [O, C, K]; taps: [K, L] of `ConvolutionStage`; inputs: shape [C, H, W].
    """

    weight: Floats
    taps: Places
    inputs: tuple[int, int, int]

    @cached_property
    def _flat(self) -> Floats:
        return self.weight.reshape(len(self.weight), -1)

    def patches(self, u: Floats) -> Floats:
        """Return what the window sees of u [C, HW]: [C, K, L]."""
        return np.concatenate([u, np.zeros((len(u), 1))], 1)[:, self.taps]

    def spread(self, patches: Floats) -> Floats:
        """Return the transpose of `patches`: [C, HW] for [C, K, L]."""
        out = np.zeros((len(patches), self.inputs[1] * self.inputs[2]))
        for k, row in enumerate(self.taps):
            seen = row >= 0
            out[:, row[seen]] += patches[:, k, seen]  # one entry of the kernel sees no place twice
        return out

    def forward(self, u: Floats) -> Floats:
        """Return the outputs [O, L] for inputs u [C, HW]."""
        patches = self.patches(u)
        return np.asarray(self._flat @ patches.reshape(-1, patches.shape[2]))

    def backward(self, cotangents: Floats) -> Floats:
        """Return the cotangents [C, HW] of the input for those of the output [O, L]."""
        return self.spread((self._flat.T @ cotangents).reshape(*self.weight.shape[1:], -1))

    def gradient(self, cotangents: Floats, u: Floats) -> Floats:
        """Return the weights' gradient [O, C, K] for cotangents [O, L] and inputs u [C, HW]."""
        patches = self.patches(u)
        return np.asarray(cotangents @ patches.reshape(-1, patches.shape[2]).T).reshape(self.weight.shape)

    def by_input(self, cotangents: Floats, residual: Floats) -> Floats:
        """Return the transpose of `gradient` by its input: [C, HW] for a residual [O, C, K]."""
        flat = residual.reshape(len(residual), -1).T @ cotangents
        return self.spread(flat.reshape(*self.weight.shape[1:], -1))


@dataclass(frozen=True)
class LayerSystem:
    """The two systems of one layer for its input u [C, HW].

    slopes: [O, T, M], weights of the M positions of tile T in its forward row: the activation's slope, times the share
    in the mean, times the root of the row's precision. values: [O, T], what the rows must equal. cotangents: delta
    [O, L]. gradient: [O, C, K]; seen: the roots of its entries' precisions, 0 where hidden.
    """

    stage: ConvolutionStage
    convolution: LinearConvolution
    slopes: Floats
    values: Floats
    cotangents: Floats
    gradient: Floats
    seen: Floats
    prior: Prior

    def solve(self) -> Solution:
        """Return the most probable input; LinAlgError if the systems are not finite."""
        normal = self.normal()
        size = float(np.abs(normal).sum(0).max())
        if not np.isfinite(size):
            raise np.linalg.LinAlgError
        factor, failed = torch.linalg.cholesky_ex(torch.from_numpy(normal))
        if int(failed):
            raise np.linalg.LinAlgError

        def inverse(b: Floats) -> Floats:
            return np.asarray(torch.cholesky_solve(torch.from_numpy(b.reshape(len(factor), -1)), factor).numpy())

        u = np.full(self._shape, self.prior.middle)
        for _ in range(1 + REFINEMENTS):
            u = u - inverse(self.slope(u)).reshape(self._shape)
        rcond, _ = dpocon(factor.numpy().T, size, uplo="U")
        condition = min(float(rcond) ** -0.5 if rcond > 0 else FINITE, FINITE)
        return self._solution(u, condition, inverse)

    @property
    def _shape(self) -> tuple[int, int]:
        channels, high, wide = self.stage.inputs
        return channels, high * wide

    @cached_property
    def _precision(self) -> Floats:
        return self.prior.precision(self.stage.inputs)

    def _rows(self, u: Floats) -> Floats:
        """Return the weighted forward rows [O, T] at u."""
        z = self.convolution.forward(u)
        return np.asarray((self.slopes * z[:, self.stage.tiles]).sum(2))

    def slope(self, u: Floats) -> Floats:
        """Return half the objective's gradient [C, HW] at u."""
        rows = self._rows(u) - self.values
        back = np.zeros_like(self.cotangents)
        for m, member in enumerate(self.stage.tiles.T):
            back[:, member] += rows * self.slopes[:, :, m]
        forward = self.convolution.backward(back)
        gap = (self.convolution.gradient(self.cotangents, u) - self.gradient) * self.seen**2
        prior = (u - self.prior.middle) @ self._precision
        return np.asarray(forward + self.convolution.by_input(self.cotangents, gap) + prior)

    def objective(self, u: Floats) -> float:
        """Return the weighted squared residuals at u, of the prior too."""
        rows, gap = self._rows(u) - self.values, self.convolution.gradient(self.cotangents, u) - self.gradient
        off = u - self.prior.middle
        return float((rows**2).sum() + ((gap * self.seen) ** 2).sum() + (off * (off @ self._precision)).sum())

    def normal(self) -> Floats:
        """Return the normal matrix [n, n] of both systems and the prior."""
        channels, pixels = self._shape
        matrix = np.zeros((channels, pixels, channels, pixels))
        taps, weight = self.stage.taps, self.convolution.weight
        for tile, members in enumerate(self.stage.tiles):
            seen = taps[:, members]
            places, inverse = np.unique(seen, return_inverse=True)
            rows = np.zeros((len(weight), channels, len(places)))
            inverse = inverse.reshape(seen.shape)
            for m in range(len(members)):
                rows[:, :, inverse[:, m]] += self.slopes[:, tile, m, None, None] * weight
            inside = places >= 0
            flat = rows[:, :, inside].reshape(len(weight), -1)
            at = (np.arange(channels)[:, None] * pixels + places[inside]).ravel()
            matrix.reshape(channels * pixels, -1)[np.ix_(at, at)] += flat.T @ flat
        for channel, square in enumerate(self._squares()):
            matrix[channel, :, channel, :] += square + self._precision
        return matrix.reshape(channels * pixels, channels * pixels)

    @cached_property
    def reach(self) -> Floats:
        """[O, K, HW]: the cotangent of the position at which an entry of the kernel sees a place, 0 if at none."""
        rows = np.zeros((len(self.cotangents), len(self.stage.taps), self._shape[1]))
        for k, row in enumerate(self.stage.taps):
            rows[:, k, row[row >= 0]] = self.cotangents[:, row >= 0]
        return rows

    def _squares(self) -> list[Floats]:
        """Return the gradient system's normal matrix [HW, HW] of each channel."""
        channels, pixels = self._shape
        flat, squares = self.reach.reshape(-1, pixels), list[Floats]()
        for channel in range(channels):
            if channel and np.array_equal(self.seen[:, channel], self.seen[:, channel - 1]):
                squares.append(squares[-1])
            else:
                weighted = flat * self.seen[:, channel].reshape(-1, 1)
                squares.append(weighted.T @ weighted)
        return squares

    def _solution(self, u: Floats, condition: float, inverse: Callable[[Floats], Floats]) -> Solution:
        rows, gap = self._rows(u) - self.values, self.convolution.gradient(self.cotangents, u) - self.gradient
        gap = gap * self.seen
        left = float((rows**2).sum() + (gap**2).sum())
        equations = int((self.values != 0).sum() + (self.seen > 0).sum())
        excess = max(1.0, left / max(equations - u.size, 1))
        draws = np.sign(np.random.default_rng(0).standard_normal((u.size, PROBES)))
        variance = float((draws * inverse(draws)).sum() / draws.size)
        determined = u.size
        if variance > CERTAIN / u.size * self.prior.width**2:
            own = np.diagonal(inverse(np.eye(u.size)))
            determined = int((own < CERTAIN * self.prior.width**2).sum())
            variance = float(own.mean())
        return Solution(
            u=u,
            condition=condition,
            determined=determined,
            forward=_relative(rows, self.values),
            backward=_relative(gap, self.gradient * self.seen),
            deviation=(variance * excess) ** 0.5,
        )


@dataclass(frozen=True)
class Solution:
    """A layer's input u [C, HW] with what is known of it.

    condition: of both systems and the prior together, an estimate. determined: how many numbers the systems determine.
    forward, backward: relative residuals of the two systems. deviation: expected error of a number.
    """

    u: Floats
    condition: float
    determined: int
    forward: float
    backward: float
    deviation: float

    @property
    def residual(self) -> float:
        """The larger relative residual."""
        return max(self.forward, self.backward)


def _relative(gap: Floats, whole: Floats) -> float:
    size = float(np.linalg.norm(whole))
    return float(np.linalg.norm(gap)) / size if size > 0 else 0.0
