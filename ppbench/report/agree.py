"""What several cells of a folder share and must agree on: a training, a question, an original image."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from ppbench.records.schema import Cost, Record
from ppbench.records.store import CellImages
from ppbench.records.times import training_of

TRAINING_FIELDS = ("utility", "cost", "privacy", "played")
"""Fields of a record that all cells of one training share."""


def of_training(source: Any, name: str) -> Any:
    """Return one of `TRAINING_FIELDS` of a record or kept training, as all cells of the training share it."""
    value = getattr(source, name)
    return value.of_training if name == "privacy" else value


def disagreements(records: Sequence[Record]) -> Iterator[str]:
    """Yield a sentence for each contradiction between cells of one training, or with one question."""
    trainings = _groups((_training(r), r) for r in records if not _untrained(r))
    for some in trainings:
        for name in TRAINING_FIELDS:
            for cell, others in _odd((r.cell_id, repr(of_training(r, name))) for r in some):
                yield f"{cell}.json: {name} is not that of {others} of its training"
        for alike in _groups(((r.config.probe, r.config.probe_rounds), r) for r in some if _has_probe_guarantee(r)):
            for cell, others in _odd((r.cell_id, repr(r.privacy)) for r in alike):
                yield f"{cell}.json: the guarantee of its probe is not that of {others} probed alike"
    for some in _groups(((r.asked, r.config.attack.kind), r) for r in records if r.asked and r.victims):
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


def _has_probe_guarantee(record: Record) -> bool:
    return record.privacy.probe_epsilon is not None


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


def _groups(pairs: Iterable[tuple[Hashable, Record]]) -> Iterator[list[Record]]:
    groups: dict[Hashable, list[Record]] = {}
    for key, record in pairs:
        groups.setdefault(key, []).append(record)
    return (some for some in groups.values() if len(some) > 1)


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
