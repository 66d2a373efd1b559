"""Labels from the head's gradient under the squared loss: which classes a batch holds, and bounds on how often.

Let Z [C, B] be the outputs, Y [B, C] the one-hot labels, W and b the head, G and g the gradients of its weight and
bias. From B G = (Z - Y^T) H^T, B g = (Z - Y^T) 1 and Z = W H^T + b 1^T follows

    K := W G^T + b g^T = (Z Z^T - Z Y) / B.

Z Z^T is symmetric, so A := K - K^T = P^T - P with P := Z Y / B, whose column j is the sum of the outputs of the
examples of class j over B, and zero where no example has the class. Hence A vanishes exactly between absent classes,
and for i absent, j present P_ij = -A_ij is known, as is (Z Z^T)_ij = B K_ij for both absent. The rows of Z of absent
classes, projected on the indicator 1_j of the examples of class j, then bound the number of these from below:

    n_j = |1_j|^2 >= p_j^T (Z Z^T)^+ p_j  with p_j = B P_ij over absent i;

with equality where those rows span the batch, so for batches up to the number of absent classes, as a rule. Nothing
is estimated and no property of the features is used: it works at any stage of training, with and without biases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ppbench.base.tree import Params

ROUNDING = 5e-6
"""Size up to which an entry of A counts as zero, in units of K's terms (root of the sum of squares, largest entry).

Measured on float32 gradients of seven small networks: at most 5e-7 between absent classes, 7e-3 at the median
elsewhere. Noise lies above it, and then nothing is claimed.
"""
EIGENVALUE = 1e-4
"""Share of the largest eigenvalue from which a direction of the outputs counts as seen."""


@dataclass(frozen=True)
class Histogram:
    """What a batch holds. present: [C] bool; counts: [C] float64, lower bounds, -inf for absent classes."""

    present: Tensor
    counts: Tensor


def label_histogram(
    params: Params, weight_gradient: Tensor, bias_gradient: Tensor | None, batch: int
) -> Histogram | None:
    """Return the classes in a batch, or None where the gradient is not exact or too many classes may be present.

    params: the public weights, `head.weight` [C, D] and `head.bias` [C], if any; the gradients of both are means over
    the `batch`, None for a head without bias.
    """
    if (bias_gradient is None) != ("head.bias" not in params):
        return None
    weights, gradients = [params["head.weight"]], [weight_gradient]
    if bias_gradient is not None:
        weights, gradients = [*weights, params["head.bias"][:, None]], [*gradients, bias_gradient[:, None]]
    w, g = (torch.cat([part.detach().double().cpu() for part in parts], 1) for parts in (weights, gradients))
    k, zero = w @ g.T, ROUNDING * float(((w * w) @ (g * g).T).max().sqrt())
    if not k.isfinite().all() or not 0 < zero < math.inf:
        return None
    a = k - k.T
    absent = _absent(a, zero)
    if int(absent.sum()) < 2:  # one class, present or not, has no pair to vanish with
        if bias_gradient is None:
            return None
        absent = (a.sum(1) + g[:, -1]).abs() <= zero * len(a)  # column sums of P less n_j / B
    present = ~absent
    if not 0 < int(present.sum()) <= batch:
        return None
    counts = torch.full((len(k),), -torch.inf, dtype=torch.float64)
    counts[present] = _lengths(batch * k[absent][:, absent], -batch * a[absent][:, present])
    return Histogram(present, counts)


def _absent(a: Tensor, zero: float) -> Tensor:
    """Return [C] bool: the classes left when those with most entries of A above `zero` are taken out in turn.

    A present class has such an entry with every absent one, so present classes go first while two absent ones are left.
    """
    left = torch.ones(len(a), dtype=torch.bool)
    size = a.abs() / a.abs().sum().clamp(min=1e-300)
    while True:
        rows = left.nonzero()[:, 0]
        above = a[rows][:, rows].abs() > zero
        if not above.any():
            return left
        left[rows[(above.sum(1) + size[rows][:, rows].sum(1)).argmax()]] = False


def _lengths(gram: Tensor, products: Tensor) -> Tensor:
    """Return [S] the squared lengths of vectors within the span of others, from Gram matrix [R, R], products [R, S]."""
    if len(gram) == 0:
        return torch.zeros(products.shape[1], dtype=products.dtype)
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    keep = values > EIGENVALUE * values[-1].clamp(min=0)
    lengths: Tensor = ((vectors[:, keep].T @ products) ** 2 / values[keep][:, None]).sum(0)
    return lengths
