"""Whether records contradict themselves, one another, or the history of an accepted baseline."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from ppbench.base.errors import UsageError
from ppbench.base.registry import load_plugin
from ppbench.federation.contract import Defense
from ppbench.federation.threats import THREATS
from ppbench.metrics.intervals import clopper_pearson
from ppbench.questions.base import question_for
from ppbench.records.archive import files_of
from ppbench.records.figure import aggregate, grouped
from ppbench.records.run_files import training_of
from ppbench.records.schema import Cost, Record, Strict, Utility
from ppbench.records.store import CellImages, Store, canonical_json
from ppbench.report.controls import CONTROLS
from ppbench.report.frame import EVALUATION, frame_of

# -- Accepted baselines: BASELINE/accepted.jsonl says which records were accepted, when and why, one line per move --

HISTORY = "accepted.jsonl"


class Moved(Strict):
    """Numbers of cells that a move added, removed, and changed (one name, other results)."""

    added: int
    removed: int
    changed: int


class Accepted(Strict):
    """A line of accepted.jsonl: when (UTC, "2026-05-03T17:04:05Z"), why, by which version; digest: `records_digest`."""

    date: str
    reason: str = Field(min_length=1)
    ppbench: str
    cells: int
    digest: str
    moved: Moved


def records_digest(records: Sequence[Record]) -> str:
    """Return the SHA-256 over the canonical JSON of `records`, by name; the layout of files does not count."""
    digest = sha256()
    for record in sorted(records, key=lambda r: r.cell_id):
        digest.update(f"{record.cell_id} {sha256(canonical_json(record)).hexdigest()}\n".encode())
    return digest.hexdigest()


def history(out: Path) -> list[Accepted]:
    """Return a baseline's accepted.jsonl, oldest first, [] where there is none; UsageError where it was changed."""
    files = files_of(out)
    path = files.path / HISTORY
    try:
        lines = files.read(HISTORY).decode().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as cause:
        raise UsageError(f"{path} cannot be read ({cause}); restore it from version control.") from cause
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(Accepted.model_validate_json(line, strict=True))
        except ValidationError as cause:
            raise UsageError(
                f"{path} line {number} is no entry of `ppbench baseline accept`; restore the file from version control."
            ) from cause
    return entries


def baseline_problems(store: Store, records: Sequence[Record]) -> Iterator[str]:
    """Yield a clause if a baseline with these records was not moved by `ppbench baseline accept`."""
    try:
        lines = history(store.out)
    except UsageError as error:
        yield str(error)
        return
    if not lines:
        if store.bare:
            yield f"{HISTORY} is missing, though the marker says that this is an accepted baseline"
        return
    last, digest = lines[-1], records_digest(records)
    if digest != last.digest:
        yield (
            f"the {len(records)} records have the digest {digest[:16]}, the last line of {HISTORY} says "
            f"{last.digest[:16]} of {last.cells}; a baseline is moved by `ppbench baseline accept` alone"
        )


# -- What several cells of a folder share and must agree on: a training, a question, an original image --

TRAINING_FIELDS = ("utility", "cost", "privacy", "played")
"""Fields of a record that all cells of one training share."""


def of_training(source: Any, name: str) -> Any:
    """Return one of `TRAINING_FIELDS` of a record or kept training, as all cells of the training share it."""
    value = getattr(source, name)
    return value.of_training if name == "privacy" else value


def disagreements(records: Sequence[Record]) -> Iterator[str]:
    """Yield a sentence for each contradiction between cells of one training, or with one question."""
    for some in _several((r for r in records if not _untrained(r)), _training):
        for name in TRAINING_FIELDS:
            for cell, others in _odd((r.cell_id, repr(of_training(r, name))) for r in some):
                yield f"{cell}.json: {name} is not that of {others} of its training"
        with_guarantee = [r for r in some if r.privacy.probe_epsilon is not None]
        for alike in _several(with_guarantee, lambda r: r.config.probing):
            for cell, others in _odd((r.cell_id, repr(r.privacy)) for r in alike):
                yield f"{cell}.json: the guarantee of its probe is not that of {others} probed alike"
    for some in _several((r for r in records if r.asked and r.victims), lambda r: (r.asked, r.config.attack.kind)):
        scored = ((r.cell_id, tuple((score.place, score.truth) for score in r.victims)) for r in some)
        for cell, others in _odd(scored):
            yield f"{cell}.json: its victims are not those of {others} with the same question"


@dataclass
class Originals:
    """The original images of cells, by victim; cells of one federation must hold equal ones."""

    _seen: dict[Hashable, dict[bytes, list[str]]] = field(default_factory=dict)

    def add(self, record: Record, images: CellImages) -> None:
        """Add a cell's originals and its blind guess."""
        config, federation = record.config, record.config.federation
        data = (config.data.model_dump_json(), config.seed)
        if images.blind is not None:
            self._note(("blind", *data), images.blind.tobytes(), record.cell_id)
        dealt = (*data, federation.clients, federation.partition, config.batch_size, config.victims_from)
        for score, truth in zip(record.victims, images.truth, strict=False):
            self._note((*dealt, score.place), truth.tobytes(), record.cell_id)

    def _note(self, key: Hashable, data: bytes, cell: str) -> None:
        self._seen.setdefault(key, defaultdict(list))[sha256(data).digest()].append(cell)

    def disagreements(self) -> Iterator[str]:
        """Yield a sentence for each cell whose originals are not those of the other cells."""
        contradictions = dict[str, list[str]]()
        for versions in self._seen.values():
            contents = [(cell, content) for content, cells in versions.items() for cell in cells]
            for cell, others in _odd(contents) if len(versions) > 1 else ():
                contradictions.setdefault(cell, []).append(others)
        for cell, some in sorted(contradictions.items()):
            yield f"{cell}.json: {len(some)} originals beside its scores are not those of {some[0]}"


def missing_controls(records: Sequence[Record]) -> Iterator[str]:
    """Yield a sentence for each control without a cell in a scene where a defense was attacked.

    Views for publication stand alone.
    """
    every = frame_of(record for record in records if record.config.victims_from is None)
    for evaluation in every.by(EVALUATION).values():
        scenes = {name: {_scene(r) for r in evaluation if r.config.defense.id == name} for name in CONTROLS}
        defended = [r for r in evaluation if r.config.defense.id not in CONTROLS]
        for name, present in scenes.items():
            lacking = [r.config for r in defended if _scene(r) not in present]
            if lacking:
                about = lacking[0]
                yield (
                    f"the control {name} has no cell beside {len(lacking)} cells, such as {about.defense.id} under "
                    f"{about.attack.id} [{about.threat_model.id}, {about.stage}, batch {about.batch_size}, seed "
                    f"{about.seed}]: it was taken away, or the run was interrupted; run it again into the folder"
                )


def _scene(record: Record) -> Hashable:
    config = record.config
    return config.threat_model.id, config.stage, config.batch_size, config.victims, config.probing, config.audit


def _training(record: Record) -> Hashable:
    """Return the key of a record's training; an audit trains a model of its own, for its candidates."""
    audit = record.config.audit
    own = None if audit is None else (audit.canaries, audit.canary_clients, record.config.victims)
    return training_of(record), record.config.stage == "audit", own


def _untrained(record: Record) -> bool:
    """Return whether a cell failed before its training, so that it has no figures of one."""
    utility = record.utility
    empty = Cost(bytes_up=0, bytes_down=0, bytes_setup=0)
    return record.status == "failed" and utility.accuracy is None and utility.mse is None and record.cost == empty


def _several(records: Iterable[Record], key: Callable[[Record], Hashable]) -> list[list[Record]]:
    """Return the groups of more than one record."""
    return [some for some in grouped(records, key).values() if len(some) > 1]


def _odd(contents: Iterable[tuple[str, Hashable]]) -> Iterator[tuple[str, str]]:
    """Yield each cell whose content is not the commonest (of equals the first), with words on the cells that have it.

    Where one of two is forged, which one is unknown: the words name the other.
    """
    pairs = list(contents)
    (content, count), *rest = Counter(content for _, content in pairs).most_common()
    first = next(cell for cell, other in pairs if other == content)
    for cell, other in pairs if rest else ():
        if other != content:
            yield cell, f"{count} other cells, such as {first}.json,"


# -- Contradictions within a record; no other file is read --

SHARE_PRECISION = 1e-9
_NAME = re.compile(r"[\w .:+=(),/-]+")


def implausible(record: Record) -> Iterator[str]:
    """Yield a clause for each contradiction between parts of a record, metrics excepted."""
    yield from _configuration(record)
    yield from _outcome(record)
    yield from _privacy(record)
    yield from _utility(record)
    yield from _curve(record)
    yield from question_for(record).flawed(record)


def _configuration(record: Record) -> Iterator[str]:
    config, axis = record.config, record.config.defense.control
    threat, adaptive = config.threat_model, config.attack.adaptive
    known = THREATS.get(threat.id)
    if known is not None and threat.sees != known.sees:
        yield f"threat model {known} sees {threat.sees!r}, not {known.sees!r}"
    if adaptive != threat.knows_defense:
        yield f"its attack is {'' if adaptive else 'not '}adaptive where the threat model says the opposite"
    stated = None if axis is None else config.defense.parameters.get(axis.name)
    if axis is not None and (not isinstance(stated, int | float) or stated != axis.value):
        yield f"its control {axis.name} is {axis.value}, its defense's parameter {stated}"
    tuned = record.tuned
    if tuned is not None and tuned.scores.index(max(tuned.scores)) != tuned.chosen:
        yield f"tuned.chosen is {tuned.chosen}, variant {tuned.scores.index(max(tuned.scores))} gave most"


def _outcome(record: Record) -> Iterator[str]:
    if (record.status == "complete") != (record.reason is None):
        yield f"status {record.status!r} has reason {record.reason!r}; only what is not complete has one"
    if record.status == "complete" and not record.victims:
        yield "status 'complete' without any victim's score"
    if record.status != "complete" and (record.victims or record.artifacts):
        yield f"status {record.status!r} with scores or reconstructions; only a complete cell has any"
    places = [score.place for score in record.victims]
    if len(set(places)) < len(places):
        yield "a victim is scored twice"


def _privacy(record: Record) -> Iterator[str]:
    privacy = record.privacy
    if len({part is None for part in (privacy.epsilon, privacy.delta)}) > 1:
        yield f"privacy has epsilon {privacy.epsilon} with delta {privacy.delta}; it has both or none"
    if (privacy.epsilon is None) == (privacy.reason is None):
        yield f"privacy.epsilon is {privacy.epsilon} with reason {privacy.reason!r}; only a missing one has a reason"


def _utility(record: Record) -> Iterator[str]:
    utility = record.utility
    if utility.accuracy is None:
        if utility.reason is None:
            yield "utility.accuracy is null without a reason"
        return
    if utility.resamples:
        for name in ("accuracy", *(["dice"] if utility.dice is not None else [])):
            value, low, high = utility.figure(name)
            ascending = [0.0, *(end for end in (low, value, high) if end is not None), 1.0]
            if ascending != sorted(ascending):
                yield f"utility.{name} and its interval {(low, value, high)} are not in order within [0, 1]"
        return
    hits = round(utility.accuracy * utility.n)
    if utility.n < 1 or not 0 <= hits <= utility.n or not _is_share(utility, record):
        yield f"utility.accuracy {utility.accuracy} is no share of {utility.n} test examples"
        return
    interval = clopper_pearson(hits, utility.n)
    for name in ("low", "high"):
        stated, expected = getattr(utility, name), getattr(interval, name)
        if stated is None or expected is None or abs(stated - expected) > SHARE_PRECISION:
            yield f"utility.{name} is {stated}, {hits} of {utility.n} give {expected}"


def _is_share(utility: Utility, record: Record) -> bool:
    """Return whether accuracy is a share of the test examples, or a mean of shares where clients keep own models."""
    accuracy, n = utility.accuracy or 0.0, utility.n
    counts = (n, n * record.config.federation.clients) if _keep_own(record.config.defense.id) else (n,)
    return any(abs(round(accuracy * count) / count - accuracy) <= SHARE_PRECISION for count in counts)


def _keep_own(defense: str) -> bool:
    """Return whether clients end with models of their own, according to the installed defense."""
    try:
        return bool(load_plugin("defenses", defense).own_models is not Defense.own_models)
    except UsageError:  # not installed, or broken
        return False


def _curve(record: Record) -> Iterator[str]:
    utility, config = record.utility, record.config
    if utility.n != config.data.test:
        yield f"utility.n is {utility.n}, the data set has {config.data.test} test examples"
    if utility.dice is None and abs(utility.chance - 1 / config.model.classes) > SHARE_PRECISION:
        yield f"utility.chance is {utility.chance}, {config.model.classes} classes give {1 / config.model.classes}"
    rounds = [number for number, _ in utility.curve]
    if rounds != sorted(set(rounds)) or any(not 1 <= number <= config.federation.rounds for number in rounds):
        yield f"utility.curve is at rounds {rounds}, which do not ascend from 1 to {config.federation.rounds}"
    last = utility.curve[-1][1] if utility.curve else None
    if utility.accuracy is not None and utility.dice is None and last != utility.accuracy:
        yield f"utility.accuracy is {utility.accuracy}, its curve ends at {last}"


def record_problems(record: Record) -> Iterator[str]:
    """Yield where a record contradicts its own configuration and scores, a clause each."""
    config = record.config
    if record.cell_id != config.cell_id():
        yield f"its configuration has the name {config.cell_id()}; the configuration was changed"
    for what, name in (("defense", config.defense.id), ("attack", config.attack.id)):
        if not _NAME.fullmatch(name):
            yield f"{what} {name!r} has a name that no plugin can have"
    yield from implausible(record)
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


def sound_records(store: Store) -> tuple[list[Record], list[str]]:
    """Return the readable records, and problems that the records alone show, without images, tables or data."""
    records, problems = store.readable()
    wrong = {record.cell_id: [*record_problems(record)] for record in records}
    problems += [f"{cell}.json: {problem}" for cell, some in wrong.items() for problem in some]
    return records, [*problems, *disagreements([record for record in records if not wrong[record.cell_id]])]
