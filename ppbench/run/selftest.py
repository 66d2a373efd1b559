"""The self-test: DLG must break an undefended sigmoid LeNet, and algebra a first linear layer.

If one is not broken, something between training and scoring is wrong (a sign, another loss, a wrong view), and no
result of the harness counts. The test runs where cells are computed; its outcome is kept beside them.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache

import torch

from ppbench.adversary.victims import choose_victims
from ppbench.base.registry import load
from ppbench.base.version import __version__
from ppbench.federation.engine import Federation
from ppbench.federation.threats import HONEST_SERVER
from ppbench.metrics.modalities import BROKEN_DB
from ppbench.questions.images import score_images
from ppbench.records.schema import Scalar
from ppbench.records.soundness import SelftestTrial, Soundness
from ppbench.records.sources import source_digest
from ppbench.run.choice import make_defense
from ppbench.run.config import configure
from ppbench.run.task import Task, make_task

VICTIMS = 2


@dataclass(frozen=True)
class Subject:
    """A network and the attack that must break it, on the embedded digits."""

    model: str
    attack: str
    options: tuple[tuple[str, Scalar], ...] = ()


DLG_OPTIONS = (("label", "inferred"), ("restarts", 0), ("stop", 1e-5), ("budget", 600))
SUBJECTS = (Subject("lenet", "dlg", DLG_OPTIONS), Subject("mlp", "analytic"))


def share_broken(subject: Subject) -> float:
    """Return the share of victims that are reconstructed above 20 dB, by the same code as in every evaluation."""
    task: Task = make_task(configure(defense="none", model=subject.model, clients=2, train=40, seed=0))
    federation = Federation(make_defense("none"), task.plan, task.shards, task.seeds)
    federation.start(task.params)
    victims = choose_victims(task.shards, HONEST_SERVER, 1, VICTIMS, task.seeds)
    view = federation.probe(victims.data).view(HONEST_SERVER)
    attack = load("attacks", subject.attack)(**dict(subject.options))
    guesses = attack.run(view, victims.challenges(), torch.Generator().manual_seed(0))
    scores = score_images(victims, guesses, {}, {}, task.plan.data_range).victims
    return float(sum((s.psnr or 0.0) > BROKEN_DB for s in scores) / len(scores))


@lru_cache(maxsize=1)
def selftest() -> Soundness:
    """Attack both networks (three seconds, once per process) and return the outcome; an error counts as unbroken."""
    trials = []
    for subject in SUBJECTS:
        try:
            share, error = share_broken(subject), ""
        except Exception as cause:  # noqa: BLE001 - whatever breaks here is what this test is for
            share, error = 0.0, f"{type(cause).__name__}: {cause}"
        trials.append(SelftestTrial(model=subject.model, attack=subject.attack, share=share, error=error))
    return Soundness(
        ppbench=__version__,
        code=source_digest(),
        torch=str(torch.__version__),
        python=platform.python_version(),
        trials=trials,
    )
