"""Which plugins an evaluation is about: points (a defense at one control value) and attacks, with their parameters."""

from __future__ import annotations

import dataclasses
import multiprocessing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ppbench.adversary.apart import apart
from ppbench.adversary.attack import Attack, among
from ppbench.base.blame import guard, stranger
from ppbench.base.errors import UsageError
from ppbench.base.make import made
from ppbench.base.registry import load, load_all, plugins
from ppbench.federation.contract import Defense
from ppbench.federation.threats import HONEST_SERVER, ThreatModel, threat_model
from ppbench.questions.base import question_of
from ppbench.records.schema import Control, DefenseInfo, Scalar
from ppbench.records.sources import code_of
from ppbench.report.controls import CONTROLS
from ppbench.run.config import EvaluateConfig

WHOLE = ("quick", "standard", "all")
"""Words that stand for many attacks, each for those of the word before it too. "quick" also looks before it asks, see
`looks`."""


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
        """What records hold of it."""
        own, value = self.defense, self.value
        control = None if own.control is None else Control(name=own.control, value=value or 0.0)
        code, told = code_of(("defenses", own.name)), dataclasses.asdict(own)
        return DefenseInfo(id=own.name, version=own.version, parameters=told, control=control, code=code)

    @property
    def label(self) -> str:
        """For people: "spn alpha2=0.1"."""
        return self.defense.name if self.value is None else f"{self.defense.name} {self.defense.control}={self.value:g}"


def make_defense(name: str, parameters: Mapping[str, Scalar] | None = None) -> Defense:
    """Return the defense called `name` with `parameters`; raises UsageError for an unknown name or parameter."""
    return made("defenses", Defense, name, parameters or {})


def make_attack(name: str, parameters: Mapping[str, Scalar] | None = None, isolate: bool = False) -> Attack:
    """Return the attack called `name` with `parameters`, of a stranger's the stand-in where `isolate` is asked for.

    Raises UsageError: an unknown name or parameter.
    """
    if isolate and stranger("attacks", name):
        return apart(name, tuple((parameters or {}).items()))
    attack = made("attacks", Attack, name, parameters or {})
    with guard("attacks", name):
        attack.check()
    return attack


def built_for(attack: Attack, defense: str) -> bool:
    """Return whether an attack may be run on a defense: it is built for it, or for no defense in particular."""
    return among(attack.targets, defense)


def points(config: EvaluateConfig) -> list[Point]:
    """Return the controls, then the defense over its grid; UsageError for what is unknown or has no such grid."""
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


def attacks(config: EvaluateConfig) -> list[Attack]:
    """Return the attacks of an evaluation, with their parameters; a word of `WHOLE` means those that apply."""
    for key in config.settings:
        if "." in key:
            _attack(config, key.split(".")[0])  # a parameter of an attack that does not run is still checked
    whole = set(config.attacks) & {*WHOLE}
    named = [name for name in config.attacks if name not in WHOLE]
    meant = [name for name, factory in _offered(config) if _meant(config, factory)] if whole else []
    chosen = []
    for name in dict.fromkeys([*meant, *named]):
        with unless_unasked(name, name in named) as asked:
            attack = _attack(config, name)
            with guard("attacks", name):
                obstacle = _obstacle(config, attack)
        if not asked:
            continue
        if obstacle and name in named:
            raise UsageError(f"Attack {name!r} {obstacle}")
        if not obstacle:
            chosen.append(attack)
    known = {attack.contains for attack in chosen}
    chosen = [attack for attack in chosen if attack.name in named or attack.name not in known]
    _check_sources(chosen)
    return chosen


@contextmanager
def unless_unasked(attack: str, named: bool) -> Iterator[list[str]]:
    """Give a list of one thing, which is empty where a stranger's attack that nobody named cannot be used: it is left
    out with a warning. What was named is refused (UsageError)."""
    going = [attack]
    try:
        yield going
    except UsageError as error:
        if named or not stranger("attacks", attack):
            raise
        going.clear()
        if multiprocessing.parent_process() is None:  # who started this worker has said so
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


def _meant(config: EvaluateConfig, factory: Any) -> bool:
    """Return whether a word of `WHOLE` means this plugin.

    An audit that is asked for comes with its own attacks, a server that acts with those that act.
    """
    audited = "audit" in config.stages and bool(getattr(factory, "audit", ""))
    known = getattr(factory, "threats", ())
    acting = any(threat.acts and threat.among(known) for threat in map(threat_model, config.threats))
    if "all" in config.attacks or audited or acting:
        return True
    # Of its own, not inherited: who builds on an attack that is left out need not be left out.
    quick = getattr(factory, "__dict__", {}).get("quick", True)
    return getattr(factory, "standard", True) and ("standard" in config.attacks or quick)


def _offered(config: EvaluateConfig) -> Iterator[tuple[str, Any]]:
    """Yield every attack with its class, or its stand-in; broken ones are left out with a warning."""
    if not config.isolate:
        yield from load_all("attacks").items()
        return
    for name, plugin in plugins("attacks").items():
        with unless_unasked(name, named=False) as asked:
            factory = plugin.loaded if plugin.ours else type(make_attack(name, isolate=True))
        if asked:
            yield name, factory


def _attack(config: EvaluateConfig, name: str) -> Attack:
    elsewhere = config.isolate and stranger("attacks", name)
    prefix, factory = f"{name}.", type(make_attack(name, isolate=True)) if elsewhere else load("attacks", name)
    own = {k[len(prefix) :]: v for k, v in config.settings.items() if k.startswith(prefix)}
    if config.budget is not None and "budget" in getattr(factory, "__dataclass_fields__", {}):
        own = {"budget": config.budget, **own}
    return make_attack(name, own, config.isolate)


def threats_of(attack: Attack, config: EvaluateConfig) -> Iterator[ThreatModel]:
    """Yield the threat models under which `attack` runs: the asked ones that it supports, else its own.

    Where a server that acts was asked about, an attack that does not act runs under the one that is honest.
    """
    known = [threat_model(name) for name in config.threats]
    asked = [threat for threat in known if threat.among(attack.threats)]
    passive = [HONEST_SERVER] if any(t.acts for t in known) and HONEST_SERVER.among(attack.threats) else []
    yield from asked or passive or map(threat_model, attack.threats)
