"""An experiment: a configuration with its task, points and attacks resolved, once."""

from __future__ import annotations

import dataclasses
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from ppbench.adversary.attack import Attack, among, attack_answer_faults
from ppbench.adversary.isolation import IsolatedAttack, check_package, isolated_attack
from ppbench.base.errors import UsageError
from ppbench.base.fence import check_answers, guard, made, third_party
from ppbench.base.registry import admit, load_all, load_plugin, plugins
from ppbench.federation.contract import Defense
from ppbench.federation.threats import HONEST_SERVER, ThreatModel, recorded_threat, threat_model
from ppbench.questions.base import question_of
from ppbench.records.schema import Control, DataInfo, DefenseInfo, FederationInfo, ModelInfo, Scalar
from ppbench.records.sources import code_of
from ppbench.report.controls import CONTROLS
from ppbench.run.config import EvaluateConfig
from ppbench.run.task import Task, describe, task_key, task_of

# -- Which plugins an evaluation is about: points (a defense at one control value) and attacks, with their parameters
# --

WHOLE = ("quick", "standard", "all")
"""Words that select many attacks; each includes those of the word before it. "quick" also gates searches, see
`run.schedule`."""


@dataclass(frozen=True)
class Point:
    """A defense at one value of its control parameter."""

    defense: Defense

    @property
    def value(self) -> float | None:
        """The control parameter's value, or None for a defense without one."""
        name = self.defense.control
        return None if name is None else float(getattr(self.defense, name))

    @property
    def info(self) -> DefenseInfo:
        """The defense as records describe it."""
        own, value = self.defense, self.value
        control = None if own.control is None else Control(name=own.control, value=value or 0.0)
        code, parameters = code_of(("defenses", own.name)), dataclasses.asdict(own)
        return DefenseInfo(id=own.name, version=own.version, parameters=parameters, control=control, code=code)

    @property
    def label(self) -> str:
        """For people: "spn alpha2=0.1"."""
        return self.defense.name if self.value is None else f"{self.defense.name} {self.defense.control}={self.value:g}"


def make_defense(name: str, parameters: Mapping[str, Scalar] | None = None) -> Defense:
    """Return the defense called `name` with `parameters`; raises UsageError for an unknown name or parameter."""
    return made("defenses", Defense, name, parameters or {})


def make_attack(name: str, parameters: Mapping[str, Scalar] | None = None, isolate: bool = False) -> Attack:
    """Return the attack called `name` with `parameters`; with `isolate`, the stand-in of another package's attack.

    Raises UsageError: an unknown name or parameter, or what the package brings would run in this process too.
    """
    if isolate and third_party("attacks", name):
        if multiprocessing.parent_process() is None:  # a worker's parent has checked
            check_package(plugins("attacks")[name])
        return isolated_attack(name, tuple((parameters or {}).items()))
    return made("attacks", Attack, name, parameters or {}, lambda attack: attack.check())


def built_for(attack: Attack, defense: str) -> bool:
    """Return whether an attack applies to a defense: it targets this one, or none in particular."""
    return among(attack.targets, defense)


def points(config: EvaluateConfig) -> list[Point]:
    """Return the controls, then the defense over its grid; UsageError: an unknown defense, parameter or grid."""
    own = {key: value for key, value in config.settings.items() if "." not in key}
    base = make_defense(config.defense, own)
    if base.control is None:
        if not isinstance(config.grid, str):
            raise UsageError(f"Defense {base.name!r} has no control parameter; leave out --grid.")
        grid = [Point(base)]
    else:
        values = base.grids.get(config.grid, ()) if isinstance(config.grid, str) else config.grid
        if base.control in own and config.grid == "quick":
            values = (float(getattr(base, base.control)),)  # --set of the control parameter is a grid of one
        if not values:
            raise UsageError(f"Defense {base.name!r} declares no {config.grid!r} grid; give values, as --grid 0.1,1.")
        grid = [Point(make_defense(config.defense, {**own, base.control: v})) for v in values]
    names = {point.defense.name for point in grid}
    return [Point(make_defense(name)) for name in CONTROLS if name not in names] + grid


def select_attacks(config: EvaluateConfig) -> list[Attack]:
    """Return the attacks of an evaluation, with their parameters; a word of `WHOLE` selects those that apply."""
    for key in config.settings:
        if "." in key:
            _attack(config, key.split(".")[0])  # a parameter of an attack that does not run is still checked
    words = set(config.attacks) & {*WHOLE}
    named = [name for name in config.attacks if name not in WHOLE]
    included = [name for name, factory in _available(config) if _is_included(config, factory)] if words else []
    chosen = []
    for name in dict.fromkeys([*included, *named]):
        with skip_unusable(name, name in named) as use:
            attack = _attack(config, name)
            obstacle = _obstacle(config, attack)
        if not use.possible:
            continue
        if obstacle and name in named:
            raise UsageError(f"Attack {name!r} {obstacle}")
        if not obstacle:
            chosen.append(attack)
    contained = {attack.contains for attack in chosen}
    chosen = [attack for attack in chosen if attack.name in named or attack.name not in contained]
    _check_sources(chosen)
    return chosen


@dataclass
class Use:
    """Whether an attack can be used."""

    possible: bool = True


@contextmanager
def skip_unusable(attack: str, named: bool) -> Iterator[Use]:
    """Yield the attack's `Use`. An error in the body makes it impossible, with a warning, if another package brings
    the attack and the user did not name it; else the error is raised, in a sentence."""
    use = Use()
    try:
        with guard("attacks", attack):
            yield use
    except UsageError as error:
        if named or not third_party("attacks", attack):
            raise
        use.possible = False
        if multiprocessing.parent_process() is None:  # a worker's parent has already warned
            warnings.warn(f"Attack {attack!r} of package {plugins('attacks')[attack].distribution!r} is left out: "
                          f"{error}", stacklevel=3)  # fmt: skip


def _obstacle(config: EvaluateConfig, attack: Attack) -> str:
    if not built_for(attack, config.defense):
        return f"is built for {', '.join(sorted(attack.targets or ()))}, not for {config.defense!r}; leave it out."
    if attack.audit and "audit" not in config.stages:
        return "is asked in audits; add --stage audit."
    if attack.audit == "references" and not config.references:
        return "learns from reference runs; add --references 16."
    if attack.audit == "clients" and not config.canary_clients:
        return "asks about canary clients; add --canary-clients 100."
    if attack.audit == "secrets" and not config.canaries:
        return "asks about planted secrets; add --canaries 80."
    if lacking := attack.lacks_rounds(config.probe_rounds):
        return f"{lacking}; add --probe-rounds {attack.probe_rounds}."
    if attack.needs_public and not config.public:
        return "learns from public examples; set some apart, as --public 0.5."
    return ""


def _check_sources(chosen: Sequence[Attack]) -> None:
    kinds = {attack.kind for attack in chosen}
    for attack in chosen:
        source = "" if attack.audit else question_of(attack.kind).follows
        if source and source not in kinds:
            raise UsageError(
                f"{attack.kind.capitalize()} needs {source}s; add a {source} attack, as --attack dlg,{attack.name}."
            )


def _is_included(config: EvaluateConfig, factory: Any) -> bool:
    """Return whether a word of `WHOLE` includes this plugin.

    An audit includes its own attacks; a server that acts includes the attacks that act.
    """
    audited = "audit" in config.stages and bool(getattr(factory, "audit", ""))
    known = getattr(factory, "threats", ())
    acting = any(threat.acts and threat.among(known) for threat in map(recorded_threat, config.threats))
    if "all" in config.attacks or audited or acting:
        return True
    # Not inherited: a subclass of an attack that is left out need not be left out.
    quick = getattr(factory, "__dict__", {}).get("quick", True)
    if quick == "foreign":
        return third_party("defenses", config.defense)
    if quick == "unaware":
        aware = (one for _, one in _available(config) if getattr(one, "adaptive", False) and one.targets is not None)
        quick = not any(among(one.targets, config.defense) for one in aware)
    return getattr(factory, "standard", True) and ("standard" in config.attacks or quick)


def _available(config: EvaluateConfig) -> Iterator[tuple[str, Any]]:
    """Yield the name and class (or stand-in class) of every attack; broken ones are left out with a warning."""
    if not config.isolate:
        yield from load_all("attacks").items()
        return
    for name, plugin in plugins("attacks").items():
        with skip_unusable(name, named=False) as use:
            factory = plugin.loaded if plugin.ours else type(make_attack(name, isolate=True))
        if use.possible:
            yield name, factory


def _attack(config: EvaluateConfig, name: str) -> Attack:
    isolated = config.isolate and third_party("attacks", name)
    prefix, factory = f"{name}.", type(make_attack(name, isolate=True)) if isolated else load_plugin("attacks", name)
    own = {k[len(prefix) :]: v for k, v in config.settings.items() if k.startswith(prefix)}
    if config.budget is not None and "budget" in getattr(factory, "__dataclass_fields__", {}):
        own = {"budget": config.budget, **own}
    return make_attack(name, own, config.isolate)


def threats_of(attack: Attack, config: EvaluateConfig) -> Iterator[ThreatModel]:
    """Yield the threat models under which `attack` runs: those of `config` that it supports.

    If `config` has a server that acts, an attack that does not act runs under the honest server. If it has the honest
    server, who is meant where none is named, an attack that supports none of them runs under its own.
    """
    requested = [threat_model(name) for name in config.threats]
    supported = [threat for threat in requested if threat.among(attack.threats)]
    passive = (
        [HONEST_SERVER] if any(threat.acts for threat in requested) and HONEST_SERVER.among(attack.threats) else []
    )
    own = map(threat_model, attack.threats if any(threat.lone_server for threat in requested) else ())
    yield from supported or passive or own


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
        """How the task's data were read, in lines for people, and how many test examples are trained on."""
        count, whole = self.task.trained_tests(), len(self.task.test.x)
        words = f"{count} of {whole} test examples are training examples too: accuracy counts them"
        return *self.task.dataset.notes, *([f"{words}, questions about members pass them over"] if count else [])

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
                options = "".join(f", {name}={value}" for name, value in config.model_options.items())
                model = f"model {config.model!r} with loss {config.loss!r}{options}"
                why = model if probed else f"--probe {config.probe}"
                raise UsageError(f"Attack {attack.name!r} has no use for {why}; leave it out.")
        return tuple(suitable)

    def _suits(self, attack: Attack) -> bool:
        """Return whether an attack suits the task; another package's declarations are checked first (PluginError)."""
        plan = self.task.plan
        if not isinstance(attack, IsolatedAttack):  # checked where it runs
            defenses = {point.defense.name for point in self.points}
            check_answers("attacks", attack.name, lambda: attack_answer_faults(attack, plan, defenses))
        if third_party("attacks", attack.name):
            attack.check_held({client: shard.x for client, shard in self.task.shards.items()})
        return attack.suits(plan)


def resolve(config: EvaluateConfig) -> Experiment:
    """Return the experiment of `config`, no data read (UsageError: an unknown name, an attack that cannot run)."""
    admit(config.defense)
    grid, attacks = points(config), select_attacks(config)
    for threat in config.threats:  # an attack's module may have registered it
        threat_model(threat)
    return Experiment(config, tuple(grid), tuple(attacks))


@cache
def _arrived(text: str) -> Experiment:
    return resolve(EvaluateConfig.model_validate_json(text))
