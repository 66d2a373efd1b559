"""Weak scaling of a sweep: 1, 2 and 4 workers, each with the same work, on idle cores.

    OMP_NUM_THREADS=1 python benchmarks/bench_workers.py --keep            # 12 minutes on two idle cores
    OMP_NUM_THREADS=1 python benchmarks/bench_workers.py --workers 1 2 --seeds 1 --repeats 1 --budget 20   # tries it

A worker gets `--seeds` evaluations: a training of digits under `dp` and both controls, and `ig` on eight images at two
stages. So the wall time of the whole command, with start, self-test and board, would stay equal if nothing was shared.
Efficiency is the time of one worker over that of n, in turn; with more workers than cores it is at best cores / n.
`--keep` writes results/workers.json and draws
docs/images/weak-scaling.svg of it. The script refuses to keep figures
where other processes take the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas
import seaborn
from bench_scale import watched  # beside this file

from ppbench.report.page.figures import STYLE

RESULTS = Path(__file__).with_name("results") / "workers.json"
FIGURE = Path(__file__).parents[1] / "docs" / "images" / "weak-scaling.svg"
SUITE = """schema = "ppbench.run.suite/1"
id = "weak"
version = 1
title = "The same work for each worker"
base = "quick"
seeds = {seeds}

[task]
dataset = "digits"
model = "mlp"
train = 400
clients = 4

[federation]
rounds = 20

[questions]
stages = ["init", "final"]
attack_batch = [1]
attacks = ["ig"]
victims = 8

[attack.ig]
budget = {budget}

[[defense]]
id = "dp"
grid = [0.1]
"""


def sweep_seconds(workers: int, seeds: int, budget: int) -> dict[str, float]:
    """Return wall and CPU seconds of a sweep of `seeds` evaluations for each of `workers` workers."""
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "weak.toml"
        suite.write_text(SUITE.format(seeds=list(range(workers * seeds)), budget=budget), encoding="utf-8")
        where = ["--out", f"{folder}/out", "--workers", str(workers), "--engine", "local"]
        figures = watched([sys.executable, "-m", "ppbench", "sweep", str(suite), "--no-isolate", *where])
        records = len(list((Path(folder) / "out" / "records").glob("*[0-9a-f].json")))
    return dict(workers=workers, records=records, **figures)


def measured(options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the runs of every repeat with its efficiency, the numbers of workers in turn."""
    runs = []
    for repeat in range(options.repeats):
        turn = [sweep_seconds(workers, options.seeds, options.budget) for workers in options.workers]
        runs += [dict(repeat=repeat, **run, efficiency=round(turn[0]["wall_s"] / run["wall_s"], 3)) for run in turn]
    return runs


def draw(runs: Sequence[dict[str, Any]], cores: int, path: Path) -> None:
    """Draw efficiency over workers: the mean, its range, each run, and the most that so many cores allow."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "workers"}):
        figure = matplotlib.figure.Figure(figsize=(4.2, 3), layout="constrained")
        axes = figure.subplots()
        frame = pandas.DataFrame(runs)
        seaborn.lineplot(frame, x="workers", y="efficiency", errorbar=("pi", 100), marker="o", ax=axes)
        seaborn.stripplot(frame, x="workers", y="efficiency", color=".3", size=3, native_scale=True, ax=axes)
        counts = sorted(set(frame["workers"]))
        axes.plot(counts, [min(1, cores / count) for count in counts], color=".6", linestyle=":")
        axes.set(xticks=counts, ylim=(0, 1.1), ylabel="time of 1 worker / time of n")
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> int:
    """Measure and print a line of JSON; with `--keep` write the figures too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="the first is what others are over")
    parser.add_argument("--seeds", type=int, default=8, help="evaluations for each worker")
    parser.add_argument("--budget", type=int, default=300, help="gradient evaluations of the attack")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--figure", type=Path, help="draws the runs to this file")
    options = parser.parse_args()
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if options.keep and load > 0.5:
        print(f"Load is {load:.1f} on {cores} cores; keep figures of idle cores.", file=sys.stderr)
        return 2
    runs = measured(options)
    about = dict(cores=cores, load=round(load, 2), seeds=options.seeds, budget=options.budget, runs=runs)
    print(json.dumps(about))
    if options.figure or options.keep:
        draw(runs, cores, options.figure or FIGURE)
    if options.keep:
        RESULTS.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
