"""The description of a submission: the package, code and machine behind results of another package's plugin.

A submission is an archive of results (`ppbench pack`) with one more member, submission.json. Its content is only
claimed: the receiver recomputes code digests and cells (`ledger.examination`).
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
from ppbench.base.registry import ADDRESSED, DISTRIBUTION, GROUP_NOUNS, Plugin, PluginGroup, find
from ppbench.base.startup_code import installed, required
from ppbench.base.version import __version__
from ppbench.ledger.form import ShownLine, ShownWord
from ppbench.records.archive import SUBMISSION, Files
from ppbench.records.run_files import commit_of
from ppbench.records.schema import Record
from ppbench.records.scores import AtLeastOne, Strict
from ppbench.records.sources import code_of, source_digest

SUBMISSION_SCHEMA: Literal["ppbench.submission/1"] = "ppbench.submission/1"
MAX_SUBMISSION_BYTES = 1 << 20
"""Most bytes of a submission.json."""
FIGURE_PACKAGES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "scikit-image", "lpips", "dp-accounting")
"""Packages whose code computes figures, besides ppbench and the submitted ones."""
CodeDigest = Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
Commit = Annotated[str, Field(pattern="^([0-9a-f]{40})?$")]
LicenceText = Annotated[str, Field(max_length=100)]
PluginKey = tuple[PluginGroup, str]


class SubmittedPlugin(Strict):
    """A plugin of another package that cells of the results use.

    code: digest of its source (`records.sources.code_of`). commit: of the checkout that its folder is in, "" if it
    is none or its files differ from that commit.
    """

    group: Literal["defenses", "attacks", "questions"]
    name: ShownWord
    package: ShownWord
    version: ShownWord
    code: CodeDigest
    commit: Commit = ""

    @property
    def words(self) -> str:
        """For sentences: "defense 'sign_sgd' of ppbench-sign-sgd 0.1.0"."""
        return f"{GROUP_NOUNS[self.group]} {shown(self.name)} of {self.package} {self.version}"


class Package(Strict):
    """An installed distribution."""

    name: ShownWord
    version: ShownWord


class Machine(Strict):
    """The submitter's machine, compared with the one that recomputes cells.

    code: digest of ppbench's own source. processor: its name and the instructions that torch uses; cores, memory: for
    people. packages: those that compute figures, and the requirements of the submitted ones.
    """

    ppbench: ShownWord
    code: CodeDigest
    python: ShownWord
    torch: ShownWord
    platform: ShownWord
    processor: ShownWord
    cores: AtLeastOne
    memory: ShownWord
    packages: Annotated[tuple[Package, ...], Field(max_length=1000)]

    def unlike(self, other: Machine) -> tuple[str, ...]:
        """Return the differences to another machine that may change last bits of figures, a clause each."""
        mine, theirs = ({p.name: p.version for p in one.packages if p.name in FIGURE_PACKAGES} for one in (self, other))
        compared = [("processor", self.processor, other.processor), ("torch", self.torch, other.torch)]
        names = sorted({*mine, *theirs} - {"torch"})
        compared += [(name, mine.get(name, "none"), theirs.get(name, "none")) for name in names]
        return tuple(f"{what} {one}, here {two}" for what, one, two in compared if one != two)


class Submission(Strict):
    """A submission. suite, digest: as in its cells. paper: where the method is described; reference: its code or page;
    day: UTC, YYYY-MM-DD."""

    schema_: Literal["ppbench.submission/1"] = Field(default=SUBMISSION_SCHEMA, alias="schema")
    suite: ShownWord
    digest: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    plugins: Annotated[tuple[SubmittedPlugin, ...], Field(min_length=1, max_length=100)]
    environment: Machine
    paper: ShownLine = ""
    reference: ShownLine = ""
    licence: LicenceText = ""
    day: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]


def describe_submission(
    records: Sequence[Record], paper: str = "", reference: str = "", licence: str = ""
) -> Submission:
    """Return the description of records of one suite as a submission, with the packages installed here.

    Raises UsageError: records of no suite or of several, of no other package, or of one that is not installed here.
    """
    suite, digest = suite_of(records)
    entered = tuple(entry_of(group, name) for group, name in third_party_plugins(records))
    if not entered:
        raise UsageError(
            "No cell is of a defense or attack of another package, so there is nothing to hand in; sweep with yours, "
            "as `ppbench sweep SUITE --add NAME`."
        )
    day = datetime.now(timezone.utc).date().isoformat()
    try:
        return Submission(
            suite=suite, digest=digest, plugins=entered, environment=this_machine(one.package for one in entered),
            paper=paper, reference=reference, licence=licence, day=day,
        )  # fmt: skip
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{where} {shown(first['input'])} cannot be handed in: {first['msg'].lower()}.") from error


def suite_of(records: Sequence[Record]) -> tuple[str, str]:
    """Return name and digest of the one suite of all records (UsageError: none, or several)."""
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
    """Return the device of a record's training, in words; with TF32 or without it on a GPU."""
    where = record.config.federation
    return where.device if where.tf32 is None else f"{where.device} {'with' if where.tf32 else 'without'} TF32"


def third_party_plugins(records: Iterable[Record]) -> list[PluginKey]:
    """Return the plugins of other packages that took part in records, sorted.

    Raises UsageError: one is not installed here.
    """
    plugin_keys = set[PluginKey]()
    for record in records:
        plugin_keys |= set(_foreign_plugins(record))
    return sorted(plugin_keys)


def _foreign_plugins(record: Record) -> Iterator[PluginKey]:
    """Yield the plugins of other packages that a record names."""
    config = record.config
    if config.defense.code:
        yield "defenses", config.defense.id
    if not config.attack.code:
        return
    about = config.attack
    named: tuple[PluginKey, ...] = (("attacks", about.id), ("questions", about.kind), ("attacks", about.follows or ""))
    known = [(group, name, find(group, name)) for group, name in named if name]
    for group, name, plugin in known:
        if plugin is None:
            raise UsageError(f"The {GROUP_NOUNS[group]} {shown(name)} is not installed here; install its package.")
        if not plugin.ours:
            yield group, name


def entry_of(group: PluginGroup, name: str) -> SubmittedPlugin:
    """Return the description of an installed plugin. Raises UsageError: not installed, or at an address, not in a
    package."""
    plugin = find(group, name)
    if plugin is None or plugin.distribution == ADDRESSED or plugin.adapter:
        raise UsageError(
            f"The {GROUP_NOUNS[group]} {shown(name)} is no plugin of a package that is installed here; install its "
            "package, or make it one with an entry point: others must be able to."
        )
    version = plugin.entry.dist.version if plugin.entry.dist is not None else None
    commit = commit_of(_home(plugin))
    return SubmittedPlugin.model_validate({
        "group": group, "name": name, "package": plugin.distribution, "version": version or "?",
        "code": code_of((group, name)), "commit": commit if re.fullmatch("[0-9a-f]{40}", commit) else "",
    })  # fmt: skip


def _home(plugin: Plugin) -> Path:
    """Return the folder of the source of a plugin's package; nothing of it is imported."""
    spec = util.find_spec(plugin.root)
    folders = [*(spec.submodule_search_locations or ()), str(Path(spec.origin or ".").parent)] if spec else ["."]
    return Path(folders[0])


def this_machine(packages: Iterable[str] = ()) -> Machine:
    """Return the description of this machine; packages: submitted ones, whose requirements are included."""
    submitted = [dist for package in packages if (dist := installed(package)) is not None]
    names = {*FIGURE_PACKAGES, *(name for dist in submitted for name in required(dist, extras=False))} - {DISTRIBUTION}
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


def _version(name: str) -> str:
    try:
        return str(metadata.version(name))
    except Exception:  # noqa: BLE001 - not installed, or metadata that cannot be read
        return ""


def submission_of(files: Files) -> Submission:
    """Return the description in a submission's files; UsageError: there is none, or it has a wrong form."""
    try:
        data = files.read(SUBMISSION)
    except FileNotFoundError as cause:
        raise UsageError(
            f"{files.path} is no submission (it has no {SUBMISSION}); use `ppbench submit FOLDER`."
        ) from cause
    except OSError as cause:
        raise UsageError(f"{files.path}: {SUBMISSION} cannot be read ({cause.strerror}).") from cause
    try:
        return Submission.model_validate_json(data[: MAX_SUBMISSION_BYTES + 1], strict=True)
    except ValidationError as error:
        why = first_fault(error)
        raise UsageError(f"{files.path}: {SUBMISSION} does not have the required form ({why}).") from error
