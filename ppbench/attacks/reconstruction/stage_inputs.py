"""The input of one stage from its output, by the linear systems of `linear_systems`, made linear again where needed.

One solution suffices where the output gives the convolution's result: a monotone activation without pooling behind it.
Else the activation is replaced by its tangent at the solution before, and the systems are solved again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.linalg as sl
import torch

from ppbench.attacks.reconstruction.linear_systems import LayerSystem, LinearConvolution, Prior, Solution
from ppbench.attacks.reconstruction.stages import ConvolutionStage
from ppbench.federation.plan import Noise
from ppbench.metrics.intervals import Floats

# -- Input and cotangents together, where part of the loss is secret: Levenberg and Marquardt's method --
# The weights' gradient is linear in the input for known cotangents, and in the cotangents for a known input. Solving
# for one after the other is slow where units are saturated, so both are corrected at once.

STEPS = 100
"""Corrections, at most."""
DAMPING, EASED, RAISED, HOPELESS = 1e-4, 0.2, 10.0, 1e8
"""Damping at first, its factors after a better and a worse step, and the one at which the search ends."""
PROGRESS = 1e-9
"""Relative decrease of the objective below which the search ends."""
LARGEST = 2**26
"""Most products of an unknown of the input and a cotangent: half a gigabyte."""


def cotangents_of(
    convolution: LinearConvolution, u: Floats, gradient: Floats, seen: Floats, sums: Floats | None
) -> Floats:
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


# -- One stage --

ROUNDING = 1e-7
"""Relative error of an entry of a float32 gradient."""
TANGENTS = 20
"""Times that an activation is replaced by its tangent, at most."""
PROGRESS, PATIENCE = 0.5, 4
"""Tangents end after so many in a row that do not leave less than this share of the least mismatch."""
SETTLED = 1e-10
"""Relative change of the rows at which they have settled."""
DOUBTFUL = 1e-4
"""Relative error of an output above which the activation's input is not its inverse."""
FLAT = 1e-5
"""Outputs up to this share of the largest one count as those of a unit that does not fire."""


@dataclass(frozen=True)
class KnownMaps:
    """A stage's output: values and cotangents [O, T], the latter None if they are secret, expected error of a value."""

    values: Floats
    cotangents: Floats | None
    deviation: float

    def shaped(self, channels: int) -> KnownMaps:
        """Return the same numbers as [channels, T]."""
        cotangents = None if self.cotangents is None else self.cotangents.reshape(channels, -1)
        return KnownMaps(self.values.reshape(channels, -1), cotangents, self.deviation)

    @property
    def doubt(self) -> float:
        """The expected relative error."""
        return self.deviation / max(float(np.sqrt((self.values**2).mean())), 1e-300)


@dataclass(frozen=True)
class StageGradient:
    """What was observed of a stage's convolution.

    weight: [O, C, K]; bias: [O] or None; seen: [O, C, K], 0 where the gradient is hidden, else its precision relative
    to the others; noise: the public law of noise, for the parameter `name`.
    """

    name: str
    weight: Floats
    bias: Floats | None
    seen: Floats
    noise: Noise | None

    def precision(self, doubt: float) -> Floats:
        """Return the roots of the entries' precisions; doubt: relative error of the cotangents."""
        size = float(np.sqrt((self.weight**2).mean()))
        noise = 0.0 if self.noise is None else self.noise.of(self.name)
        error = float(np.hypot(noise, (ROUNDING + doubt) * size))
        return np.sqrt(self.seen) / max(error, 1e-300)


@dataclass(frozen=True)
class _Tangent:
    """The activation replaced by its tangent: value + slope (z - at), at positions [O, L] or [O, T]."""

    slope: Floats
    constant: Floats

    def moved(self, other: _Tangent) -> float:
        """Return the largest change to another tangent, relative to its numbers."""
        pairs = (self.slope, other.slope), (self.constant, other.constant)
        return float(max(np.abs(a - b).max() / max(np.abs(a).max(), 1e-300) for a, b in pairs))


@dataclass(frozen=True)
class StageProblem:
    """One stage with its weights, what was observed, its known output, and what is known of its input beforehand.

    weight: [O, C, K]; bias: [O].
    """

    stage: ConvolutionStage
    weight: Floats
    bias: Floats
    gradient: StageGradient
    known: KnownMaps
    prior: Prior

    @property
    def convolution(self) -> LinearConvolution:
        """The convolution."""
        return LinearConvolution(self.weight, self.stage.taps, self.stage.inputs)

    def linearized(self) -> LayerSystem:
        """Return the systems with the activation replaced by its tangent where the known output puts its input."""
        tangent, known = self._tangent(self._start()), self.known.cotangents
        delta = np.zeros(self._positions) if known is None else self._delta(tangent.slope, known)
        return self._system(tangent, delta, self.gradient.precision(self.known.doubt))

    def solved(self) -> tuple[Solution, Floats]:
        """Return the stage's input, and its cotangents [C, HW]; LinAlgError if nothing finite solves the systems."""
        best: tuple[float, Solution, Floats] | None = None
        vain = 0
        for solution, delta, gap in self._solutions():
            vain = 0 if best is None or gap < PROGRESS * best[0] else vain + 1
            if best is None or gap < best[0]:
                best = gap, solution, delta
            if vain == PATIENCE:
                break
        if best is None:
            raise np.linalg.LinAlgError
        return best[1], self.convolution.backward(best[2])

    def _solutions(self) -> Iterator[tuple[Solution, Floats, float]]:
        """Yield solutions with their cotangents [O, L], and the mismatch of the systems without tangents."""
        tangent, solution = self._tangent(self._start()), None
        for _ in range(TANGENTS):
            solution, delta = self._linear(tangent, solution)
            z = self.convolution.forward(solution.u) + self.bias[:, None]
            new = self._tangent(self._nearest(z))
            yield solution, delta, self._mismatch(solution, z)
            if new.moved(tangent) <= SETTLED:
                return
            tangent = new

    def _linear(self, tangent: _Tangent, near: Solution | None) -> tuple[Solution, Floats]:
        """Return the solution, and the cotangents [O, L], with the activation replaced by a tangent.

        near: the solution with the tangent before.
        """
        if self.known.cotangents is not None:
            delta = self._delta(tangent.slope, self.known.cotangents)
            return self._system(tangent, delta, self.gradient.precision(self.known.doubt)).solve(near), delta
        g, precision = self.gradient, self.gradient.precision(self.known.doubt)
        blind = self._system(tangent, np.zeros(self._positions), np.zeros_like(self.weight)).solve()
        delta = cotangents_of(self.convolution, blind.u, g.weight, g.seen, g.bias)
        joint = JointSystem(self._system(tangent, delta, precision), g.bias, float(precision.max()))
        system = joint.improved(blind.u)
        return system.solve(), system.cotangents

    @property
    def _positions(self) -> tuple[int, int]:
        return len(self.weight), self.stage.taps.shape[1]

    def _start(self) -> Floats:
        """Return the first inputs of the activation: [O, L], or [O, T] if the pooling comes first."""
        values = self.known.values
        if not self.stage.pools_first:
            count = self.stage.spread(np.ones_like(values))
            values = np.where(count > 0, self.stage.spread(values) / np.where(count > 0, count, 1), 0.0)
        return self._inverse(values, None)

    def _nearest(self, z: Floats) -> Floats:
        """Return the inputs of the activation that give the known output, next to z [O, L].

        z itself where they are unknown, or where noise makes z, which all equations agree on, the better estimate.
        """
        if self.known.doubt > DOUBTFUL:
            return self.stage.pooled(z) if self.stage.pools_first else z
        if self.stage.pools_first:
            return self._inverse(self.known.values, self.stage.pooled(z))
        return self._inverse(self.known.values, z) if self.stage.pool is None else z

    def _inverse(self, values: Floats, near: Floats | None) -> Floats:
        slack = max(FLAT * float(np.abs(self.known.values).max()), 10 * self.known.deviation)
        place = None if near is None else torch.from_numpy(near)
        return np.asarray(self.stage.activation.inverse(torch.from_numpy(values), place, slack).numpy())

    def _tangent(self, z: Floats) -> _Tangent:
        point = torch.from_numpy(np.ascontiguousarray(z))
        slope = self.stage.activation.slope(point).numpy()
        return _Tangent(slope, self.stage.activation(point).numpy() - np.where(slope == 0, 0.0, slope * z))

    def _delta(self, slope: Floats, cotangents: Floats) -> Floats:
        """Return the cotangents [O, L] of the convolution's output."""
        if self.stage.pools_first:
            return self.stage.spread(cotangents * slope)
        return self.stage.spread(cotangents) * slope

    def _system(self, tangent: _Tangent, delta: Floats, seen: Floats) -> LayerSystem:
        root, stage = 1 / max(self.known.deviation, 1e-300), self.stage
        if stage.pools_first:
            slopes, constant = np.repeat(tangent.slope[:, :, None], stage.tiles.shape[1], 2), tangent.constant
        else:
            slopes, constant = tangent.slope[:, stage.tiles], stage.pooled(tangent.constant)
        slopes = slopes / stage.tiles.shape[1]
        values = np.where((slopes != 0).any(2), self.known.values - constant - slopes.sum(2) * self.bias[:, None], 0.0)
        return LayerSystem(
            stage, self.convolution, root * slopes, root * values, delta, self.gradient.weight, seen, self.prior
        )

    def _mismatch(self, solution: Solution, z: Floats) -> float:
        """Return the relative squared mismatch of the output and the gradient at a solution, without tangents."""
        act, known = self.stage.activation, self.known
        inner = torch.from_numpy(self.stage.pooled(z) if self.stage.pools_first else z)
        out = act(inner).numpy() if self.stage.pools_first else self.stage.pooled(act(inner).numpy())
        gap = float(((out - known.values) ** 2).sum() / max((known.values**2).sum(), 1e-300))
        if known.cotangents is None:
            return gap + solution.backward**2
        simulated = self.convolution.gradient(self._delta(act.slope(inner).numpy(), known.cotangents), solution.u)
        seen, whole = self.gradient.seen > 0, self.gradient.weight
        return gap + float(((simulated - whole)[seen] ** 2).sum() / max((whole[seen] ** 2).sum(), 1e-300))
