"""Which classes a batch may hold, from the column space of the head's gradient alone: exact for all predictions.

With cross-entropy the head's gradient is A^T F / B, row i of A [B, C] being p_i - onehot(y_i): less than 0 at the label
and nowhere else. If B < C its columns span the rows of A, so that a class is in the batch only if some vector of that
span is negative there alone: a linear program for each class (Dang et al., Revealing and Protecting Labels in
Distributed Training, NeurIPS 2021, search such a vector by a perceptron). A trained network's predictions, on which
counts of labels otherwise depend, are not needed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from torch import Tensor

RANK_TOLERANCE = 2e-6
"""Smallest singular value, relative to the largest, of a direction that counts: float32 rounding gives up to 6e-8."""
SIGN_SLACK: Final = 1e-3
"""How far below 0 other entries may lie, in units of the label's: directions too small to count are missing."""


def exact_span(weight_gradient: Tensor, bias_gradient: Tensor | None, batch: int) -> NDArray[np.float64] | None:
    """Return an orthonormal basis [C, rank] of the columns of the head's gradient; None if these exclude no class.

    That is so if the gradient is noisy (its rank larger than the batch), or if there are as many examples as classes.

    Args:
        weight_gradient: [C, D] of the head, under cross-entropy, finite.
        bias_gradient: [C], or None for a head without bias.
        batch: number of examples B.
    """
    parts = [weight_gradient] if bias_gradient is None else [weight_gradient, bias_gradient[:, None]]
    left, sizes, _ = torch.linalg.svd(
        torch.cat([part.detach().double().cpu() for part in parts], 1), full_matrices=False
    )
    rank = int((sizes > RANK_TOLERANCE * sizes[0]).sum())
    if rank > batch or batch >= len(left):
        return None
    basis: NDArray[np.float64] = left[:, :rank].numpy()
    return basis


def possible_classes(span: NDArray[np.float64]) -> Tensor:
    """Return [C] bool: the classes that a batch may hold if its head's gradient has columns in this `exact_span`."""
    return torch.tensor([_largest_least(span, label) > -SIGN_SLACK for label in range(len(span))])


def _largest_least(span: NDArray[np.float64], label: int) -> float:
    """Return the largest least other entry over vectors of a span that are -1 at the label; -inf if none is."""
    others = np.delete(span, label, 0)
    result = linprog(
        np.append(np.zeros(span.shape[1]), -1.0),
        A_ub=np.hstack([-others, np.ones((len(others), 1))]),
        b_ub=np.zeros(len(others)),
        A_eq=np.append(span[label], 0.0)[None],
        b_eq=[-1.0],
        bounds=[(None, None)] * span.shape[1] + [(-1, 1)],
    )
    return float(result.x[-1]) if result.status == 0 else -np.inf
