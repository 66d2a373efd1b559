"""Tracing: whose image is it? Algorithm 6 of Fan et al., "Rethinking Privacy Preserving Deep Learning"."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.metrics.intervals import Estimate, clopper_pearson, unsupported


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
