"""What it costs to run an attack in a process of its own (`--isolate`), and whether it guesses the same.

Run: python benchmarks/bench_isolate.py [--attacks idlg,analytic,label_recovery,dlg] [--victims 8] [--budget 200]
Each attack answers the same challenges beside the truth and apart, in turn; printed are the seconds of both, what the
process of its own adds, and whether the guesses are equal bit for bit. The exit code is 1 where they are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.adversary.isolation import isolated_guesses
from ppbench.base.confine import confinement
from ppbench.federation.threats import HONEST_SERVER
from ppbench.run.cells import CellGroup
from ppbench.run.config import configure
from ppbench.run.experiment import make_attack, resolve
from ppbench.run.scene import group_victims
from ppbench.run.train import federation


def tensors(guess: Guess) -> Iterator[Tensor]:
    """Yield every tensor of a guess."""
    for field in dataclasses.fields(guess):
        value = getattr(guess, field.name)
        parts = value if isinstance(value, tuple) else [value]
        for part in parts:
            last = part[-1] if isinstance(part, tuple) else part
            if isinstance(last, Tensor):
                yield last


def equal(one: Guess, other: Guess) -> bool:
    """Return whether two guesses are the same, bit for bit."""
    mine, theirs = list(tensors(one)), list(tensors(other))
    equal_counts = (one.confidence, one.evaluations) == (other.confidence, other.evaluations)
    return equal_counts and len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def main() -> int:
    """Print a line an attack, and the largest cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attacks", default="label_recovery,analytic,idlg,dlg")
    parser.add_argument("--victims", type=int, default=8)
    parser.add_argument("--budget", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    experiment = resolve(configure(defense="none", model="mlp", train=200, victims=options.victims, attack_batch=(1,)))
    fed = federation(experiment, experiment.points[0])
    fed.start(experiment.task.params)
    victims = group_victims(experiment, CellGroup(0, "init", HONEST_SERVER, 1, False))
    view, challenges = fed.probe(victims.data).view("server/1"), victims.challenges()
    print(f"apart: {confinement().words}; Python {sys.version.split()[0]}, torch {torch.__version__}, cpu, 1 thread")
    costs, alike = [], True
    for name in options.attacks.split(","):
        known = {field.name for field in dataclasses.fields(type(make_attack(name)))}
        attack = make_attack(name, {"budget": options.budget} if "budget" in known else {})
        isolated_guesses(attack, view, challenges, 1)  # what it tells of itself is asked once a run, and told below
        began = time.perf_counter()
        here = attack.run(view, challenges, torch.Generator().manual_seed(0))
        between = time.perf_counter()
        there = isolated_guesses(attack, view, challenges, 0)
        ended = time.perf_counter()
        same = len(here) == len(there) and all(map(equal, here, there))
        costs.append((ended - between) - (between - began))
        alike = alike and same
        print(
            f"{name}: {between - began:.2f} s beside, {ended - between:.2f} s apart, {costs[-1]:+.2f} s a cell; "
            f"{len(here)} guesses, {'equal bit for bit' if same else 'NOT EQUAL'}"
        )
    print(f"at most {max(costs):.2f} s a cell, {'all guesses equal' if alike else 'guesses differ'}")
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
