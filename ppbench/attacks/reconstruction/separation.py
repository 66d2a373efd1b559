"""The inputs of a batch, exact, from the gradient of one linear layer z = W x + b with a ReLU behind it.

The gradients of weights and biases are sums over the batch of k examples: [dW, db] = Delta [X, 1], with Delta = dL/dz
[m, k] zero wherever a unit does not fire. The left side has rank k, so that Delta = U Q and [X, 1] = Q^-1 S V^T for its
singular vectors and an unknown Q [k, k]; a column of Q is the one vector that is orthogonal to all rows of U of units
that its example does not fire (Dimitrov et al., SPEAR, NeurIPS 2024). As there, subsets of k - 1 rows are drawn, and
directions that vanish on more rows than that are candidates. Three things here are not in the paper:

- Rows are also drawn by corners: inputs of the row space, in the data range, that are least in a random direction.
  Real inputs lie near such corners, and rows of units that a corner does not fire are right far more often.
- A candidate counts only if some input of the row space fires exactly the units that it is not zero on.
- A partly wrong basis has some right inputs. Their firing gives their own columns, so a basis is mended in turns until
  each input fires the units of its column: then it explains all observations.

Tolerances are those of the rounding in the observation: its residual beyond the rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppbench.attacks.reconstruction.directions import (
    LEAST_SINGULAR,
    DirectionCandidates,
    GradientSpan,
    PublicLayer,
    span_of,
)

MENDS = 20
"""Turns of mending a basis, at most."""
VAIN = 20_000
"""Draws without any candidate after which the search ends."""
STALE, NEARLY = 3, 0.97
"""Rounds without progress after which the search ends, if inputs agree with so many units on average."""


@dataclass(frozen=True)
class Separation:
    """The examples of a batch: inputs [k, D] and cotangents [m, k] float64, on the observation's scale.

    agreement: [k] shares of units where firing agrees with a nonzero cotangent; 1 for a right input.
    draws: number of subsets of rows that were tried.
    """

    inputs: Tensor
    cotangents: Tensor
    agreement: Tensor
    draws: int


def separate(
    weight_grad: Tensor, bias_grad: Tensor, layer: PublicLayer, count: int, generator: torch.Generator, draws: int
) -> Separation | None:
    """Return the examples whose gradients sum to [m, D] and [m], or None if they cannot be separated.

    Equal inputs are one example. `count` is the largest number of examples, `draws` the largest number of subsets of
    rows to try; `agreement` of the result shows whether they sufficed. None: no gap in the singular values up to
    `count` (noise), too few units that fire, or fewer than `rank - 1` candidates among all draws.
    """
    span = span_of(torch.cat([weight_grad, bias_grad[:, None]], 1).double(), layer, count)
    if span is None:
        return None
    search, best, stale = DirectionCandidates(span, layer, generator), None, 0
    while search.draws < draws:
        search.more()
        stale += 1
        for basis in search.bases():
            mended = _mended(span, basis)
            if best is None or mended[1].sum() > best[1].sum():
                best, stale = mended, 0
        if best is None and search.draws >= VAIN and not len(search.directions):
            break
        if best is not None and bool((best[1] == 1).all() or (stale >= STALE and best[1].mean() >= NEARLY)):
            break
    if best is None:
        return None
    basis, agreement = best
    full = torch.linalg.inv(basis).T @ span.right
    cotangents = span.left @ basis.T * full[:, -1]
    return Separation(full[:, :-1] / full[:, -1:], cotangents, agreement, search.draws)


def _mended(span: GradientSpan, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best basis [k, k] and its agreement [k], replacing columns by those of the units that inputs fire."""
    best: tuple[Tensor, Tensor] | None = None
    for _ in range(MENDS):
        silent = (span.inputs(basis) @ span.firing <= 0)[:, span.live]
        agreement = (silent == span.zeros(basis)).double().mean(1)
        if best is None or agreement.sum() > best[1].sum():
            best = basis, agreement
        q, only = span.orthogonal(silent)
        before = basis
        for i in (only & (agreement < 1)).nonzero()[:, 0].tolist():
            changed = basis.clone()
            changed[i] = q[i]
            if float(torch.linalg.svdvals(changed)[-1]) > LEAST_SINGULAR:
                basis = changed
        if torch.equal(basis, before):
            break
    assert best is not None  # the loop runs at least once
    return best
