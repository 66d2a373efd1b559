"""Write the table of tests that plant faults by themselves (README.md): where each stood before and stands now.

Run: python benchmarks/mutants/planted.py [--before COMMIT]
The exit code is 1 where a test has no successor.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
TREE = HERE.parents[1]
BEGIN, END = "<!-- planted -->\n", "<!-- /planted -->"


def tests_of(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the files in which each test function stands, by name."""
    found: dict[str, list[str]] = {}
    for file, text in sorted(sources.items()):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name, []).append(file)
    return found


def today() -> dict[str, list[str]]:
    return tests_of({path.name: path.read_text() for path in (TREE / "tests").rglob("test_*.py")})


def at(commit: str) -> dict[str, list[str]]:
    """Return the same of a commit of this repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=TREE, capture_output=True, text=True, check=True).stdout

    files = [name for name in git("ls-tree", "--name-only", commit, "tests/").split() if "/test_" in name]
    return tests_of({name.removeprefix("tests/"): git("show", f"{commit}:{name}") for name in files})


def rows(before: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> Iterable[tuple[str, str, str]]:
    """Yield (id before, id now, what is planted) of every test."""
    about = tomllib.loads((HERE / "planted.toml").read_text())
    for name, planted in about["planted"].items():
        later = about["renamed"].get(name, name)
        yield place(name, before), place(later, now), planted


def place(name: str, where: Mapping[str, list[str]]) -> str:
    """Return a test's id or ids, "-" where there is none."""
    return ", ".join(f"{file}::{name}" for file in where.get(name, [])) or "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", default="c49250f")
    asked = parser.parse_args()
    found = list(rows(at(asked.before), today()))
    counts = [sum(row[side] != "-" for row in found) for side in (0, 1)]
    lines = [
        f"{counts[0]} such tests before, {counts[1]} now.",
        "",
        "| before | now | planted |",
        "| --- | --- | --- |",
    ]
    for one, two, planted in found:
        lines.append(f"| {one} | {'the same' if one == two else two} | {planted} |")
    readme = HERE / "README.md"
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(head + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1])
    lost = [one for one, two, _ in found if two == "-"]
    print(f"{counts[0]} before, {counts[1]} now", *(f"LOST {one}" for one in lost), sep="\n")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
