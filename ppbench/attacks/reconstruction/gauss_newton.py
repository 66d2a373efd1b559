"""An image by Gauss and Newton's method on a whole gradient at once, from the answer of linear systems on.

Layer by layer each input is computed from its own equations alone. What noise, or a null space, leaves open in one
layer, the equations of others may tell. Here all of them are linearized in the image: the answer is the most probable
image under the noise's law and a wide prior (as in Balunovic et al., ICLR 2022, whose search is by first order).

`GaussNewton` searches so from a grey image. Adapters of low rank, as LoRA's, hold few numbers of each token, so that
directions of the image differ by four orders of magnitude in the gradient: searches by first order explain nearly all
of it by another image. The law starts loose, so that the smooth prior decides, and narrows down to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.reconstruction.analytic import guessed_labels
from ppbench.attacks.reconstruction.linear_systems import Prior
from ppbench.attacks.reconstruction.search.starts import PosedVictim, posed, usable
from ppbench.attacks.reconstruction.stage_inputs import ROUNDING
from ppbench.base.tree import Params
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Noise, Plan
from ppbench.federation.view import View
from ppbench.metrics.intervals import Floats
from ppbench.metrics.modality import modality_in
from ppbench.nets.classifier import HEAD_NAMES

# -- Damped steps (Levenberg and Marquardt) --

DAMPING, EASED, RAISED, HOPELESS = 1e-3, 0.2, 6.0, 1e6
"""Damping at first, its factors after a better and a worse step, and the one at which the search ends."""
SMALLEST_DIAGONAL = 1e-14
"""Smallest diagonal entry that damping scales with, relative to the largest."""


class LeastSquares(Protocol):
    """A penalized sum of squares to minimize over a vector z [n], float64."""

    def residual(self, z: Tensor) -> Tensor:
        """Return the residuals [P] at z."""

    def objective(self, z: Tensor, residual: Tensor) -> float:
        """Return the sum of squares of `residual` and the penalty of z."""

    def linearized(self, z: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normal matrix [n, n] and half the objective's gradient [n] at z, on the CPU."""


@dataclass(frozen=True)
class Minimum:
    """Where damped Gauss-Newton steps end: z [n], the residuals [P] there, and gradient evaluations spent."""

    z: Tensor
    residual: Tensor
    evaluations: int


def gauss_newton_minimum(
    fit: LeastSquares, z: Tensor, *, cost: int, steps: int, progress: float, enough: float
) -> Minimum:
    """Return where damped Gauss-Newton steps from z end.

    cost: gradient evaluations of a linearization; steps: at most. Below the objective `enough`, the search ends at a
    relative decrease below `progress`.
    """
    residual, damping, spent = fit.residual(z), DAMPING, 1
    size = fit.objective(z, residual)
    for _ in range(steps):
        normal, slope = fit.linearized(z, residual)
        scale = normal.diagonal().clamp(min=SMALLEST_DIAGONAL * float(normal.diagonal().max()))
        spent, before = spent + cost, size
        while damping <= HOPELESS:
            factor, failed = torch.linalg.cholesky_ex(normal + torch.diag(damping * scale))
            trial = z - torch.cholesky_solve(slope[:, None], factor)[:, 0].to(z)
            left = fit.residual(trial)
            after, spent = fit.objective(trial, left), spent + 1
            if not int(failed) and after < size:
                z, residual, size, damping = trial, left, after, EASED * damping
                break
            damping *= RAISED
        if size == before or (size < enough and size > (1 - progress) * before):
            break
    return Minimum(z, residual, spent)


# -- One image, under noise or with null spaces --

IMAGE_STEPS, CHUNK = 30, 64
"""Steps, at most, and columns of the Jacobian that are computed at once."""
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

    shape: of the image; prior: of its numbers; data_range: which it hardly leaves; precision: of each entry of the
    gradient, in place of those that the law and `Evidence.weight` give; steps: at most; scaled: whether the gradient
    has an unknown factor; progress: relative decrease of the objective below which the search ends.
    """

    evidence: Evidence
    y: Tensor
    noise: Noise | None
    shape: tuple[int, ...]
    prior: Prior
    data_range: tuple[float, float]
    precision: Params | None = None
    steps: int = IMAGE_STEPS
    scaled: bool = False
    progress: float = LEAST_PROGRESS

    @torch.no_grad()
    def refined(self, image: Tensor) -> Refined:
        """Return the most probable image near `image` [1, *shape]; RuntimeError if the network has no Jacobian."""
        start = image.detach().double().to(self.evidence.device).flatten()
        before = self.residual(start)
        end = gauss_newton_minimum(
            self, start, cost=len(start), steps=self.steps, progress=self.progress, enough=np.inf
        )
        left, seen = float(end.residual @ end.residual), int((self._roots > 0).sum())
        explains = left <= min(float(before @ before), NOISE_EXPLAINED * seen)
        return Refined(end.z.cpu().view_as(image), explains, end.evaluations + 1)

    def residual(self, z: Tensor) -> Tensor:
        """Return the residuals [P] at an image [n], in units of their deviations."""
        simulated = self.evidence.simulate(z.view(1, 1, *self.shape), self.y[None].to(z))
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

    def objective(self, z: Tensor, residual: Tensor) -> float:
        """Return the sum of squares with what prior and data range add."""
        off, outside = self._off(z), self._outside(z)
        return float(residual @ residual) + float((off * self._pull(off)).sum()) + float((outside**2).sum())

    def linearized(self, z: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normal matrix [n, n] and half the objective's gradient [n] at an image [n]."""

        def derivative(direction: Tensor) -> Tensor:
            along: Tensor = jvp(self.residual, (z,), (direction,))[1]
            return along

        axes, (channels, high, wide) = torch.eye(len(z), dtype=z.dtype, device=z.device), self.shape
        jacobian, outside = vmap(derivative, chunk_size=CHUNK)(axes).T, self._outside(z)
        matrix = (jacobian.T @ jacobian).cpu().numpy()
        matrix += np.kron(np.eye(channels), self.prior.precision((1, high, wide)))
        matrix[np.diag_indices(len(matrix))] += (outside != 0) * self._bound**2
        slope = (jacobian.T @ residual).cpu().numpy() + self._pull(self._off(z)).ravel() + outside * self._bound
        return torch.from_numpy(matrix), torch.from_numpy(slope)

    def _off(self, z: Tensor) -> Floats:
        """Return the differences [C, H, W] from the prior's middle."""
        return np.asarray(z.cpu().numpy().reshape(self.shape) - self.prior.middle)

    def _pull(self, off: Floats) -> Floats:
        """Return the prior's precision times differences [C, H, W]."""
        size = off.shape[1], off.shape[2]
        return self.prior.slope(off.reshape(len(off), -1), size).reshape(off.shape)

    @property
    def _bound(self) -> float:
        low, high = self.data_range
        return 1 / (OVERSHOOT * (high - low))

    def _outside(self, z: Tensor) -> Floats:
        """Return how far numbers [n] leave the data range, in units of a typical distance."""
        return np.asarray((z - z.clamp(*self.data_range)).cpu().numpy() * self._bound)


# -- One image from the start, under a law that narrows --

LOOSE, NARROWER = 1.0, 0.3
"""Deviation of an entry at first, of its tensor's root mean square, and the factor from one law to the next."""
STALLED = 0.05
"""Relative decrease of the objective below which the next law follows."""
MOST_SEARCHED, MOST_ENTRIES = 3072, 100_000_000
"""Numbers of an image, and entries of a Jacobian (0.8 GB), up to which it is searched."""


@dataclass(frozen=True)
class GaussNewton(Attack):
    """One image by Gauss and Newton's method on the whole gradient, from grey on, under a law that narrows to rounding.

    Built for adapters of vision transformers (LoRA) and other smooth networks, most of whose weights are frozen. What
    the law of an entry leaves open is decided by a prior of smooth images, so that patches get to their places before
    they get sharp. A linearization costs as many gradients as the image has numbers. Batches get grey images.

    steps: linearizations under one law, at most.
    """

    name: ClassVar[str] = "gauss_newton"
    kind: ClassVar[Kind] = "reconstruction"
    standard: ClassVar[bool] = False
    quick: ClassVar[bool] = False
    probes: ClassVar[tuple[str, ...]] = ("gradient",)
    reference: ClassVar[str] = "this project; the likelihood of Balunovic et al., ICLR 2022, by second order"

    steps: PositiveInt = 4

    def suits(self, plan: Plan) -> bool:
        """Return whether inputs are small images, and a trained head with a bias shows their labels."""
        net, numbers = plan.net, math.prod(plan.spec.shape)
        small = modality_in(plan).drawn and numbers <= MOST_SEARCHED and numbers * net.parameter_count <= MOST_ENTRIES
        return super().suits(plan) and small and not net.pixelwise and {*HEAD_NAMES} <= {*net.names}

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge; a grey image of batches, and where nothing was observed."""
        return [self._guess(victim) for victim in posed(self.evidence(view), view.plan, challenges, generator)]

    def _guess(self, victim: PosedVictim) -> Guess:
        image, labels, evidence = victim.image("grey"), guessed_labels(victim), victim.evidence
        blind = Guess(x=image, y=labels, evaluations=1)
        if victim.size[0] > 1 or evidence is None or not usable(evidence):
            return blind
        if evidence.measure != "squares" or evidence.nuisance:
            return blind
        try:
            return self._searched(evidence, victim.plan, image, labels)
        except RuntimeError:  # an operation without a forward derivative
            return blind

    def _searched(self, evidence: Evidence, plan: Plan, image: Tensor, labels: Tensor) -> Guess:
        """Return the guess of a search from `image` [1, *shape]."""
        y = one_hot(labels, plan.spec.classes).double().to(evidence.device)
        x, spent, deviation = image.double(), 1, LOOSE
        while deviation > ROUNDING:
            problem = GradientProblem(
                *(evidence, y, None, plan.spec.shape, image_prior(plan), plan.data_range, law_of(evidence, deviation)),
                steps=self.steps,
                progress=STALLED,
            )
            answer = problem.refined(x)
            x, spent, deviation = answer.image, spent + answer.evaluations, NARROWER * deviation
        return Guess(x=x.clamp(*plan.data_range).float(), y=labels, evaluations=spent)


def law_of(evidence: Evidence, deviation: float) -> Params:
    """Return the precision of each entry whose error has a deviation in units of its tensor's root mean square.

    The noise's law adds to it. Of a tensor that is 0 everywhere nothing is compared.
    """
    law = {}
    for name, value in evidence.observed.items():
        size = float(value.double().square().mean().sqrt())
        error = math.hypot(deviation * size, 0.0 if evidence.noise is None else evidence.noise.of(name))
        seen = torch.ones_like(value) if evidence.weight is None else evidence.weight[name].expand_as(value)
        law[name] = seen.double() / error**2 if error > 0 else torch.zeros_like(seen).double()
    return law
