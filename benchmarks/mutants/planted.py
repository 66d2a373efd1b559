"""Write the tables of README.md: faults that are caught, and where each test that plants some by itself stands.

Run: python benchmarks/mutants/planted.py [--before COMMIT]
The exit code is 1 where a test has no successor.
"""

from __future__ import annotations

import argparse
import ast
import csv
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


def tests_of(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the files in which each test function stands, by name."""
    results: dict[str, list[str]] = {}
    for file, text in sorted(sources.items()):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                results.setdefault(node.name, []).append(file)
    return results


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


def counts() -> list[str]:
    """Return a table of what became of the planted faults, by `before.csv` and `now.csv`, as run.py writes them."""
    lines = ["| tree | planted | caught | survived |", "| --- | --- | --- | --- |"]
    for side in ("before", "now"):
        with (HERE / f"{side}.csv").open(newline="") as file:
            outcomes = {row["name"]: row["outcome"] for row in csv.DictReader(file)}
        left = [name for name, outcome in outcomes.items() if not outcome.startswith("caught")]
        survived = f"{len(left)}: {', '.join(left)}" if left else "0"
        lines.append(f"| {side} | {len(outcomes)} | {len(outcomes) - len(left)} | {survived} |")
    return lines


def written(text: str, mark: str, lines: Iterable[str]) -> str:
    """Return the README with `lines` between the marks."""
    head, rest = text.split(f"<!-- {mark} -->\n")
    return (
        head + f"<!-- {mark} -->\n" + "\n".join(lines) + "\n" + f"<!-- /{mark} -->" + rest.split(f"<!-- /{mark} -->")[1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", default="c49250f")
    options = parser.parse_args()
    result = list(rows(at(options.before), today()))
    many = [sum(row[side] != "-" for row in result) for side in (0, 1)]
    lines = [f"{many[0]} such tests before, {many[1]} now.", "", "| before | now | planted |", "| --- | --- | --- |"]
    lines += [f"| {one} | {'the same' if one == two else two} | {planted} |" for one, two, planted in result]
    readme = HERE / "README.md"
    readme.write_text(written(written(readme.read_text(), "planted", lines), "counts", counts()))
    lost = [one for one, two, _ in result if two == "-"]
    print(f"{many[0]} before, {many[1]} now", *(f"LOST {one}" for one in lost), sep="\n")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
