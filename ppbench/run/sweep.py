"""Sweeps: every cell of a suite that a folder does not hold yet, on one machine or on a cluster."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

from ppbench.base.bars import Bars
from ppbench.base.device import computing
from ppbench.base.errors import UsageError, unknown
from ppbench.base.registry import PluginGroup, canonical, close_attacks, find, load_plugin, plugins
from ppbench.base.toml_files import shipped
from ppbench.records.run_files import salt_of, soundness_of
from ppbench.records.schema import AttackInfo, CellConfig, DefenseInfo, Record
from ppbench.records.store import Store
from ppbench.report.compare.join import where_of
from ppbench.report.controls import CONTROLS, check_harness, failures
from ppbench.report.page.boards import defense_sentences, judged_evaluations, standalone_sentences
from ppbench.run.cells import Cell
from ppbench.run.evaluation import RunResult, check_experiment, compute, prepare_results, report_results
from ppbench.run.executors import make_executor
from ppbench.run.experiment import Experiment
from ppbench.run.jobs import Gate
from ppbench.run.schedule import PlannedCells, ended_cells, plan_cells, strands, unfinished
from ppbench.run.suite import Suite, load_suite, salt_if_isolated
from ppbench.run.task import task_key
from ppbench.task.dataset import default_root
from ppbench.task.user_data import open_dataset

EVERYTHING: Mapping[str, Sequence[str]] = MappingProxyType({})
FILTERS: Mapping[str, Callable[[CellConfig], str]] = {
    "defense": lambda c: c.defense.id,
    "control": lambda c: "" if c.defense.control is None else f"{c.defense.control.value:g}",
    "attack": lambda c: c.attack.id,
    "kind": lambda c: c.attack.kind,
    "threat": lambda c: c.threat_model.id,
    "stage": lambda c: c.stage,
    "batch": lambda c: str(c.batch_size),
    "model": lambda c: c.model.id,
    "seed": lambda c: str(c.seed),
}
"""Keys that select cells, each with its value in a cell's configuration."""


@dataclass(frozen=True, kw_only=True)
class SweepResult(RunResult):
    """The result of a sweep, with the verdicts."""

    suite: Suite
    verdict: tuple[str, ...]

    @property
    def failed(self) -> tuple[Record, ...]:
        """The cells that failed; each says why, and the next sweep tries them again."""
        return tuple(failures(self.records))


@dataclass(frozen=True)
class SweepPlan:
    """The plan of a sweep: all its cells, the unfinished ones (`todo`), and the number of trainings that these need."""

    suite: Suite
    store: Store
    cells: tuple[PlannedCells, ...]
    todo: tuple[PlannedCells, ...]
    trainings: int


@computing()
def plan_sweep(suite: Suite, out: Path | str, only: Mapping[str, Sequence[str]] = EVERYTHING) -> SweepPlan:
    """Return the plan of a sweep; nothing is written. Raises UsageError: an unknown filter or value, or an evaluation
    that cannot be run."""
    for key in only:
        if key not in FILTERS:
            raise unknown("filter", key, FILTERS)
    store = Store(Path(out))
    if any(config.isolate for config in suite.configs):
        close_attacks()
        suite = salt_if_isolated(suite, salt_of(store.out))
    as_recorded: dict[str, Callable[[str], str]] = {"control": _number, "defense": canonical}
    only = {key: [as_recorded.get(key, str)(v) for v in values] for key, values in only.items()}
    named = set(only.get("defense", ())) - {*CONTROLS}
    seeds = only.get("seed", [str(c.seed) for c in suite.configs])
    places = {
        experiment: place
        for experiment, place in suite.places.items()
        if (not named or experiment.config.defense in {*named, *CONTROLS}) and str(experiment.config.seed) in seeds
    }
    if not places:
        for key in ("defense", "seed"):
            _refuse(suite, key, only, {str(getattr(c, key)) for c in suite.configs})
    all_cells = _check_and_plan(places)
    for key in only:
        _refuse(suite, key, only, {FILTERS[key](cell.config) for one in all_cells for cell in one.cells} - {""})
    kept = [replace(one, cells=tuple(c for c in one.cells if _is_selected(c, only))) for one in all_cells]
    planned = [one for one in kept if one.cells and not (suite.alone and _beside(one))]
    if not any(c.config.defense.id not in CONTROLS for one in planned for c in one.cells):
        filters = " ".join(f"{key}={','.join(values)}" for key, values in only.items())
        why = f"is left by --only {filters}; take one of these away." if only else "is of a defense; list one."
        raise UsageError(f"No cell of suite {suite.id!r} {why}")
    todo = unfinished(planned, store)
    return SweepPlan(suite, store, tuple(planned), tuple(todo), len(strands(todo, store.out)))


def _check_and_plan(places: Mapping[Experiment, str]) -> list[PlannedCells]:
    """Check every evaluation (UsageError), those of one task together, and return the cells of all."""

    def check_at_place(experiment: Experiment) -> None:
        try:
            check_experiment(experiment)
        except UsageError as cause:
            raise UsageError(f"{places[experiment]}: {cause}") from cause

    return plan_cells(sorted(places, key=lambda experiment: task_key(experiment.config)), before=check_at_place)


def _number(word: str) -> str:
    try:
        return f"{float(word):g}"
    except ValueError:
        return word


def _refuse(suite: Suite, key: str, only: Mapping[str, Sequence[str]], known: set[str]) -> None:
    for value in only.get(key, ()):
        if value not in known and not (key == "defense" and value in CONTROLS):
            raise unknown(f"{key} in suite {suite.id!r}", value, known)


def _beside(one: PlannedCells) -> bool:
    """Return whether cells belong to a control beside the evaluated defense."""
    defense = one.experiment.points[one.group.point].defense.name
    return defense in CONTROLS and defense != one.experiment.config.defense


def _is_selected(cell: Cell, only: Mapping[str, Sequence[str]]) -> bool:
    """Return whether filters keep a cell."""
    config = cell.config
    return all(_ignores_filter(config, key) or FILTERS[key](config) in values for key, values in only.items())


@computing()
def sweep(
    suite: Suite | str | Path,
    *,
    out: Path | str | None = None,
    preset: str = "",
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    only: Mapping[str, Sequence[str]] = EVERYTHING,
    add: Sequence[str] = (),
    dataset: str | None = None,
    device: str = "cpu",
    tf32: bool = False,
    isolate: bool | None = None,
    progress: Bars | None = None,
    command: str = "",
) -> SweepResult:
    """Compute every cell of a suite that `out` does not hold, and write the board; an interrupted sweep resumes.

    Args:
        suite, preset, add, dataset, device, tf32, isolate: as `load_suite`; or a suite, which has them.
        out: folder of results; by default `default_out`.
        engine, workers, address: where jobs run, as `make_executor`.
        only: keeps cells by `FILTERS`, as {"defense": ["spn"]}; the controls stay.
        progress: receives how far the work is.
        command: as typed, for `origin.json`.

    Raises UsageError: an option cannot be used (nothing has been written then), or nothing can be written.
    """
    loaded = suite
    if not isinstance(loaded, Suite):
        loaded = load_suite(loaded, preset, add=add, dataset=dataset, device=device, tf32=tf32, isolate=isolate)
    bars = progress or Bars(quiet=True)
    executor = make_executor(engine, workers, partial(bars.advance, "training"), address, device)
    planned = plan_sweep(loaded, default_out(loaded) if out is None else out, only)
    prepare_results(planned.store, next((config.salt for config in planned.suite.configs), ""))
    computed = compute(planned.cells, planned.todo, planned.store, executor, bars, strict=False, command=command)
    return _result(loaded, planned, computed)


def _result(suite: Suite, planned: SweepPlan, computed: bool) -> SweepResult:
    """Return the result of a sweep that has ended; computed: whether anything was."""
    store = planned.store
    records, answer = report_results(store, planned.cells, computed)
    sound = check_harness(soundness_of(store)).ok is not False
    verdict = tuple(standalone_sentences(defense_sentences(judged_evaluations(records, sound))))
    ended = len(ended_cells(planned.todo, store))
    return SweepResult(suite=suite, records=records, verdict=verdict, answer=answer, out=store.out, computed=ended)


def default_out(suite: Suite) -> Path:
    """Return the default folder of a suite's results."""
    return Path("ppbench-sweeps") / suite.id


# -- Whether a folder holds all cells of the shipped suites whose name and digest its records carry --

_FOLDERS = ("parquet", "imagefolder")


def local_dataset(name: str) -> str | None:
    """Return the argument that opens the data set `name` of a record here; None if it is unknown or not there."""
    kind, _, argument = name.partition(":")
    if not argument:
        return name if _opens(name) else None
    if kind == "warped":
        inner = None if argument.startswith("warped:") else local_dataset(argument)
        return None if inner is None else f"warped:{inner}"
    path = default_root() / argument
    return f"{kind}:{path}" if kind in _FOLDERS and "/" not in argument and path.exists() else None


@cache
def _opens(name: str) -> bool:
    """Return whether an installed data set opens here without an argument."""
    try:
        return name in plugins("datasets") and len(open_dataset(name, seed=0).train) > 0
    except UsageError:
        return False


def missing_cells(records: Sequence[Record]) -> Iterator[tuple[str, bool]]:
    """Yield sentences on cells that a suite has and `records` lack, or the reverse, each with whether it is a problem.

    A lack is a problem unless some `--only` would leave out exactly those cells: a sweep was interrupted, or cells were
    removed. What cannot be checked is no problem: another suite or version of it, missing data, or views computed for
    publication, each on victims of its own.
    """
    by_suite: dict[tuple[str, str, str, bool | None], list[Record]] = defaultdict(list)
    if published := [record for record in records if record.config.victims_from is not None]:
        yield (
            f"whether all views for publication are there, of which {len(published)} cells are (no suite lists them)",
            False,
        )
    for record in (record for record in records if record.config.victims_from is None):
        config = record.config
        where = config.federation
        by_suite[config.suite, config.suite_digest, where.device, where.tf32].append(record)
    for (name, digest, device, tf32), suite_records in sorted(by_suite.items(), key=lambda item: str(item[0])):
        present = [record.config for record in suite_records]
        unknown_why = f"whether all cells of {name} are there, of which {len(present)} are"
        suite = _suite(name, digest, device, local_dataset(present[0].data.name), bool(tf32), present)
        if suite is None:
            why = "no suite lists them" if not digest else "no shipped suite of that name and digest, or no data here"
            yield f"{unknown_why} ({why})", False
            continue
        try:
            expected = _expected(suite, suite_records)
        except (UsageError, OSError) as cause:
            yield f"{unknown_why} ({cause})", False
            continue
        yield from _compare(name, expected, present)


def _expected(suite: Suite, records: Sequence[Record]) -> list[CellConfig]:
    """Return the cells of a suite, without those that its gates leave out as these records came out."""
    planned = plan_cells(list(suite.places))
    keys = {cell.id: _key(cell.config) for part in planned for cell in part.cells}
    names = {_key(record.config): record.cell_id for record in records}  # a record of another version has another

    def of_records(cells: Iterable[str]) -> frozenset[str]:
        return frozenset(names[keys[cell]] for cell in cells if keys.get(cell) in names)

    gates = {part.gate: Gate(of_records(part.gate.undefended), of_records(part.gate.exact)) for part in planned}
    closed = {gate for gate, own in gates.items() if own and own.is_closed(records)}
    # controls are in each evaluation
    return list({_key(c.config): c.config for part in planned if part.gate not in closed for c in part.cells}.values())


def _suite(
    name: str, digest: str, device: str, data: str | None, tf32: bool, present: Sequence[CellConfig]
) -> Suite | None:
    """Return the shipped suite of this name and digest; None without it or its data. Nothing is downloaded.

    present: cells of it; their defenses that are installed and not the suite's own were added to it.
    """
    word, _, _ = name.rpartition("/")
    id_, _, preset = word.partition("@")
    if id_ not in shipped() or not digest or data is None:
        return None
    load = partial(load_suite, id_, preset, dataset=data, device=device, tf32=tf32, isolate=False)
    try:
        suite = load()
        own = {*CONTROLS, *(canonical(config.defense) for config in suite.configs)}
        added = sorted({config.defense.id for config in present} - own)
        suite = load(add=[name for name in added if find("defenses", name) is not None])
    except UsageError:
        return None
    known = suite.digest == digest and all(config.dataset == data for config in suite.configs)
    return suite if known else None


def _key(config: CellConfig) -> Hashable:
    network = json.dumps([config.model.id, config.model.options, config.federation.schedule], sort_keys=True)
    return where_of(config), config.seed, network


def _ignores_filter(config: CellConfig, key: str) -> bool:
    """Return whether a filter does not apply to a cell: controls vouch for whichever defense is selected, and stay."""
    return config.defense.id in CONTROLS and key in ("defense", "control")


def _compare(name: str, expected: Sequence[CellConfig], present: Sequence[CellConfig]) -> Iterator[tuple[str, bool]]:
    present_keys = {_key(config) for config in present}
    known = [config for config in expected if _key(config) in present_keys]
    values = {k: {of(c) for c in known if not _ignores_filter(c, k)} for k, of in FILTERS.items()}
    absent = [config for config in expected if _key(config) not in present_keys]
    followed = {config.attack.follows for config in known}  # controls follow attacks on defenses that may not be here
    missing = [c for c in absent if all(_ignores_filter(c, k) or of(c) in values[k] for k, of in FILTERS.items())]
    missing = [config for config in missing if config.attack.follows in followed]
    if missing:
        sentence = f"{len(missing)} of the {len(expected)} cells of suite {name} are missing, such as"
        yield f"{sentence} {_words(missing[0])}; sweep into the folder again", True
    if left := len(absent) - len(missing):
        yield f"{left} of the {len(expected)} cells of suite {name} (they are not here, as with --only)", False
    yield from _surplus(name, expected, present)


def _surplus(name: str, expected: Sequence[CellConfig], present: Sequence[CellConfig]) -> Iterator[tuple[str, bool]]:
    """Yield sentences on cells that a suite does not ask for: others, or with other settings.

    A problem where the suite has their defense and attack in these versions; else it may have had them.
    """
    expected_cells = {_key(config): config for config in expected}
    versions = {_versions(config) for config in expected}
    surplus = [config for config in present if _key(config) not in expected_cells]
    surplus += [c for c in present if (one := expected_cells.get(_key(c))) is not None and not _is_asked(one, c)]
    odd = [config for config in surplus if _versions(config) in versions]
    if odd:
        yield (
            f"{len(odd)} cells are not as suite {name} asks for them, whose name they bear, such as {_words(odd[0])}",
            True,
        )
    if others := len(surplus) - len(odd):
        yield f"whether suite {name} asked for {others} of {len(present)} cells (not as it is here)", False


Parameterized = AttackInfo | DefenseInfo


def _versions(config: CellConfig) -> Hashable:
    """Return the versions of a cell's defense, of its attack, and of the attack that this one follows."""
    defense, attack = config.defense, config.attack
    followed = attack.parameters.get(f"{attack.follows}.version")
    return defense.id, defense.edition, attack.id, attack.version, attack.code, attack.follows, followed


def _is_asked(expected: CellConfig, present: CellConfig) -> bool:
    """Return whether a cell has the settings that a suite asks for."""
    return (
        (expected.victims, expected.tuning) == (present.victims, present.tuning)
        and _ran_so("attacks", expected.attack, present.attack)
        and _ran_so("defenses", expected.defense, present.defense)
    )


def _ran_so(kind: PluginGroup, expected: Parameterized, present: Parameterized) -> bool:
    """Return whether a plugin ran with these parameters.

    One that its version has got since counts where the suite leaves it at its default: that is how it ran.
    """
    added = expected.parameters.keys() - present.parameters.keys()
    same = {name: value for name, value in expected.parameters.items() if name not in added}
    if str(sorted(same.items())) != str(sorted(present.parameters.items())):
        return False
    usual = {one.name: one.default for one in dataclasses.fields(load_plugin(kind, expected.id))} if added else {}
    return all(expected.parameters[name] == usual.get(name, dataclasses.MISSING) for name in added)


def _words(config: CellConfig) -> str:
    axis = "" if config.defense.control is None else f" {config.defense.control.name}={config.defense.control.value:g}"
    return (
        f"{config.defense.id}{axis} under {config.attack.id} [{config.threat_model.id}, {config.stage}, batch "
        f"{config.batch_size}, seed {config.seed}]"
    )
