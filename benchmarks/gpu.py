"""Runs the parts of `gpu.sh`, each in its share of the time, and writes the page and the archive of what they left."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from ppbench.base.device import check_device, device_name
from ppbench.base.errors import UsageError

HOME = Path(__file__).resolve().parent.parent
DEFENSES = ("none", "dp", "dp_sgd", "ppdl", "spn", "secagg", "pbpfl", "mpdp", "fedpc", "baffle", "tp_smc")
"""Whose every attack runs in the first part."""
GRACE_S = 20
"""Seconds that a part gets to stop by itself when its time is over."""


@dataclass(frozen=True)
class Part:
    """One command. name: of its log and its results; share: of all minutes; command: after the interpreter."""

    name: str
    share: float
    command: Sequence[str]


@dataclass(frozen=True)
class Outcome:
    """How a part ended: `code` is its exit status, None where its time was over first."""

    part: Part
    seconds: float
    code: int | None

    @property
    def word(self) -> str:
        """What the page says of it."""
        if self.code is None:
            return f"did not fit: stopped after {self.seconds:.0f} s"
        return "done" if self.code == 0 else f"FAILED with exit status {self.code}"


def parts(device: str, out: Path, data: Path | None) -> list[Part]:
    """Return the parts in the order in which they run: what says most of the code's health first."""
    cifar = [] if data is None else [f"--dataset=parquet:{data / 'cifar10'}"]
    sweep = ["-m", "ppbench", "sweep", "--device", device]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    figures = [*pytest, "--benchmark-only", "--device", device]
    quick = ["-m", "ppbench", "evaluate", "--defense", "spn", "--device", device]
    return [
        Part("battery", 0.15, [str(HOME / "tests" / "far_evaluation.py"), str(out / "battery"), "pairs", *DEFENSES]),
        Part("evaluation", 0.18, [*quick, "--out", str(out / "evaluation")]),
        *(
            Part(name, 0.1, [*figures, f"--benchmark-json={out / name}.json", str(HOME / "benchmarks" / f"{name}.py")])
            for name in ("bench_device", "bench_training")
        ),
        *(
            Part(name, 0.22, [*sweep, name, *cifar, "--out", str(out / name)])
            for name in ("cifar10-dlnet", "cifar10-resnet20")
        ),
    ]


def run(part: Part, seconds: float, out: Path, device: str = "cpu") -> Outcome:
    """Run a part for at most so many seconds; what it says goes to a file of its name."""
    began = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=HOME,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PPBENCH_FAR": device},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            stop(process)
    return Outcome(part, time.monotonic() - began, code)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a process and its children; kill them where they do not end in `GRACE_S`."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        os.killpg(process.pid, sign)
        try:
            process.wait(GRACE_S)
            return
        except subprocess.TimeoutExpired:
            continue


def machine(device: str) -> dict[str, str]:
    """Return what the figures hang on: device, driver, versions, commit, date."""
    queries = {
        "driver": ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        "commit": ["git", "-C", str(HOME), "rev-parse", "--short=12", "HEAD"],
    }
    answers = {}
    for name, command in queries.items():
        try:
            answers[name] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            answers[name] = "none"
    return {
        "device": f"{device} ({device_name(device)})",
        "driver": answers["driver"],
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "python": platform.python_version(),
        "CPU": f"{platform.machine()}, {os.cpu_count()} cores",
        "commit": answers["commit"],
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def page(about: dict[str, str], outcomes: Sequence[Outcome], out: Path) -> str:
    """Return the page in Markdown: the machine, the parts, the figures, the records."""
    lines = ["# Figures of one machine", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| part | seconds | how it ended | last line |", "| --- | --- | --- | --- |"]
    for outcome in outcomes:
        printed = (out / f"{outcome.part.name}.log").read_text(errors="replace").strip().splitlines()
        last = printed[-1].strip(" =").replace("|", "/")[:160] if printed else ""
        lines.append(f"| {outcome.part.name} | {outcome.seconds:.0f} | {outcome.word} | {last} |")
    for file in sorted(out.glob("bench_*.json")):
        lines += ["", f"## {file.stem}", "", *figures(file)]
    for folder in sorted(path.parent for path in out.glob("*/records")):
        lines += ["", f"## Records of {folder.name}", "", *records(folder)]
    return "\n".join(lines) + "\n"


def figures(file: Path) -> list[str]:
    """Return what the benchmarks of a file kept in `extra_info`, a line each; one cut short leaves it empty."""
    text = file.read_text()
    kept = json.loads(text)["benchmarks"] if text.strip() else []
    rows = [f"- {row['name']}: " + ", ".join(f"{n} {v}" for n, v in row["extra_info"].items()) for row in kept]
    return rows or ["No figure: the part was cut short."]


def records(folder: Path) -> list[str]:
    """Return how many cells of a results folder ended how, and why some failed."""
    kept = [json.loads(file.read_text()) for file in sorted((folder / "records").glob("*.json"))]
    ends = Counter(record["status"] for record in kept)
    why = Counter(record["reason"] for record in kept if record["status"] == "failed")
    rows = [f"- {count} cells {word}" for word, count in sorted(ends.items())]
    return [*(rows or ["- no cell"]), *(f"- {count} failed: {reason}" for reason, count in why.most_common(10))]


def archive(out: Path) -> Path:
    """Write what lies in `out` to one archive beside it and return its path; caches of trainings stay out."""
    path = out.with_suffix(".zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(out.rglob("*")):
            inside = file.relative_to(out)
            if file.is_file() and "cache" not in inside.parts:
                packed.write(file, Path(out.name) / inside)
    return path


def main() -> int:
    """Run all parts; see `gpu.sh`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="as torch names it; cpu tries the parts without a GPU")
    parser.add_argument("--minutes", type=float, default=25.0, help="for everything together")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="a folder; the archive lies beside it")
    parser.add_argument("--data", type=Path, help="a folder with cifar10/*.parquet; else it is downloaded")
    options = parser.parse_args()
    try:
        check_device(options.device)
    except UsageError as refused:
        print(refused, file=sys.stderr)
        return 2
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    ends, outcomes = time.monotonic() + 60 * options.minutes, []
    todo = parts(options.device, out, options.data)
    for number, part in enumerate(todo):  # what one part leaves of its time, the later ones share
        left = (ends - time.monotonic()) * part.share / sum(other.share for other in todo[number:])
        outcomes.append(run(part, max(1.0, left - min(GRACE_S, left / 4)), out, options.device))
        print(f"{part.name}: {outcomes[-1].word}", flush=True)
    (out / "page.md").write_text(page(machine(options.device), outcomes, out))
    print(f"Page: {out / 'page.md'}\nArchive: {archive(out)}")
    return int(any(outcome.code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
