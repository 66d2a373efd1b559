"""Freezing one view: its files, the look through them for the truth before they leave, and the truth's own file."""

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
from ppbench.ledger.form import ABOUT, GRADIENTS, VIEW, About, Asked, File, Observed, Truth, commitment, written
from ppbench.ledger.transcript import load_transcript, model_code, packed, planned
from ppbench.questions.base import question_of
from ppbench.questions.inquiry import Probe
from ppbench.records.schema import CellConfig, Record
from ppbench.records.store import Store
from ppbench.run.cells import Group
from ppbench.run.choice import Point
from ppbench.run.experiment import Experiment
from ppbench.run.scene import attacked, draws_of, probed, victims_of, yardstick_of


@dataclass(frozen=True)
class Scene:
    """What is frozen: a group of an evaluation, its cells' records in `store`, the secret of their draws."""

    store: Store
    experiment: Experiment
    group: Group
    records: list[Record]
    title: str
    salt: str

    @property
    def victims(self) -> Tensor:
        """The images [N, *shape] that are asked about."""
        found = victims_of(self.experiment, self.group)
        return torch.cat([found.truth(unit).x for unit in found.units])

    @property
    def config(self) -> CellConfig:
        """That of its first record."""
        return self.records[0].config


def frozen(scene: Scene, out: Path, secrets: Sequence[Tensor]) -> About:
    """Write the transcript of a scene below `out`, its truth into the results; UsageError: it gives that away.

    secrets: the victims [N, *shape] of all views that are published beside it.
    """
    fed, _ = attacked(scene.experiment, scene.group, scene.store.out)
    _, view, victims, _ = probed(scene.experiment, scene.group, fed)
    x, y = (torch.stack([getattr(victims.truth(unit), part) for unit in victims.units]) for part in ("x", "y"))
    nonce = hashlib.sha256(f"ppbench.nonce/{scene.salt}/{scene.config.cell_id()}".encode()).hexdigest()
    observed, tensors = _gradients(view, victims)
    files = {VIEW: packed(view), GRADIENTS: save(tensors or {"none": torch.zeros(0)})}
    about = _about(scene, view, victims, observed, files, commitment(nonce, x, y))
    home = out / about.id

    def write(draft: Path) -> None:
        (draft / ABOUT).write_bytes(written(about))
        for name, data in files.items():
            (draft / name).write_bytes(data)
        _look(draft, secrets, scene.salt)

    publish_folder(home, write)
    _keep_truth(scene, Truth(id=about.id, nonce=nonce, cell=scene.config.cell_id()), x, y)
    return about


def _gradients(view: View, victims: Victims) -> tuple[list[Observed], dict[str, Tensor]]:
    """Return what the defense's plain evidence says of each question, and its tensors by name."""
    places = {frozenset(unit): place for place, unit in enumerate(victims.units)}
    listed, tensors, models = list[Observed](), dict[str, Tensor](), list[Any]()
    for evidence in view.defense.evidence(view):
        place = places.get(frozenset(evidence.unit))
        if place is None:
            continue
        which = _model(evidence, models, tensors)
        law, std = (None, None) if evidence.noise is None else (evidence.noise.law, evidence.noise.std)
        for name, value in evidence.observed.items():
            tensors[f"gradient.{len(listed)}.{name}"] = value.detach().cpu().contiguous().clone()
        listed.append(Observed(question=place, channel=evidence.channel, weights=which, law=law, std=std))
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
    scene: Scene, view: View, victims: Victims, observed: list[Observed], files: Mapping[str, bytes], sealed: str
) -> About:
    config, group = scene.config, scene.group
    whole = sorted({r.config.attack.id for r in scene.records})
    about = About(
        id="",
        title=scene.title,
        threat=view.threat.name,
        sees=view.threat.sees,
        party=view.party,
        plan=planned(view.plan),
        defense=Point(scene.experiment.points[group.point].defense).info,
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
        kinds=_kinds(scene, view, victims),
        questions=tuple(Asked(unit=tuple((s.probe, s.client) for s in unit)) for unit in victims.units),
        sessions=view.sessions,
        observed=tuple(observed),
        draws={name: draws_of(scene.experiment, group, name) for name in whole},
        commitment=sealed,
        files={name: File(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data)) for name, data in files.items()},
        ppbench=__version__,
        torch=str(torch.__version__),
    )
    return about.model_copy(update={"id": about.name()})


def _kinds(scene: Scene, view: View, victims: Victims) -> tuple[str, ...]:
    """Return the questions that a transcript asks: those in which no examples are handed out, the victims' least."""
    task, found = scene.experiment.task, []
    for kind in sorted({r.config.attack.kind for r in scene.records}):
        probe = Probe(scene.experiment.attacks[0], view, victims, task.seeds, task.test)
        asked = question_of(kind).of_probe(probe).challenges
        if all(c.x is None and c.reconstructions is None and not c.extra for c in asked):
            found.append(kind)
    return tuple(found)


def _look(draft: Path, secrets: Sequence[Tensor], salt: str) -> None:
    """Refuse what gives the truth, or what it was drawn from, away (UsageError): nothing of it is published then."""
    back = load_transcript(draft, trust=True)
    found = leaks((back.view, back.challenges), secrets)
    data = b"".join((draft / name).read_bytes() for name in (ABOUT, VIEW, GRADIENTS))
    rows = [row.tobytes() for x in secrets for row in x.flatten(1).numpy() if (row != row[0]).any()]
    found += ["a victim's values stand in its files" for row in rows if row in data][:1]
    found += ["the secret of the draws stands in its files"] * (salt.encode() in data or bytes.fromhex(salt) in data)
    if found:
        raise UsageError(
            f"The transcript {back.about.title!r} gives the truth away ({found[0]}); it was not published."
        )


def _keep_truth(scene: Scene, truth: Truth, x: Tensor, y: Tensor) -> None:
    ruler = yardstick_of(scene.experiment)
    tensors = {"x": x, "y": y} | ({} if ruler.mean is None else {"mean": ruler.mean})
    if ruler.gallery is not None:
        tensors["gallery"] = ruler.gallery.x
        if ruler.gallery.classes is not None:
            tensors["classes"] = ruler.gallery.classes
    folder = make_folder(scene.store.out / "truth")
    folder.chmod(0o700)
    write_atomic(folder / f"{truth.id}.safetensors", save({n: t.contiguous() for n, t in tensors.items()}))
    write_atomic(folder / f"{truth.id}.json", written(truth))
