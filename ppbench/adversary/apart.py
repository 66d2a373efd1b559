"""Strangers' attacks at a distance: stand-ins that have every hook answered by a process of its own (`inside`).

The stranger's module is never imported here. What it declares, answers and sends comes as JSON and safetensors from a
folder that nothing else was in, is taken from regular files only, and is checked as if it were meant to harm.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import get_annotations
from keyword import iskeyword
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ppbench.adversary.asking import asked, remembered
from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.adversary.facts import Ask, Facts, Hook, Setting
from ppbench.base import tree
from ppbench.base.errors import PluginError, UsageError, shown
from ppbench.base.files import kind_of
from ppbench.base.precision import tf32_allowed
from ppbench.base.registry import load, plugins
from ppbench.federation.acting import Before, Sent
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.threats import HONEST_SERVER
from ppbench.federation.view import Mechanism, View
from ppbench.records.scores import Scalar


class Unread(UsageError):
    """An attack found nothing in the view that it could read."""


@dataclasses.dataclass(frozen=True)
class Apart(Attack):
    """A stranger's attack, which runs elsewhere. Its class is made of what it declares, its fields are the attack's.

    apart: what it told of itself. given: what the user set. evidence: of its own it is not asked here, for whoever asks
    at the truth would hand it over; so records of it have no discrepancy at the truth.
    """

    apart: ClassVar[Facts]
    given: ClassVar[Mapping[str, Scalar]]

    def check(self) -> None:
        """Nothing: it was asked where it runs."""

    def parameters(self) -> dict[str, Scalar]:
        """Return what it said."""
        return dict(self.apart.setting.told)

    def check_held(self, held: Mapping[int, Tensor]) -> None:
        """Have it refuse in a process that ends with that (UsageError)."""
        if self.apart.holds:
            self._asked("check_held", lambda home: tree.save(dict(held), home / "held.safetensors"))

    @property
    def needs_public(self) -> bool:
        """Whether it said so."""
        return self.apart.needs_public

    def variants(self) -> Sequence[Attack]:
        """Return stand-ins for the settings that it named."""
        return [_standing(self.name, setting, self.apart, self.given) for setting in self.apart.variants]

    def suits(self, plan: Plan) -> bool:
        """Ask whether it suits `plan` (PluginError: its answers have another form than the contract asks for)."""
        return _suits(self, json.dumps(dataclasses.asdict(plan)))

    def knows(self, defense: str) -> bool:
        """Return whether it said so."""
        return defense in self.apart.knows

    def crafted(self, before: Before, generator: torch.Generator) -> Sent:
        """Have it choose weights."""
        view = View(HONEST_SERVER, None, before.plan, before.defense, (), (), (), before.public)

        def write(home: Path) -> None:
            view.save(home)
            tree.save((before.server, before.cohort, before.target), home / "before.safetensors")
            tree.save(generator.get_state(), home / "draws.safetensors")

        where = next(iter(before.server.params.values())).device
        found = self._asked("crafted", write, device=str(where), **_named(before.plan, before.defense))
        sent = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
        if not _is_params(sent[0]) or not (sent[1] is None or _is_params(sent[1])):
            raise PluginError(f"{plugins('attacks')[self.name].words} sends something else than weights by name.")
        return Sent(*tree.moved(sent, where))

    def evidence(self, view: View) -> list[Evidence]:
        """Return the defense's plain evidence, or none where the attack has its own."""
        return [] if self.apart.own else view.defense.evidence(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Have it guess. Unread: nothing in the view can be read, where its question reads views."""

        def write(home: Path) -> None:
            view.save(home)
            tree.save([_fields(challenge) for challenge in challenges], home / "challenges.safetensors")
            tree.save(generator.get_state(), home / "draws.safetensors")

        device = next((str(t.device) for letter in view.mail for t in tree.leaves(letter.message)), "cpu")
        reads = bool(load("questions", self.kind).reads)
        found = self._asked("run", write, device=device, evidence=reads, **_named(view.plan, view.defense))
        if not isinstance(found, list) or not all(isinstance(one, list) for one in found):
            raise PluginError(f"{plugins('attacks')[self.name].words} answers something else than a list of guesses.")
        return [self._guess(one) for one in found]

    def _guess(self, fields: list[Any]) -> Guess:
        names = [field.name for field in dataclasses.fields(Guess)]
        told = dict(zip(names, fields, strict=False))
        if len(fields) != len(names) or not all(_GUESS.get(name, _is_tensor)(part) for name, part in told.items()):
            raise PluginError(
                f"{plugins('attacks')[self.name].words} answers a guess whose fields are not as `Guess`'s."
            )
        return Guess(**{**told, "path": tuple(map(tuple, told["path"])), "others": tuple(told["others"])})

    def _asked(self, hook: Hook, write: Callable[[Path], object], **more: Any) -> Any:
        ask = Ask(hook=hook, attack=self.name, parameters=dataclasses.asdict(self),
                  device=more.pop("device", "cpu"), evidence=more.pop("evidence", False),
                  threads=torch.get_num_threads(), tf32=tf32_allowed())  # fmt: skip
        reply, found = asked(ask, write, _files({**self.given, **more}))
        if reply.unread:
            raise Unread
        return found


def _fields(value: Challenge) -> list[object]:
    found = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [[list(slot) for slot in value.unit], *(dict(one) if isinstance(one, Mapping) else one for one in found[1:])]


def _is_params(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(n, str) and isinstance(v, Tensor) for n, v in found.items())


def _is_tensor(found: object) -> bool:
    return found is None or isinstance(found, Tensor)


def _is_path(found: object) -> bool:
    return isinstance(found, tuple | list) and all(
        isinstance(step, tuple | list) and len(step) == 2 and type(step[0]) is int and isinstance(step[1], Tensor)
        for step in found
    )


_GUESS: Mapping[str, Callable[[object], bool]] = {
    "confidence": lambda found: found is None or type(found) in (int, float),
    "evaluations": lambda found: type(found) is int and found >= 0,
    "path": _is_path,
    "others": lambda found: isinstance(found, tuple | list) and all(isinstance(one, Tensor) for one in found),
    "extra": _is_params,
}
"""What fields of a guess may be that are not a tensor or None."""


def _named(plan: Plan, defense: Mechanism) -> dict[str, Scalar]:
    """Return what may name files that the attack needs as well: of the network's options and the defense's."""
    own = {f"defense.{name}": value for name, value in dataclasses.asdict(defense).items()}
    return {**{f"model.{name}": value for name, value in dict(plan.spec.options).items()}, **own}


def _files(values: Mapping[str, Scalar]) -> list[Path]:
    """Return the files that values name; of the attack's only what the user set, never what it names by itself."""
    paths = [Path(value).absolute() for value in values.values() if isinstance(value, str) and value]
    return [path for path in paths if kind_of(path) == "file"]


# -- making stand-ins --------------------------------------------------------------------------------------------------
@lru_cache
def apart(name: str, given: tuple[tuple[str, Scalar], ...] = ()) -> Apart:
    """Return the stand-in for a stranger's attack with parameters that a user gave, by name and value.

    Raises UsageError: these cannot be used; PluginError: the attack is malformed, or tells things that cannot be.
    """
    reply = remembered(Ask(hook="describe", attack=name, parameters=dict(given)))
    if reply.facts is None:
        raise PluginError(f"{plugins('attacks')[name].words} does not say what it is.")
    return _standing(name, reply.facts.setting, reply.facts, dict(given))


def _standing(name: str, setting: Setting, facts: Facts, given: Mapping[str, Scalar]) -> Apart:
    odd = [key for key in setting.values if not key.isidentifier() or iskeyword(key) or hasattr(Apart, key)]
    if odd:
        raise PluginError(
            f"{plugins('attacks')[name].words} has the parameter {shown(odd[0])}; call it something else."
        )
    declared = {key: getattr(facts, key) for key in get_annotations(Attack) if key in Facts.model_fields}
    space = {**declared, "name": name, "apart": facts.model_copy(update={"setting": setting}), "given": given}
    fields = [(key, Any, dataclasses.field(default=value)) for key, value in setting.values.items()]
    made = dataclasses.make_dataclass("Standing", fields, bases=(Apart,), namespace=space, frozen=True)
    found: Apart = made()
    return found


@lru_cache(maxsize=256)
def _suits(attack: Apart, plan: str) -> bool:
    ask = Ask(hook="suits", attack=attack.name, parameters=dataclasses.asdict(attack))
    return remembered(ask, plan, _files(attack.given)).suits


def isolated(attack: Attack, view: View, challenges: Sequence[Challenge], seed: int) -> list[Guess]:
    """Return the guesses of any installed attack, ours too, run in a process of its own on files alone."""
    given = tuple(dataclasses.asdict(attack).items())
    return apart(attack.name, given).run(view, challenges, torch.Generator().manual_seed(seed))
