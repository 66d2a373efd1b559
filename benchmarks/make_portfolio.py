"""Every defense through the whole portfolio, at one control value each: what leaderboards/portfolio-digits.csv holds.

Run: python benchmarks/make_portfolio.py OUT [DEFENSE ...]
Smaller than `--preset portfolio`, so that fifteen defenses fit an hour of two cores: one control value, batches of one
at random weights, 12 victims, 600 gradient evaluations a victim for every attack that searches, 8 reference runs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ppbench.base.registry import load
from ppbench.federation.contract import Defense
from ppbench.run.evaluation import evaluate

DEFENSES = (
    *(
        "none",
        "full_noise",
        "dp",
        "dp_sgd",
        "ppdl",
        "spn",
        "pbpfl",
        "pbpfl_ext",
        "mpdp",
        "mpdp_h",
        "mp_cdp",
        "mp_dp_naive",
    ),
    *("fedpc", "phong", "baffle"),
)
SMALL: dict[str, Any] = {
    **{"attacks": ("all",), "public": 0.5, "references": 8, "canaries": 70, "candidates": 100, "budget": 600},
    **{"stages": ("init", "audit"), "attack_batch": (1,), "victims": 12, "tuning": 4},
}
ROUNDS = {"pbpfl": 200, "pbpfl_ext": 100, "mpdp": 200, "mpdp_h": 200, "mp_cdp": 200, "mp_dp_naive": 200, "baffle": 100}


def options(name: str) -> dict[str, Any]:
    """Return the evaluation of one defense: the middle of its quick grid, fewer rounds where its setting has many."""
    defense: type[Defense] = load("defenses", name)
    values = defense.grids["quick"]
    found = {"defense": name, **SMALL}
    if values:
        found["grid"] = (values[len(values) // 2],)
    if name in ROUNDS:
        found["rounds"] = ROUNDS[name]
    if name.startswith("mp"):
        found["train"] = 700  # its setting's 300 are too few for 20 equal shards with canaries
    return found


def main(out: Path, names: list[str]) -> None:
    """Run what is missing."""
    for name in names or DEFENSES:
        began = time.perf_counter()
        result = evaluate(out=out, workers=2, **options(name))
        print(f"{name}: {result.computed} cells in {time.perf_counter() - began:.0f} s", flush=True)
        for check in result.checks:
            print(f"  [{check.control}] {check.sentence}", flush=True)
        for reason in sorted({r.reason or "" for r in result.records if r.status != "complete"}):
            print(f"  failed: {reason}", flush=True)
        print(*result.verdict, sep="\n  ", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
