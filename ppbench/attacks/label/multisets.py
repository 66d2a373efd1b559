"""Multisets of labels in the order in which estimated counts speak for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations_with_replacement

import torch
from torch import Tensor

MOST = 20_000
"""Multisets that are put in order, at most: else the first one is the only one."""


def greedy_multiset(counts: Tensor, present: Tensor, batch: int) -> Tensor:
    """Return `batch` labels [batch] int64, sorted: one of each present class, then the class least served so far.

    counts [C] float64: estimated examples a class, need not be whole.  present [C] bool: classes known to occur; where
    these are more than `batch`, those with the largest counts.
    """
    chosen = sorted(present.nonzero()[:, 0].tolist(), key=lambda c: -float(counts[c]))[:batch]
    left = counts.clone()
    left[chosen] -= 1
    while len(chosen) < batch:
        best = int(left.argmax())
        left[best] -= 1
        chosen.append(best)
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def likely_multisets(counts: Tensor, present: Tensor, batch: int) -> Iterator[Tensor]:
    """Yield multisets of labels [batch] int64, sorted, `greedy_multiset` first, then by distance from the counts.

    Arguments as there; classes with counts of -inf are in none, those present in all.
    """
    first = greedy_multiset(counts, present, batch)
    yield first
    sure, maybe = present.nonzero()[:, 0].tolist(), counts.isfinite().nonzero()[:, 0].tolist()
    free = batch - len(sure)
    if free <= 0 or not maybe or math.comb(len(maybe) + free - 1, free) > MOST:
        return
    rest = torch.tensor(list(combinations_with_replacement(maybe, free)))
    every = torch.cat([torch.tensor(sure, dtype=torch.int64).expand(len(rest), -1), rest], 1).sort(1).values
    held = torch.nn.functional.one_hot(every, len(counts)).sum(1)
    apart = (held - counts.nan_to_num(neginf=0.0)).square().sum(1)
    for place in apart.argsort(stable=True).tolist():
        if not torch.equal(every[place], first):
            yield every[place]
