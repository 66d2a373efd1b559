"""Write docs/claims.md from our published records and benchmarks: `python docs/make_claims.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

from ppbench.claims.page import write_claims

PAGE = Path(__file__).with_name("claims.md")
ROOT = PAGE.parent.parent
TIMED = ("baffle", "perturbation", "rounds")
"""Benchmarks whose figures are ratios of times that papers claim."""


def page() -> str:
    """Return the page from every archive and baseline in leaderboards/results and the figures of the benchmarks."""
    results = ROOT / "leaderboards" / "results"
    archives = [*results.glob("*/records.zip"), *results.glob("*/baseline")]
    return write_claims(sorted(archives), [ROOT / "benchmarks" / "results" / f"{name}.json" for name in TIMED])


def main(words: list[str]) -> int:
    """Write the page, or with --check say whether it is what the records give; the exit code."""
    if words not in ([], ["--check"]):
        print("usage: python docs/make_claims.py [--check]", file=sys.stderr)
        return 2
    text = page()
    if words and PAGE.read_text(encoding="utf-8") != text:
        print("docs/claims.md is not what the records give; run: python docs/make_claims.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
