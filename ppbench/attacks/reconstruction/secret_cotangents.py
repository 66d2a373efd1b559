"""A layer's input and its cotangents together, where part of the loss is secret: Levenberg and Marquardt's method.

The weights' gradient is linear in the input for known cotangents, and in the cotangents for a known input. Solving for
one after the other approaches the solution slowly where units are saturated, so both are corrected at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.linalg as sl

from ppbench.attacks.reconstruction.linear_systems import Convolution, LayerSystem
from ppbench.attacks.reconstruction.stages import Floats

STEPS = 100
"""Corrections, at most."""
DAMPING, EASED, RAISED, HOPELESS = 1e-4, 0.2, 10.0, 1e8
"""Damping at first, its factors after a better and a worse step, and the one at which the search ends."""
PROGRESS = 1e-9
"""Relative decrease of the objective below which the search ends."""
LARGEST = 2**26
"""Most products of an unknown of the input and a cotangent: half a gigabyte."""


def cotangents_of(convolution: Convolution, u: Floats, gradient: Floats, seen: Floats, sums: Floats | None) -> Floats:
    """Return the cotangents [O, L] that give a weights' gradient [O, C, K] and a bias's `sums` [O] at inputs u.

    By least squares. seen: [O, C, K], 0 where the gradient is hidden.
    """
    patches = convolution.patches(u).reshape(-1, convolution.taps.shape[1])
    rows, right, visible = patches, gradient.reshape(len(gradient), -1), (seen > 0).reshape(len(gradient), -1)
    if sums is not None:
        rows, right = np.concatenate([rows, np.ones((1, rows.shape[1]))]), np.concatenate([right, sums[:, None]], 1)
        visible = np.concatenate([visible, np.ones((len(gradient), 1), dtype=bool)], 1)
    if visible.all():
        return np.asarray(np.linalg.lstsq(rows, right.T, rcond=None)[0].T)
    parts = [np.linalg.lstsq(rows[on], one[on], rcond=None)[0] for one, on in zip(right, visible, strict=True)]
    return np.stack(parts)


@dataclass(frozen=True)
class JointSystem:
    """A layer's systems with its cotangents as unknowns too; `system` holds the start of both.

    sums: [O], the bias's gradient, which the cotangents sum to; None if it is hidden. rate: the root of its precision.
    """

    system: LayerSystem
    sums: Floats | None
    rate: float

    def improved(self, u: Floats) -> LayerSystem:
        """Return the system with better cotangents, searched together with the input, from u [C, HW] on."""
        damping, system, size = DAMPING, self.system, self._objective(self.system, u)
        if u.size * system.cotangents.size > LARGEST:
            return system
        for _ in range(STEPS):
            try:
                by_u, by_delta = self._step(system, u, damping)
            except np.linalg.LinAlgError:
                by_u, by_delta = np.full_like(u, np.inf), system.cotangents
            trial = replace(system, cotangents=system.cotangents - by_delta)
            new = self._objective(trial, u - by_u) if np.isfinite(by_u).all() else np.inf
            if new < size:
                slow = new > size * (1 - PROGRESS)
                u, system, size, damping = u - by_u, trial, new, damping * EASED
                if slow:
                    break
            elif damping > HOPELESS:
                break
            else:
                damping *= RAISED
        return system

    def _objective(self, system: LayerSystem, u: Floats) -> float:
        total = system.objective(u)
        if self.sums is not None:
            total += float((((system.cotangents.sum(1) - self.sums) * self.rate) ** 2).sum())
        return total

    def _step(self, system: LayerSystem, u: Floats, damping: float) -> tuple[Floats, Floats]:
        """Return the damped Gauss-Newton steps of the input [C, HW] and the cotangents [O, L]."""
        patches = system.convolution.patches(u)
        square = system.seen**2
        gap = (system.convolution.gradient(system.cotangents, u) - system.gradient) * square
        slope = np.einsum("ock,ckl->ol", gap, patches)
        own = np.einsum("ckl,ock,ckm->olm", patches, square, patches, optimize=True)
        if self.sums is not None:
            own += self.rate**2
            slope += self.rate**2 * (system.cotangents.sum(1) - self.sums)[:, None]
        own += damping * np.eye(own.shape[1]) * own.diagonal(axis1=1, axis2=2)[:, :, None]
        cross = np.einsum("okp,ock,ckl->cpol", system.reach, square, patches, optimize=True).reshape(
            u.size, len(own), -1
        )
        factors = [sl.cho_factor(one, lower=True) for one in own]
        schur, right = system.normal(), system.slope(u).ravel()
        schur[np.diag_indices(u.size)] *= 1 + damping
        for o, factor in enumerate(factors):
            schur -= cross[:, o] @ sl.cho_solve(factor, cross[:, o].T)
            right = right - cross[:, o] @ sl.cho_solve(factor, slope[o])
        by_u = sl.cho_solve(sl.cho_factor(schur, lower=True), right)
        return by_u.reshape(u.shape), self._back(factors, slope, cross, by_u)

    def _back(self, factors: Sequence[tuple[Floats, bool]], slope: Floats, cross: Floats, by_u: Floats) -> Floats:
        """Return the step of the cotangents after that of the input."""
        parts = [sl.cho_solve(f, slope[o] - cross[:, o].T @ by_u) for o, f in enumerate(factors)]
        return np.stack(parts)
