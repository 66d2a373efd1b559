"""What a process of a stranger's attack does: it reads what is asked from a folder, and answers into another.

The only process in which the attack's module is imported, so what it does to other modules, to objects that it finds,
or to files, it does to itself. It never meets the truth, but for `check_held`, of which one sentence comes back.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import resource
import signal
import sys
from pathlib import Path

import torch
from pydantic import TypeAdapter

from ppbench.adversary.attack import Attack, Challenge
from ppbench.adversary.declared import answer_faults, told_faults
from ppbench.adversary.facts import Ask, Facts, Reply, Setting
from ppbench.adversary.reading import read
from ppbench.base import tree
from ppbench.base.blame import guard, refuse
from ppbench.base.errors import PluginError, UsageError
from ppbench.base.make import made
from ppbench.base.precision import computing
from ppbench.base.registry import plugins
from ppbench.federation.acting import Before
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot

LARGEST = 4 << 30
"""Bytes of one file that such a process may write."""
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def main(ask: str, work: str) -> None:
    """Answer what stands in the folder `ask` in the folder `work`: answer.json, and answer.safetensors where tensors
    are asked for."""
    _settle()
    home, out = Path(ask), Path(work)
    asked = Ask.model_validate_json((home / "ask.json").read_bytes())
    torch.set_num_threads(asked.threads)
    try:
        with guard("attacks", asked.attack), computing(asked.tf32):
            reply = answered(asked, home, out)
    except UsageError as refusal:
        reply = Reply(refused=str(refusal)[:4000], plugin=isinstance(refusal, PluginError))
    (out / "answer.json").write_text(reply.model_dump_json())


def _settle() -> None:
    if sys.platform == "linux":  # where there are walls they see to it too
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() == 1 and not Path("/proc/1/comm").read_text().startswith("bwrap"):
            sys.exit(1)  # who asked has gone already
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))


def answered(asked: Ask, home: Path, out: Path) -> Reply:
    """Return the reply to what is asked; tensors are written to `out`. UsageError: what cannot be used."""
    attack = made("attacks", Attack, asked.attack, asked.parameters)
    attack.check()
    if asked.hook == "describe":
        return Reply(facts=_facts(attack))
    if asked.hook == "suits":
        plan = TypeAdapter(Plan).validate_json((home / "plan.json").read_bytes())
        refuse("attacks", attack.name, answer_faults(attack, plan, ()))
        return Reply(suits=attack.suits(plan))
    if asked.hook == "check_held":
        attack.check_held(dict(tree.load(home / "held.safetensors")))
        return Reply()
    generator = torch.Generator()
    generator.set_state(tree.load(home / "draws.safetensors"))
    if asked.hook == "crafted":
        sent = attack.crafted(_before(home, asked.device), generator)
        tree.save((sent.params, sent.others), out / "answer.safetensors")
        return Reply()
    return _run(attack, asked, home, out, generator)


def _run(attack: Attack, asked: Ask, home: Path, out: Path, generator: torch.Generator) -> Reply:
    view = View.load(home, asked.device)
    challenges = []
    for unit, *rest in tree.moved(tree.load(home / "challenges.safetensors"), torch.device("cpu")):
        challenges.append(Challenge(tuple(Slot(*slot) for slot in unit), *rest))
    if asked.evidence and not read(attack, view, challenges):
        return Reply(unread=True)
    guesses = attack.run(view, challenges, generator)
    fields = [[getattr(guess, field.name) for field in dataclasses.fields(guess)] for guess in guesses]
    tree.save([[dict(one) if isinstance(one, dict) else one for one in each] for each in fields],
              out / "answer.safetensors")  # fmt: skip
    return Reply()


def _before(home: Path, device: str) -> Before:
    view = View.load(home, device)  # plan and defense, and the public examples
    server, cohort, target = tree.moved(tree.load(home / "before.safetensors"), torch.device(device))
    return Before(view.plan, view.defense, server, tuple(cohort), target, view.public)  # type: ignore[arg-type]


def _facts(attack: Attack) -> Facts:
    # Of its own, not inherited, as `choice` reads it: who builds on an attack that is left out need not be left out.
    quick = type(attack).__dict__.get("quick", True)
    refuse("attacks", attack.name, told_faults(attack, plugins("defenses")))
    return Facts(
        **{name: getattr(attack, name) for name in ("version", "kind", "threats", "adaptive", "targets", "probes")},
        **{name: getattr(attack, name) for name in ("standard", "contains", "audit", "reads_alone", "reference")},
        quick=quick,
        own=type(attack).evidence is not Attack.evidence,
        holds=type(attack).check_held is not Attack.check_held,
        needs_public=attack.needs_public,
        knows=frozenset(name for name in plugins("defenses") if attack.knows(name)),
        setting=_setting(attack),
        variants=tuple(map(_setting, attack.variants())),
    )


def _setting(attack: Attack) -> Setting:
    return Setting(values=dataclasses.asdict(attack), told=dict(attack.parameters()))
