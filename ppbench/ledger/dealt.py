"""Whether answers tell victims apart: whether each is closest to its own victim, by an exact test of permutations.

Who sees nothing may still know what such images look like, and beat the blind guesses of this bench by a better one of
his own. What he cannot know is which answer belongs to which victim: were they dealt out anew, he would do as well. So
answers are compared with one another, on every victim. Dealt out at random, M victims get an answer that no other beats
(of N, r_i do at victim i), and P(M >= k) is at most E[C(M, k)] = e_k(r_1, ..., r_N) / (N (N - 1) ... (N - k + 1));
e_k is the elementary symmetric polynomial: 1 / k! without ties, 1 for equal answers. It holds for any scores.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BLOCK = 48
"""Victims that are compared with one another: of more, so many neighbours each, dealt out within their block alone."""


def by_chance(count: int, judge: Callable[[NDArray[np.intp]], Floats]) -> float:
    """Return the p of `count` answers that tell no victim from another.

    judge: of an order [count] how well answer order[i] does on victim i, larger being better, [count].
    """
    blocks = np.array_split(np.arange(count), -(-count // BLOCK))
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
    """Return E[C(M, k)] of one block for k = 0, ..., N: of N answers dealt out, ties[i] are best on victim i."""
    count = len(ties)
    symmetric = np.zeros(count + 1)
    symmetric[0] = 1.0
    for one in ties:
        symmetric[1:] += one * symmetric[:-1]
    return np.asarray(symmetric / np.cumprod(np.concatenate([[1.0], np.arange(count, 0, -1.0)])))
