"""Label recovery (the SPN paper's "membership"): right labels as multisets, and the chance of blind guessing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy import special

from ppbench.metrics.intervals import Estimate, clopper_pearson, unsupported


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

    (C / B) sum_k P(X >= k)^2 over k = 1 to B, X ~ Binomial(B, 1/C): the expected minimum of two independent counts.
    """
    counts = np.arange(1, batch + 1)
    tails = special.betainc(counts, batch + 1 - counts, 1 / classes)
    return float(classes / batch * (tails**2).sum())


# -- Tracing: whose image is it? Algorithm 6 of Fan et al., "Rethinking Privacy Preserving Deep Learning" --


def tracing_accuracy(owners: Sequence[int], guesses: Sequence[int]) -> Estimate:
    """Return the share of queries whose guessed owner (client index) is right, with its Clopper-Pearson interval.

    Chance is 1 over the number of owners: the reconstructions belong to the same clients. No value for a single owner
    (a role that one client always plays), whom noise names too.
    """
    if not owners:
        return unsupported(0, "no image was traced")
    chance = 1 / len(set(owners))
    if chance == 1:
        return unsupported(len(owners), "all queries are one client's: there is nobody else to name", chance)
    hits = sum(owner == guess for owner, guess in zip(owners, guesses, strict=True))
    return Estimate(hits / len(owners), clopper_pearson(hits, len(owners)), len(owners), chance=chance)
