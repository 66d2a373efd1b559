"""An experiment: a configuration with its task, points and attacks resolved, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from ppbench.adversary.apart import IsolatedAttack
from ppbench.adversary.attack import Attack
from ppbench.adversary.declared import attack_answer_faults
from ppbench.base.blame import guard, refuse, stranger
from ppbench.base.errors import UsageError
from ppbench.base.registry import admit
from ppbench.records.schema import DataInfo, FederationInfo, ModelInfo
from ppbench.run.choice import Point, points, select_attacks, skip_unusable
from ppbench.run.config import EvaluateConfig
from ppbench.run.task import Task, describe, task_key, task_of


@dataclass(frozen=True, eq=False)
class Experiment:
    """An evaluation with all that its configuration names; between processes it travels as its configuration.

    points: the controls, then the defense over its grid; applicable: the attacks that may be run on the defense.
    """

    config: EvaluateConfig
    points: tuple[Point, ...]
    applicable: tuple[Attack, ...]

    def __reduce__(self) -> tuple[Callable[[str], Experiment], tuple[str]]:
        return _arrived, (self.config.model_dump_json(),)

    @property
    def task(self) -> Task:
        """The task. Tasks are large: a process holds the two that it used last, shared by equal experiments."""
        return task_of(self._task_key)

    @cached_property
    def _task_key(self) -> str:
        return task_key(self.config)

    @cached_property
    def facts(self) -> tuple[DataInfo, ModelInfo, FederationInfo]:
        """The parts of a cell's configuration that the task determines."""
        return describe(self.task, self.config)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """How the task's data were read, in lines for people."""
        return self.task.dataset.notes

    @cached_property
    def attacks(self) -> tuple[Attack, ...]:
        """The attacks that suit the task's network and loss, and the probes (UsageError: a named one does not)."""
        config, suitable = self.config, []
        for attack in self.applicable:
            named = attack.name in config.attacks
            with skip_unusable(attack.name, named) as use:
                suits = self._suits(attack)
            if not use.possible:
                continue
            if suits and config.probe in attack.probes:
                suitable.append(attack)
            elif named:
                probed = config.probe in attack.probes
                why = f"model {config.model!r} with loss {config.loss!r}" if probed else f"--probe {config.probe}"
                raise UsageError(f"Attack {attack.name!r} has no use for {why}; leave it out.")
        return tuple(suitable)

    def _suits(self, attack: Attack) -> bool:
        """Return whether an attack suits the task; another package's declarations are checked first (PluginError)."""
        plan = self.task.plan
        with guard("attacks", attack.name):
            if stranger("attacks", attack.name) and not isinstance(attack, IsolatedAttack):  # checked where it runs
                faults = attack_answer_faults(attack, plan, {point.defense.name for point in self.points})
                refuse("attacks", attack.name, faults)
            if stranger("attacks", attack.name):
                attack.check_held({client: shard.x for client, shard in self.task.shards.items()})
            return attack.suits(plan)


@guard()
def resolve(config: EvaluateConfig) -> Experiment:
    """Return the experiment of `config`, no data read (UsageError: an unknown name, an attack that cannot run)."""
    admit(config.defense)
    return Experiment(config, tuple(points(config)), tuple(select_attacks(config)))


@cache
def _arrived(text: str) -> Experiment:
    return resolve(EvaluateConfig.model_validate_json(text))
