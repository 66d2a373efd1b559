"""Tracing: whose image is it? Accuracy and chance of Algorithm 6 of Fan et al., "Rethinking Privacy
Preserving Deep Learning": a query succeeds when the owner of its nearest reconstruction is its own owner."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.metrics.intervals import Estimate, clopper_pearson, refused


def chance(clients: int) -> float:
    """Return the accuracy of blind guessing among `clients` owners, 1 / N.

    Raises:
        ValueError: no clients.
    """
    if clients < 1:
        raise ValueError("tracing needs at least one client")
    return 1 / clients


def tracing_accuracy(owners: Sequence[int], guesses: Sequence[int], clients: int) -> Estimate:
    """Return the share of queries whose guessed owner (client index) is right.

    The interval is Clopper-Pearson over queries, given this federation and these reconstructions: both stay
    fixed.

    Args:
        owners: true owner of each query.
        guesses: guessed owner of each query, in the same order.
        clients: number of owners N.
    """
    if not owners:
        return refused(0, "no image was traced", chance(clients))
    hits = sum(owner == guess for owner, guess in zip(owners, guesses, strict=True))
    return Estimate(hits / len(owners), clopper_pearson(hits, len(owners)), len(owners), chance=chance(clients))
