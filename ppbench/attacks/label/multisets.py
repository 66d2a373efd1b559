"""Multisets of labels in the order of their distance from estimated counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations_with_replacement

import torch
from torch import Tensor

MOST_MULTISETS = 20_000
"""Multisets that are sorted, at most; if there are more, only the first is returned."""


def greedy_multiset(counts: Tensor, present: Tensor, batch: int) -> Tensor:
    """Return `batch` labels [batch] int64, sorted: one of each present class, then the class with the largest rest.

    counts [C] float64: estimated examples per class, need not be whole. present [C] bool: classes known to occur; if
    these are more than `batch`, those with the largest counts are used.
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

    Same arguments; classes with counts of -inf are in no multiset, those present in all.
    """
    first = greedy_multiset(counts, present, batch)
    yield first
    certain, possible = present.nonzero()[:, 0].tolist(), counts.isfinite().nonzero()[:, 0].tolist()
    free = batch - len(certain)
    if free <= 0 or not possible or math.comb(len(possible) + free - 1, free) > MOST_MULTISETS:
        return
    rest = torch.tensor(list(combinations_with_replacement(possible, free)))
    every = torch.cat([torch.tensor(certain, dtype=torch.int64).expand(len(rest), -1), rest], 1).sort(1).values
    tallies = torch.nn.functional.one_hot(every, len(counts)).sum(1)
    distances = (tallies - counts.nan_to_num(neginf=0.0)).square().sum(1)
    for place in distances.argsort(stable=True).tolist():
        if not torch.equal(every[place], first):
            yield every[place]
