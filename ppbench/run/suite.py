"""Suites: sets of evaluations in a TOML file with a version and a digest, shipped ones and users' own.

    schema = "ppbench.run.suite/1"      id, version, title, base, seeds
    [task] [federation] [questions] fields of `EvaluateConfig`; defaults are the base preset's
    [attack.NAME]                   parameters of an attack
    [[defense]]                     id, grid, set (its parameters), and own [task], [federation], [questions]
    [preset.NAME]                   changes to all of it, entries too; the suite is then called ID@NAME

A suite expands to one evaluation per defense and seed: its cells are those of `ppbench evaluate` under another name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ppbench.adversary.isolation import IsolatedAttack
from ppbench.base.errors import UsageError, shown, unknown
from ppbench.base.files import kind_of
from ppbench.base.registry import plugins
from ppbench.base.toml_files import Loc, TomlFile, shipped, toml_file
from ppbench.records.schema import Scalar, Strict
from ppbench.run.config import DefenseName, EvaluateConfig, configure, telling_fault
from ppbench.run.experiment import WHOLE, Experiment, built_for, make_attack, resolve
from ppbench.run.options import MAX_LIST, FederationOptions, ModelOptions, QuestionOptions, TaskOptions

SUITE_SCHEMA = "ppbench.run.suite/1"
Grid = Annotated[tuple[float, ...], Field(min_length=1, max_length=MAX_LIST)]
MasterSeed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class TaskPart(TaskOptions, Strict):
    """A section [task]."""

    model_options: ModelOptions = Field(default_factory=dict)


class FederationPart(FederationOptions, Strict):
    """A section [federation]."""


class QuestionsPart(QuestionOptions, Strict):
    """A section [questions]."""


SECTIONS: dict[str, type[BaseModel]] = {"task": TaskPart, "federation": FederationPart, "questions": QuestionsPart}


class SuiteParts(Strict):
    """The sections that a suite, its presets and its defenses may each have."""

    task: TaskPart = TaskPart()
    federation: FederationPart = FederationPart()
    questions: QuestionsPart = QuestionsPart()

    def options(self) -> dict[str, Any]:
        """Return the fields of `EvaluateConfig` that are set here."""
        parts: Sequence[BaseModel] = (self.task, self.federation, self.questions)
        return {name: value for part in parts for name, value in part.model_dump(exclude_unset=True).items()}


class DefensePart(SuiteParts):
    """A defense with its grid ("quick", "paper" or values), its parameters, and sections that override the suite's."""

    id: DefenseName
    grid: Literal["quick", "paper"] | Grid = "quick"
    set: dict[str, Scalar] = Field(default_factory=dict)


class PresetPart(SuiteParts):
    """Changes to a suite. defenses: the ones kept; grids: other values, by defense."""

    seeds: tuple[MasterSeed, ...] | None = Field(default=None, min_length=1, max_length=MAX_LIST)
    defenses: tuple[DefenseName, ...] | None = Field(default=None, min_length=1)
    grids: dict[DefenseName, Grid] = Field(default_factory=dict)
    attack: dict[str, dict[str, Scalar]] = Field(default_factory=dict)


class SuiteFile(SuiteParts):
    """A suite file."""

    schema_: Literal["ppbench.run.suite/1"] = Field(alias="schema")
    id: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=100)
    version: int = Field(ge=1, le=1_000_000)
    title: str = Field(max_length=1000)
    base: Literal["quick", "portfolio", "paper"] = "quick"
    seeds: tuple[MasterSeed, ...] = Field(default=(0,), min_length=1, max_length=MAX_LIST)
    attack: dict[str, dict[str, Scalar]] = Field(default_factory=dict)
    defense: tuple[DefensePart, ...] = Field(min_length=1)
    preset: dict[str, PresetPart] = Field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """A suite, ready to be swept. id: with the preset, as "mnist-dlnet@two-cores"; version, title: of the file.

    digest: hash of what all cells share, but for the data's place and the lists of defenses, attacks and seeds, so that
    a suite can grow. places: each evaluation with its place, as "FILE, line 12, key defense.2".
    alone: whether controls run only where they are an evaluation's own defense.
    """

    id: str
    version: int
    title: str
    digest: str
    places: Mapping[Experiment, str]
    alone: bool = False

    @property
    def configs(self) -> tuple[EvaluateConfig, ...]:
        """The evaluations, in the order of the file."""
        return tuple(experiment.config for experiment in self.places)

    @property
    def name(self) -> str:
        """The suite's name in records: "mnist-dlnet@two-cores/1"."""
        return f"{self.id}/{self.version}"


def load_suite(
    suite: str | Path,
    preset: str = "",
    *,
    add: Sequence[str] = (),
    dataset: str | None = None,
    device: str = "cpu",
    weights: str | None = None,
    tf32: bool = False,
    isolate: bool | None = None,
) -> Suite:
    """Return a suite. Raises UsageError: an unknown suite or preset, or a fault in it, by file, line and key.

    Args:
        suite, preset: the name of a shipped one, or a TOML file; one of its presets, or "".
        add: installed defenses that it does not list, each over its quick grid.
        dataset: argument that opens its data here, as "parquet:FOLDER"; the same data keep figures comparable.
        device, weights, tf32: as in `EvaluateConfig`.
        isolate: whether attacks of other packages run in processes of their own; by default if there are any.
    """
    source = toml_file(_path(suite), "suite")
    file = _validate(source)
    if preset and preset not in file.preset:
        raise unknown(f"preset of suite {file.id!r}", preset, file.preset or ["(it has none)"])
    overrides = {"dataset": dataset, "weights": weights, "device": device, "tf32": tf32}
    here = {name: value for name, value in overrides.items() if value is not None}
    if isolate is None:
        isolate = any(not plugin.ours for plugin in plugins("attacks").values())
        suited = _expand(source, file, preset, add, {**here, "isolate": isolate})
        if not isolate or any(isinstance(attack, IsolatedAttack) for one in suited.places for attack in one.applicable):
            return suited
        isolate = False  # others are installed, but not used
    return _expand(source, file, preset, add, {**here, "isolate": isolate})


def salt_if_isolated(suite: Suite, salt: str) -> Suite:
    """Return a suite whose draws depend on a secret if other packages' attacks are isolated; else the suite itself."""
    isolated = any(config.isolate and not config.salt for config in suite.configs)
    return with_salt(suite, salt) if isolated else suite


def with_salt(suite: Suite, salt: str) -> Suite:
    """Return a suite whose draws depend on a secret, so that nobody without it can draw the victims."""
    places = {resolve(one.config.model_copy(update={"salt": salt})): place for one, place in suite.places.items()}
    return replace(suite, places=places)


def _validate(source: TomlFile) -> SuiteFile:
    try:
        return SuiteFile.model_validate(source.raw)
    except ValidationError as error:
        first = telling_fault(error)
        loc = first["loc"]
        if first["type"] == "extra_forbidden":
            models: dict[str, type[BaseModel]] = {"defense": DefensePart, "preset": PresetPart, **SECTIONS}
            holder = next((models[p] for p in reversed(loc[:-1]) if isinstance(p, str) and p in models), SuiteFile)
            known = [field.alias or name for name, field in holder.model_fields.items()]
            raise source.error(loc, str(unknown("key", str(loc[-1]), known))) from error
        instead = "" if first["type"] == "missing" else f", not {shown(first['input'])}"
        raise source.error(loc, f"{first['msg']}{instead}.") from error


def _expand(source: TomlFile, file: SuiteFile, preset: str, add: Sequence[str], here: Mapping[str, Any]) -> Suite:
    changes = file.preset[preset] if preset else PresetPart()
    options_of_all = {**file.options(), **changes.options()}
    id_ = f"{file.id}@{preset}" if preset else file.id
    shared = {name: value for name, value in options_of_all.items() if name not in ("attacks", "dataset")}
    text = json.dumps([SUITE_SCHEMA, id_, file.version, file.base, shared], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    own = {"suite": f"{id_}/{file.version}", "suite_digest": digest}
    settings = _settings(source, file, changes, preset, here["isolate"])
    places: dict[Experiment, str] = {}
    for loc, part in _defenses(source, file, changes, preset, add):
        for seed in changes.seeds or file.seeds:
            options = {**here, **file.options(), **part.options(), **changes.options(), **own, "seed": seed}
            if "dataset" in here and "dataset" not in part.options():
                options["dataset"] = here["dataset"]
            options["grid"] = changes.grids.get(part.id, part.grid)
            if file.base == "quick":
                options.setdefault("attacks", ("standard",))  # a suite skips nothing unless it says so
            if "attacks" in (
                options_of_all if "attacks" not in part.options() else changes.options()
            ):  # those of all defenses
                options["attacks"] = _attack_names(source, options_of_all["attacks"], part.id, here["isolate"])
            place = source.place(loc) if loc else f"Option --add {part.id} cannot be used"
            try:
                config = configure(file.base, defense=part.id, settings={**settings, **part.set}, **options)
                places[resolve(config)] = place
            except UsageError as cause:
                raise UsageError(f"{place}: {cause}") from cause
    return Suite(id_, file.version, file.title, digest, places)


def _attack_names(source: TomlFile, names: Sequence[str], defense: str, isolate: bool) -> tuple[str, ...]:
    if not names:
        raise source.error(("questions", "attacks"), 'No attack is named; give names, or ["standard"].')
    with source.at(("questions", "attacks")):
        return tuple(name for name in names if name in WHOLE or built_for(make_attack(name, isolate=isolate), defense))


def _settings(source: TomlFile, file: SuiteFile, changes: PresetPart, preset: str, isolate: bool) -> dict[str, Scalar]:
    settings: dict[str, Scalar] = {}
    for at, attacks in ((("attack",), file.attack), (("preset", preset, "attack"), changes.attack)):
        for name, values in attacks.items():
            with source.at((*at, name)):
                make_attack(name, values, isolate)
            settings |= {f"{name}.{key}": value for key, value in values.items()}
    return settings


def _defenses(
    source: TomlFile, file: SuiteFile, changes: PresetPart, preset: str, add: Sequence[str]
) -> list[tuple[Loc, DefensePart]]:
    """Return the defenses to sweep, with their places in the file; added ones have the place ()."""
    listed = {part.id for part in file.defense}
    for key, names in (("defenses", changes.defenses or ()), ("grids", changes.grids)):
        for name in names:
            if name not in listed:
                raise source.error(("preset", preset, key), str(unknown("defense of the suite", name, listed)))
    kept = changes.defenses or listed
    defenses: list[tuple[Loc, DefensePart]] = [
        (("defense", index), part) for index, part in enumerate(file.defense) if part.id in kept
    ]
    added = [DefensePart(id=name) for name in add]
    return defenses + [((), part) for part in added if part.id not in {known.id for _, known in defenses}]


def _path(suite: str | Path) -> Path:
    path, known = Path(suite), shipped()
    if path.suffix == ".toml":
        if kind_of(path) != "file":
            raise UsageError(f"There is no suite file {path}; give a TOML file or one of {', '.join(known)}.")
        return path
    if str(suite) not in known:
        raise unknown("suite", str(suite), known)
    return known[str(suite)]
