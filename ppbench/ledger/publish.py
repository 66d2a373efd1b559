"""Publishing: the view of every cell in a folder of results whose draws are secret becomes a transcript.

Results that were drawn from a seed alone are refused: who knows the seed draws the same victims. What leaves is looked
through before it does, as an object (`adversary.leaks`) and as bytes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ppbench.base.errors import UsageError
from ppbench.base.files import make_folder, write_atomic
from ppbench.federation.threats import recorded_threat
from ppbench.ledger.form import About, row_of
from ppbench.ledger.freeze import Scene, frozen
from ppbench.ledger.scenes import separated
from ppbench.questions.base import question_of
from ppbench.records.salt import salt_of
from ppbench.records.schema import CellConfig, Record
from ppbench.records.store import Store
from ppbench.run.again import again
from ppbench.run.complete import at_hand
from ppbench.run.schedule import Progress
from ppbench.run.suite import drawn_with, load_suite
from ppbench.run.sweep import EVERYTHING, Swept, sweep

PUBLIC = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "svhn")
"""Data sets that everybody has."""
LARGEST = 200_000_000
"""Bytes that a board's transcripts should not exceed together: people fetch them."""


@dataclass(frozen=True)
class Published:
    """What was published: transcripts, their bytes together, sentences on what was left out, and on what to know."""

    transcripts: tuple[About, ...]
    bytes: int
    left_out: tuple[str, ...]
    remarks: tuple[str, ...]


def computed(
    suite: str,
    out: Path,
    preset: str = "",
    only: Mapping[str, Sequence[str]] = EVERYTHING,
    dataset: str | None = None,
    weights: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> Swept:
    """Compute a suite's views, each on victims of its own that a secret chooses, a new one where `out` has none.

    Arguments as of `run.sweep.sweep`. Raises UsageError: see there.
    """
    asked = drawn_with(load_suite(suite, preset, dataset=dataset, weights=weights), salt_of(out))
    return sweep(separated(asked), out=out, only=only, workers=workers, progress=progress, command=command)


def publish(results: Path, out: Path, dataset: str | None = None, weights: str | None = None) -> Published:
    """Publish the views of the cells in `results` into the folder `out`; the truth goes to results/truth.

    dataset: what opens the data here where `run.complete.at_hand` cannot know. The same results give the same files.
    Raises UsageError: the results were not drawn with a secret, or nothing in them can be published.
    """
    store, salt = Store(results), salt_of(results, fresh=False)
    if not salt:
        raise UsageError(
            f"The draws of {results} derive from its seeds alone, which anybody can repeat; publish a suite into a new "
            "folder of results, or evaluate with --isolate."
        )
    every, left_out = list[Scene](), list[str]()
    for some in _views(store.load_all()):
        if why := _obstacle(some[0].config):
            left_out.append(f"{title_of(some[0].config)}: {why}")
            continue
        data = dataset or at_hand(some[0].config.data.name)
        if data is None:
            name = some[0].config.data.name
            raise UsageError(f"Where {name} lies here cannot be known; name it, as --dataset parquet:FOLDER.")
        experiment, group, _ = again(some[0].config, data, salt, weights)
        every.append(Scene(store, experiment, group, some, title_of(some[0].config), salt))
    if not every:
        raise UsageError(f"Nothing in {results} can be published: {'; '.join(left_out) or 'it holds no cells'}.")
    return _written(every, out, left_out)


def _written(every: Sequence[Scene], out: Path, left_out: Sequence[str]) -> Published:
    kept, secrets, clashes = _disjoint(every)
    make_folder(out)
    made = [frozen(scene, out, secrets) for scene in kept]
    index = [{"id": a.id, "title": a.title, "kinds": list(a.kinds), "bytes": _size(a)} for a in made]
    write_atomic(out / "index.json", (json.dumps(index, indent=1, sort_keys=True) + "\n").encode())
    return Published(tuple(made), sum(map(_size, made)), (*left_out, *clashes), tuple(_remarks(made)))


def _disjoint(every: Sequence[Scene]) -> tuple[list[Scene], list[Tensor], list[str]]:
    """Return the views of which no two share a victim, their victims, and why the others are left out.

    Who reads one would answer the other. Views of one evaluation's roles are of the same probes, and count once.
    """
    owners, secrets = dict[bytes, str](), dict[str, Tensor]()
    clashes, refused = list[str](), set[str]()
    for scene in every:
        probes = row_of(scene.config.model_copy(update={"role": ""}))
        if probes in secrets or probes in refused:
            continue
        images = [image.tobytes() for image in scene.victims.flatten(1).numpy()]
        other = next((owners[image] for image in images if image in owners), None)
        if other is not None:
            refused.add(probes)
            clashes.append(f"{scene.title}: it has a victim in common with {other}, whose readers would answer it")
            continue
        owners |= dict.fromkeys(images, scene.title)
        secrets[probes] = scene.victims
    kept = [s for s in every if row_of(s.config.model_copy(update={"role": ""})) in secrets]
    return kept, list(secrets.values()), clashes


def _remarks(made: Sequence[About]) -> Iterator[str]:
    """Yield what an organizer must know of what he publishes."""
    for name in sorted({about.data.name for about in made}):
        parts = name.split(":")
        if not {*parts} & {*PUBLIC}:
            continue
        if parts[0] == "warped":
            yield (
                f"whoever has {name.partition(':')[2]} can still look originals up and bend them until they fit, but "
                "for the grain (docs/benchmarks.md): only data that nobody has leave no dictionary"
            )
        else:
            yield (
                f"whoever has {name} can look victims up in it, by what their gradients would be: a guess of such a "
                "dictionary is no reconstruction; warped:DATA makes victims that stand in no data set"
            )


def _size(about: About) -> int:
    return sum(file.bytes for file in about.files.values())


def _views(records: Sequence[Record]) -> list[list[Record]]:
    """Return the cells that read uploads, together by what they look at."""
    found = defaultdict(list)
    for record in records:
        question = question_of(record.config.attack.kind)
        if record.status == "complete" and question.source == "probe" and not question.follows:
            found[row_of(record.config)].append(record)
    each = [sorted(some, key=lambda r: r.cell_id) for some in found.values()]
    return sorted(each, key=lambda some: (title_of(some[0].config), some[0].cell_id))


def title_of(config: CellConfig) -> str:
    """Return what people call a view."""
    control = config.defense.control
    at = "" if control is None else f" {control.name}={control.value:g}"
    parts = [config.threat_model.id, config.stage, f"batch {config.batch_size}", config.role]
    return f"{config.defense.id}{at}, {config.data.name}, {config.model.id}: {', '.join(filter(None, parts))}"


def _obstacle(config: CellConfig) -> str:
    """Return why nobody else could attack such a view, "" where one can."""
    if recorded_threat(config.threat_model.id).acts:
        return "its server chose what clients were sent, and nobody can choose again"
    if any(str(value).startswith("sha256:") for value in config.model.options.values()):
        return "its network has weights in a file"
    return ""
