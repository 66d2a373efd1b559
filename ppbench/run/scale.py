"""The factor between a gradient and that of the mean cross-entropy of a batch: a sum, a learning rate, clipping.

The gradient of the last layer is s / B times A^T [Phi, 1], with A = p - y [B, C] and features Phi [B, D], which lie in
the row space of its weight's gradient: Phi = M R. The predictions p = softmax(Phi W^T + b) close the system: fewer
unknowns, M [B, B] and s, than equations where B < C (Phong et al. 2018 for one example; `feature_inversion`, s = 1).
The layers before are not used, and nothing is searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.special import softmax
from torch import Tensor

from ppbench.base.tree import Params

Floats = NDArray[np.float64]
MAX_EXAMPLES = 8
"""Most examples of a batch whose factor is fitted: unknowns grow with the square."""
CONSISTENT = 1e-11
"""Relative squared residual below which a factor explains the layer's gradient; rounding to float32 leaves 1e-14."""
CANDIDATES, RESTARTS, SPREAD = 16, 2, 0.3
"""Number of multisets of labels and of further starts of the features, and the relative noise of the starts."""
MULTISETS = 5000
"""Most multisets of labels that are ordered; beyond, each label must show in the bias's gradient."""
TINY, FAR, WORST = 1e-300, 500.0, 1e100
"""Least divisor; largest logarithm of a factor; largest residual."""
MAX_RESIDUALS = 40
"""Most residuals that are computed from one start."""
NEAR, ALIKE = 1e-3, 2e-6
"""Relative distance from 1 below which a factor is 1 (other small effects look like it); relative error of a fit."""


@dataclass(frozen=True)
class LastLayer:
    """The equations that the last layer's gradient gives for a batch with known labels; float64.

    target: [C, B + 1], dW R^T beside db: what s / B times A^T [M, 1] must equal; s has this `sign`. logits: [B, C],
    R W^T; bias: [C]. onehot: [B, C].
    """

    target: Floats
    logits: Floats
    bias: Floats
    onehot: Floats
    sign: float

    def starts(self) -> Iterator[Floats]:
        """Yield starting features M [B, B]: each example as if alone in its class, then with noise."""
        classes = self.onehot.argmax(1)
        plain = self.target[classes, :-1] / self.target[classes, -1:]
        draws = np.random.default_rng(0)
        yield plain
        for _ in range(RESTARTS):
            yield plain * (1 + SPREAD * draws.standard_normal(plain.shape))

    def errors(self, m: Floats) -> Floats:
        """Return A = p - y [B, C] of features M [B, B]."""
        return np.asarray(softmax(m @ self.logits + self.bias, axis=1) - self.onehot)

    def factor(self, m: Floats) -> float:
        """Return the factor, positive, that brings the bias's gradient under M nearest to the observed one."""
        mean = self.sign * self.errors(m).mean(0)
        return float(max(mean @ self.target[:, -1] / max(mean @ mean, TINY), TINY))

    def residual(self, m: Floats, factor: float) -> Floats:
        """Return the relative residuals [C * (B + 1)]."""
        wide = np.concatenate([m, np.ones((len(m), 1))], 1)
        simulated = self.sign * factor / len(m) * self.errors(m).T @ wide
        return np.asarray((simulated - self.target) / self._size).ravel()

    def jacobian(self, m: Floats, factor: float) -> Floats:
        """Return the derivatives of `residual` by M and by the factor's logarithm, [C * (B + 1), B * B + 1]."""
        p, wide = softmax(m @ self.logits + self.bias, axis=1), np.concatenate([m, np.ones((len(m), 1))], 1)
        slope = p[:, None] * (self.logits[None] - (p @ self.logits.T)[:, :, None])  # of p_ic by M_ij: [i, j, c]
        by_m = np.einsum("ijc,ik->ckij", slope, wide)
        by_m += np.einsum("ic,jk->ckij", p - self.onehot, np.eye(len(m), len(m) + 1))
        by_m *= self.sign * factor / len(m) / self._size
        by_factor = self.residual(m, factor) + self.target.ravel() / self._size
        return np.concatenate([by_m.reshape(self.target.size, -1), by_factor[:, None]], 1)

    @cached_property
    def _size(self) -> float:
        return max(float(np.linalg.norm(self.target)), TINY)

    def solve(self, m: Floats) -> tuple[float, float]:
        """Return the least squared residual near features M and any factor, and that factor."""
        begin = np.append(m.ravel(), math.log(self.factor(m)))

        def at(z: Floats) -> tuple[Floats, float]:
            return z[:-1].reshape(m.shape), math.exp(min(z[-1], FAR))

        if not np.isfinite(begin).all():
            return math.inf, 1.0
        ended = least_squares(
            lambda z: np.nan_to_num(self.residual(*at(z)), nan=WORST, posinf=WORST, neginf=-WORST),
            begin,
            jac=lambda z: np.nan_to_num(self.jacobian(*at(z))),
            method="lm",
            xtol=1e-15,
            ftol=1e-15,
            max_nfev=MAX_RESIDUALS,
        )
        return 2 * float(ended.cost), at(ended.x)[1]


def scale_of(gradient: Params, start: Params, batch: int, labels: Tensor | None) -> float | None:
    """Return s of a gradient that is s times that of the mean cross-entropy of `batch` examples.

    labels: the examples' one-hot labels [B, C] if they are known. s may be negative, for a change of weights. None: no
    factor explains the last layer (noise, weight decay). It is 1, without a fit, for more than `MAX_EXAMPLES` examples,
    for as many examples as classes or more, and if weight and bias of the last layer are not both trained. Without
    labels only those most like the bias's gradient are tried: with 8 examples and hardly more classes it may be None
    although a factor exists.
    """
    names = ("head.weight", "head.bias")
    if (
        any(name not in gradient for name in names)
        or not 1 <= batch <= MAX_EXAMPLES
        or batch >= len(gradient["head.bias"])
    ):
        return 1.0
    weight, bias = (start[name].detach().cpu().double().numpy() for name in names)
    by_weight, by_bias = (gradient[name].detach().cpu().double().numpy() for name in names)
    if weight.ndim != 2 or min(by_weight.shape) < batch or not by_bias.any():
        return 1.0
    rows = np.linalg.svd(by_weight, full_matrices=False)[2][:batch]
    target = np.concatenate([by_weight @ rows.T, by_bias[:, None]], 1)
    known = None if labels is None else labels.detach().cpu().double().numpy()
    for sign, onehot in _labelings(by_bias, batch, known, np.asarray(softmax(bias))):
        fitted = _fit(LastLayer(target, rows @ weight.T, bias, onehot, sign))
        if fitted is not None:
            return fitted
    return None


def _fit(system: LastLayer) -> float | None:
    """Return the factor with its sign, None if none explains the gradient."""
    with np.errstate(all="ignore"):  # where the bias's gradient is zero; a step that overflows is taken back
        for m in system.starts():
            size, factor = system.solve(m)
            if size <= CONSISTENT:
                return _rounded(system.sign * factor)
    return None


def _rounded(factor: float) -> float:
    """Return the factor, rounded to 1 or to four digits where the fit does not resolve the difference."""
    if abs(factor - 1) < NEAR:
        return 1.0
    short = float(f"{factor:.4g}")
    return short if abs(short / factor - 1) < ALIKE else factor


def _labelings(by_bias: Floats, batch: int, known: Floats | None, prior: Floats) -> Iterator[tuple[float, Floats]]:
    """Yield pairs of a factor's sign and possible one-hot labels [B, C] of the batch, the likeliest first.

    The bias's gradient is s (p - n / B), with p the mean prediction and n the examples of each class: times the
    factor's sign it is negative only in classes of the batch, though not in all of them if p is large. Counts are tried
    in the order in which a mean prediction near `prior` and any s explain it.
    """
    for sign in (1.0, -1.0):
        if known is not None:
            yield sign, known
            continue
        observed = sign * by_bias
        present = np.flatnonzero(observed < 0)
        free = batch - len(present)
        if not 0 <= free < batch:
            continue
        few = math.comb(len(by_bias) + free - 1, free) <= MULTISETS
        classes = range(len(by_bias)) if few else present.tolist()
        base = np.bincount(present, minlength=len(by_bias))
        more = combinations_with_replacement(classes, free)
        counts = [base + np.bincount(np.array(extra, dtype=np.int64), minlength=len(by_bias)) for extra in more]
        for count in sorted(counts, key=lambda own: _unlike(prior - own / batch, observed))[:CANDIDATES]:
            yield sign, np.eye(len(by_bias))[np.repeat(np.arange(len(by_bias)), count)]


def _unlike(expected: Floats, observed: Floats) -> float:
    """Return the least squared distance of any positive multiple of `expected` from `observed`."""
    factor = max(float(expected @ observed) / max(float(expected @ expected), TINY), 0.0)
    return float(((observed - factor * expected) ** 2).sum())
