"""Entries of leaderboards/register.toml, as .github/workflows/register.yml asks for them.

    python benchmarks/registered.py list            the names of all entries, as JSON
    python benchmarks/registered.py install NAME    what pip is to install
    python benchmarks/registered.py run NAME OUT    is it what is pinned, and does its suite give the same figures?

Exit code 0: all is as pinned; 1: something differs, or cells failed; 3: controls do not hold.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from ppbench.base.errors import UsageError, because, shown
from ppbench.base.registry import GROUP_NOUNS, PluginGroup, find
from ppbench.base.toml_files import Loc, TomlFile, shipped, toml_file
from ppbench.ledger.form import ShownWord
from ppbench.ledger.submission import CodeDigest, entry_of
from ppbench.records.schema import CellConfig, Record
from ppbench.records.scores import Strict

ROOT = Path(__file__).resolve().parent.parent
REGISTER = ROOT / "leaderboards" / "register.toml"

FIGURE_TOLERANCE = 1e-6
"""Tolerance of a figure without an interval."""
_COMMIT = re.compile(r"git\+https://\S+@[0-9a-f]{40}")
Argument = Annotated[str, Field(pattern=r"^[^-\s]\S*$", max_length=500)]
ENTRY_GROUPS: tuple[tuple[Literal["defense", "attack"], PluginGroup], ...] = (
    ("defense", "defenses"),
    ("attack", "attacks"),
)


class RegisteredFigure(Strict):
    """A metric of one cell at random weights: of `attack` on `defense`, at `control` where it has a parameter."""

    defense: ShownWord
    control: float | None = None
    attack: ShownWord
    metric: ShownWord
    value: float

    @property
    def words(self) -> str:
        """For sentences: "psnr_median of analytic on dp at 0.1"."""
        at = "" if self.control is None else f" at {self.control:g}"
        return f"{self.metric} of {self.attack} on {self.defense}{at}"

    def fits(self, config: CellConfig) -> bool:
        """Return whether the figure belongs to a cell with this configuration."""
        control = None if config.defense.control is None else config.defense.control.value
        named = (config.defense.id, control, config.attack.id, config.stage)
        return named == (self.defense, self.control, self.attack, "init")


class RegisterEntry(Strict):
    """A pinned plugin of another package.

    install: argument of pip install: PACKAGE==VERSION, git+https://...@COMMIT, or a folder of the repository that the
    register lies in. code: digest of its source as installed. suite: a shipped one, or a TOML file of that repository.
    """

    name: ShownWord
    package: Argument
    version: Argument
    install: Argument
    code: CodeDigest
    paper: Annotated[str, Field(min_length=1, max_length=2000)]
    licence: Annotated[str, Field(min_length=1, max_length=100)]
    suite: Argument
    figure: tuple[RegisteredFigure, ...] = ()


class Register(Strict):
    """The register file."""

    schema_: Literal["ppbench.register/1"] = Field(alias="schema")
    defense: tuple[RegisterEntry, ...] = ()
    attack: tuple[RegisterEntry, ...] = ()

    def entries(self) -> Iterator[tuple[PluginGroup, RegisterEntry]]:
        """Yield all entries, each with the group of its plugin."""
        for kind, group in ENTRY_GROUPS:
            yield from ((group, entry) for entry in getattr(self, kind))

    def named(self, name: str) -> tuple[PluginGroup, RegisterEntry]:
        """Return the entry called `name` with its group; UsageError: there is none."""
        for group, entry in self.entries():
            if entry.name == name:
                return group, entry
        raise UsageError(f"The register has no entry {shown(name)}; see leaderboards/register.toml.")


def load_register(path: Path) -> Register:
    """Return a register; UsageError: a fault in it, by file, line and key."""
    source = toml_file(path, "register")
    try:
        register = Register.model_validate(source.raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        instead = "" if first["type"] == "missing" else f", not {shown(first['input'])}"
        raise source.error(first["loc"], f"{because(ValueError(first['msg']))}{instead}.") from error
    names = Counter(entry.name for _, entry in register.entries())
    for kind, _ in ENTRY_GROUPS:
        for place, entry in enumerate(getattr(register, kind)):
            _check(source, (kind, place), entry)
            if names[entry.name] > 1:
                raise source.error((kind, place, "name"), f"{shown(entry.name)} is there twice.")
    return register


def _check(source: TomlFile, loc: Loc, entry: RegisterEntry) -> None:
    """Refuse an entry that pins nothing or whose suite does not exist (UsageError)."""
    root = source.path.resolve().parent.parent
    pinned = entry.install == f"{entry.package}=={entry.version}" or _COMMIT.fullmatch(entry.install)
    if not pinned and not (_inside(root, entry.install) and (root / entry.install).is_dir()):
        right = f"{entry.package}=={entry.version}, git+https://...@COMMIT or a folder of this repository"
        raise source.error((*loc, "install"), f"{shown(entry.install)} pins nothing; give {right}.")
    if entry.suite not in shipped() and not (_inside(root, entry.suite) and (root / entry.suite).is_file()):
        raise source.error((*loc, "suite"), f"{shown(entry.suite)} is no suite; give a shipped one or a TOML file.")


def _inside(root: Path, name: str) -> bool:
    return (root / name).resolve().is_relative_to(root)


def pin_faults(group: PluginGroup, entry: RegisterEntry) -> list[str]:
    """Return the differences between the pinned and the installed plugin, a sentence each."""
    if find(group, entry.name) is None:
        return [f"The {GROUP_NOUNS[group]} {shown(entry.name)} is not installed here; install {entry.install}."]
    here = entry_of(group, entry.name)
    pairs = (("package", entry.package, here.package), ("version", entry.version, here.version))
    compared = [*pairs, ("code", entry.code, here.code)]
    return [f"{entry.name}: {what} {one} is pinned, and here is {two}." for what, one, two in compared if one != two]


def moved_figures(entry: RegisterEntry, records: Sequence[Record]) -> list[str]:
    """Return the figures of an entry outside the 95 % intervals of `records`, a sentence each."""
    sentences = []
    for figure in entry.figure:
        metric = next((r.metric(figure.metric) for r in records if figure.fits(r.config)), None)
        if metric is None or metric.value is None:
            sentences.append(f"{entry.name}: {figure.words} was {figure.value:.6g}, and is not there now.")
            continue
        low, high = (metric.value if end is None else end for end in (metric.low, metric.high))
        if not low - FIGURE_TOLERANCE <= figure.value <= high + FIGURE_TOLERANCE:
            now = f"{metric.value:.6g} [{low:.6g}, {high:.6g}]"
            sentences.append(f"{entry.name}: {figure.words} was {figure.value:.6g}, and now is {now}.")
    return sentences


def run(name, out, engine="local"):
    """Compute an entry's suite into `out`, print what differs, and return the exit code."""
    group, entry = load_register(REGISTER).named(name)
    if values := pin_faults(group, entry):
        print(*values, sep="\n")
        return 1
    from ppbench.base.bars import Bars
    from ppbench.claims.check import claimed
    from ppbench.report.controls import exit_of
    from ppbench.run.suite import load_suite
    from ppbench.run.sweep import sweep
    from ppbench.verification import verify
    from ppbench.verification.recheck import recheck

    suite, defense = ROOT / entry.suite if entry.suite.endswith(".toml") else entry.suite, group == "defenses"
    configs = load_suite(suite, add=[name] if defense else [])
    only = {"defense": [name]} if defense else {"attack": [name]}
    with Bars() as bars:
        result = sweep(configs, out=out, engine=engine, only=only, progress=bars)
    if code := exit_of(result.records, result.reliable):
        print(result.answer.trust.sentence)
        return int(code)
    values = [*verify(Path(out), claimed, recheck), *moved_figures(entry, result.records)]
    print(
        *(values or [f"{name}: {len(result.records)} cells of {configs.name}, {len(entry.figure)} figures as pinned."]),
        sep="\n",
    )
    return int(bool(values))


def main(words):
    """Do what is asked for on the command line, and return the exit code."""
    if words == ["list"]:
        print(json.dumps([entry.name for _, entry in load_register(REGISTER).entries()]))
        return 0
    if len(words) == 2 and words[0] == "install":
        install = load_register(REGISTER).named(words[1])[1].install
        print(ROOT / install if (ROOT / install).is_dir() else install)
        return 0
    if len(words) == 3 and words[0] == "run":
        return run(*words[1:])
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
