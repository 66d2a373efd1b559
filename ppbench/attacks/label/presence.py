"""Which classes a batch may hold, from the column space of the head's gradient alone: exact, whatever the network says.

With cross-entropy the head's gradient is A^T F / B, row i of A [B, C] being p_i - onehot(y_i): less than 0 at the label
and nowhere else. Where B < C its columns span the rows of A, so that a class is in the batch only if some vector of
that span is negative there alone: a linear program for each class (Dang et al., Revealing and Protecting Labels in
Distributed Training, NeurIPS 2021, who look for such a vector by a perceptron). A trained network's predictions, which
counts of labels otherwise hang on, are not needed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from torch import Tensor

RANK = 2e-6
"""Singular values, beside the largest, from which a direction counts as seen: float32 leaves up to 6e-8 of others."""
SLACK: Final = 1e-3
"""How far below 0 entries beside the label's may lie, in units of that: directions too small to be seen are missing."""


def exact_span(weight_gradient: Tensor, bias_gradient: Tensor | None, batch: int) -> NDArray[np.float64] | None:
    """Return an orthonormal basis [C, rank] of the columns of the head's gradient; None where these exclude nothing.

    So it is where the gradient is noisy (its rank larger than the batch), or there are as many examples as classes.

    Args:
        weight_gradient: [C, D] of the head, under cross-entropy, finite.
        bias_gradient: [C], or None for a head without bias.
        batch: number of examples B.
    """
    parts = [weight_gradient] if bias_gradient is None else [weight_gradient, bias_gradient[:, None]]
    left, sizes, _ = torch.linalg.svd(
        torch.cat([part.detach().double().cpu() for part in parts], 1), full_matrices=False
    )
    rank = int((sizes > RANK * sizes[0]).sum())
    if rank > batch or batch >= len(left):
        return None
    basis: NDArray[np.float64] = left[:, :rank].numpy()
    return basis


def possible_classes(span: NDArray[np.float64]) -> Tensor:
    """Return [C] bool: the classes that a batch may hold whose head's gradient has columns in this `exact_span`."""
    return torch.tensor([_least(span, label) > -SLACK for label in range(len(span))])


def _least(span: NDArray[np.float64], label: int) -> float:
    """Return the largest least entry, but the label's, of vectors of a span that are -1 there; -inf if none is."""
    others = np.delete(span, label, 0)
    found = linprog(
        np.append(np.zeros(span.shape[1]), -1.0),
        A_ub=np.hstack([-others, np.ones((len(others), 1))]),
        b_ub=np.zeros(len(others)),
        A_eq=np.append(span[label], 0.0)[None],
        b_eq=[-1.0],
        bounds=[(None, None)] * span.shape[1] + [(-1, 1)],
    )
    return float(found.x[-1]) if found.status == 0 else -np.inf
