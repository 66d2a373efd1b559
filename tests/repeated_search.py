"""Searches that an attacker repeats: where they end depends on the seed, and on how a processor rounds."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ppbench.run.inversion_result import Inverted

SEEDS = 24
"""Searches at most. On networks with kinks about one in eight ends at the images, which depends on rounding."""


def best_of_seeds(search: Callable[[int], Inverted], x: Tensor, enough: float) -> Inverted:
    """Return the result of least mismatch among seeds 0, 1, ...: the first that has `enough` dB on all of `x`, else the
    best of all; the attacker knows mismatches alone."""
    best = search(0)
    for seed in range(1, SEEDS):
        if min(best.psnr(x)) > enough:
            break
        best = min(best, search(seed), key=lambda result: float("inf") if result.mismatch is None else result.mismatch)
    return best
