"""Label recovery (the SPN paper's "membership"): right labels as multisets, and the chance of blind guessing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from scipy import stats


def multiset_hits(guess: Sequence[int], truth: Sequence[int]) -> list[bool]:
    """Return for each true label whether a guessed label matches it, compared as multisets."""
    remaining, hits = Counter(guess), []
    for label in truth:
        hits.append(remaining[label] > 0)
        remaining[label] -= 1
    return hits


@lru_cache(maxsize=256)
def multiset_chance(classes: int, batch: int) -> float:
    """Return the expected multiset accuracy of `batch` uniform guesses against `batch` uniform labels of C `classes`.

    (C / B) sum_k P(X >= k)^2 with X ~ Binomial(B, 1/C): the expected minimum of two independent counts of a class.
    """
    tails = stats.binom.sf(range(batch), batch, 1 / classes)
    return float(classes / batch * (tails**2).sum())
