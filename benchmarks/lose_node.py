"""Sweep on a Ray cluster of three nodes that loses one in the middle, and compare with a sweep in one process.

    pip install 'ppbench-fl[ray]'
    OMP_NUM_THREADS=1 python benchmarks/lose_node.py [--seconds 3]     # two to four minutes on two cores

Three raylets of one CPU each run on this machine; the cells of the slow attack sleep for so many seconds. When a third
of the records are there and each node is at such a cell, one is killed (SIGKILL on its raylet; its workers follow).
Figures are printed as JSON; the exit code is 1 where a record, an image or a table differs, or where the node was lost
too late to matter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kill_sweep import PLANTED, SUITE, compare  # beside this file

from ppbench.records.store import Store
from ppbench.run.sweep import sweep

FAST_DEATH = {"health_check_period_ms": 1000, "health_check_failure_threshold": 5}
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@dataclass(frozen=True)
class Loss:
    """What was seen.

    Attributes:
        nodes: alive before and after the loss.
        cells: of the sweep; records: that were there when the node was killed; complete: at the end.
        lost: jobs that the node took with it: starts of the slow attack beyond one a cell.
        differ: names of records, images and tables that are not those of one process.
        seconds: wall time of the sweep on the cluster.
    """

    nodes: tuple[int, int]
    cells: int
    records: int
    complete: int
    lost: int
    differ: tuple[str, ...]
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether the node was lost in the middle, and every cell came out the same."""
        return self.nodes == (3, 2) and self.records < self.cells == self.complete and not self.differ


def three_nodes() -> tuple[Any, Any]:
    """Return a cluster of three nodes of one CPU each on this machine, and the last of the nodes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": FAST_DEATH})
    cluster.add_node(**NODE)
    return cluster, cluster.add_node(**NODE)


def alive() -> int:
    """Return how many nodes are alive."""
    import ray

    return sum(node["Alive"] for node in ray.nodes())


def measure(folder: Path, seconds: float) -> Loss:
    """Sweep in this process, then on the cluster that loses a node; return what was seen."""
    import ray

    suite, log, out = folder / "nodes.toml", folder / "log", folder / "cluster"
    suite.write_text(SUITE.format(seeds="[0]", seconds=seconds, grid="[0.1]"))
    cells = len(sweep(suite, out=folder / "alone", engine="inline", isolate=False).records)
    os.environ["PPBENCH_PLANTED_LOG"] = str(log)  # before the nodes start: their workers inherit it
    cluster, last = three_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    before, seen = alive(), list[int]()

    def count() -> int:
        return len(list((out / "records").glob("*[0-9a-f].json")))

    def busy() -> int:
        events = [json.loads(line)["event"] for line in log.read_text().splitlines()] if log.is_file() else []
        return events.count("start") - events.count("end")

    def lose() -> None:
        while (now := count()) < cells // 3 or (busy() < before and now < 2 * cells // 3):
            time.sleep(0.02)
        seen.append(count())
        cluster.remove_node(last, allow_graceful=False)

    began, killer = time.monotonic(), threading.Thread(target=lose, daemon=True)
    killer.start()
    try:
        sweep(suite, out=out, engine="ray", workers=3, isolate=False)
        took = time.monotonic() - began
        killer.join(30)
        after = alive()
    finally:
        ray.shutdown()
        cluster.shutdown()
    records = Store(out).load_all()
    starts = sum(json.loads(line)["event"] == "start" for line in log.read_text().splitlines())
    return Loss(
        nodes=(before, after),
        cells=cells,
        records=seen[0],
        complete=sum(record.status == "complete" for record in records),
        lost=starts - sum(record.config.attack.id == "planted_slow" for record in records),
        differ=compare(folder / "alone", out),
        seconds=round(took, 1),
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a cell of the slow attack")
    options = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PLANTED), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(PLANTED))
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.seconds)
    print(json.dumps(asdict(figures)))
    return int(not figures.sound)


if __name__ == "__main__":
    sys.exit(main())
