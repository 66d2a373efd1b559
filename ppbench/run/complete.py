"""Whether a folder holds all cells of the shipped suites whose name and digest its records carry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from ppbench.base.errors import UsageError
from ppbench.records.schema import CellConfig, Record
from ppbench.report.compare.join import where_of
from ppbench.report.controls import CONTROLS
from ppbench.run.cells import cells, groups
from ppbench.run.suite import Suite, load_suite
from ppbench.run.sweep import FILTERS
from ppbench.suites import shipped
from ppbench.task.dataset import default_root

_FOLDERS = ("parquet", "imagefolder")


def local_dataset(name: str) -> str | None:
    """Return the argument that opens the data set `name` of a record here; None if it is unknown or not there."""
    kind, _, argument = name.partition(":")
    if not argument:
        return name if kind == "digits" else None
    if kind == "warped":
        inner = None if argument.startswith("warped:") else local_dataset(argument)
        return None if inner is None else f"warped:{inner}"
    path = default_root() / argument
    return f"{kind}:{path}" if kind in _FOLDERS and "/" not in argument and path.exists() else None


def missing_cells(records: Sequence[Record]) -> Iterator[tuple[str, bool]]:
    """Yield sentences on cells that a suite has and `records` lack, each with whether it is a problem.

    It is a problem unless some `--only` would leave out exactly those cells: a sweep was interrupted, or cells were
    removed. What cannot be checked is no problem: another suite or version of it, missing data, or views computed for
    publication, each on victims of its own.
    """
    by_suite: dict[tuple[str, str, str, bool | None], list[Record]] = defaultdict(list)
    if any(record.config.victims_from is not None for record in records):
        yield "whether all views for publication are there (no suite lists them)", False
    for record in (record for record in records if record.config.victims_from is None):
        config = record.config
        where = config.federation
        by_suite[config.suite, config.suite_digest, where.device, where.tf32].append(record)
    for (name, digest, device, tf32), suite_records in sorted(by_suite.items(), key=str):
        suite = _suite(name, digest, device, local_dataset(suite_records[0].config.data.name), bool(tf32))
        if suite is None:
            why = "no shipped suite of that name and digest, or its data are not here"
            yield f"whether all cells of {name} are there ({why})", False
            continue
        try:
            whole = [cell.config for e in suite.places for group in groups(e) for cell in cells(e, group)]
        except (UsageError, OSError) as cause:
            yield f"whether all cells of {name} are there ({cause})", False
            continue
        expected = list({_key(config): config for config in whole}.values())  # controls are in each evaluation
        yield from _compare(name, expected, [record.config for record in suite_records])


def _suite(name: str, digest: str, device: str, data: str | None, tf32: bool) -> Suite | None:
    """Return the shipped suite of this name and digest; None without it or its data. Nothing is downloaded."""
    word, _, _ = name.rpartition("/")
    id_, _, preset = word.partition("@")
    if id_ not in shipped() or not digest or data is None:
        return None
    try:
        suite = load_suite(id_, preset, dataset=data, device=device, tf32=tf32, isolate=False)
    except UsageError:
        return None
    known = suite.digest == digest and all(config.dataset == data for config in suite.configs)
    return suite if known else None


def _key(config: CellConfig) -> Hashable:
    return where_of(config), config.seed


def _ignores_filter(config: CellConfig, key: str) -> bool:
    """Return whether a filter does not apply to a cell: controls stay whichever defense is selected."""
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
        first = missing[0]
        axis = "" if first.defense.control is None else f" {first.defense.control.name}={first.defense.control.value:g}"
        yield (
            f"{len(missing)} of the {len(expected)} cells of suite {name} are missing, such as "
            f"{first.defense.id}{axis} under {first.attack.id} [{first.threat_model.id}, {first.stage}, batch "
            f"{first.batch_size}, seed {first.seed}]; sweep into the folder again",
            True,
        )
    if left := len(absent) - len(missing):
        yield f"{left} of the {len(expected)} cells of suite {name} (they are not here, as with --only)", False
