"""What is handed in with results of somebody's defense or attack: which package, which code, which machine, by whom.

A submission is an archive of results (`ppbench pack`) with one more member, submission.json. What it says is no more
than said: whoever judges it computes code and cells again (`ledger.examine`).
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from importlib import metadata, util
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, ValidationError

from ppbench.base.device import processor
from ppbench.base.errors import UsageError, first_fault, shown
from ppbench.base.machine import GIB, memory
from ppbench.base.registry import ADDRESSED, KINDS, OWN, Group, Plugin, find
from ppbench.base.version import __version__
from ppbench.ledger.form import Line, Word
from ppbench.records.archive import SUBMISSION, Files
from ppbench.records.origin import commit_of
from ppbench.records.schema import Record
from ppbench.records.scores import Some, Strict
from ppbench.records.sources import code_of, source_digest

SCHEMA: Literal["ppbench.submission/1"] = "ppbench.submission/1"
LARGEST = 1 << 20
"""Bytes of a submission.json."""
FIGURES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "scikit-image", "lpips", "dp-accounting")
"""Packages whose code figures come from, beside ppbench and what is handed in."""
Code = Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
Commit = Annotated[str, Field(pattern="^([0-9a-f]{40})?$")]
Share = Annotated[str, Field(max_length=100)]
Named = tuple[Group, str]


class Entered(Strict):
    """A plugin of another package that cells of the results are of.

    code: digest of its source (`records.sources.code_of`). commit: what its folder is a checkout of, "" where it is
    none, or holds other files than that commit.
    """

    group: Literal["defenses", "attacks", "questions"]
    name: Word
    package: Word
    version: Word
    code: Code
    commit: Commit = ""

    @property
    def words(self) -> str:
        """For sentences: "defense 'sign_sgd' of ppbench-sign-sgd 0.1.0"."""
        return f"{KINDS[self.group]} {shown(self.name)} of {self.package} {self.version}"


class Package(Strict):
    """An installed distribution."""

    name: Word
    version: Word


class Machine(Strict):
    """Where results were handed in from: compared with where they are computed again.

    code: digest of ppbench's own source. processor: its name and the instructions that torch uses; cores, memory: for
    people. packages: those that figures come from, and what the packages handed in require.
    """

    ppbench: Word
    code: Code
    python: Word
    torch: Word
    platform: Word
    processor: Word
    cores: Some
    memory: Word
    packages: Annotated[tuple[Package, ...], Field(max_length=1000)]

    def unlike(self, other: Machine) -> tuple[str, ...]:
        """Return what may change the last bits of figures and differs on the other machine, a clause each."""
        mine, theirs = ({p.name: p.version for p in one.packages if p.name in FIGURES} for one in (self, other))
        compared = [("processor", self.processor, other.processor), ("torch", self.torch, other.torch)]
        names = sorted({*mine, *theirs} - {"torch"})
        compared += [(name, mine.get(name, "none"), theirs.get(name, "none")) for name in names]
        return tuple(f"{what} {one}, here {two}" for what, one, two in compared if one != two)


class Submission(Strict):
    """A submission. suite, digest: as its cells name them. paper: where the method is described; reference: its code or
    page; day: UTC, YYYY-MM-DD."""

    schema_: Literal["ppbench.submission/1"] = Field(default=SCHEMA, alias="schema")
    suite: Word
    digest: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    plugins: Annotated[tuple[Entered, ...], Field(min_length=1, max_length=100)]
    environment: Machine
    paper: Line = ""
    reference: Line = ""
    licence: Share = ""
    day: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]


def described(records: Sequence[Record], paper: str = "", reference: str = "", licence: str = "") -> Submission:
    """Return the submission that these records are, of one suite, with what is installed here.

    Raises UsageError: they are of none or of several suites, of nobody's package, or of one that is not installed here.
    """
    suite, digest = suite_of(records)
    entered = tuple(entry_of(group, name) for group, name in strangers(records))
    if not entered:
        raise UsageError(
            "No cell is of a defense or attack of another package, so there is nothing to hand in; sweep with yours, "
            "as `ppbench sweep SUITE --add NAME`."
        )
    day = datetime.now(timezone.utc).date().isoformat()
    try:
        return Submission(
            suite=suite, digest=digest, plugins=entered, environment=machine(one.package for one in entered),
            paper=paper, reference=reference, licence=licence, day=day,
        )  # fmt: skip
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{where} {shown(first['input'])} cannot be handed in: {first['msg'].lower()}.") from error


def suite_of(records: Sequence[Record]) -> tuple[str, str]:
    """Return name and digest of the one suite that records are of (UsageError: of none, or of several)."""
    named = sorted({(r.config.suite, r.config.suite_digest, _device(r)) for r in records})
    if not named:
        raise UsageError("There are no records; give the --out of a sweep.")
    if any(not digest for _, digest, _ in named):
        raise UsageError("Cells of no suite cannot be handed in; use `ppbench sweep SUITE --add NAME`.")
    if len(named) > 1:
        listed = ", ".join(" ".join(one) for one in named)
        raise UsageError(f"Cells of one suite, one state of it and one device are handed in, and here are {listed}.")
    return named[0][0], named[0][1]


def _device(record: Record) -> str:
    """Return what computed, in words that differ where numbers do."""
    where = record.config.federation
    return where.device if where.tf32 is None else f"{where.device} {'with' if where.tf32 else 'without'} TF32"


def strangers(records: Iterable[Record]) -> list[Named]:
    """Return the plugins of other packages that records say took part, as far as they are known here, in order.

    Raises UsageError: one is not installed here; so nobody can say what its cells are of.
    """
    plugins_ = set[Named]()
    for record in records:
        plugins_ |= set(_own(record))
    return sorted(plugins_)


def _own(record: Record) -> Iterator[Named]:
    """Yield what of other packages a record names."""
    config = record.config
    if config.defense.code:
        yield "defenses", config.defense.id
    if not config.attack.code:
        return
    about = config.attack
    named: tuple[Named, ...] = (("attacks", about.id), ("questions", about.kind), ("attacks", about.follows or ""))
    known = [(group, name, find(group, name)) for group, name in named if name]
    for group, name, plugin in known:
        if plugin is None:
            raise UsageError(f"The {KINDS[group]} {shown(name)} is not installed here; install its package.")
        if not plugin.ours:
            yield group, name


def entry_of(group: Group, name: str) -> Entered:
    """Return a plugin as it is installed here. Raises UsageError: it is not, or is no package's but at an address."""
    plugin = find(group, name)
    if plugin is None or plugin.distribution == ADDRESSED or plugin.adapter:
        raise UsageError(
            f"The {KINDS[group]} {shown(name)} is no plugin of a package that is installed here; install its package, "
            "or make it one with an entry point: others must be able to."
        )
    version = plugin.entry.dist.version if plugin.entry.dist is not None else None
    commit = commit_of(_home(plugin))
    return Entered.model_validate({
        "group": group, "name": name, "package": plugin.distribution, "version": version or "?",
        "code": code_of((group, name)), "commit": commit if re.fullmatch("[0-9a-f]{40}", commit) else "",
    })  # fmt: skip


def _home(plugin: Plugin) -> Path:
    """Return the folder of the source of a plugin's package; nothing of it is imported."""
    spec = util.find_spec(plugin.root)
    folders = [*(spec.submodule_search_locations or ()), str(Path(spec.origin or ".").parent)] if spec else ["."]
    return Path(folders[0])


def machine(packages: Iterable[str] = ()) -> Machine:
    """Return this machine; packages: those handed in, whose requirements it names too."""
    names = {*FIGURES, *(name for package in packages for name in _required(package))} - {OWN}
    versions = [(name, _version(name)) for name in sorted(names)]
    return Machine(
        ppbench=__version__,
        code=source_digest(own=True),
        python=platform.python_version(),
        torch=str(torch.__version__),
        platform=platform.platform()[:200],
        processor=processor()[:200],
        cores=os.cpu_count() or 1,
        memory=f"{memory() / GIB:.1f} GiB",
        packages=tuple(Package(name=name, version=version) for name, version in versions if version),
    )


def _required(package: str) -> Iterator[str]:
    """Yield what a package requires always, by name; nothing where its metadata do not tell."""
    try:
        requirements = metadata.requires(package) or []
    except Exception:  # noqa: BLE001 - somebody's metadata that cannot be read
        requirements = []
    for text in requirements:
        named = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", text)
        if named is not None and "extra" not in text.partition(";")[2]:
            yield re.sub(r"[-_.]+", "-", named[0]).lower()


def _version(name: str) -> str:
    try:
        return str(metadata.version(name))
    except Exception:  # noqa: BLE001 - not installed, or metadata that cannot be read
        return ""


def submission_of(files: Files) -> Submission:
    """Return what results say of themselves as a submission; UsageError: they are none, or it is not of its form."""
    try:
        data = files.read(SUBMISSION)
    except FileNotFoundError as cause:
        raise UsageError(
            f"{files.path} is no submission (it has no {SUBMISSION}); use `ppbench submit FOLDER`."
        ) from cause
    except OSError as cause:
        raise UsageError(f"{files.path}: {SUBMISSION} cannot be read ({cause.strerror}).") from cause
    try:
        return Submission.model_validate_json(data[: LARGEST + 1], strict=True)
    except ValidationError as error:
        why = first_fault(error)
        raise UsageError(f"{files.path}: {SUBMISSION} is not of the form that it must have ({why}).") from error
