"""What `ppbench.invert` makes of networks as people write them, beside the same networks written by formula.

    OMP_NUM_THREADS=1 python benchmarks/measure_networks.py 0 36 200

Cases FIRST to LAST of `tests/users_networks.py`: layers, modes by layer, what is frozen, containers, drawn by a seed;
`dlg` with labels, so many evaluations. "alike" is within 1 dB, or above 60 dB in both.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

from torch import Tensor, nn

import ppbench
from ppbench.base.errors import UsageError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import users_networks

EXACT = 60.0
"""Decibels from which pictures count as one: how far a search goes on from there is rounding."""


def decibels(case: users_networks.Case, module: nn.Module, gradient: list[Tensor], budget: int) -> float:
    """Return the mean PSNR of what `dlg` finds, at most `EXACT` an image."""
    inversion = ppbench.invert(module, gradient, users_networks.SHAPE, case.y, budget=budget, restarts=0)
    return sum(min(value, EXACT) for value in inversion.psnr(case.x)) / len(case.x)


def outcome(case: users_networks.Case, budget: int) -> tuple[str, str]:
    """Return what came out, in a word and in figures."""
    gradient = case.gradient or [p.detach().clone() + 1 for p in case.module.parameters() if p.requires_grad]
    try:
        value = decibels(case, case.module, gradient, budget)
    except UsageError as error:
        return ("refused truly" if case.refusal and case.refusal in str(error) else "refused wrongly"), str(error)
    if case.refusal:
        return "not refused", case.refusal
    plain = decibels(case, case.plain, case.plain_gradient(), budget)
    return ("alike" if abs(value - plain) <= 1 else "other"), f"{value:.1f} dB, by formula {plain:.1f} dB"


def main(first: int, last: int, budget: int) -> None:
    """Print a line a case, and how many came out how."""
    warnings.simplefilter("ignore")
    counts = Counter[str]()
    for seed in range(first, last):
        case = users_networks.case(seed)
        word, figures = outcome(case, budget)
        counts[word] += 1
        print(f"{seed:4} {word:15} {figures} | {case.about}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
