"""The target of a group's cells: the model at its stage, probed clients, the truth, and the yardstick of answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ppbench.adversary.victims import Victims, choose_victims
from ppbench.base.seeds import Seeds
from ppbench.federation.acting import Acting
from ppbench.federation.engine import Federation
from ppbench.federation.threats import TARGET, ThreatModel
from ppbench.federation.view import Transcript, View
from ppbench.metrics.modality import modality_in
from ppbench.metrics.perceptual import feature_network, measurable
from ppbench.questions.inquiry import Yardstick
from ppbench.run.cells import CellGroup
from ppbench.run.experiment import Experiment
from ppbench.run.options import Stage
from ppbench.run.train import TrainingResult, federation, train


class Scene(NamedTuple):
    """A probe: the whole transcript, the adversary's view of it, the victims (the truth), how the server acted."""

    transcript: Transcript
    view: View
    victims: Victims
    acting: Acting | None


def probe_group(experiment: Experiment, group: CellGroup, fed: Federation) -> Scene:
    """Probe the victims of a group and return the scene; its victims' units are () if no client played the role."""
    victims = group_victims(experiment, group)
    acting = acting_of(experiment, group, victims)
    return probe_victims(experiment, group, fed, victims, experiment.config.victims_at(group.batch), acting)


def probe_victims(
    experiment: Experiment,
    group: CellGroup,
    fed: Federation,
    victims: Victims,
    count: int,
    acting: Acting | None = None,
) -> Scene:
    """Probe clients that hold victims and return the scene; with a role, of about `count` victims that play it."""
    config = experiment.config
    transcript = fed.probe(victims.data, config.probe, config.probe_rounds, acting)
    view = replace(transcript.view(group.threat, own=victims.own), public=experiment.task.public)
    if group.role:
        victims = victims.playing(group.role, transcript.roles(), count)
    return Scene(transcript, view, victims, acting)


def draws_of(experiment: Experiment, group: CellGroup, attack: str, follows: str = "") -> int:
    """Return the seed of an attack's own draws on a group's view; it reveals no other draws."""
    return attack_seed(experiment.task.seeds, attack, group.threat, group.stage, group.batch, follows)


def attack_seed(seeds: Seeds, attack: str, threat: ThreatModel, stage: Stage, batch: int, follows: str = "") -> int:
    """Return the seed of the draws of the attack so named, under a threat model, at a stage, for a batch size."""
    return seeds.seed("attack", attack, follows, threat.name, stage, batch)


def group_victims(experiment: Experiment, group: CellGroup) -> Victims:
    """Return the victims of a group, of all roles. Raises UsageError where clients have too few examples."""
    config, task, defense = experiment.config, experiment.task, experiment.points[group.point].defense
    roles = len(defense.roles) if group.role or group.acting else 1
    count, skip = config.victims_at(group.batch), config.victims_from
    return choose_victims(
        task.shards, group.threat, group.batch, count, task.seeds, sums=defense.sums, roles=roles, skip=skip
    )


def acting_of(experiment: Experiment, group: CellGroup, victims: Victims) -> Acting | None:
    """Return how the server of a group acts, None if it does not; it targets one client if only one is a victim."""
    attack = next((a for a in experiment.attacks if group.acting and a.name == group.acting), None)
    if attack is None:
        return None
    slot_count = sum(map(len, victims.units))
    return Acting(attack.crafted, TARGET if slot_count < len(victims.data) else None, experiment.task.public)


def yardstick_of(experiment: Experiment) -> Yardstick:
    """Return the yardstick of a task's reconstructions: the public (else test) mean, feature network and gallery."""
    task = experiment.task
    seen = task.test if task.public is None else task.public
    modality = modality_in(task.plan)
    measured = modality.perceptual and measurable(task.plan.spec.shape)
    known = feature_network(experiment.config.weights) if measured else None
    blind = modality.blind_guess(seen.x)
    return Yardstick(blind.cpu(), known, task.gallery(known), modality.blind_tokens(seen.x))


def prepare_federation(experiment: Experiment, group: CellGroup, out: Path) -> tuple[Federation, TrainingResult]:
    """Return the federation at a group's stage and the training's figures; train now if `out` lacks the training."""
    point = experiment.points[group.point]
    fed, trained = train(experiment, point, out / "cache")
    if group.stage == "init":
        fed = federation(experiment, point)
        fed.start(experiment.task.params)
    return fed, trained
