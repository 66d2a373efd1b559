"""What is attacked in a group's cells: the model at its stage, probed clients, the truth, and what answers meet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ppbench.adversary.victims import Victims, choose_victims
from ppbench.base.seeds import Seeds
from ppbench.federation.acting import Acting
from ppbench.federation.engine import Federation
from ppbench.federation.view import TARGET, Transcript, View
from ppbench.metrics.modalities import modality_from
from ppbench.metrics.perceptual import measurable, network
from ppbench.questions.inquiry import Yardstick
from ppbench.run.cells import Group
from ppbench.run.config import Stage
from ppbench.run.experiment import Experiment
from ppbench.run.train import Trained, federation, train


class Scene(NamedTuple):
    """Probed clients: all that passed, what the adversary of a group has of it, whom it is asked about (the truth)."""

    transcript: Transcript
    view: View
    victims: Victims
    acting: Acting | None


def probed(experiment: Experiment, group: Group, fed: Federation) -> Scene:
    """Return what is attacked in a group's cells; its victims' units are () where no client played the group's role."""
    config, task = experiment.config, experiment.task
    victims = victims_of(experiment, group)
    acting = acting_of(experiment, group, victims)
    transcript = fed.probe(victims.data, config.probe, config.probe_rounds, acting)
    view = replace(transcript.view(group.threat, own=victims.own), public=task.public)
    if group.role:
        victims = victims.playing(group.role, transcript.roles(), config.victims_at(group.batch))
    return Scene(transcript, view, victims, acting)


def draws_of(experiment: Experiment, group: Group, attack: str, follows: str = "") -> int:
    """Return the seed of an attack's own draws on a group's view; it tells nothing of other draws."""
    return attack_seed(experiment.task.seeds, attack, group.threat, group.stage, group.batch, follows)


def attack_seed(seeds: Seeds, attack: str, threat: str, stage: Stage, batch: int, follows: str = "") -> int:
    """Return the seed of the draws of an attack, called so, under a threat model, at a stage, on batches of a size."""
    return seeds.seed("attack", attack, follows, threat, stage, batch)


def victims_of(experiment: Experiment, group: Group) -> Victims:
    """Return the victims of a group, of all roles. Raises UsageError where clients have too few examples."""
    config, task, defense = experiment.config, experiment.task, experiment.points[group.point].defense
    roles = len(defense.roles) if group.role or group.acting else 1
    count, skip = config.victims_at(group.batch), config.victims_from
    return choose_victims(
        task.shards, group.threat, group.batch, count, task.seeds, sums=defense.sums, roles=roles, skip=skip
    )


def acting_of(experiment: Experiment, group: Group, victims: Victims) -> Acting | None:
    """Return how the server of a group acts, None where it does not; after one client where only that one is asked."""
    attack = next((a for a in experiment.attacks if group.acting and a.name == group.acting), None)
    if attack is None:
        return None
    asked = sum(map(len, victims.units))
    return Acting(attack.crafted, TARGET if asked < len(victims.data) else None, experiment.task.public)


def yardstick_of(experiment: Experiment) -> Yardstick:
    """Return what reconstructions of a task are measured with: the public (else test) mean, the feature network."""
    task = experiment.task
    seen = task.test if task.public is None else task.public
    known = network(experiment.config.weights) if measurable(task.plan.spec.shape) else None
    blind = modality_from(task.plan.spec.shape, task.plan.loss).blind_guess(seen.x)
    return Yardstick(blind.cpu(), known, task.gallery(known))


def attacked(experiment: Experiment, group: Group, out: Path) -> tuple[Federation, Trained]:
    """Return the federation at a group's stage, and what the training gave, which is done now if `out` lacks it."""
    point = experiment.points[group.point]
    fed, trained = train(experiment, point, out / "cache")
    if group.stage == "init":
        fed = federation(experiment, point)
        fed.start(experiment.task.params)
    return fed, trained
