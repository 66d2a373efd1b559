"""What the same sweep costs in two worktrees, in CPU seconds, and how far apart its figures are.

    python benchmarks/pair_trees.py BEFORE AFTER SUITE OUT.json [--pairs 3] [-- options of `ppbench sweep`]

BEFORE and AFTER are worktrees of two commits, each with its `.venv`; SUITE is a name or a file of both. The whole
command runs in one process (`--engine inline`) with one thread, each time from nothing, in turn: before, after, after,
before, ... CPU seconds are user and system time of that process. Cells are paired by name: equal names ask the same of
the same victims.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any


def spent(tree: Path, suite: str, options: list[str], out: Path) -> float:
    """Return the CPU seconds of one sweep in `tree`, whose records lie in `out` then; a sweep that fails ends all."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [tree / ".venv/bin/ppbench", "sweep", suite, "--engine", "inline", "--out", out, *options]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=one_thread, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):  # 3: a control failed; few victims do not hold all of them
        raise SystemExit(f"{tree}: the sweep ended with {done.returncode}: {done.stderr[-2000:]}")
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


def cells(out: Path) -> dict[str, dict[str, Any]]:
    """Return the complete records of a folder of results by name, each with the seconds that its attack took."""
    results = {}
    for path in (out / "records").glob("*.json"):
        if not path.name.endswith(".timing.json"):
            record = json.loads(path.read_text())
            timing = json.loads(path.with_suffix(".timing.json").read_text())
            results[path.stem] = {**record, "seconds": timing["seconds"]}
    return results


def median_psnr(record: dict[str, Any]) -> dict[str, Any] | None:
    """Return the metric of a record's median PSNR with its interval, None where it has none."""
    result = (metric for metric in record["metrics"] if metric["name"] == "psnr_median" and metric["value"] is not None)
    return next(result, None)


def by_attack(before: dict[str, Any], after: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return by attack and batch: seconds of both; cells; of them compared, alike and inside; the largest change in dB.

    Compared is the median PSNR: alike to .01 dB, inside the interval that the cell had before.
    """
    words = ("before", "after", "cells", "compared", "alike", "inside", "most_db")
    table: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(words, 0.0))
    for name in sorted(before.keys() & after.keys()):
        config = before[name]["config"]
        row = table[f"{config['attack']['id']}, batch {config['batch_size']}"]
        row["before"] += before[name]["seconds"]
        row["after"] += after[name]["seconds"]
        row["cells"] += 1
        old, new = median_psnr(before[name]), median_psnr(after[name])
        if old is None or new is None:
            continue
        gap = abs(old["value"] - new["value"])
        row["compared"] += 1
        row["alike"] += gap < 0.01
        row["inside"] += gap < 0.01 or (old["low"] is not None and old["low"] <= new["value"] <= old["high"])
        row["most_db"] = max(row["most_db"], gap)
    return dict(table)


def main() -> None:
    """Run the pairs and write what they gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("suite")
    parser.add_argument("result", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    own, rest = (sys.argv[1:], []) if "--" not in sys.argv else _split(sys.argv[1:])
    options, pairs = parser.parse_args(own), []
    for turn in range(options.pairs):
        with tempfile.TemporaryDirectory() as folder:
            order = [("before", options.before), ("after", options.after)]
            took = {
                name: spent(tree.absolute(), options.suite, rest, Path(folder) / name)
                for name, tree in order[:: 1 - 2 * (turn % 2)]
            }
            results = {name: cells(Path(folder) / name) for name in took}
        pairs.append({**took, "ratio": took["after"] / took["before"], "attacks": by_attack(**results)})
        print(json.dumps(pairs[-1]), flush=True)
    ratios = [pair["ratio"] for pair in pairs]
    result = {"suite": options.suite, "ratio": statistics.median(ratios), "ratios": ratios, "pairs": pairs}
    options.result.write_text(json.dumps(result, indent=1) + "\n")


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    place = words.index("--")
    return words[:place], words[place + 1 :]


if __name__ == "__main__":
    main()
