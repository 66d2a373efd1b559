"""What size costs: CPU seconds, peak memory and bytes of many clients, of many cells, and of a page of many records.

    PPBENCH_SHARED=FOLDER python benchmarks/bench_scale.py clients --defense dp     # FOLDER/mnist/*.parquet
    python benchmarks/bench_scale.py cells --cells 100000
    python benchmarks/bench_scale.py page --records 20000

Each measures a process of its own, so that the peak is of nothing else, and with `--keep` adds its line to
`results/scale.json`. Cells are not computed: a sweep of them is planned, in an empty folder and in one that holds a
record of each. CPU seconds count, as wall time depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppbench.base.bars import Bars
from ppbench.questions.labels import LabelScore
from ppbench.records.store import Store
from ppbench.run.evaluation import prepare_results
from ppbench.run.jobs import Done, WorkItem
from ppbench.run.schedule import Scheduler, count_cells, strands
from ppbench.run.suite import load_suite
from ppbench.run.sweep import SweepPlan, plan_sweep

RESULTS = Path(__file__).with_name("results") / "scale.json"
GRIDS = {"dp": ("--grid", "0.01"), "spn": ("--grid", "0.1")}

SUITE = """schema = "ppbench.run.suite/1"
id = "scale"
version = 1
title = "Many cells, which nothing computes"
base = "quick"
seeds = {seeds}

[task]
dataset = "digits"
model = "mlp"
train = 400
clients = 4

[federation]
rounds = 2

[questions]
stages = ["init", "final"]
attack_batch = [1, 2, 4, 8, 16]
attacks = ["dlg", "idlg", "ig", "analytic", "label_recovery"]
victims = 16

[[defense]]
id = "dp"
grid = {grid}
"""
CELLS_A_SEED = 1000
"""Cells of a seed: 20 points (18 values and two controls), two stages, five sizes of batches and five attacks."""


def watched(command: Sequence[str], **environment: str) -> dict[str, float]:
    """Return CPU seconds, wall seconds and peak MB of a command (RuntimeError: it fails), its output on the screen."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return dict(
        cpu_s=round(used.ru_utime + used.ru_stime, 1),
        wall_s=round(time.perf_counter() - began, 1),
        peak_mb=round(used.ru_maxrss / 1024),
    )


def clients(options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a defense on MNIST whose clients have five examples each, in one process."""
    data = Path(os.environ["PPBENCH_SHARED"]) / "mnist"
    federation = f"--clients {options.clients} --train {5 * options.clients} --sample {options.sample}".split()
    training = f"--rounds {options.rounds} --schedule parallel --workers 1".split()
    attack = ["--attack", "label_recovery", "--stage", "final", "--attack-batch", "1", "--victims", "8"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ppbench", "evaluate", "--defense", options.defense, "--out", folder]
        defense = [*GRIDS.get(options.defense, ()), "--dataset", f"parquet:{data}"]
        figures = watched([*command, *defense, *federation, *training, *attack])
        on_disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    options_used = dict(defense=options.defense, clients=options.clients, sample=options.sample, rounds=options.rounds)
    return dict(**options_used, **figures, disk_mb=round(on_disk / 1e6, 1))


class Recorder:
    """An executor that computes nothing: it writes a small record of each cell of a job."""

    capacity = 2

    def __init__(self, plan: SweepPlan) -> None:
        self._configs = {cell.id: cell.config for one in plan.todo for cell in one.cells}
        self._folder, self._jobs = plan.store.folder, list[WorkItem]()
        self._rest = _record_without_config()

    def submit(self, job: WorkItem) -> None:
        """Write the records of a job at once."""
        for cell in job.cells:
            config = json.dumps(self._configs[cell].model_dump(mode="json", by_alias=True))
            text = f'{{"cell_id": "{cell}", "config": {config}, {self._rest}'
            (self._folder / f"{cell}.json").write_text(text, encoding="utf-8")
        self._jobs.append(job)

    def wait(self) -> Done:
        """Return the job that was submitted first."""
        return Done(self._jobs.pop(0))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        return


def _record_without_config() -> str:
    """Return the JSON of a record after its name and configuration."""
    victims = [LabelScore(probe=0, client=0, index=index, label=True) for index in range(16)]
    environment = dict(ppbench="0", python="3", torch="2", device="x86_64", threads=1, dtype="float32")
    parts = dict(
        victims=[victim.model_dump(mode="json") for victim in victims],
        metrics=[],
        utility=dict(accuracy=0.9, low=0.88, high=0.92, n=500, chance=0.1, curve=[], reason=None),
        cost=dict(bytes_up=77752, bytes_down=77752, bytes_setup=80),
        privacy=dict(epsilon=None, delta=None, reason="no noise"),
        status="complete",
        environment=environment,
    )
    return json.dumps(parts)[1:]


def planned(folder: Path, cells: int) -> SweepPlan:
    """Return the plan of a sweep of `cells` cells into `folder`."""
    grid = [round(0.01 * 1.3**power, 6) for power in range(18)]
    file = folder / "suite.toml"
    file.write_text(SUITE.format(seeds=list(range(cells // CELLS_A_SEED)), grid=grid), encoding="utf-8")
    return plan_sweep(load_suite(file), folder / "out")


def schedule(folder: Path, cells: int) -> None:
    """Plan a sweep into an empty folder and schedule it, on an executor that computes nothing."""
    began = time.process_time()
    plan = planned(folder, cells)
    done = time.process_time()
    assert count_cells(plan.todo) == cells
    prepare_results(plan.store, "")
    work = Scheduler(plan.store, Recorder(plan), Bars(quiet=True), strict=False)
    work.run(strands(plan.todo, plan.store.out))
    print(f"planned in {done - began:.1f}, scheduled and recorded in {time.process_time() - done:.1f} CPU s")
    assert len(Store(folder / "out").ids()) == cells


def resume(folder: Path, cells: int) -> None:
    """Plan the sweep of `schedule` again: nothing is left to do."""
    plan = planned(folder, cells)
    assert count_cells(plan.cells) == cells
    assert not plan.todo


def many_cells(options: argparse.Namespace) -> dict[str, Any]:
    """Plan and schedule a sweep, and plan it again with all records there, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        figures = {}
        for step in ("schedule", "resume"):
            call = (
                f"from pathlib import Path; from bench_scale import {step}; {step}(Path({folder!r}), {options.cells})"
            )
            for name, value in watched([sys.executable, "-c", call], PYTHONPATH=str(Path(__file__).parent)).items():
                figures[f"{step}_{name}"] = value
    return dict(cells=options.cells, **figures)


def page(options: argparse.Namespace) -> dict[str, Any]:
    """Draw the page of made-up records, see bench_page.py: seconds are of the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        bench = str(Path(__file__).with_name("bench_page.py"))
        command = [sys.executable, bench, "--records", str(options.records), "--folder", folder]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(printed))


PARTS = {"clients": clients, "cells": many_cells, "page": page}


def main() -> None:
    """Measure a part; one line of JSON on the screen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--keep", default="", metavar="LABEL", help="add the line to results/scale.json, with a label")
    parser.add_argument("--defense", default="dp")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cells", type=int, default=100_000, help=f"a multiple of {CELLS_A_SEED}")
    parser.add_argument("--records", type=int, default=20_000)
    options = parser.parse_args()
    line = PARTS[options.part](options)
    print(json.dumps(line))
    if options.keep:
        kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
        kept.setdefault(options.part, []).append({"label": options.keep, **line})
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
