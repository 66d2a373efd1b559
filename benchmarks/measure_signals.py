"""What signals at random moments leave of an evaluation: codes, processes, files, records.

Run: python benchmarks/measure_signals.py [--signals 30] [--seed 0]
A small evaluation runs in a session of its own; at a moment drawn from its undisturbed length one of SIGTERM, SIGHUP
and SIGINT goes to all its processes; then the same command runs to its end. One run in three has one worker, the others
two. Records are compared byte for byte with those of an undisturbed run. The exit code is 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

WORDS = (
    "--defense dp --grid 0.1 --rounds 3 --victims 4 --attack dlg,adaptive_dp,label_recovery --set dlg.budget=200 "
    "--set adaptive_dp.budget=200 --train 200 --clients 4 --stage init,final --attack-batch 1,2 --tuning 0"
)


@dataclass(frozen=True)
class Outcome:
    """One signal. after, took: seconds; orphans: processes left 5 s later; strays: files after the next run; late:
    whether all had been said already."""

    name: str
    workers: int
    after: float
    code: int
    took: float
    orphans: int
    strays: int
    equal: bool
    noise: bool
    late: bool

    @property
    def right(self) -> bool:
        """Whether all is as promised; what came before the program began ends it as the system does."""
        number = getattr(signal, self.name)
        return (
            self.code in ((0, 3) if self.late else (128 + number, -number))
            and not (self.orphans or self.strays or self.noise)
            and self.equal
        )


def started(out: Path, workers: int, log: Path) -> subprocess.Popen[bytes]:
    """Start the evaluation in a session of its own."""
    command = [
        sys.executable,
        "-m",
        "ppbench",
        "evaluate",
        *WORDS.split(),
        "--workers",
        str(workers),
        "--out",
        str(out),
    ]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, preexec_fn=hearing)


def hearing() -> None:
    """Take back what a shell's background, or nohup, has its programs ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def left(session: int) -> int:
    """Return how many processes of a session live."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        count += int(words[3]) == session and words[0] != "Z"
    return count


def kept(out: Path) -> dict[str, bytes]:
    """Return what results are: records and images."""
    files = (path for path in sorted((out / "records").glob("*")) if not path.name.endswith(".timing.json"))
    return {path.name: path.read_bytes() for path in files}


def tried(number: int, workers: int, after: float, folder: Path, whole: dict[str, bytes]) -> Outcome:
    """Send one signal, and run the same command once more."""
    log, out = folder / "said", folder / "out"
    process = started(out, workers, log)
    time.sleep(after)
    began, late = time.monotonic(), bool(kept(out)) and b"leaderboard.html" in log.read_bytes()
    if process.poll() is None:
        os.killpg(process.pid, number)
    code = process.wait(60)
    took = time.monotonic() - began
    while left(process.pid) and time.monotonic() < began + took + 5:
        time.sleep(0.05)
    orphans, printed = left(process.pid), log.read_text(errors="replace")
    started(out, workers, folder / "again").wait()
    strays = sum(path.name.endswith(".tmp") for path in out.rglob("*"))
    noise = any(word in printed for word in ("Traceback", "leaked", "Exception"))
    name = signal.Signals(number).name
    return Outcome(name, workers, after, code, took, orphans, strays, kept(out) == whole, noise, late)


def main() -> int:
    """Print a line a signal, and their sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--signals", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options, root = parser.parse_args(), Path(tempfile.mkdtemp(prefix="ppbench-signals-"))
    began = time.monotonic()
    started(root / "whole", 2, root / "said").wait()
    length, whole, draw = time.monotonic() - began, kept(root / "whole"), random.Random(options.seed)
    print(f"undisturbed: {length:.1f} s, {len(whole)} files")
    outcomes = []
    for number in range(options.signals):
        which = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)[number % 3]
        folder = root / str(number)
        folder.mkdir()
        outcomes.append(tried(which, 1 + (number % 9 < 6), draw.uniform(0.2, length), folder, whole))
        print(outcomes[-1], flush=True)
    wrong = sum(not one.right for one in outcomes)
    slow = max(one.took for one in outcomes)
    print(f"{len(outcomes)} signals, {wrong} with anything wrong; the slowest end took {slow:.1f} s")
    shutil.rmtree(root)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
