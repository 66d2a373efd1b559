"""The process of a third-party attack: it reads one call from a folder and writes the answer into another.

Only this process imports the attack's module, so changes to modules, objects or files affect nothing else. It never
gets the truth, except for `check_held`, which returns one sentence.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationInfo, field_validator

from ppbench.adversary.attack import Attack, Challenge, attack_answer_faults, reads_anything, static_answer_faults
from ppbench.base import tree
from ppbench.base.declarations import declared, read_declared
from ppbench.base.device import computing, set_threads
from ppbench.base.errors import PluginError, UsageError
from ppbench.base.fence import check_answers, guard, made
from ppbench.base.registry import plugins
from ppbench.federation.acting import Before
from ppbench.federation.plan import Plan
from ppbench.federation.threats import THREATS, ThreatModel, register
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.records.scores import Scalar, Strict

# -- Messages to and from the process of a third-party attack: JSON, every value checked --

ShortText = Annotated[str, Field(max_length=200)]
Values = Annotated[dict[ShortText, Scalar], Field(max_length=200)]
Hook = Literal["describe", "suits", "check_held", "crafted", "run"]


class AttackSetting(Strict):
    """One setting of an attack. values: its fields; parameters: its `parameters()`."""

    values: Values
    parameters: Values


class AttackFacts(Strict):
    """The declarations of an attack, with its setting and its `variants`.

    defined: the threat models that it names, which its module may have registered. declared: the class attributes of
    `Attack`, by name. own: whether it has its own `evidence`. holds: whether it has its own `check_held`. knows: the
    installed defenses whose mechanism it knows.
    """

    defined: Annotated[tuple[ThreatModel, ...], Field(max_length=20)] = ()
    declared: dict[str, Any]
    own: bool
    holds: bool
    needs_public: bool
    knows: frozenset[ShortText]
    setting: AttackSetting
    variants: Annotated[tuple[AttackSetting, ...], Field(min_length=1, max_length=100)]

    @field_validator("declared")
    @classmethod
    def _known(cls, values: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        checked = read_declared(values, Attack)
        if checked["kind"] not in plugins("questions"):
            raise ValueError("no question of this name is installed")
        known = {*THREATS, *(threat.name for threat in info.data.get("defined", ()))}
        if unknown_threats := [threat for threat in checked["threats"] if threat not in known]:
            raise ValueError(f"no threat model is called {unknown_threats[0][:40]!r}")
        return checked


class HookCall(Strict):
    """A call of a hook of the attack named `attack` with these `parameters`.

    threats: the registered ones. evidence: whether to reply "unread" if the view has no evidence. device, threads:
    torch's. tf32: whether a GPU may compute in TF32.
    """

    hook: Hook
    attack: str
    parameters: dict[str, Scalar]
    threats: tuple[ThreatModel, ...] = ()
    evidence: bool = False
    device: str = "cpu"
    threads: int = 1
    tf32: bool = False


class Reply(Strict):
    """The answer to a call, besides tensors. refused: the sentence of a `UsageError`; unread: nothing could be read;
    plugin: the attack is to blame."""

    refused: Annotated[str, Field(max_length=4000)] = ""
    plugin: bool = False
    unread: bool = False
    suits: bool = False
    facts: AttackFacts | None = None


LARGEST_FILE = 4 << 30
"""Most bytes of a file that the process may write."""
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def main(ask: str, work: str) -> None:
    """Answer the call in the folder `ask` by answer.json and, for tensors, answer.safetensors in the folder `work`."""
    _settle()
    home, out = Path(ask), Path(work)
    call = HookCall.model_validate_json((home / "ask.json").read_bytes())
    for threat in call.threats:
        register(threat)
    set_threads(call.threads)
    try:
        with guard("attacks", call.attack), computing(call.tf32):
            reply = reply_to(call, home, out)
    except UsageError as refusal:
        reply = Reply(refused=str(refusal)[:4000], plugin=isinstance(refusal, PluginError))
    (out / "answer.json").write_text(reply.model_dump_json())


def _settle() -> None:
    if sys.platform == "linux":  # bubblewrap does the same
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() == 1 and not Path("/proc/1/comm").read_text().startswith("bwrap"):
            sys.exit(1)  # the parent has already ended
    if sys.platform != "win32":  # which has no such module
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))


def reply_to(call: HookCall, home: Path, out: Path) -> Reply:
    """Return the reply to `call` with input in `home`; tensors are written to `out`. UsageError: an unusable input."""
    attack = made("attacks", Attack, call.attack, call.parameters, lambda made: made.check())
    if call.hook == "describe":
        return Reply(facts=_facts(attack))
    if call.hook == "suits":
        plan = TypeAdapter(Plan).validate_json((home / "plan.json").read_bytes())
        check_answers("attacks", attack.name, lambda: attack_answer_faults(attack, plan, ()))
        return Reply(suits=attack.suits(plan))
    if call.hook == "check_held":
        attack.check_held(dict(tree.load_tree(home / "held.safetensors")))
        return Reply()
    generator = torch.Generator()
    generator.set_state(tree.load_tree(home / "draws.safetensors"))
    if call.hook == "crafted":
        sent = attack.crafted(_before(home, call.device), generator)
        tree.save_tree((sent.params, sent.others), out / "answer.safetensors")
        return Reply()
    return _run(attack, call, home, out, generator)


def _run(attack: Attack, call: HookCall, home: Path, out: Path, generator: torch.Generator) -> Reply:
    view = View.load(home, call.device)
    challenges = []
    for unit, *rest in tree.moved(tree.load_tree(home / "challenges.safetensors"), torch.device("cpu")):
        challenges.append(Challenge(tuple(Slot(*slot) for slot in unit), *rest))
    if call.evidence and not reads_anything(attack, view, challenges):
        return Reply(unread=True)
    guesses = attack.run(view, challenges, generator)
    fields = [[getattr(guess, field.name) for field in dataclasses.fields(guess)] for guess in guesses]
    tree.save_tree([[dict(one) if isinstance(one, dict) else one for one in each] for each in fields],
              out / "answer.safetensors")  # fmt: skip
    return Reply()


def _before(home: Path, device: str) -> Before:
    view = View.load(home, device)  # plan and defense, and the public examples
    server, cohort, target = tree.moved(tree.load_tree(home / "before.safetensors"), torch.device(device))
    return Before(view.plan, view.defense, server, tuple(cohort), target, view.public)  # type: ignore[arg-type]


def _facts(attack: Attack) -> AttackFacts:
    # Not inherited, as in `run.experiment`: a subclass of an attack that is not quick may be quick.
    quick = type(attack).__dict__.get("quick", True)
    check_answers("attacks", attack.name, lambda: static_answer_faults(attack, plugins("defenses")))
    return AttackFacts(
        declared={**declared(type(attack), Attack), "quick": quick},
        defined=tuple(THREATS[name] for name in attack.threats),
        own=type(attack).evidence is not Attack.evidence,
        holds=type(attack).check_held is not Attack.check_held,
        needs_public=attack.needs_public,
        knows=frozenset(name for name in plugins("defenses") if attack.knows(name)),
        setting=_setting(attack),
        variants=tuple(map(_setting, attack.variants())),
    )


def _setting(attack: Attack) -> AttackSetting:
    return AttackSetting(values=dataclasses.asdict(attack), parameters=dict(attack.parameters()))
