"""Plant the faults of `faults.toml`, one at a time, and see whether the tests that must find them do.

Run: python benchmarks/mutants/run.py [NAME ...] [-j 1] [--tree DIR] [--before] [--csv FILE] [--check]
Each fault is planted in a copy of the tree, never in the tree itself. First the named tests must pass without a fault.
The exit code is 1 where a fault survives or no longer applies. `--tree DIR --before` runs an older tree (a worktree of
c49250f): the faults as they read there, against the tests that stood there.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue

from planting import Copy, Fault, Outcome

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FAULTS = Path(__file__).with_name("faults.toml")
TREE = Path(__file__).parents[2]
CLEAN_S = 1800


def faults_of(path: Path, before: bool) -> list[Fault]:
    """Return the faults, as today's tree has them or as the older one had; what that one could not have is left out."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    results = []
    for entry in raw["fault"]:
        old = entry.pop("before", {})
        if before:
            entry = {**entry, "file": raw["files_before"].get(entry["file"], entry["file"]), **old}
        if "absent" not in entry:
            results.append(Fault(**{**entry, "tests": tuple(entry["tests"])}))
    return results


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


def stale(tree: Path, faults: Sequence[Fault]) -> Iterator[Outcome]:
    """Yield the faults that no longer apply: their text is not there once, or a test is not."""
    for fault in faults:
        path = tree / fault.file
        places = path.read_text(encoding="utf-8").count(fault.old) if path.is_file() else 0
        try:
            why = "" if places == 1 else f"{places} places"
            for test in fault.tests:
                located(tree, test)
        except LookupError as cause:
            why = str(cause)
        if why:
            yield Outcome(fault.name, fault.file, f"NO LONGER APPLIES: {why}", 0.0)


def clean(copy: Copy, faults: Sequence[Fault]) -> Mapping[str, str]:
    """Return, by test, why it cannot be used: it fails without a fault. Found one by one only where any fails."""
    ids = sorted({test for fault in faults for test in fault.tests})
    code, first = copy.test(ids, CLEAN_S)
    if code == 0:
        return {}
    print(f"without a fault pytest ends with {code} ({first}): each test is run alone", flush=True)
    return {test: first for test in ids for code, first in [copy.test([test], CLEAN_S)] if code != 0}


def run(tree: Path, faults: Sequence[Fault], jobs: int) -> Iterator[Outcome]:
    """Yield what becomes of each fault, as they end."""
    gone = list(stale(tree, faults))
    yield from gone
    names = {outcome.name for outcome in gone}
    known = [
        replace(fault, tests=tuple(located(tree, test) for test in fault.tests))
        for fault in faults
        if fault.name not in names
    ]
    with tempfile.TemporaryDirectory(prefix="ppbench-mutants-") as home:
        copies: SimpleQueue[Copy] = SimpleQueue()
        first = Copy(tree, Path(home, "0"))
        unusable = clean(first, known)
        for copy in (first, *(Copy(tree, Path(home, str(number))) for number in range(1, jobs))):
            copies.put(copy)

        def one(fault: Fault) -> Outcome:
            if bad := [test for test in fault.tests if test in unusable]:
                return Outcome(fault.name, fault.file, f"ERROR without the fault: {unusable[bad[0]]}", 0.0)
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
    parser.add_argument("--check", action="store_true", help="say which faults no longer apply, and plant none")
    options = parser.parse_args()
    faults = [f for f in faults_of(FAULTS, options.before) if not options.names or f.name in options.names]
    if options.check:
        gone = [f"{outcome.name}: {outcome.outcome}" for outcome in stale(options.tree.resolve(), faults)]
        print(*gone, f"{len(faults) - len(gone)} of {len(faults)} faults apply", sep="\n")
        sys.exit(bool(gone))
    outcomes = []
    for outcome in run(options.tree.resolve(), faults, options.jobs):
        outcomes.append(outcome)
        print(f"{outcome.outcome:<18} {outcome.name} ({outcome.seconds} s) {outcome.found_by}", flush=True)
    if options.csv is not None:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(asdict(outcomes[0])))
            table.writeheader()
            table.writerows(asdict(outcome) for outcome in sorted(outcomes, key=lambda outcome: outcome.name))
    caught = sum(outcome.outcome.startswith("caught") for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} faults are caught")
    sys.exit(caught < len(outcomes))


if __name__ == "__main__":
    main()
