"""`ppbench verify`: recompute whatever can be recomputed in a results folder, and report differences."""

from __future__ import annotations

import csv
import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppbench.base.errors import UsageError, count_of
from ppbench.metrics.modality import modality_of
from ppbench.questions.base import question_for
from ppbench.records.archive import Files
from ppbench.records.run_files import SELFTEST, soundness_of, training_of
from ppbench.records.schema import Record
from ppbench.records.store import MARKER, Store
from ppbench.report.columns import CELLS, WORST, Column
from ppbench.report.controls import check_harness
from ppbench.report.frame import frame_of
from ppbench.report.integrity import Originals, baseline_problems, sound_records
from ppbench.report.page.boards import Claims, boards_of, csv_text, no_claims, worst_csv

TABLE, WORST_CASE = "leaderboard.csv", "worst_case.csv"


@dataclass(frozen=True)
class Findings:
    """The problems of results, a sentence each, and what could not be checked, a clause each (see `not_checked`).

    checked: what agrees with what it can be computed from, and how many of it, where there is no problem.
    """

    problems: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the report: first what was not checked, then the problems, or what agrees."""
        agrees = f"What was checked agrees: {', '.join(self.checked)}."
        return "\n".join([f"Not checked: {'; '.join(self.unchecked)}.", *(self.problems or [agrees])])


def not_checked(what: str, count: int, total: int, why: str, unit: str = "cells") -> str:
    """Return a clause on what was not checked: "accuracy in 2 of 3 trainings (only training again shows it)"."""
    return f"{what} in {count} of {total} {unit} ({why})"


Further = Callable[[Store, Sequence[Record]], Findings]
"""Further checks of sound records that need data and plugins (`ppbench.verification.recheck`)."""


def verify(out: Path, claims: Claims | None = None, further: Further | None = None) -> list[str]:
    """Return the problems of the results in `out`, a sentence each; see `examine`."""
    return list(examine(out, claims, further).problems)


def examine(out: Path, claims: Claims | None = None, further: Further | None = None) -> Findings:
    """Return the problems of the results in `out`, a folder or an archive, and what was not checked.

    Recomputed: names from configurations, metrics from per-victim scores (exactly), scores of images from the kept
    reconstructions (see `questions.kept`), flags that scores raise, intervals of accuracy, what cells of one
    training or question share, digests, and, where all records are sound, the tables and
    what `further` checks. claims: for the column `claimed`, None: unchecked. UsageError: `out` is no results folder of
    this ppbench.
    """
    store = Store(out)
    if not store.files.holds(MARKER):
        raise UsageError(f"{out} holds no ppbench results (no {MARKER} in it); give a finished run's folder.")
    records, problems = sound_records(store)
    sound = not problems
    problems += _picture_problems(store, records) if store.bare else _image_problems(store, records)
    problems += _strays(store)
    problems += baseline_problems(store, records)
    more = Findings() if further is None or not sound else further(store, records)
    problems += more.problems
    unchecked = (*more.unchecked, *_unchecked(store, records))
    try:
        harness = check_harness(soundness_of(store))
    except UsageError as error:
        return Findings((*problems, str(error)), unchecked)
    problems += _table_problems(store.files, records, claims, harness.ok is not False) if sound else ()
    return Findings(tuple(problems), unchecked, (*_checked(store, records), *more.checked))


_RUN_AGAIN = "only running them again shows it"


def _unchecked(store: Store, records: Sequence[Record]) -> Iterator[str]:
    """Yield what cannot be checked from these results, a clause each."""
    yield from _unchecked_answers(store, records)
    total = len(records)
    why = "they come from trainings and probes; for those of evidence see above"
    yield not_checked("flags that no score gives, as probe_noticed", total, total, why)
    if tuned := sum(record.tuned is not None for record in records):
        yield not_checked("scores of tuning", tuned, total, "only tuning again shows it")
    if ended := sum(record.status != "complete" for record in records):
        yield not_checked("why there is no result", ended, total, "it is stated alone")
    yield not_checked("where and when it ran", total, total, "environment and origin.json are stated alone")
    trainings = len({training_of(record) for record in records})
    what = "accuracy, bytes and memory as measured"
    yield not_checked(what, trainings, trainings, "only training again shows it", "trainings")
    timed = sum(name.endswith(".timing.json") for name in store.files.names("records"))
    if timed := timed + len(store.files.names("times")):
        yield not_checked("times", timed, timed, "no run takes as long twice", "files")
    why = "it runs again wherever a cell is computed" if store.files.holds(SELFTEST) else f"{SELFTEST} is not here"
    yield not_checked("the self-test", 1, 1, why, "folders")
    if absent := [name for name in (TABLE, WORST_CASE) if not store.files.holds(name)]:
        why = f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not here"
        yield not_checked("rows", len(absent), 2, why, "tables")


def _unchecked_answers(store: Store, records: Sequence[Record]) -> Iterator[str]:
    """Yield what cannot be checked of attacks' answers and their scores, a clause each."""
    scored, total = [record for record in records if record.victims], len(records)
    images = [record for record in scored if _pictured(record)]
    for kind, cells in Counter(modality_of(r.config) for r in scored if question_for(r).inputs).items():
        if not kind.drawn:
            yield not_checked(f"scores of {kind.inputs}", cells, total, f"the {kind.noun} are not kept")
    if images and (store.bare or not any(record.artifacts for record in records)):
        why = "an accepted baseline leaves the reconstructions out" if store.bare else "no reconstructions are here"
        yield not_checked("scores of images", len(images), total, why)
    if pictures := len(_pictures_of(store)):
        why = "no digest is of them; they agree with their scores to 1/255, the rounding of what a page draws"
        yield not_checked("whether pictures are what was scored", pictures, total, why)
    if images:
        what = "whether images, labels, confidence, oracle, path and layers are what attacks answered"
        yield not_checked(what, len(images), total, _RUN_AGAIN)
    if searches := sum(map(_is_search, images)):
        yield not_checked("budgets", searches, total, "a search may stop early, so only that no more was spent")
    if others := [record for record in scored if not question_for(record).inputs]:
        kinds = ", ".join(sorted({record.config.attack.kind for record in others}))
        yield not_checked(f"answers of attacks on {kinds}", len(others), total, f"they are not kept; {_RUN_AGAIN}")


def _checked(store: Store, records: Sequence[Record]) -> Iterator[str]:
    """Yield what was checked of these results, with its number."""
    yield count_of(len(records), "record")
    if (files := sum(len(record.artifacts) for record in records)) and not store.bare:
        yield count_of(files, "file") + " of reconstructions"
    if pictures := len(_pictures_of(store)):
        yield count_of(pictures, "file") + " of pictures"
    for name in (TABLE, WORST_CASE):
        if store.files.holds(name):
            yield name


def _pictures_of(store: Store) -> list[str]:
    """Return the names of the cells whose pictures a published board keeps."""
    ends = (name.partition(".") for name in store.files.names("records")) if store.bare else ()
    return [cell for cell, _, end in ends if end == "safetensors"]


def _picture_problems(store: Store, records: Sequence[Record]) -> Iterator[str]:
    """Yield pictures of no cell that has any, or that contradict its scores or one another."""
    originals, by_id = Originals(), {record.cell_id: record for record in records}
    for cell in _pictures_of(store):
        record = by_id.get(cell)
        if record is None or not record.artifacts or not _pictured(record):
            yield f"{cell}.safetensors: not the pictures of any cell that has reconstructions"
            continue
        try:
            images = store.images(record)
        except UsageError as error:
            yield str(error)
            continue
        assert images is not None  # its file is here
        yield from (f"{cell}.json: {problem}" for problem in question_for(record).contradicted(record, images))
        originals.add(record, images)
    yield from originals.disagreements()


def _image_problems(store: Store, records: Sequence[Record]) -> Iterator[str]:
    """Yield problems of reconstructions and other files of cells, and scores that these do not give."""
    originals, kept = Originals(), any(record.artifacts for record in records)
    for record in records:
        problems = [*_artifact_problems(store, record)]
        if len(record.artifacts) != (_pictured(record) and kept):
            problems.append(
                f"{len(record.artifacts)} files of reconstructions where other such cells have another number"
            )
        images = None
        try:
            images = None if problems else store.images(record)
        except UsageError as error:
            problems = [str(error)]
        if images is not None:
            problems = [*question_for(record).contradicted(record, images)]
            originals.add(record, images)
        yield from (f"{record.cell_id}.json: {problem}" for problem in problems)
    yield from originals.disagreements()


def _table_problems(files: Files, records: Sequence[Record], claims: Claims | None, sound: bool) -> Iterator[str]:
    """Yield where the tables differ from those of `records`; sound: whether the self-test passed."""
    frame = frame_of(records)
    all_boards = boards_of(frame, no_claims, sound)
    if files.holds(TABLE):
        unchecked = () if claims is not None else ("claimed",)
        yield from _differences(files, TABLE, csv_text(frame, claims or no_claims, all_boards), CELLS, unchecked)
    if files.holds(WORST_CASE):
        yield from _differences(files, WORST_CASE, worst_csv(all_boards), WORST)


def _is_search(record: Record) -> bool:
    """Return whether an attack has a budget that its evaluations need not exhaust: it keeps no path, as descents do."""
    budgets = any(name.endswith("budget") for name in record.config.attack.parameters)
    return budgets and not any(getattr(score, "path", None) for score in record.victims)


def _pictured(record: Record) -> bool:
    """Return whether a cell has reconstructions of images, which are kept, unlike other inputs."""
    return bool(record.victims) and question_for(record).inputs and modality_of(record.config).drawn


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
    """Yield JSON files that belong to no finished cell, and times that cannot be read."""
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
    """Yield where the table `name` differs from `text`, except in `unchecked` columns; declared: its columns today."""
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
