"""A copy of a tree in which faults are planted, one at a time, and tests are run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WARM = Path(__file__).with_name("warm.py")
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", ".*cache", ".hypothesis", "__pycache__")
LINKS = {"attacks": "attacks", "defenses": "defenses", "shipped_suites": "leaderboards/suites"}
"""Where an older tree kept parts of the package."""
LIMIT_S = 120
_MTIME = count(2_000_000_000, 10)


@dataclass(frozen=True)
class Fault:
    """One planted fault. harm: what would go wrong for a user; old, new: text of `file`; tests: who must find it.

    nightly: only tests of the nightly run find it; else those of a usual run must.
    """

    name: str
    harm: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    nightly: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: "caught", "caught (timeout)", "SURVIVED", or why it could not be planted."""

    name: str
    file: str
    outcome: str
    seconds: float
    found_by: str = ""


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
        words = ["-q", "-p", "no:cacheprovider", "-rfE", "--tb=no", *options, *ids]
        print(json.dumps([words, limit]), file=self.process.stdin, flush=True)
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
            code, first = self.test(fault.tests, LIMIT_S, "-x", *([] if fault.nightly else ["-m", "not nightly"]))
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
    folder = tree / "ppbench_fl.egg-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text("\n".join(lines))
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: ppbench-fl\nVersion: 0.1.0\n")
