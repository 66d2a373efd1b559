"""Make a folder of results that a sweep left the committed board of that name: accept, pack, write table and manifest.

Run: python benchmarks/publish_board.py FOLDER NAME --command TEXT --cpu-hours H --reason TEXT
FOLDER stays as it is. leaderboards/results/NAME gets records.zip, worst_case.csv and manifest.toml; what `ppbench
baseline accept` refuses is not published. H: processor hours of the sweep, trainings and all, as `time` tells them;
hours that attacks alone took (wall clock) are added up from the cells.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

from ppbench.records.archive import pack, unpack
from ppbench.records.store import Store
from ppbench.report.accepted import history
from ppbench.report.baseline import accept
from ppbench.run.recheck import recheck

RESULTS = Path(__file__).parents[1] / "leaderboards" / "results"


def attack_hours(folder: Path) -> float:
    """Return the hours, wall clock, that the attacks of all cells took."""
    return sum(json.loads(path.read_text())["seconds"] for path in folder.glob("records/*.timing.json")) / 3600


def publish(args: argparse.Namespace) -> None:
    """Write a committed board. Raises UsageError where the results have problems."""
    board = RESULTS / args.name
    with tempfile.TemporaryDirectory() as made:
        base, packed = Path(made) / "base", Path(made) / "records.zip"
        if (board / "records.zip").is_file():  # whose history goes on
            unpack(board / "records.zip", base)
        accept(args.folder, base, args.reason, recheck)
        pack(base, packed)
        board.mkdir(parents=True, exist_ok=True)
        (board / "records.zip").write_bytes(packed.read_bytes())
        (board / "worst_case.csv").write_bytes((base / "worst_case.csv").read_bytes())
        accepted, records = history(base)[-1], Store(base).load_all()
    where = records[0].environment
    about = {
        "command": args.command,
        "accepted": accepted.date,
        "machine": args.machine,
        "ppbench": where.ppbench,
        "torch": where.torch,
        "python": where.python,
        "cells": len(records),
        "seeds": sorted({r.config.seed for r in records}),
        "cpu_hours": args.cpu_hours,
        "attack_hours": round(attack_hours(args.folder), 2),
        "records_digest": accepted.digest,
        "archive_sha256": hashlib.sha256((board / "records.zip").read_bytes()).hexdigest(),
    }
    lines = [
        "# What was run, where and when; records: records.zip.",
        *(f"{k} = {json.dumps(v)}" for k, v in about.items()),
    ]
    (board / "manifest.toml").write_text("\n".join(lines) + "\n")


def main() -> int:
    """Publish what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    for name in ("command", "reason"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--cpu-hours", type=float, required=True)
    parser.add_argument("--machine", default="two shared CPU cores, x86_64")
    publish(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
