"""A published transcript read back: a view that any attack runs on, and what is asked about it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.base import tree
from ppbench.base.blame import guard
from ppbench.base.errors import UsageError, because, first_fault, shown
from ppbench.base.registry import STOCK, admit, find, plugins
from ppbench.federation.contract import Defense
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.ledger.form import ABOUT, TENSOR_BYTES, VIEW, About, bounded, parsed
from ppbench.ledger.sound import faults, fitting, view_of
from ppbench.records.scores import Scalar
from ppbench.run.choice import make_attack, make_defense


@dataclass(frozen=True, eq=False)
class Frozen:
    """What one adversary saw, frozen. view: as in the cell it was made for; challenges: one a question, in order."""

    about: About
    view: View
    challenges: tuple[Challenge, ...]

    def draws(self, attack: str) -> torch.Generator:
        """Return the generator of an attack's draws: that of the ordinary cell for those of its portfolio."""
        known = self.about.draws.get(attack)
        if known is None:
            known = int.from_bytes(hashlib.sha256(f"{self.about.id}/{attack}".encode()).digest()[:8], "big") >> 1
        return torch.Generator().manual_seed(known)

    def run(self, attack: str | Attack, **parameters: Scalar) -> list[Guess]:
        """Return the guesses of an attack, one a question.

        attack: a name, with `parameters` in place of its defaults, or an attack. Raises UsageError: there is none of
        this name, or it answers another question, or cannot use such a view.
        """
        own = make_attack(attack, parameters) if isinstance(attack, str) else attack
        if own.kind not in self.about.kinds:
            raise UsageError(f"Attack {own.name!r} answers {own.kind}; asked is {' or '.join(self.about.kinds)}.")
        if not self.view.threat.among(own.threats) or not own.suits(self.view.plan):
            raise UsageError(f"Attack {own.name!r} has no use for a view of {self.view.threat} on this network.")
        with guard("attacks", own.name):
            return own.run(self.view, list(self.challenges), self.draws(own.name))


def load_transcript(path: Path | str, *, trust: bool = False, device: str = "cpu") -> Frozen:
    """Return the transcript in a folder, everything in it checked: form, digests, shapes.

    trust: whether a network or a defense may be somebody's code at an address (MODULE:NAME): opening such a transcript
    imports that module. device: where the tensors go. Raises UsageError: the folder holds no such thing, was altered,
    or needs what is not installed.
    """
    home = Path(path)
    about = about_of(home)
    plan, defense = _plan(about, home, trust), _defense(about, home, trust)
    with _named(home / ABOUT):
        for fault in chain(faults(about, plan), fitting(about, plan)):
            raise UsageError(fault)
        defense.check(plan)
    data = checked(home, about, VIEW)
    with _named(home / VIEW):
        view = view_of(about, plan, defense, tree.moved(tree.unpacked(data), torch.device(device)))
    asked = [Challenge(tuple(Slot(*slot) for slot in one.unit), about.batch) for one in about.questions]
    return Frozen(about, view, tuple(asked))


def about_of(home: Path) -> About:
    """Return what the transcript in a folder says of itself; UsageError: it says nothing, or was altered."""
    about = parsed(About, home / ABOUT)
    if about.id != about.name():
        raise UsageError(f"{home / ABOUT} was altered: its id is {about.id}, what it says has {about.name()}.")
    return about


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file of a transcript that is none (UsageError)."""
    try:
        yield
    except (UsageError, RecursionError) as cause:
        why = "nested too deep" if isinstance(cause, RecursionError) else because(cause, 240)
        raise UsageError(f"{path} is not what a transcript holds ({why}); fetch it again.") from cause


def checked(home: Path, about: About, name: str) -> bytes:
    """Return the bytes of a file of a transcript; UsageError: they are not those that it was published with."""
    data, told = bounded(home / name, TENSOR_BYTES), about.files.get(name)
    if told is None or hashlib.sha256(data).hexdigest() != told.sha256:
        raise UsageError(f"{home / name} is not the file that {ABOUT} tells of; fetch the transcript again.")
    return data


def _plan(about: About, home: Path, trust: bool) -> Plan:
    try:
        plan = TypeAdapter(Plan).validate_python(about.plan)
    except ValidationError as error:
        raise UsageError(f"{home / ABOUT} holds no plan ({first_fault(error)}); publish it again.") from error
    _permit(plan.spec.model in plugins("models"), "network", plan.spec.model, trust)
    if any(value for name, value in plan.spec.options if name == "weights") or plan.spec.model == "frozen_backbone":
        raise UsageError(f"{home / ABOUT} names a file of weights on another machine; such networks are not published.")
    return plan


def _defense(about: About, home: Path, trust: bool) -> Defense:
    name = about.defense.id
    _permit(name in plugins("defenses") or name.partition(":")[2].startswith(STOCK), "defense", name, trust)
    if trust:
        admit(name)
    if find("defenses", name) is None:
        raise UsageError(f"{home / ABOUT} is about the defense {shown(name)}, which is not installed here.")
    made = make_defense(name, about.defense.parameters)
    if made.version != about.defense.version:
        told = f"version {about.defense.version}, here is {made.version}"
        raise UsageError(f"{home / ABOUT} is about {shown(name)} in {told}; install the one that it was made with.")
    return made


def _permit(installed: bool, what: str, name: str, trust: bool) -> None:
    if not installed and not trust:
        raise UsageError(
            f"The {what} {shown(name)} is not installed here; where it is code at an address, it is imported only "
            "where you say so: load_transcript(path, trust=True), --trust."
        )


def packed(view: View) -> bytes:
    """Return view.safetensors: `View.parts` in which equal tensors are one, as every probe is sent the model anew."""
    known: dict[tuple[str, torch.Size, bytes], torch.Tensor] = {}

    def one(leaf: torch.Tensor) -> torch.Tensor:
        here = leaf.detach().cpu().contiguous()
        digest = hashlib.sha256(here.reshape(-1).view(torch.uint8).numpy().tobytes() if here.numel() else b"").digest()
        return known.setdefault((str(here.dtype), here.shape, digest), here)

    return tree.packed(tree.tree_map(one, view.parts()))


def planned(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON can hold it."""
    return dict(TypeAdapter(Plan).dump_python(plan, mode="json"))


def model_code(name: str) -> str:
    """Return where the code of a network is: MODULE:NAME."""
    plugin = find("models", name)
    return name if plugin is None else plugin.target
