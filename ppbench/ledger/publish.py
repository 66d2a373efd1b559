"""Publish the view of every cell in a folder of results with secret draws as a transcript.

Results drawn from a seed alone are refused: anyone who knows the seed draws the same victims. Files are searched for
the truth before they are published, as an object (`adversary.leaks`) and as bytes.
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
from ppbench.ledger.form import TranscriptInfo, row_key
from ppbench.ledger.freeze import ViewSource, freeze
from ppbench.ledger.scenes import separate_views
from ppbench.questions.base import question_of
from ppbench.records.salt import salt_of
from ppbench.records.schema import CellConfig, Record
from ppbench.records.store import Store
from ppbench.run.again import find_cell
from ppbench.run.complete import local_dataset
from ppbench.run.schedule import Progress
from ppbench.run.suite import load_suite, with_salt
from ppbench.run.sweep import EVERYTHING, SweepResult, sweep

PUBLIC_DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "svhn")
"""Public data sets."""
BOARD_BYTES = 200_000_000
"""Most bytes that a board's transcripts should have together, as people download them."""


@dataclass(frozen=True)
class Published:
    """The published transcripts, their total bytes, sentences on views left out, and remarks for the organizer."""

    transcripts: tuple[TranscriptInfo, ...]
    bytes: int
    left_out: tuple[str, ...]
    remarks: tuple[str, ...]


def compute_views(
    suite: str,
    out: Path,
    preset: str = "",
    only: Mapping[str, Sequence[str]] = EVERYTHING,
    dataset: str | None = None,
    weights: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> SweepResult:
    """Compute a suite's views, each on its own victims, drawn with the secret of `out`, a new one if it has none.

    Arguments as of `run.sweep.sweep`. Raises UsageError: see there.
    """
    loaded = with_salt(load_suite(suite, preset, dataset=dataset, weights=weights), salt_of(out))
    return sweep(separate_views(loaded), out=out, only=only, workers=workers, progress=progress, command=command)


def publish(results: Path, out: Path, dataset: str | None = None, weights: str | None = None) -> Published:
    """Publish the views of the cells in `results` into the folder `out`; the truth goes to results/truth.

    dataset: the argument that opens the data here, if `run.complete.local_dataset` does not know it. The same results
    give the same files. Raises UsageError: the results have no secret, or nothing in them can be published.
    """
    store, salt = Store(results), salt_of(results, fresh=False)
    if not salt:
        raise UsageError(
            f"The draws of {results} derive from its seeds alone, which anyone can repeat; publish a suite into a new "
            "folder of results, or evaluate with --isolate."
        )
    every, left_out = list[ViewSource](), list[str]()
    for some in _views(store.load_all()):
        if why := _obstacle(some[0].config):
            left_out.append(f"{title_of(some[0].config)}: {why}")
            continue
        data = dataset or local_dataset(some[0].config.data.name)
        if data is None:
            name = some[0].config.data.name
            raise UsageError(f"The place of {name} on this machine is unknown; give it, as --dataset parquet:FOLDER.")
        experiment, group, _ = find_cell(some[0].config, data, salt, weights)
        every.append(ViewSource(store, experiment, group, some, title_of(some[0].config), salt))
    if not every:
        raise UsageError(f"Nothing in {results} can be published: {'; '.join(left_out) or 'it holds no cells'}.")
    return _write(every, out, left_out)


def _write(every: Sequence[ViewSource], out: Path, left_out: Sequence[str]) -> Published:
    kept, secrets, clashes = _disjoint(every)
    make_folder(out)
    made = [freeze(scene, out, secrets) for scene in kept]
    index = [{"id": a.id, "title": a.title, "kinds": list(a.kinds), "bytes": _size(a)} for a in made]
    write_atomic(out / "index.json", (json.dumps(index, indent=1, sort_keys=True) + "\n").encode())
    return Published(tuple(made), sum(map(_size, made)), (*left_out, *clashes), tuple(_remarks(made)))


def _disjoint(every: Sequence[ViewSource]) -> tuple[list[ViewSource], list[Tensor], list[str]]:
    """Return the views of which no two share a victim, their victims, and why the others are left out.

    A view would answer another with the same victim. Views of an evaluation's roles use the same probes and count once.
    """
    owners, secrets = dict[bytes, str](), dict[str, Tensor]()
    clashes, refused = list[str](), set[str]()
    for scene in every:
        probes = row_key(scene.config.model_copy(update={"role": ""}))
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
    kept = [s for s in every if row_key(s.config.model_copy(update={"role": ""})) in secrets]
    return kept, list(secrets.values()), clashes


def _remarks(made: Sequence[TranscriptInfo]) -> Iterator[str]:
    """Yield remarks for the organizer on the published transcripts."""
    for name in sorted({about.data.name for about in made}):
        parts = name.split(":")
        if not {*parts} & {*PUBLIC_DATASETS}:
            continue
        if parts[0] == "warped":
            yield (
                f"anyone with {name.partition(':')[2]} can still look up originals and warp them until they fit, "
                "except for the grain (docs/benchmarks.md): only private data rule out a dictionary"
            )
        else:
            yield (
                f"anyone with {name} can look victims up in it, by the gradients of its images: such a lookup is no "
                "reconstruction; warped:DATA makes victims that are in no data set"
            )


def _size(about: TranscriptInfo) -> int:
    return sum(file.bytes for file in about.files.values())


def _views(records: Sequence[Record]) -> list[list[Record]]:
    """Return the complete cells that read uploads, grouped by view."""
    by_row = defaultdict(list)
    for record in records:
        question = question_of(record.config.attack.kind)
        if record.status == "complete" and question.source == "probe" and not question.follows:
            by_row[row_key(record.config)].append(record)
    each = [sorted(some, key=lambda r: r.cell_id) for some in by_row.values()]
    return sorted(each, key=lambda some: (title_of(some[0].config), some[0].cell_id))


def title_of(config: CellConfig) -> str:
    """Return the title of a view."""
    control = config.defense.control
    at = "" if control is None else f" {control.name}={control.value:g}"
    parts = [config.threat_model.id, config.stage, f"batch {config.batch_size}", config.role]
    return f"{config.defense.id}{at}, {config.data.name}, {config.model.id}: {', '.join(filter(None, parts))}"


def _obstacle(config: CellConfig) -> str:
    """Return why a view cannot be published, "" if it can."""
    if recorded_threat(config.threat_model.id).acts:
        return "its server chose the weights that clients received, and a reader cannot choose again"
    if any(str(value).startswith("sha256:") for value in config.model.options.values()):
        return "its network has weights in a file"
    return ""
