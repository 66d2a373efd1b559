"""Plant the faults of `faults.toml`, one at a time, and see whether the tests that must find them do.

Run: python benchmarks/mutants/run.py [NAME ...] [-j 1] [--tree DIR] [--before] [--csv FILE]
Each fault is planted in a copy of the tree, never in the tree itself. First the named tests must pass without a fault.
The exit code is 1 where a fault survives or no longer applies. `--tree DIR --before` runs an older tree (a worktree of
c49250f): the faults as they read there, against the tests that stood there.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WARM = Path(__file__).with_name("warm.py")
FAULTS = Path(__file__).with_name("faults.toml")
TREE = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", ".*cache", ".hypothesis", "__pycache__")
LINKS = {"attacks": "attacks", "defenses": "defenses", "shipped_suites": "leaderboards/suites"}
"""Where an older tree kept parts of the package."""
LIMIT_S = 120
CLEAN_S = 1800
_MTIME = count(2_000_000_000, 10)


@dataclass(frozen=True)
class Fault:
    """One planted fault. harm: what would go wrong for a user; old, new: text of `file`; tests: who must find it."""

    name: str
    harm: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: "caught", "caught (timeout)", "SURVIVED", or why it could not be planted."""

    name: str
    file: str
    outcome: str
    seconds: float
    found_by: str = ""


def faults_of(path: Path, before: bool) -> list[Fault]:
    """Return the faults, as today's tree has them or as the older one had; what that one could not have is left out."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    found = []
    for entry in raw["fault"]:
        old = entry.pop("before", {})
        if before:
            entry = {**entry, "file": raw["files_before"].get(entry["file"], entry["file"]), **old}
        if "absent" not in entry:
            found.append(Fault(**{**entry, "tests": tuple(entry["tests"])}))
    return found


def located(tree: Path, name: str) -> str:
    """Return the id of a test, given as FILE or FILE::ID, or by a function's name alone, whatever file it stands in."""
    if ".py" in name:
        return f"tests/{name}"
    function, _, case = name.partition("[")
    pattern = re.compile(rf"^def {function}\(", re.MULTILINE)
    files = [path for path in sorted((tree / "tests").rglob("test_*.py")) if pattern.search(path.read_text())]
    if len(files) != 1:
        raise LookupError(f"{len(files)} tests are called {function}")
    return f"{files[0].relative_to(tree).as_posix()}::{function}" + (f"[{case}" if case else "")


class Copy:
    """A copy of a tree with an interpreter that finds the package there and everything else where this one does."""

    def __init__(self, tree: Path, home: Path) -> None:
        self.tree = home / "tree"
        shutil.copytree(tree, self.tree, ignore=LEFT_OUT, symlinks=True)
        for name, place in LINKS.items():
            if (self.tree / place).is_dir() and not (self.tree / "ppbench" / name).exists():
                (self.tree / "ppbench" / name).symlink_to(self.tree / place)
        _describe(self.tree)
        venv.create(home / "venv", with_pip=False)
        site = next((home / "venv").glob("lib/python*/site-packages"))
        paths = [str(self.tree), *(p for p in sys.path if Path(p).name == "site-packages")]
        (site / "copy.pth").write_text("\n".join(paths))
        command = [home / "venv" / "bin" / "python", WARM]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=self.tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def test(self, ids: Sequence[str], limit: float, *options: str) -> tuple[int | None, str]:
        """Run tests; return pytest's exit code, None after `limit` seconds, and the id of the first that failed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        asked = ["-q", "-p", "no:cacheprovider", "-rfE", "--tb=no", *options, *ids]
        print(json.dumps([asked, limit]), file=self.process.stdin, flush=True)
        code, text = json.loads(self.process.stdout.readline())
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", text, re.MULTILINE)
        return code, failed[1] if failed else text[-300:]

    def plant(self, fault: Fault) -> Outcome:
        """Plant a fault, run its tests, and mend it again."""
        path = self.tree / fault.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(fault.old) != 1:
            return Outcome(fault.name, fault.file, f"NO LONGER APPLIES: {text.count(fault.old)} places", 0.0)
        began = time.monotonic()
        try:
            _write(path, text.replace(fault.old, fault.new))
            code, first = self.test(fault.tests, LIMIT_S, "-x")
        finally:
            _write(path, text)
        words = {0: "SURVIVED", 1: "caught", None: "caught (timeout)"}.get(code, f"ERROR: pytest ended with {code}")
        return Outcome(fault.name, fault.file, words, round(time.monotonic() - began, 1), first if code else "")


def _write(path: Path, text: str) -> None:
    """Write a source file with a time that no file had before, or a compiled one of before would be taken for it."""
    path.write_text(text, encoding="utf-8")
    os.utime(path, (now := next(_MTIME), now))


def _describe(tree: Path) -> None:
    """Write what an installer would: the entry points that the tree's pyproject.toml names."""
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [line for group, entries in groups.items() for line in (f"[{group}]", *map(" = ".join, entries.items()))]
    folder = tree / "ppbench.egg-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text("\n".join(lines))
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: ppbench\nVersion: 0.1.0\n")


def clean(copy: Copy, faults: Sequence[Fault]) -> Mapping[str, str]:
    """Return, by test, why it cannot be used: it fails without a fault. Found one by one only where any fails."""
    ids = sorted({test for fault in faults for test in fault.tests})
    code, first = copy.test(ids, CLEAN_S)
    if code == 0:
        return {}
    print(f"without a fault pytest ends with {code} ({first}): each test is run alone", flush=True)
    return {test: str(code) for test in ids if (code := copy.test([test], CLEAN_S)[0]) != 0}


def run(tree: Path, faults: Sequence[Fault], jobs: int) -> Iterator[Outcome]:
    """Yield what becomes of each fault, as they end."""
    known, unknown = [], []
    for fault in faults:
        try:
            known.append(replace(fault, tests=tuple(located(tree, test) for test in fault.tests)))
        except LookupError as cause:
            unknown.append(Outcome(fault.name, fault.file, f"NO LONGER APPLIES: {cause}", 0.0))
    yield from unknown
    with tempfile.TemporaryDirectory(prefix="ppbench-mutants-") as home:
        copies: SimpleQueue[Copy] = SimpleQueue()
        first = Copy(tree, Path(home, "0"))
        unusable = clean(first, known)
        for copy in (first, *(Copy(tree, Path(home, str(number))) for number in range(1, jobs))):
            copies.put(copy)

        def one(fault: Fault) -> Outcome:
            if bad := [test for test in fault.tests if test in unusable]:
                return Outcome(fault.name, fault.file, f"ERROR: {bad[0]} fails without the fault", 0.0)
            copy = copies.get()
            try:
                return copy.plant(fault)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(one, known)
        for _ in range(jobs):
            copies.get().process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="faults to plant; all by default")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--tree", type=Path, default=TREE)
    parser.add_argument("--before", action="store_true", help="the tree is the older one")
    parser.add_argument("--csv", type=Path)
    asked = parser.parse_args()
    faults = [f for f in faults_of(FAULTS, asked.before) if not asked.names or f.name in asked.names]
    outcomes = []
    for outcome in run(asked.tree.resolve(), faults, asked.jobs):
        outcomes.append(outcome)
        print(f"{outcome.outcome:<18} {outcome.name} ({outcome.seconds} s) {outcome.found_by}", flush=True)
    if asked.csv is not None:
        with asked.csv.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(asdict(outcomes[0])))
            table.writeheader()
            table.writerows(asdict(outcome) for outcome in sorted(outcomes, key=lambda outcome: outcome.name))
    caught = sum(outcome.outcome.startswith("caught") for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} faults are caught")
    sys.exit(caught < len(outcomes))


if __name__ == "__main__":
    main()
