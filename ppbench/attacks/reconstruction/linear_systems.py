"""A layer's input from two linear systems: its known output, and its weights' gradient (Zhu and Blaschko, ICLR 2021).

With z = conv(u) + b at the positions of a convolution and delta = dL/dz, the known output gives rows of the forward
system, weighted by the activation's slope, and dW = sum over positions of delta times the patch of u. Each row counts
by its precision, and a wide prior decides what no row does: least squares is then the most probable input. Conjugate
gradients in float64 solve the normal equations, led by a rough inverse of their matrix: a factor in float32, or one of
the rows' covariance where these are few. `Solution` says what was determined, and how well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import scipy.linalg as sl
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from ppbench.attacks.reconstruction.stages import ConvolutionStage, IntPair, Places
from ppbench.metrics.intervals import Floats

PROBES = 8
"""Random vectors that estimate the mean variance and the condition of a solution."""
POWER_STEPS = 8
"""Products with the normal matrix that show its largest eigenvalue."""
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

    def slope(self, off: Floats, size: IntPair) -> Floats:
        """Return the precision times `off` [C, HW], differences from the middle of maps of a size (H, W)."""
        out = off / self.width**2
        if self.step is not None:
            maps, slopes = off.reshape(-1, *size), out.reshape(-1, *size)
            down, right = np.diff(maps, axis=1) / self.step**2, np.diff(maps, axis=2) / self.step**2
            slopes[:, 1:] += down
            slopes[:, :-1] -= down
            slopes[:, :, 1:] += right
            slopes[:, :, :-1] -= right
        return out

    def precision(self, stage_inputs: tuple[int, int, int]) -> Floats:
        """Return the precision [HW, HW] of one channel."""
        _, high, wide = stage_inputs
        return self.slope(np.eye(high * wide), (high, wide))


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


# -- Rough inverses of the normal matrix, and conjugate gradients that they lead --

SOLVED = 1e-6
"""Decrease of the objective, a sum of squares in units of their deviations, below which nothing is left to solve."""
STEPS, ROUGH_STEPS = 30, 10
"""Steps of conjugate gradients, at most, with an inverse that is as good as float64 has it, and with another."""
LARGE = 1024
"""Unknowns from which on the cheaper inverses are tried."""
FEW_ROWS = 0.5
"""Rows of the forward system, per unknown, up to which the inverse is that of their covariance."""


@dataclass(frozen=True)
class DenseInverse:
    """The inverse of scale times L L^T. factor: L [n, n] in the order of LAPACK, float32 or float64."""

    factor: NDArray[np.floating[Any]]
    scale: float

    @classmethod
    def of(cls, matrix: Floats, dtype: type[np.floating[Any]]) -> DenseInverse | None:
        """Return the inverse of a symmetric matrix, factored in a dtype; None if rounding makes it indefinite."""
        scale = float(np.diagonal(matrix).max())
        if not 0 < scale < np.inf:
            return None
        scaled = np.empty(matrix.shape, dtype)
        np.multiply(matrix, 1 / scale, out=scaled, casting="unsafe")
        factor, failed = torch.linalg.cholesky_ex(torch.from_numpy(scaled))
        return None if int(failed) else cls(np.asfortranarray(factor.numpy()), scale)

    def __call__(self, right: Floats) -> Floats:
        """Return the inverse times right sides [n, k]."""
        scaled = (right / self.scale).astype(self.factor.dtype)
        return np.asarray(sl.cho_solve((self.factor, True), scaled, check_finite=False), dtype=np.float64)

    def diagonal(self) -> Floats:
        """Return the diagonal [n]."""
        lower = torch.from_numpy(self.factor)
        root = torch.linalg.solve_triangular(lower, torch.eye(len(lower), dtype=lower.dtype), upper=False)
        return np.asarray(root.double().square().sum(0).numpy()) / self.scale


@dataclass(frozen=True)
class RowInverse:
    """The inverse where all channels share the gradient's matrix, by the covariance of the forward rows.

    In the basis [HW, HW] gradient and prior alone give independent numbers of variance 1. rows: [R, C * HW], the
    forward system in this basis; covariance: the inverse of 1 + rows rows^T.
    """

    basis: Floats
    rows: Floats
    covariance: DenseInverse

    @classmethod
    def of(cls, system: LayerSystem) -> RowInverse | None:
        """Return the inverse of a system's normal matrix; None if it is not finite."""
        gradient = torch.from_numpy((system.reach * system.seen[:, 0, :, None]).reshape(-1, system.reach.shape[2]))
        prior = torch.from_numpy(system.prior.precision(system.stage.inputs))
        if not bool(gradient.isfinite().all()):
            return None
        whitened = torch.linalg.solve_triangular(
            torch.linalg.cholesky(prior), torch.eye(len(prior), dtype=prior.dtype), upper=False
        ).T
        _, sizes, right = torch.linalg.svd(gradient @ whitened, full_matrices=len(gradient) < len(prior))
        spread = torch.ones(len(prior), dtype=prior.dtype)
        spread[: len(sizes)] += sizes**2
        basis = (whitened @ right.T / spread.sqrt()).numpy()
        seen = system.rows[system.used]
        rows = (seen.reshape(-1, len(basis)) @ basis).reshape(seen.shape)
        square = rows @ rows.T
        square[np.diag_indices(len(square))] += 1
        covariance = DenseInverse.of(square, np.float64)
        return None if covariance is None else cls(basis, rows, covariance)

    def __call__(self, right: Floats) -> Floats:
        """Return the inverse times right sides [n, k]."""
        shape = (-1, len(self.basis), right.shape[1])
        own: Floats = (self.basis.T @ right.reshape(shape)).reshape(right.shape)
        own -= self.rows.T @ self.covariance(self.rows @ own)
        return np.asarray((self.basis @ own.reshape(shape)).reshape(right.shape))

    def diagonal(self) -> Floats:
        """Return the diagonal [n]."""
        lower = torch.from_numpy(self.covariance.factor)
        known = torch.linalg.solve_triangular(lower, torch.from_numpy(self.rows), upper=False).numpy()
        shares = known.reshape(-1, len(self.basis)) @ self.basis.T
        known_variance = np.square(shares).reshape(self.rows.shape).sum(0) / self.covariance.scale
        own = np.square(self.basis).sum(1)
        whole = np.tile(own, len(known_variance) // len(own))
        return np.asarray(np.maximum(whole - known_variance, 0.0))


Inverse = DenseInverse | RowInverse
"""About the inverse of a normal matrix."""


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

    def solve(self, near: Solution | None = None) -> Solution:
        """Return the most probable input; LinAlgError if the systems are not finite.

        near: of almost the same systems, whose inverse is tried first.
        """
        best: Solution | None = None
        start = np.full(self._shape, self.prior.middle) if near is None else near.u
        tried = () if near is None else ((near.inverse, ROUGH_STEPS),)
        for inverse, steps in chain(tried, self._inverses()):
            u, left = self._descended(start, inverse, steps)
            if np.isfinite(left) and np.isfinite(u).all():
                best = Solution(self, u, inverse)
                if left <= SOLVED:
                    break
        if best is None:
            raise np.linalg.LinAlgError
        return best

    def _inverses(self) -> Iterator[tuple[Inverse, int]]:
        """Yield inverses of the normal matrix, with the steps that each may take: the cheapest first, the best last."""
        size = int(np.prod(self.stage.inputs))
        large, few = size >= LARGE, 0 < int(self.used.sum()) <= FEW_ROWS * size
        if large and few and bool((self.seen == self.seen[:, :1]).all()):
            by_rows = RowInverse.of(self)
            if by_rows is not None:
                yield by_rows, ROUGH_STEPS
        matrix = self.normal()
        rough = DenseInverse.of(matrix, np.float32) if large and not few else None
        if rough is not None:
            yield rough, ROUGH_STEPS
        inverse = DenseInverse.of(matrix, np.float64)
        if inverse is not None:
            yield inverse, STEPS

    def _descended(self, u: Floats, inverse: Inverse, steps: int) -> tuple[Floats, float]:
        """Return inputs [C, HW] after conjugate gradients from u on, and the decrease of the objective that is left."""
        back, left = -self.slope(u), np.inf
        ahead = step = inverse(back.reshape(-1, 1)).reshape(u.shape)
        for _ in range(steps):
            left, curvature = float((back * ahead).sum()), float((step * self.curved(step)).sum())
            if left <= SOLVED or not curvature > 0:
                break
            u = u + step * (left / curvature)
            before, back = back, -self.slope(u)
            ahead = inverse(back.reshape(-1, 1)).reshape(u.shape)
            step = ahead + step * (float(((back - before) * ahead).sum()) / left)
        return u, left

    @property
    def _shape(self) -> tuple[int, int]:
        channels, high, wide = self.stage.inputs
        return channels, high * wide

    @cached_property
    def rows(self) -> csr_array:
        """The weighted rows [O * T, C * HW] of the forward system; rows without a slope are empty."""
        stage, (outputs, channels, _) = self.stage, self.convolution.weight.shape
        places, tiles = stage.taps[:, stage.tiles], len(stage.tiles)  # [K, T, M]
        shape = (outputs, channels, *places.shape)
        values = np.einsum("ock,otm->ocktm", self.convolution.weight, self.slopes)
        row = (np.arange(outputs)[:, None] * tiles + np.arange(tiles))[:, None, None, :, None]
        column = np.arange(channels)[:, None, None, None] * self._shape[1] + places
        used = np.broadcast_to(places >= 0, shape) & (values != 0)
        at = np.broadcast_to(row, shape)[used], np.broadcast_to(column, shape)[used]
        return csr_array((values[used], at), shape=(outputs * tiles, channels * self._shape[1]))

    @property
    def used(self) -> NDArray[np.bool_]:
        """[O * T]: which rows have a slope."""
        return np.asarray(np.diff(self.rows.indptr) > 0)

    def slope(self, u: Floats) -> Floats:
        """Return half the objective's gradient [C, HW] at u."""
        rows, gap = self.residuals(u)
        return self._back(rows, gap) + self.prior.slope(u - self.prior.middle, self.stage.inputs[1:])

    def curved(self, step: Floats) -> Floats:
        """Return the normal matrix times a step [C, HW]."""
        gap = self._correlated(step) * self.seen
        return self._back(self.rows @ step.ravel(), gap) + self.prior.slope(step, self.stage.inputs[1:])

    def _correlated(self, u: Floats) -> Floats:
        """Return the weights' gradient [O, C, K] at u."""
        flat = u @ self.reach.reshape(-1, self._shape[1]).T
        return flat.reshape(len(u), len(self.cotangents), -1).swapaxes(0, 1)

    def _back(self, rows: Floats, gap: Floats) -> Floats:
        """Return the transpose of both systems times weighted residuals: [C, HW]."""
        by_channel = (gap * self.seen).swapaxes(0, 1).reshape(self._shape[0], -1)
        backward = by_channel @ self.reach.reshape(-1, self._shape[1])
        return np.asarray((self.rows.T @ rows).reshape(self._shape) + backward)

    def objective(self, u: Floats) -> float:
        """Return the weighted squared residuals at u, of the prior too."""
        rows, gap = self.residuals(u)
        off = u - self.prior.middle
        prior = (off * self.prior.slope(off, self.stage.inputs[1:])).sum()
        return float((rows**2).sum() + (gap**2).sum() + prior)

    def residuals(self, u: Floats) -> tuple[Floats, Floats]:
        """Return the weighted residuals at u, of the rows [O * T] and of the gradient [O, C, K]."""
        gap = (self._correlated(u) - self.gradient) * self.seen
        return self.rows @ u.ravel() - self.values.ravel(), gap

    def normal(self) -> Floats:
        """Return the normal matrix [n, n] of both systems and the prior."""
        channels, pixels = self._shape
        rows = self.rows.toarray() if channels * pixels <= LARGE else self.rows
        square = rows.T @ rows if isinstance(rows, np.ndarray) else (rows.T @ rows).toarray()
        matrix = square.reshape(channels, pixels, channels, pixels)
        precision = self.prior.precision(self.stage.inputs)
        for channel, square in enumerate(self._squares()):
            matrix[channel, :, channel, :] += square + precision
        return np.asarray(matrix.reshape(channels * pixels, channels * pixels))

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


@dataclass(frozen=True)
class Solution:
    """A layer's input u [C, HW] with what is known of it."""

    system: LayerSystem
    u: Floats
    inverse: Inverse

    @cached_property
    def forward(self) -> float:
        """The relative residual of the forward system."""
        return _relative(self._residuals[0], self.system.values)

    @cached_property
    def backward(self) -> float:
        """The relative residual of the gradient system."""
        return _relative(self._residuals[1], self.system.gradient * self.system.seen)

    @property
    def residual(self) -> float:
        """The larger relative residual."""
        return max(self.forward, self.backward)

    @property
    def determined(self) -> int:
        """How many numbers the systems determine."""
        certain = CERTAIN * self.system.prior.width**2
        return self.u.size if self._variances is None else int((self._variances < certain).sum())

    @property
    def deviation(self) -> float:
        """The expected error of a number."""
        left = sum(float((part**2).sum()) for part in self._residuals)
        equations = int((self.system.values != 0).sum() + (self.system.seen > 0).sum())
        excess = max(1.0, left / max(equations - self.u.size, 1))
        variance = self._mean_variance if self._variances is None else float(self._variances.mean())
        return float(np.sqrt(variance * excess))

    @cached_property
    def condition(self) -> float:
        """The condition number of both systems and the prior together, an estimate."""
        draws, solved = self._probes
        step = draws[:, 0].reshape(self.u.shape)
        for _ in range(POWER_STEPS):
            step = self.system.curved(step / np.linalg.norm(step))
        basis = np.linalg.qr(solved)[0]
        largest = np.linalg.norm(step) * np.linalg.norm(basis.T @ self.inverse(basis), 2)
        return float(np.clip(largest, 1.0, FINITE**2) ** 0.5)

    @cached_property
    def _residuals(self) -> tuple[Floats, Floats]:
        return self.system.residuals(self.u)

    @cached_property
    def _probes(self) -> tuple[Floats, Floats]:
        """Random signs [n, PROBES], and the inverse times these."""
        draws = np.sign(np.random.default_rng(0).standard_normal((self.u.size, PROBES)))
        return draws, self.inverse(draws)

    @property
    def _mean_variance(self) -> float:
        draws, solved = self._probes
        return float((draws * solved).sum() / draws.size)

    @cached_property
    def _variances(self) -> Floats | None:
        """The variance of each number; None where their mean shows that all are determined."""
        few = self._mean_variance <= CERTAIN / self.u.size * self.system.prior.width**2
        return None if few else self.inverse.diagonal()


def _relative(gap: Floats, whole: Floats) -> float:
    size = float(np.linalg.norm(whole))
    return float(np.linalg.norm(gap)) / size if size > 0 else 0.0
