"""Clipping before masking: what MP-DP's noise is measured by, and what a client can do of it.

Yang et al. (2024, note 2) clip the gradient of the true model, F / max(1, ||F|| / B), and take S_f = B. By their own
Theorem 2 (and note 1) a client does not know F = R o (G - r^T Psi + r^T r Phi): R and r are the server's, and what
it could guess of them bounds nothing. What it has is G, the gradient at the perturbed weights, to which the noise is
added. So the rule that can be carried out, with a sensitivity that is bounded, is the paper's with G in the place of F.
One factor shrinks G, Psi and Phi: then the server recovers just that factor times F (to clip G alone would break
Theorem 4). The mask makes G larger than F, for kappa above 1 about as kappa^2, and clipping costs that much signal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.tree import Params, tree_map
from ppbench.defenses.pbpfl.perturbation import Surrogates
from ppbench.federation.evidence import Simulate

Clip = Literal["seen", "oracle", "none"]


def norm(tree: Mapping[str, Tensor]) -> Tensor:
    """Return the L2 norm of a tree's entries together, a scalar, float64."""
    return torch.stack([value.double().square().sum() for value in tree.values()]).sum().sqrt()


def factor(measured: Mapping[str, Tensor], bound: float) -> Tensor:
    """Return min(1, bound / ||measured||), a scalar, float64; its derivative is 0 where nothing is clipped."""
    squares = torch.stack([value.double().square().sum() for value in measured.values()]).sum()
    return bound / squares.clamp(min=bound**2).sqrt()


def clipped(found: Surrogates, measured: Params, bound: float) -> Surrogates:
    """Return the surrogates times min(1, bound / ||measured||): by one factor, so that recovery stays exact."""
    by = factor(measured, bound)
    return tree_map(lambda value: value * by.to(value.dtype), found)


@dataclass(frozen=True, eq=False)
class Clipped:
    """A simulation of clients who clip `true`, each his one slot's batch, by the norm of `measured`; their mean."""

    true: Simulate
    measured: Simulate
    bound: float
    alters: ClassVar[bool] = True

    @property
    def unscaled(self) -> Simulate:
        """What one client clips by a factor: its direction is the whole's."""
        return self.true

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the mean of the clipped gradients at x [U, B, *shape], y [U, B, C], in the dtype of x."""
        parts = []
        for i in range(len(x)):
            batch = x[i : i + 1], y[i : i + 1]
            by = factor(self.measured(*batch), self.bound).to(x.dtype)
            parts.append({name: by * value for name, value in self.true(*batch).items()})
        return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
