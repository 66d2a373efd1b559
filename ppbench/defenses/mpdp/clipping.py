"""Clipping before masking, which bounds the sensitivity of MP-DP, as far as a client can do it.

Yang et al. (2024, note 2) clip the gradient of the true model, F / max(1, ||F|| / B), and take S_f = B. By their own
Theorem 2 (and note 1) a client does not know F = R o (G - r^T Psi + r^T r Phi): R and r are the server's, and guesses
give no bound. A client knows G, the gradient at the perturbed weights, to which the noise is added. So the feasible
rule with a bounded sensitivity is the paper's with G instead of F. One factor scales G, Psi and Phi, so that the server
recovers that factor times F (clipping G alone would break Theorem 4). The mask makes G larger than F, for kappa above 1
by about kappa^2, and clipping costs as much signal.
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


def tree_norm(tree: Mapping[str, Tensor]) -> Tensor:
    """Return the L2 norm of all entries of a tree, a scalar, float64."""
    return torch.stack([value.double().square().sum() for value in tree.values()]).sum().sqrt()


def clipping_factor(measured: Mapping[str, Tensor], bound: float) -> Tensor:
    """Return min(1, bound / ||measured||), a scalar, float64; its derivative is 0 if nothing is clipped."""
    squares = torch.stack([value.double().square().sum() for value in measured.values()]).sum()
    return bound / squares.clamp(min=bound**2).sqrt()


def clipped(surrogates: Surrogates, measured: Params, bound: float) -> Surrogates:
    """Return the surrogates times min(1, bound / ||measured||), one factor for all, so that recovery stays exact."""
    by = clipping_factor(measured, bound)
    return tree_map(lambda value: value * by.to(value.dtype), surrogates)


@dataclass(frozen=True, eq=False)
class Clipped:
    """A simulation of clients that each clip `true`, on their slot's batch, by the norm of `measured`; their mean."""

    true: Simulate
    measured: Simulate
    bound: float
    alters: ClassVar[bool] = True

    @property
    def unscaled(self) -> Simulate:
        """The simulation before clipping, which has the same direction for one client."""
        return self.true

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the mean of the clipped gradients at x [U, B, *shape], y [U, B, C], in the dtype of x."""
        parts = []
        for i in range(len(x)):
            batch = x[i : i + 1], y[i : i + 1]
            by = clipping_factor(self.measured(*batch), self.bound).to(x.dtype)
            parts.append({name: by * value for name, value in self.true(*batch).items()})
        return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
