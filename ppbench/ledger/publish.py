"""Publish the view of every cell in a folder of results with secret draws as a transcript.

Results drawn from a seed alone are refused: anyone who knows the seed draws the same victims. Files are searched for
the truth before they are published, as an object (`adversary.leaks`) and as bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ppbench.adversary.leaks import leaks
from ppbench.adversary.victims import Victims, probed_units
from ppbench.base.bars import Bars
from ppbench.base.errors import UsageError
from ppbench.base.files import make_folder, publish_folder, write_atomic
from ppbench.base.tree import packed
from ppbench.base.version import __version__
from ppbench.federation.evidence import Evidence
from ppbench.federation.threats import recorded_threat
from ppbench.federation.view import View
from ppbench.ledger.form import (
    ABOUT,
    GRADIENTS,
    VIEW,
    File,
    ObservedUpdate,
    QuestionSlots,
    TranscriptInfo,
    Truth,
    row_key,
    truth_commitment,
)
from ppbench.ledger.transcript import load_transcript, model_code, plan_json
from ppbench.questions.base import question_of
from ppbench.questions.inquiry import Probe
from ppbench.records.run_files import salt_of
from ppbench.records.schema import CellConfig, Record, Scalar
from ppbench.records.store import Store, canonical_json
from ppbench.report.controls import CONTROLS
from ppbench.run.audit.runs import with_shared_tensors
from ppbench.run.cells import CellGroup, find_cell, groups
from ppbench.run.config import EvaluateConfig
from ppbench.run.experiment import WHOLE, Experiment, Point, built_for, make_attack, resolve
from ppbench.run.scene import draws_of, group_victims, prepare_federation, probe_group, yardstick_of
from ppbench.run.suite import Suite, load_suite, with_salt
from ppbench.run.sweep import EVERYTHING, SweepResult, local_dataset, sweep

# -- The publishable views of a suite: one evaluation per view, no two of which share a victim --
# On a board all defenses face the same victims, so that they can be compared one by one. Published side by side, the
# undefended uploads would give the answers to all others. So each view has victims of its own here.


def separate_views(suite: Suite) -> Suite:
    """Return a suite with one evaluation per publishable view, of the first seed alone.

    Seeds share the data, and other seeds might draw the same victims. Views of servers that act are left out: a reader
    cannot choose the sent weights again. Controls are views like others.
    """
    first = min(config.seed for config in suite.configs)
    places, seen, passed = dict[Experiment, str](), set[str](), Counter[str]()
    for experiment, place in suite.places.items():
        if experiment.config.seed != first:
            continue
        for group in groups(experiment):
            one = _alone(experiment, group)
            if one is None or (key := one.model_dump_json()) in seen:
                continue
            seen.add(key)
            places[resolve(one.model_copy(update={"victims_from": passed[one.dataset]}))] = place
            passed[one.dataset] += _taken(experiment, group)  # networks may differ: clients hold the same
    return replace(suite, places=places, alone=True)


def _alone(experiment: Experiment, group: CellGroup) -> EvaluateConfig | None:
    """Return the evaluation of a group's view alone, None if it cannot be published."""
    config, point = experiment.config, experiment.points[group.point]
    if group.records or group.threat.acts or group.stage == "audit":
        return None
    settings: dict[str, Scalar] = {name: value for name, value in config.settings.items() if "." in name}
    if point.defense.name == config.defense:
        own = dataclasses.asdict(point.defense)
        settings |= {name: value for name, value in own.items() if name != point.defense.control}
    elif point.defense.name not in CONTROLS:
        return None
    named = [name for name in config.attacks if name in WHOLE or built_for(make_attack(name), point.defense.name)]
    return config.model_copy(
        update={
            "defense": point.defense.name,
            "attacks": tuple(named),
            "settings": settings,
            "grid": "quick" if point.value is None else (point.value,),
            "stages": (group.stage,),
            "threats": (group.threat.name,),
            "attack_batch": (group.batch,),
        }
    )


def _taken(experiment: Experiment, group: CellGroup) -> int:
    """Return the number of examples of each client that a view's probes use."""
    config, defense = experiment.config, experiment.points[group.point].defense
    count, roles = -(-config.victims_at(group.batch) // group.batch), len(defense.roles) if group.role else 1
    slots, _ = probed_units(range(config.clients), group.threat, count, sums=defense.sums, roles=roles)
    return (max(slot.probe for slot in slots) + 1) * group.batch


# -- Freeze one view: write its files, search them for the truth before they are published, keep the truth apart --


@dataclass(frozen=True)
class ViewSource:
    """The source of a published view: a group of an evaluation, its records in `store`, the secret of the draws."""

    store: Store
    experiment: Experiment
    group: CellGroup
    records: list[Record]
    title: str
    salt: str

    @property
    def victims(self) -> Tensor:
        """The victims' images [N, *shape]."""
        victims = group_victims(self.experiment, self.group)
        return torch.cat([victims.truth(unit).x for unit in victims.units])

    @property
    def config(self) -> CellConfig:
        """The configuration of the first record."""
        return self.records[0].config


def freeze(source: ViewSource, out: Path, secrets: Sequence[Tensor]) -> TranscriptInfo:
    """Write the transcript of a view below `out`, and its truth into the results; UsageError: it reveals the truth.

    secrets: the victims [N, *shape] of all views that are published together.
    """
    fed, _ = prepare_federation(source.experiment, source.group, source.store.out)
    _, view, victims, _ = probe_group(source.experiment, source.group, fed)
    x, y = (torch.stack([getattr(victims.truth(unit), part) for unit in victims.units]) for part in ("x", "y"))
    nonce = hashlib.sha256(f"ppbench.nonce/{source.salt}/{source.config.cell_id()}".encode()).hexdigest()
    observed, tensors = _gradients(view, victims)
    files = {VIEW: packed(with_shared_tensors(view.parts())), GRADIENTS: save(tensors or {"none": torch.zeros(0)})}
    about = _about(source, view, victims, observed, files, truth_commitment(nonce, x, y))
    home = out / about.id

    def write(draft: Path) -> None:
        (draft / ABOUT).write_bytes(canonical_json(about))
        for name, data in files.items():
            (draft / name).write_bytes(data)
        _check_leaks(draft, secrets, source.salt)

    publish_folder(home, write)
    _keep_truth(source, Truth(id=about.id, nonce=nonce, cell=source.config.cell_id()), x, y)
    return about


def _gradients(view: View, victims: Victims) -> tuple[list[ObservedUpdate], dict[str, Tensor]]:
    """Return the observed updates of each question, by the defense's own evidence, and their tensors by name."""
    places = {frozenset(unit): place for place, unit in enumerate(victims.units)}
    listed, tensors, models = list[ObservedUpdate](), dict[str, Tensor](), list[Any]()
    for evidence in view.defense.evidence(view):
        place = places.get(frozenset(evidence.unit))
        if place is None:
            continue
        which = _model(evidence, models, tensors)
        law, std = (None, None) if evidence.noise is None else (evidence.noise.law, evidence.noise.std)
        for name, value in evidence.observed.items():
            tensors[f"gradient.{len(listed)}.{name}"] = value.detach().cpu().contiguous().clone()
        listed.append(ObservedUpdate(question=place, channel=evidence.channel, weights=which, law=law, std=std))
    return listed, tensors


def _model(evidence: Evidence, models: list[Any], tensors: dict[str, Tensor]) -> int | None:
    if evidence.params is None or evidence.measure != "squares":
        return None
    for which, known in enumerate(models):
        if all(torch.equal(known[name], value) for name, value in evidence.params.items()):
            return which
    models.append(evidence.params)
    for name, value in evidence.params.items():
        tensors[f"weights.{len(models) - 1}.{name}"] = value.detach().cpu().contiguous().clone()
    return len(models) - 1


def _about(
    source: ViewSource,
    view: View,
    victims: Victims,
    observed: list[ObservedUpdate],
    files: Mapping[str, bytes],
    sealed: str,
) -> TranscriptInfo:
    config, group = source.config, source.group
    whole = sorted({r.config.attack.id for r in source.records})
    about = TranscriptInfo(
        id="",
        title=source.title,
        threat=view.threat.name,
        sees=view.threat.sees,
        party=view.party,
        plan=plan_json(view.plan),
        defense=Point(source.experiment.points[group.point].defense).info,
        federation=config.federation,
        data=config.data,
        model=config.model,
        code=model_code(config.model.id),
        layers=str(view.plan.net.module),
        stage=config.stage,  # type: ignore[arg-type]  # no audit reads uploads
        batch=config.batch_size,
        **dict(config.probing),
        role=config.role,
        kinds=_kinds(source, view, victims),
        questions=tuple(QuestionSlots(unit=tuple((s.probe, s.client) for s in unit)) for unit in victims.units),
        sessions=view.sessions,
        observed=tuple(observed),
        draws={name: draws_of(source.experiment, group, name) for name in whole},
        commitment=sealed,
        files={name: File(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data)) for name, data in files.items()},
        ppbench=__version__,
        torch=str(torch.__version__),
    )
    return about.model_copy(update={"id": about.name()})


def _kinds(source: ViewSource, view: View, victims: Victims) -> tuple[str, ...]:
    """Return the kinds of questions that a transcript asks: those whose challenges contain no examples."""
    task, kinds = source.experiment.task, []
    for kind in sorted({r.config.attack.kind for r in source.records}):
        probe = Probe(source.experiment.attacks[0], view, victims, task.seeds, task.test)
        challenges = question_of(kind).of_probe(probe).challenges
        if all(c.x is None and c.reconstructions is None and not c.extra for c in challenges):
            kinds.append(kind)
    return tuple(kinds)


def _check_leaks(draft: Path, secrets: Sequence[Tensor], salt: str) -> None:
    """Refuse files that reveal the truth or the secret of the draws (UsageError); then nothing is published."""
    back = load_transcript(draft, trust=True)
    faults = leaks((back.view, back.challenges), secrets)
    data = b"".join((draft / name).read_bytes() for name in (ABOUT, VIEW, GRADIENTS))
    rows = [row.tobytes() for x in secrets for row in x.flatten(1).numpy() if (row != row[0]).any()]
    faults += ["a victim's values are in its files" for row in rows if row in data][:1]
    faults += ["the secret of the draws is in its files"] * (salt.encode() in data or bytes.fromhex(salt) in data)
    if faults:
        raise UsageError(
            f"The transcript {back.about.title!r} gives the truth away ({faults[0]}); it was not published."
        )


def _keep_truth(source: ViewSource, truth: Truth, x: Tensor, y: Tensor) -> None:
    ruler = yardstick_of(source.experiment)
    tensors = {"x": x, "y": y} | ({} if ruler.mean is None else {"mean": ruler.mean})
    if ruler.gallery is not None:
        tensors["gallery"] = ruler.gallery.x
        if ruler.gallery.classes is not None:
            tensors["classes"] = ruler.gallery.classes
    folder = make_folder(source.store.out / "truth")
    folder.chmod(0o700)
    write_atomic(folder / f"{truth.id}.safetensors", save({n: t.contiguous() for n, t in tensors.items()}))
    write_atomic(folder / f"{truth.id}.json", canonical_json(truth))


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
    progress: Bars | None = None,
    command: str = "",
) -> SweepResult:
    """Compute a suite's views, each on its own victims, drawn with the secret of `out`, a new one if it has none.

    Arguments as of `run.sweep.sweep`. Raises UsageError: see there.
    """
    loaded = with_salt(load_suite(suite, preset, dataset=dataset, weights=weights), salt_of(out))
    return sweep(separate_views(loaded), out=out, only=only, workers=workers, progress=progress, command=command)


def publish(results: Path, out: Path, dataset: str | None = None, weights: str | None = None) -> Published:
    """Publish the views of the cells in `results` into the folder `out`; the truth goes to results/truth.

    dataset: the argument that opens the data here, if `run.sweep.local_dataset` does not know it. The same results
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
