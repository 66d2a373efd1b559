"""An image by Gauss and Newton's method on a whole gradient at once, from the answer of linear systems on.

Layer by layer each input is computed from its own equations alone. What noise, or a null space, leaves open in one
layer, the equations of others may tell. Here all of them are linearized in the image: the answer is the most probable
image under the noise's law and a wide prior (as in Balunovic et al., ICLR 2022, whose search is by first order).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.linalg as sl
import torch
from torch import Tensor
from torch.func import jvp, vmap

from ppbench.attacks.reconstruction.linear_systems import Prior
from ppbench.attacks.reconstruction.stage_inputs import ROUNDING
from ppbench.base.tree import Params
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Noise, Plan
from ppbench.metrics.intervals import Floats

STEPS, CHUNK = 30, 64
"""Steps, at most, and columns of the Jacobian that are computed at once."""
DAMPING, EASED, RAISED, HOPELESS = 1e-3, 0.1, 10.0, 1e6
"""Damping at first, its factors after a better and a worse step, and the one at which the search ends."""
LEAST_PROGRESS = 1e-4
"""Relative decrease of the objective below which the search ends."""
OVERSHOOT = 0.01
"""Typical distance by which a number of the answer leaves the data range, of that range."""
MOST_REFINED = 1024
"""Numbers of an image up to which the whole gradient is solved at once."""
STEP, SMOOTH_PIXELS = 0.1, 16
"""Typical difference of neighboring pixels, of the data range, in images of at least so many pixels a side."""
SPREAD = 0.5
"""Typical distance of a pixel from the middle of the data range, in units of that range."""
NOISE_EXPLAINED = 3.0
"""Mean squared residual, in units of the noise's variance, up to which an image explains the observation."""


def image_prior(plan: Plan) -> Prior:
    """Return what is known of an image beforehand: a wide law around the middle of the data range."""
    low, high = plan.data_range
    smooth = min(plan.spec.shape[-2:]) >= SMOOTH_PIXELS
    return Prior((low + high) / 2, SPREAD * (high - low), STEP * (high - low) if smooth else None)


@dataclass(frozen=True)
class Refined:
    """An image [1, *shape] float64, whether it explains the observation up to its noise, and evaluations spent."""

    image: Tensor
    explains: bool
    evaluations: int


@dataclass(frozen=True)
class GradientProblem:
    """One observed gradient of one image with label y [1, C], its law of noise, and what is known of the image.

    prior: of its numbers; data_range: which it hardly leaves; precision: of each entry of the gradient, in place of
    those that the law and `Evidence.weight` give; steps: at most; scaled: whether the gradient has an unknown factor.
    """

    evidence: Evidence
    y: Tensor
    noise: Noise | None
    prior: Prior
    data_range: tuple[float, float]
    precision: Params | None = None
    steps: int = STEPS
    scaled: bool = False

    @torch.no_grad()
    def refined(self, image: Tensor) -> Refined:
        """Return the most probable image near `image` [1, *shape]; RuntimeError if the network has no Jacobian."""
        x, damping, spent = image.detach().double().to(self.evidence.device), DAMPING, 1
        gap = self._gap(x)
        size, start = self._objective(x, gap), float(gap @ gap)
        for _ in range(self.steps):
            matrix, slope = self._linearized(x, gap)
            spent, before = spent + x.numel(), size
            while damping <= HOPELESS:
                trial = x - torch.from_numpy(_solved(matrix, slope, damping)).to(x).view_as(x)
                other = self._gap(trial)
                new, spent = self._objective(trial, other), spent + 1
                if new < size:
                    x, gap, size, damping = trial, other, new, damping * EASED
                    break
                damping *= RAISED
            if not size < (1 - LEAST_PROGRESS) * before:
                break
        end = float(gap @ gap)
        return Refined(x.cpu(), end <= min(start, NOISE_EXPLAINED * int((self._roots > 0).sum())), spent)

    def _gap(self, x: Tensor) -> Tensor:
        """Return the residuals [P] in units of their deviations."""
        simulated = self.evidence.simulate(x[None], self.y[None].to(x))
        flat = torch.cat([simulated[name].flatten() for name in self.evidence.observed])
        gap, seen = flat * self._roots, self._observed * self._roots
        factor = (gap @ seen) / (seen @ seen) if self.scaled else 1.0
        return gap - factor * seen

    @cached_property
    def _observed(self) -> Tensor:
        return torch.cat([value.double().flatten() for value in self.evidence.observed.values()])

    @cached_property
    def _roots(self) -> Tensor:
        """The roots [P] of the entries' precisions."""
        if self.precision is not None:
            return torch.cat([self.precision[name].double().sqrt().flatten() for name in self.evidence.observed])
        roots, weight = [], self.evidence.weight
        for name, value in self.evidence.observed.items():
            noise = 0.0 if self.noise is None else self.noise.of(name)
            error = float(np.hypot(noise, ROUNDING * float(value.double().square().mean().sqrt())))
            seen = torch.ones_like(value) if weight is None else weight[name].expand_as(value)
            roots.append(seen.double().sqrt().flatten() / error if error > 0 else torch.zeros_like(value).flatten())
        return torch.cat(roots)

    def _objective(self, x: Tensor, gap: Tensor) -> float:
        off, outside = self._off(x), self._outside(x)
        return float(gap @ gap) + float((off * self._pull(off)).sum()) + float((outside**2).sum())

    def _linearized(self, x: Tensor, gap: Tensor) -> tuple[Floats, Floats]:
        """Return the normal matrix [n, n] and half the objective's gradient [n] at x."""

        def derivative(direction: Tensor) -> Tensor:
            along: Tensor = jvp(self._gap, (x,), (direction,))[1]
            return along

        axes = torch.eye(x.numel(), dtype=x.dtype, device=x.device).view(-1, *x.shape)
        jacobian, outside = vmap(derivative, chunk_size=CHUNK)(axes).T, self._outside(x)
        matrix = (jacobian.T @ jacobian).cpu().numpy()
        matrix += np.kron(np.eye(x.shape[1]), self.prior.precision((1, x.shape[2], x.shape[3])))
        matrix[np.diag_indices(len(matrix))] += (outside != 0) * self._bound**2
        slope = (jacobian.T @ gap).cpu().numpy() + self._pull(self._off(x)).ravel() + outside * self._bound
        return np.asarray(matrix), np.asarray(slope)

    def _off(self, x: Tensor) -> Floats:
        """Return the differences [C, H, W] from the prior's middle."""
        return np.asarray(x[0].cpu().numpy() - self.prior.middle)

    def _pull(self, off: Floats) -> Floats:
        """Return the prior's precision times differences [C, H, W]."""
        size = off.shape[1], off.shape[2]
        return self.prior.slope(off.reshape(len(off), -1), size).reshape(off.shape)

    @property
    def _bound(self) -> float:
        low, high = self.data_range
        return 1 / (OVERSHOOT * (high - low))

    def _outside(self, x: Tensor) -> Floats:
        """Return how far numbers [n] leave the data range, in units of a typical distance."""
        return np.asarray((x - x.clamp(*self.data_range)).flatten().cpu().numpy() * self._bound)


def _solved(matrix: Floats, slope: Floats, damping: float) -> Floats:
    """Return the step with a damped normal matrix; not finite where rounding makes that indefinite."""
    try:
        factor = sl.cho_factor(matrix + damping * np.diag(matrix.diagonal()), lower=True, check_finite=False)
    except np.linalg.LinAlgError:
        return np.full_like(slope, np.inf)
    return np.asarray(sl.cho_solve(factor, slope, check_finite=False))
