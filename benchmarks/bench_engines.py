"""What an engine costs beside the cells: worker starts, questions, scores, files, the board.

Run: python benchmarks/bench_engines.py [--cells 24] [--seconds 5] [--workers 1 2] [--engine local]
Cells are those of a planted attack that sleeps, so that other people's load on the cores hardly matters; trainings are
done before. Overhead is (wall x workers - seconds of all cells) / seconds of all cells, of the engine alone and of the
whole sweep with its canaries and its board; `cpu` is the same in processor seconds beside the sleep, which a loaded
machine does not stretch. The same cells without sleep tell what of it each cell costs: the rest is paid once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLANTED = Path(__file__).parents[1] / "tests" / "planted"
LIMIT = 0.03
POINTS = 3
"""Points of an evaluation of DP at one value, with its controls."""


@dataclass(frozen=True)
class Overhead:
    """Shares of the seconds that cells took, which are 1.

    Attributes:
        workers, cells: of the sweep.
        seconds: of a cell's sleep.
        engine: wall time of the engine from its start to its end, times workers, beyond the cells.
        whole: the same of the sweep, with plan, canaries and board.
        cpu: processor seconds of the engine's processes, all of them beyond the cells' sleep.
        per_cell: what each further cell adds to `engine`.
        once_s: wall seconds of the engine that are paid once, mostly starts of processes.
    """

    workers: int
    cells: int
    seconds: float
    engine: float
    whole: float
    cpu: float
    per_cell: float
    once_s: float


@dataclass(frozen=True)
class Run:
    """One sweep: wall seconds of the engine and of all, processor seconds, and the seconds of its cells."""

    engine: float
    whole: float
    cpu: float
    cells: float


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def run(folder: Path, engine: str, workers: int, cells: int, seconds: float) -> Run:
    """Sweep `cells` cells that sleep so long, in a new folder whose trainings are there."""
    from ppbench.base.bars import Bars
    from ppbench.claims.check import PAPER_CLAIMS
    from ppbench.records.store import Store, Timing
    from ppbench.report.controls import check_controls
    from ppbench.report.page.board import write_board
    from ppbench.run.config import configure
    from ppbench.run.evaluation import compute
    from ppbench.run.executors import make_executor
    from ppbench.run.experiment import resolve
    from ppbench.run.jobs import WorkItem, work
    from ppbench.run.schedule import plan_cells, unfinished

    batches = tuple(range(1, cells // POINTS + 1))
    options: dict[str, Any] = {"defense": "dp", "grid": (0.1,), "attacks": ("planted_slow",), "attack_batch": batches}
    small: dict[str, Any] = {"clients": 4, "train": 200, "rounds": 1, "victims": 4, "stages": ("init",)}
    experiment = resolve(configure(**options, **small, settings={"planted_slow.seconds": seconds}))
    store = Store(folder)
    store.prepare()
    for point in range(POINTS):
        work(WorkItem(experiment, folder, point))
    began, cpu = time.perf_counter(), _cpu()
    cells_of = plan_cells([experiment])
    todo = unfinished(cells_of, store)
    at = time.perf_counter()
    compute(cells_of, todo, store, make_executor(engine, workers, lambda rounds: None), Bars(quiet=True), strict=False)
    took, used = time.perf_counter() - at, _cpu() - cpu
    write_board(store, PAPER_CLAIMS)
    check_controls(store.load_all())
    times = [Timing.model_validate_json(p.read_text()).seconds for p in store.folder.glob("*.timing.json")]
    assert len(times) == cells
    return Run(took, time.perf_counter() - began, used, sum(times))


def measure(engine: str, workers: int, cells: int, seconds: float) -> Overhead:
    """Return the overhead of an engine."""
    with tempfile.TemporaryDirectory() as folder:
        idle = run(Path(folder) / "idle", engine, workers, cells, 0.0)
        few = run(Path(folder) / "few", engine, workers, POINTS * 2, 0.0)
        full = run(Path(folder) / "full", engine, workers, cells, seconds)
    each = max(0.0, (idle.engine - few.engine) / (cells - POINTS * 2))  # wall seconds; workers share the cells
    return Overhead(
        workers=workers,
        cells=cells,
        seconds=seconds,
        engine=(full.engine * workers - full.cells) / full.cells,
        whole=(full.whole * workers - full.cells) / full.cells,
        cpu=full.cpu / full.cells,
        per_cell=each * workers / seconds,
        once_s=full.engine - full.cells / workers - each * cells,
    )


def main() -> int:
    """Measure and print; the exit code is 1 where a whole sweep costs more than 3 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=24, help=f"a multiple of {POINTS}")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--engine", default="local")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(PLANTED)
    sys.path.insert(0, str(PLANTED))
    results = [measure(options.engine, workers, options.cells, options.seconds) for workers in options.workers]
    print(json.dumps([asdict(one) for one in results], indent=1))
    return int(any(one.engine > LIMIT for one in results))


if __name__ == "__main__":
    sys.exit(main())
