"""Tuning of an attack's settings on examples whose truth the adversary knows, never on the reported victims."""

from __future__ import annotations

import dataclasses
import warnings

from ppbench.adversary.attack import Attack
from ppbench.adversary.victims import Victims, choose_victims
from ppbench.base.blame import guard
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data
from ppbench.federation.view import View
from ppbench.questions.base import question_of
from ppbench.questions.inquiry import Probe
from ppbench.records.schema import Tuned
from ppbench.run.cells import CellGroup
from ppbench.run.experiment import Experiment
from ppbench.run.task import Task

FIRST_TUNING_PROBE = 1_000_000
"""Number of the first tuning probe: far from those of victims, whose noise and masks must not be reused."""


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """The adversary's own victims, and its view of them."""

    view: View
    victims: Victims


def rehearse(fed: Federation, experiment: Experiment, group: CellGroup) -> Rehearsal:
    """Probe `tuning` images of the test part, which no client trains on and no cell reports, and return the view."""
    config, victims = experiment.config, tuning_victims(fed.defense, experiment, group)
    transcript = fed.probe(victims.data, config.probe, config.probe_rounds)
    view = dataclasses.replace(transcript.view(group.threat, own=victims.own), public=experiment.task.public)
    if group.role:
        victims = victims.playing(group.role, transcript.roles(), config.tuning)
    return Rehearsal(view, victims)


def tuning_victims(defense: Defense, experiment: Experiment, group: CellGroup) -> Victims:
    """Return the victims of a rehearsal, examples of the test part; UsageError: it has too few."""
    task, clients, count = experiment.task, experiment.config.clients, experiment.config.tuning
    seeds, roles, sums = Seeds(task.seeds.seed("tuning")), len(defense.roles) if group.role else 1, defense.sums
    parts = {c: Data(task.test.x[c::clients], task.test.y[c::clients]) for c in range(clients)}
    try:
        return choose_victims(
            parts, group.threat, group.batch, count, seeds, sums=sums, roles=roles, first=FIRST_TUNING_PROBE
        )
    except UsageError as cause:
        raise UsageError(
            f"Option tuning={count} cannot be used: the {len(task.test.x)} test examples, dealt to {clients} "
            f"clients, are too few for so many in batches of {group.batch}; give fewer, or a smaller --attack-batch."
        ) from cause


def tune(attack: Attack, trial: Rehearsal, task: Task, label: tuple[str | int, ...]) -> tuple[Attack, Tuned]:
    """Run all variants of `attack` on the tuning victims; return the best by its question's worth, and all scores.

    A variant that fails scores worst; ties go to the first. `label` names the cell, for the attack's draws.
    """
    variants = list(attack.variants())
    scores = [_run_variant(variant, trial, task, label) for variant in variants]
    best = max(range(len(variants)), key=lambda i: (scores[i], -i))
    settings = [dataclasses.asdict(variant) for variant in variants]
    differ = [name for name in settings[0] if len({repr(s[name]) for s in settings}) > 1]
    return variants[best], Tuned(variants=[{n: s[n] for n in differ} for s in settings], scores=scores, chosen=best)


def _run_variant(attack: Attack, trial: Rehearsal, task: Task, label: tuple[str | int, ...]) -> float:
    victims, question = trial.victims, question_of(attack.kind)
    if not victims.units:
        return question.worth([], task.plan)
    try:
        with guard("attacks", attack.name):
            inquiry = question.of_probe(Probe(attack, trial.view, victims, task.seeds, task.test))
            guesses = attack.run(trial.view, inquiry.challenges, task.seeds.generator("tuning", *label))
            return question.worth(inquiry.score(guesses).victims, task.plan)
    except Exception as cause:  # noqa: BLE001 - another package's variant may raise anything; it is not chosen
        about = f"attack {attack.name!r} failed on tuning victims: {type(cause).__name__}: {cause}"
        warnings.warn(f"A variant of {about}; the others are compared without it.", stacklevel=2)
        return question.worth([], task.plan)
