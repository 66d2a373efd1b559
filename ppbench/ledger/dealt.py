"""Whether answers tell victims apart: whether each is closest to its own victim, by an exact permutation test.

A blind attacker may still know what such images look like, and beat the blind guesses of this bench with a better one.
What it cannot know is which answer belongs to which victim: a random assignment of its answers would score as well. So
answers are compared with one another, on every victim. Assigned at random, M victims get an answer that no other beats
(of N answers, r_i are best at victim i), and P(M >= k) is at most
E[C(M, k)] = e_k(r_1, ..., r_N) / (N (N - 1) ... (N - k + 1)); e_k is the elementary symmetric polynomial: 1 / k!
without ties, 1 for equal answers. It holds for any scores.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MAX_BLOCK = 48
"""Most victims that are compared with one another; more are split into blocks, and permuted within each."""


def permutation_p(count: int, judge: Callable[[NDArray[np.intp]], Floats]) -> float:
    """Return the p-value of `count` answers under the hypothesis that they do not tell victims apart.

    judge: maps an order [count] to scores [count] of answer order[i] on victim i; larger is better.
    """
    blocks = np.array_split(np.arange(count), -(-count // MAX_BLOCK))
    own, best, ties = judge(np.arange(count)), np.full(count, -np.inf), np.zeros(count)
    for shift in range(max(map(len, blocks))):
        order = np.concatenate([np.roll(block, -shift) for block in blocks])
        scores = judge(order) if shift else own
        new = np.concatenate([np.full(len(block), shift < len(block)) for block in blocks])
        better = new & (scores > best)
        ties = np.where(better, 1.0, ties + (new & (scores == best)))
        best = np.where(better, scores, best)
    hits, tail = int((own >= best).sum()), np.ones(1)
    for block in blocks:
        tail = np.convolve(tail, _expected(ties[block]))
    return float(min(1.0, tail[: hits + 1].min()))


def _expected(ties: Floats) -> Floats:
    """Return E[C(M, k)] of one block for k = 0, ..., N: of N answers in random order, ties[i] are best on victim i."""
    count = len(ties)
    symmetric = np.zeros(count + 1)
    symmetric[0] = 1.0
    for one in ties:
        symmetric[1:] += one * symmetric[:-1]
    return np.asarray(symmetric / np.cumprod(np.concatenate([[1.0], np.arange(count, 0, -1.0)])))
