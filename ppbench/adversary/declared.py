"""Checks of every attack before it is used: its declarations, and the answers of its public methods."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ppbench.adversary.attack import Attack
from ppbench.base.declared import SCALARS, class_faults, field_faults, is_scalar, word_faults
from ppbench.base.errors import shown
from ppbench.base.registry import plugins
from ppbench.federation.plan import Plan
from ppbench.federation.threats import THREATS

PROBE_KINDS = ("gradient", "local")


def faults(plugin: Any, name: str) -> Iterator[str]:
    """Yield why a class is not the attack `name`; after the first fault others may be meaningless."""
    yield from class_faults(plugin, Attack, name)
    yield from field_faults(plugin)
    yield from word_faults(plugin, ("threats", "probes", "version"))
    if plugin.kind not in plugins("questions"):
        known = ", ".join(plugins("questions"))
        yield f"answers the question {plugin.kind!r}, which is not installed; known are {known}"
    if plugin.targets is not None and not plugin.targets:
        yield "declares targets without any; name the defenses it is built for, or set None for all"
    for attribute, known_words in (("threats", tuple(THREATS)), ("probes", PROBE_KINDS)):
        if unknown_words := [word for word in getattr(plugin, attribute) if word not in known_words]:
            yield f"declares {attribute} with {shown(unknown_words[0], 60)}; known are {', '.join(known_words)}"
    yield from acting_faults(plugin)


def acting_faults(plugin: type[Attack]) -> Iterator[str]:
    """Yield a fault if an attack acts under some of its threat models but not under others."""
    crafts = plugin.crafted is not Attack.crafted
    if any(THREATS[name].acts is not crafts for name in plugin.threats if name in THREATS):
        yield "acts under some of its threat models and not under others; define `crafted` where all of them act"


def attack_answer_faults(attack: Attack, plan: Plan, defenses: Iterable[str]) -> Iterator[str]:
    """Yield which answers of an attack before `run` break the contract."""
    suits = attack.suits(plan)
    if not isinstance(suits, bool):
        yield f"answers {shown(suits, 60)} to suits(plan); it must be True or False"
    yield from static_answer_faults(attack, defenses)


def static_answer_faults(attack: Attack, defenses: Iterable[str]) -> Iterator[str]:
    """Yield which answers that do not depend on a plan break the contract."""
    for call, answer in (
        ("needs_public", attack.needs_public),
        *((f"knows({name!r})", attack.knows(name)) for name in defenses),
    ):
        if not isinstance(answer, bool):
            yield f"answers {shown(answer, 60)} to {call}; it must be True or False"
    parameters = attack.parameters()
    if not isinstance(parameters, Mapping) or not all(
        isinstance(n, str) and is_scalar(v) for n, v in parameters.items()
    ):
        yield f"answers {shown(parameters, 60)} to parameters(); it must be a mapping from names to values; {SCALARS}"
    variants = attack.variants()
    if not isinstance(variants, Sequence) or not variants or any(type(one) is not type(attack) for one in variants):
        yield f"answers {shown(variants, 60)} to variants(); it must be one or more {type(attack).__name__}"
