"""The publishable views of a suite: one evaluation per view, no two of which share a victim.

On a board all defenses face the same victims, so that they can be compared one by one. Published side by side, the
undefended uploads would give the answers to all others. So each view has victims of its own here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import replace

from ppbench.adversary.victims import probed_units
from ppbench.records.schema import Scalar
from ppbench.report.controls import CONTROLS
from ppbench.run.cells import CellGroup, groups
from ppbench.run.choice import WHOLE, built_for, make_attack
from ppbench.run.config import EvaluateConfig
from ppbench.run.experiment import Experiment, resolve
from ppbench.run.suite import Suite


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
