"""Freeze one view: write its files, search them for the truth before they are published, keep the truth apart."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ppbench.adversary.leaks import leaks
from ppbench.adversary.victims import Victims
from ppbench.base.errors import UsageError
from ppbench.base.files import make_folder, publish_folder, write_atomic
from ppbench.base.version import __version__
from ppbench.federation.evidence import Evidence
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
    to_json,
    truth_commitment,
)
from ppbench.ledger.transcript import load_transcript, model_code, pack_view, plan_json
from ppbench.questions.base import question_of
from ppbench.questions.inquiry import Probe
from ppbench.records.schema import CellConfig, Record
from ppbench.records.store import Store
from ppbench.run.cells import CellGroup
from ppbench.run.choice import Point
from ppbench.run.experiment import Experiment
from ppbench.run.scene import draws_of, group_victims, prepare_federation, probe_group, yardstick_of


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
    files = {VIEW: pack_view(view), GRADIENTS: save(tensors or {"none": torch.zeros(0)})}
    about = _about(source, view, victims, observed, files, truth_commitment(nonce, x, y))
    home = out / about.id

    def write(draft: Path) -> None:
        (draft / ABOUT).write_bytes(to_json(about))
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
        probe=config.probe,
        probe_rounds=config.probe_rounds,
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
    write_atomic(folder / f"{truth.id}.json", to_json(truth))
