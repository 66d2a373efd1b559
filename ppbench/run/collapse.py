"""Trainings that collapsed: accuracy at chance in every evaluated round. They are retried, and records say so.

This detects a model that always gives one answer. Weights that jump about at random can be right more often than chance
in one round, as Adam's at a rate of 1e6 on digits in two of four seeds: as a first training these are not detected, but
none replaces one that collapsed unless it ends above chance.
"""

from __future__ import annotations

from dataclasses import replace

from ppbench.base.seeds import Seeds
from ppbench.metrics.intervals import clopper_pearson
from ppbench.nets.net import initial
from ppbench.records.outcome import TRAININGS, Utility
from ppbench.report.controls import CONTROLS
from ppbench.run.task import Task

MIN_EVALUATIONS = 3
"""Fewest evaluated rounds for a decision: at chance in fewer, a training may only have begun."""


def commonest_count(task: Task) -> int:
    """Return how many test examples are of the most frequent class: what a constant answer gets right."""
    return int(task.test.y.argmax(1).bincount().max())


def at_chance(utility: Utility, task: Task) -> bool:
    """Return whether accuracy never rose above chance: in no evaluated round, of `MIN_EVALUATIONS` or more.

    Chance is the share of the most frequent class of the test part, and the upper end of its 95 % Clopper-Pearson
    interval still counts as chance. Numbers and masks have no such level, and a training that diverged its own status.
    """
    if not task.classified or task.segmented or utility.accuracy is None or len(utility.curve) < MIN_EVALUATIONS:
        return False
    return all(accuracy <= chance_ceiling(task) for _, accuracy in utility.curve)


def ends_above_chance(utility: Utility, task: Task) -> bool:
    """Return whether the delivered model is above chance, as a training that replaces a collapsed one must be."""
    return utility.accuracy is not None and utility.accuracy > chance_ceiling(task)


def chance_ceiling(task: Task) -> float:
    """Return the largest accuracy that still counts as chance, see `at_chance`."""
    return clopper_pearson(commonest_count(task), len(task.test.x)).high or 0.0


def is_retried(defense: str) -> bool:
    """Return whether a collapsed training under a defense is repeated; those of controls are not."""
    return defense not in CONTROLS


def task_of_attempt(task: Task, attempt: int) -> Task:
    """Return the task with the seeds and the initial model of a training: 0 is the cell's own, others derive from it.

    Examples, their owners and victims stay the same.
    """
    if attempt == 0:
        return task
    seeds = Seeds(task.seeds.seed("training", attempt), task.seeds.salt)
    return replace(task, seeds=seeds, params=initial(task.plan.spec, seeds.seed("model")))


def attempt_number(utility: Utility) -> int:
    """Return the index of the training that a utility describes: the first that did not collapse, 0 if all did."""
    return 0 if utility.collapsed >= TRAININGS else utility.collapsed
