"""`ppbench verify`: recompute everything in a results folder that can be recomputed, and name what differs."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ppbench.base.errors import UsageError
from ppbench.metrics.intervals import clopper_pearson
from ppbench.records.aggregate import aggregate
from ppbench.records.archive import Files
from ppbench.records.schema import Record
from ppbench.records.soundness import soundness_of
from ppbench.records.store import MARKER, Store
from ppbench.report.accepted import baseline_problems
from ppbench.report.columns import CELLS, WORST, Column
from ppbench.report.controls import check_harness
from ppbench.report.frame import frame_of
from ppbench.report.page.boards import boards
from ppbench.report.page.table import Claims, csv_text, no_claims
from ppbench.report.page.worst import worst_csv

TABLE, WORST_CASE = "leaderboard.csv", "worst_case.csv"
_CLOSE = 1e-9
_NAME = re.compile(r"[\w .:+=(),/-]+")


def verify(out: Path, claims: Claims | None = None) -> list[str]:
    """Return what is wrong with the results in `out`, a folder or an archive, one sentence each; [] when all is right.

    Recomputed: names from configurations, metrics from per-victim scores (exactly), intervals of accuracy, digests,
    and, where all records are sound, the tables. claims: for the column `claimed`, None: unchecked. UsageError: `out`
    is no results folder of this ppbench.
    """
    store = Store(out)
    if not store.files.holds(MARKER):
        raise UsageError(f"{out} holds no ppbench results (no {MARKER} in it); give a finished run's folder.")
    records, problems = store.readable()
    for record in records:
        problems += [f"{record.cell_id}.json: {problem}" for problem in record_problems(record)]
    sound = not problems
    for record in () if store.bare else records:
        problems += [f"{record.cell_id}.json: {problem}" for problem in _artifact_problems(store, record)]
    problems += _strays(store)
    problems += baseline_problems(store, records)
    try:
        harness = check_harness(soundness_of(store))
    except UsageError as error:
        return [*problems, str(error)]
    return [*problems, *_table_problems(store.files, records, claims, harness.ok is not False)] if sound else problems


def _table_problems(files: Files, records: Sequence[Record], claims: Claims | None, sound: bool) -> Iterator[str]:
    """Yield what the tables say that `records` do not give; sound: whether the self-test passed."""
    frame = frame_of(records)
    found = boards(frame, no_claims, sound)
    if files.holds(TABLE):
        unchecked = () if claims is not None else ("claimed",)
        yield from _differences(files, TABLE, csv_text(frame, claims or no_claims, found), CELLS, unchecked)
    if files.holds(WORST_CASE):
        yield from _differences(files, WORST_CASE, worst_csv(found), WORST)


def record_problems(record: Record) -> Iterator[str]:
    """Yield what a record says that its own configuration and scores do not bear out."""
    config = record.config
    if record.cell_id != config.cell_id():
        yield f"its configuration has the name {config.cell_id()}; the configuration was changed"
    for what, name in (("defense", config.defense.id), ("attack", config.attack.id)):
        if not _NAME.fullmatch(name):
            yield f"{what} {name!r} has a name that no plugin can have"
    if (record.status == "complete") != (record.reason is None):
        yield f"status {record.status!r} has reason {record.reason!r}; only what is not complete has one"
    if record.status == "complete" and not record.victims:
        yield "status 'complete' without any victim's score"
    try:
        expected = aggregate(record.victims, classes=config.model.classes, seed=config.seed, delta=record.privacy.delta)
    except (UsageError, ValueError) as error:
        yield f"its metrics cannot be recomputed: {error}"
        return
    stated = {metric.name: metric for metric in record.metrics}
    if list(stated) != [metric.name for metric in expected] or len(stated) != len(record.metrics):
        yield f"metrics {', '.join(stated)} where the scores give {', '.join(m.name for m in expected)}"
    for metric in expected:
        other = stated.get(metric.name)
        if other is not None and other != metric:
            field = next(k for k in type(metric).model_fields if getattr(metric, k) != getattr(other, k))
            right = getattr(metric, field)
            yield f"{metric.name}.{field} is {getattr(other, field)}, the scores give {right}"
    yield from _utility_problems(record)


def _utility_problems(record: Record) -> Iterator[str]:
    utility = record.utility
    if utility.accuracy is None:
        if utility.reason is None:
            yield "utility.accuracy is null without a reason"
        return
    if utility.dice is not None:  # masks: both intervals resample images, which a record does not keep
        for name in ("accuracy", "dice"):
            value, low, high = utility.figure(name)
            told = [0.0, *(end for end in (low, value, high) if end is not None), 1.0]
            if told != sorted(told):
                yield f"utility.{name} and its interval {(low, value, high)} are not in order within [0, 1]"
        return
    hits = round(utility.accuracy * utility.n)
    if utility.n < 1 or not 0 <= hits <= utility.n or abs(hits / utility.n - utility.accuracy) > _CLOSE:
        yield f"utility.accuracy {utility.accuracy} is no share of {utility.n} test examples"
        return
    interval = clopper_pearson(hits, utility.n)
    for name in ("low", "high"):
        stated, expected = getattr(utility, name), getattr(interval, name)
        if stated is None or expected is None or abs(stated - expected) > _CLOSE:
            yield f"utility.{name} is {stated}, {hits} of {utility.n} give {expected}"


def _artifact_problems(store: Store, record: Record) -> Iterator[str]:
    for artifact in record.artifacts:
        if artifact.path != f"{record.cell_id}.safetensors":
            yield f"artifact {artifact.path!r} is not the cell's own file"
            continue
        try:
            data = store.files.read(f"records/{artifact.path}")
        except FileNotFoundError:
            yield f"artifact {artifact.path} is missing"
            continue
        except OSError as cause:
            yield f"artifact {artifact.path} cannot be read ({cause.strerror})"
            continue
        if hashlib.sha256(data).hexdigest() != artifact.sha256:
            yield f"artifact {artifact.path} is not the file that was scored (its SHA-256 differs)"
        elif len(data) != artifact.bytes:
            yield f"artifact {artifact.path} has {len(data)} bytes, not {artifact.bytes} as recorded"


def _strays(store: Store) -> Iterator[str]:
    """Yield JSON files that no finished cell has, so that nothing would read them, and times that cannot be read."""
    known = set(store.ids())
    for name in store.files.names("records"):
        if name.endswith(".json") and name.removesuffix(".json").removesuffix(".timing") not in known:
            yield f"{name}: not a file of any finished cell"
    timings = [f"records/{name}" for name in store.files.names("records") if name.endswith(".timing.json")]
    for name in [*timings, *(f"times/{name}" for name in store.files.names("times"))]:
        try:
            store.files.read(name)
        except OSError as cause:
            yield f"{name} cannot be read ({cause.strerror})"


def _differences(
    files: Files, name: str, text: str, declared: Sequence[Column], unchecked: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield where the table `name` differs from `text`, but for columns `unchecked`; declared: its columns today."""
    try:
        stated = list(csv.DictReader(io.StringIO(files.read(name).decode(), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as cause:
        yield f"{name} cannot be read as CSV ({cause})"
        return
    expected = list(csv.DictReader(io.StringIO(text, newline="")))
    if len(stated) != len(expected):
        yield f"{name} has {len(stated)} rows, the records give {len(expected)}; write it again"
        return
    head, columns = ([*rows[0]] if rows else [] for rows in (stated, expected))
    # New columns go last, so a table that lacks the last of those declared was written before them.
    own = [column.name for column in declared if column.name in columns]
    absent = own[len([column for column in own if column in head]) :]
    if head != [column for column in columns if column not in absent]:
        odd = ", ".join(map(repr, sorted({*head} ^ {*columns}, key=str)[:3])) or "their order"
        yield f"{name} has other columns than the records give ({odd}); write it again"
        return
    for number, (have, want) in enumerate(zip(stated, expected, strict=True), start=2):
        for column in have:
            if column not in unchecked and have[column] != want.get(column):
                yield f"{name} line {number}: {column} is {have[column]!r}, the records give {want.get(column)!r}"
