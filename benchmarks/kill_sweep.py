"""Kill a sweep at random moments and start it again: what is finished must stay, as it is, and be made once.

Run: python benchmarks/kill_sweep.py [--kills 20] [--workers 2] [--seed 0]
The blow is SIGKILL on the command's own process alone, as by the kernel when memory runs out: at its start, while it
trains, while it attacks, while it writes the board. Then the figures are printed as JSON; the exit code is 1 where
anything was lost, changed, made twice, or differs from a sweep that nobody disturbed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ppbench.base.seeds import Seeds
from ppbench.records.schema import Record
from ppbench.records.store import Store
from ppbench.run.sweep import sweep

PLANTED = Path(__file__).parents[1] / "tests" / "planted"
COMMAND = "from ppbench.commands import main; main()"
DERIVED = ("leaderboard.csv", "worst_case.csv")
SUITE = """\
schema = "ppbench.run.suite/1"
id = "kill"
version = 1
title = "Many small cells, to be killed"
seeds = {seeds}

[task]
clients = 2
train = 80

[federation]
rounds = 2

[questions]
attacks = ["label_recovery", "planted_slow"]
attack_batch = [1, 2]
victims = 4
stages = ["init", "final"]

[attack.planted_slow]
seconds = {seconds}

[[defense]]
id = "ppdl"
grid = {grid}
"""


@dataclass
class Watch:
    """Finished files of a folder, as they were when first seen.

    Attributes:
        out: the folder.
        files: by name, digest, mtime in ns and inode.
        changed: names of files that were gone or other when looked at again.
    """

    out: Path
    files: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def count(self) -> int:
        """Return the number of records, without a look at them."""
        return len(list((self.out / "records").glob("*[0-9a-f].json")))

    def look(self) -> int:
        """Compare all files with how they were first seen, take in new ones; return the number of records."""
        names = list((self.out / "records").glob("*[0-9a-f].json"))
        trained = [p for p in (self.out / "cache").glob("*/trained.json") if not p.parent.name.startswith(".")]
        now = {str(path.relative_to(self.out)): _state(path) for path in (*names, *trained)}
        self.changed.update(name for name, state in self.files.items() if now.get(name) != state)
        self.files = now | self.files
        return len(names)


def _state(path: Path) -> tuple[str, int, int]:
    data, seen = path.read_bytes(), path.stat()
    return hashlib.sha256(data).hexdigest(), seen.st_mtime_ns, seen.st_ino


@dataclass(frozen=True)
class Figures:
    """What was seen. Everything from `changed` to `differ` must be 0 or empty.

    Attributes:
        cells, trainings: finished at the end.
        kills: blows that hit a sweep at work; by_phase: where they hit.
        starts: times that the slow attack began in one of `slow_cells` cells; what the blows cost is the difference.
        changed: finished records and trainings whose bytes, time or inode were not the same to the end.
        begun_after_done: starts of the slow attack on a cell whose record was there.
        computed_at_last: cells that one more sweep found to do.
        differ: files that are not what a sweep gives that nobody disturbed.
        seconds: wall time of all.
    """

    cells: int
    trainings: int
    kills: int
    by_phase: Mapping[str, int]
    starts: int
    slow_cells: int
    changed: tuple[str, ...]
    begun_after_done: int
    computed_at_last: int
    differ: tuple[str, ...]
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether nothing was lost, changed, made twice or came out differently."""
        return not (self.changed or self.begun_after_done or self.computed_at_last or self.differ)


def start(suite: Path, out: Path, workers: int, log: Path, engine: str = "local") -> subprocess.Popen[bytes]:
    """Start `ppbench sweep`, which finds the planted plugins."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PLANTED), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "PPBENCH_PLANTED_LOG": str(log),
    }
    how = ["--out", str(out), "--workers", str(workers), "--engine", engine]
    line = [sys.executable, "-c", COMMAND, "sweep", str(suite), "--no-isolate", *how]  # its attacks keep a log
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[bytes]) -> str:
    """Wait for a sweep; return what it printed. Raises RuntimeError unless it ended with 0, 1 or 3 (weak attacks)."""
    printed = (process.communicate()[0] or b"").decode(errors="replace")
    if process.returncode not in (0, 1, 3):
        raise RuntimeError(f"exit code {process.returncode}: {printed[-2000:]}")
    return printed


def until(goal: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until `goal`, or until the process has ended by itself."""
    while process.poll() is None and not goal():
        time.sleep(0.05)


def disturb(
    suite: Path, out: Path, log: Path, cells: int, kills: int, workers: int, draws: random.Random
) -> tuple[Watch, dict[str, int]]:
    """Start a sweep again and again and kill it each time; return what was seen, and in which phase blows hit.

    A fifth of the blows falls at any moment of the start, a fifth while the board is written, the others while cells
    are made: after a random number of new records, such that there are some for all of them.
    """
    watch, phases = Watch(out), dict.fromkeys(("starting", "training", "attacking", "writing", "ended"), 0)
    kinds = ["start"] * (kills // 5) + ["cells"] * (kills - 2 * (kills // 5))
    draws.shuffle(kinds)
    kinds += ["board"] * (kills // 5)
    for index, kind in enumerate(kinds):
        before, began = watch.look(), time.monotonic()
        share = (cells - before) / (1 + kinds[index:].count("cells"))
        goal = cells if kind == "board" else before + int(draws.random() * share)
        process = start(suite, out, workers, log)
        if kind == "start":
            after = draws.uniform(0, 6)
            until(lambda: time.monotonic() > began + after, process)  # noqa: B023
        else:
            until(lambda: watch.count() >= goal, process)  # noqa: B023
            time.sleep(draws.uniform(0, 0.6))
        phase = _phase(process, watch, before, cells)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        phases[phase] += 1
    watch.look()
    return watch, phases


def _phase(process: subprocess.Popen[bytes], watch: Watch, before: int, cells: int) -> str:
    """Return what the sweep is at, by what is on disk and whether it has workers."""
    if process.poll() is not None:
        return "ended"
    now = watch.look()
    if now >= cells:
        return "writing"
    if not workers_of(process.pid):
        return "starting"
    return "attacking" if now > before or now else "training"


def workers_of(pid: int) -> list[int]:
    """Return the worker processes of a sweep (Linux)."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]
    except OSError:
        return []


def starts_of(log: Path, records: list[Record], out: Path) -> tuple[int, int]:
    """Return how often the slow attack began, and how often on a cell whose record was already there."""
    due: dict[tuple[str, str, int, int], int] = {}
    for record in records:
        config = record.config
        if config.attack.id == "planted_slow":
            drawn = Seeds(config.seed).generator(
                "attack", config.attack.id, "", config.threat_model.id, config.stage, config.batch_size
            )
            about = json.dumps(config.defense.parameters, sort_keys=True)
            key = config.defense.id, about, config.batch_size, drawn.initial_seed()
            due[key] = (out / "records" / f"{record.cell_id}.json").stat().st_mtime_ns
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    begun = [one for one in lines if one["event"] == "start"]
    late = 0
    for one in begun:
        key = one["defense"], json.dumps(one["parameters"], sort_keys=True), one["batch"], one["draws"]
        late += one["ns"] > due[key]
    return len(begun), late


def compare(one: Path, two: Path) -> tuple[str, ...]:
    """Return the names of tables and records that differ between two folders, or are in one of them only."""

    def files(out: Path) -> dict[str, bytes]:
        names = [p for p in (out / "records").iterdir() if ".timing" not in p.name]
        return {p.name: p.read_bytes() for p in (*names, *(out / name for name in DERIVED))}

    a, b = files(one), files(two)
    return tuple(sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)))


def measure(folder: Path, kills: int, workers: int, seed: int) -> Figures:
    """Sweep once undisturbed and once with blows, in two folders under `folder`; return what was seen."""
    began, suite, log = time.monotonic(), folder / "kill.toml", folder / "log"
    suite.write_text(SUITE.format(seeds="[0, 1]", seconds="0.4", grid="[0.01, 0.1]"))
    cells = len(sweep(suite, out=folder / "still", engine="inline", isolate=False).records)
    out = folder / "killed"
    watch, phases = disturb(suite, out, log, cells, kills, workers, random.Random(seed))
    finish(start(suite, out, workers, log))
    watch.look()
    records = Store(out).load_all()
    starts, late = starts_of(log, records, out)
    again = sweep(suite, out=out, engine="inline", isolate=False).computed
    watch.look()
    return Figures(
        cells=len(records),
        trainings=sum(name.startswith("cache") for name in watch.files),
        kills=kills - phases["ended"],
        by_phase=phases,
        starts=starts,
        slow_cells=sum(r.config.attack.id == "planted_slow" for r in records),
        changed=tuple(sorted(watch.changed)),
        begun_after_done=late,
        computed_at_last=again,
        differ=compare(folder / "still", out),
        seconds=round(time.monotonic() - began, 1),
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from failing_sweep import fail  # beside this file

    sys.path.insert(0, str(PLANTED))
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.kills, options.workers, options.seed)
        text = SUITE.format(seeds="[0]", seconds="0", grid="[0.1]")
        failures = fail(Path(folder), text, lambda suite, out, log: finish(start(suite, out, options.workers, log)))
    print(json.dumps({"kills": asdict(figures), "failures": asdict(failures)}, indent=1))
    return 0 if figures.sound and figures.cells and failures.sound else 1


if __name__ == "__main__":
    sys.exit(main())
