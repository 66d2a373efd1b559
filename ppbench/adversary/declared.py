"""What an attack must declare, and what its public methods may answer: asked of every attack before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ppbench.adversary.attack import Attack
from ppbench.base.declared import SCALARS, class_faults, field_faults, is_scalar, word_faults
from ppbench.base.errors import shown
from ppbench.base.registry import plugins
from ppbench.federation.plan import Plan
from ppbench.federation.threats import THREATS

PROBES = ("gradient", "local")


def faults(plugin: Any, name: str) -> Iterator[str]:
    """Yield what keeps a class from being the attack called `name`: the first fault makes others meaningless."""
    yield from class_faults(plugin, Attack, name)
    yield from field_faults(plugin)
    yield from word_faults(plugin, ("threats", "probes", "version"))
    if plugin.kind not in plugins("questions"):
        known = ", ".join(plugins("questions"))
        yield f"answers the question {plugin.kind!r}, which is not installed; known are {known}"
    if plugin.targets is not None and not plugin.targets:
        yield "declares targets without any; name the defenses it is built for, or set None for all"
    for what, known_words in (("threats", tuple(THREATS)), ("probes", PROBES)):
        if strange := [word for word in getattr(plugin, what) if word not in known_words]:
            yield f"declares {what} with {shown(strange[0], 60)}; known are {', '.join(known_words)}"
    yield from acting_faults(plugin)


def acting_faults(plugin: type[Attack]) -> Iterator[str]:
    """Yield whether an attack acts under some of its threat models and not under others."""
    crafts = plugin.crafted is not Attack.crafted
    if any(THREATS[name].acts is not crafts for name in plugin.threats if name in THREATS):
        yield "acts under some of its threat models and not under others; define `crafted` where all of them act"


def answer_faults(attack: Attack, plan: Plan, defenses: Iterable[str]) -> Iterator[str]:
    """Yield what of an attack's answers before it runs has another form than the contract asks for."""
    suits = attack.suits(plan)
    if not isinstance(suits, bool):
        yield f"answers {shown(suits, 60)} to suits(plan); it must be True or False"
    yield from told_faults(attack, defenses)


def told_faults(attack: Attack, defenses: Iterable[str]) -> Iterator[str]:
    """Yield what of its answers that depend on no plan has another form than the contract asks for."""
    for what, found in (
        ("needs_public", attack.needs_public),
        *((f"knows({name!r})", attack.knows(name)) for name in defenses),
    ):
        if not isinstance(found, bool):
            yield f"answers {shown(found, 60)} to {what}; it must be True or False"
    told = attack.parameters()
    if not isinstance(told, Mapping) or not all(isinstance(n, str) and is_scalar(v) for n, v in told.items()):
        yield f"answers {shown(told, 60)} to parameters(); names and values are asked for, and {SCALARS}"
    variants = attack.variants()
    if not isinstance(variants, Sequence) or not variants or any(type(one) is not type(attack) for one in variants):
        yield f"answers {shown(variants, 60)} to variants(); it must be one or more {type(attack).__name__}"
