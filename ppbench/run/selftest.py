"""Two networks that must always fall: where they stand, the harness is broken, and nothing it says counts.

A control can fail because an attack is weak on a hard network. An undefended LeNet of sigmoids falls to DLG, and a
first linear layer to algebra, whatever the evaluation is about: if these stand, something between training and scoring
is at fault (a sign, a loss that differs, a wrong view), and no defense may be judged by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ppbench.adversary.score import score_images
from ppbench.adversary.victims import choose_victims
from ppbench.base.registry import load
from ppbench.federation.engine import Federation
from ppbench.records.aggregate import BROKEN_DB
from ppbench.records.schema import ImageScore, Scalar
from ppbench.report.controls import BROKEN, Check
from ppbench.run.choice import make_defense
from ppbench.run.config import configure
from ppbench.run.task import Task, make_task

VICTIMS = 2


@dataclass(frozen=True)
class Canary:
    """A network and the attack that must break it, on the embedded digits."""

    model: str
    attack: str
    options: tuple[tuple[str, Scalar], ...] = ()


QUICK = (("label", "inferred"), ("restarts", 0), ("stop", 1e-5), ("budget", 600))
CANARIES = (Canary("lenet", "dlg", QUICK), Canary("mlp", "analytic"))


def share_broken(canary: Canary) -> float:
    """Return the share of victims that come out above 20 dB, through the same line as in every evaluation."""
    task: Task = make_task(configure(defense="none", model=canary.model, clients=2, train=40, seed=0))
    federation = Federation(make_defense("none"), task.plan, task.shards, task.seeds)
    federation.start(task.params)
    victims = choose_victims(task.shards, "server/1", 1, VICTIMS, task.seeds)
    view = federation.probe(victims.data).view("server/1")
    attack = load("attacks", canary.attack)(**dict(canary.options))
    guesses = attack.run(view, victims.challenges(), torch.Generator().manual_seed(0))
    scores = score_images(victims, guesses, {}, {}, task.plan.data_range).victims
    return sum(isinstance(s, ImageScore) and (s.psnr or 0.0) > BROKEN_DB for s in scores) / len(scores)


@lru_cache(maxsize=1)
def harness_check() -> Check:
    """Return whether both canaries fall; an error of an attack is a canary that stands. Runs once a process."""
    standing = []
    for canary in CANARIES:
        try:
            share, why = share_broken(canary), ""
        except Exception as cause:  # noqa: BLE001 - whatever breaks here is what this check is for
            share, why = 0.0, f" ({type(cause).__name__}: {cause})"
        if share < BROKEN:
            standing.append(f"{canary.attack} breaks {share:.0%} of an undefended {canary.model}{why}")
    if not standing:
        return Check("harness", True, "Both canaries fall: the harness finds what must be found.")
    return Check("harness", False, f"HARNESS FAULT: {'; '.join(standing)}. Nothing here may be concluded.")
