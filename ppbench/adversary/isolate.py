"""Run an attack in a fresh process, on a View read from disk: the strong form of "truth is out of reach"."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.base import tree
from ppbench.base.registry import load
from ppbench.federation.view import View
from ppbench.federation.wire import Slot


def isolated(attack: Attack, view: View, challenges: Sequence[Challenge], seed: int, folder: Path) -> list[Guess]:
    """Return the guesses of a registered attack run on files in `folder` alone (RuntimeError with its stderr)."""
    view.save(folder)
    tree.save([_fields(challenge) for challenge in challenges], folder / "challenges.safetensors")
    parameters = dataclasses.asdict(attack)
    about = {"attack": attack.name, "parameters": parameters, "seed": seed, "threads": torch.get_num_threads()}
    (folder / "attack.json").write_text(json.dumps(about))
    command = [sys.executable, "-m", "ppbench.adversary.isolate", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [Guess(*fields) for fields in tree.load(folder / "guesses.safetensors")]


def _fields(value: Challenge | Guess) -> list[object]:
    found = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [[list(slot) for slot in value.unit], *found[1:]] if isinstance(value, Challenge) else found


def _main(folder: Path) -> None:
    about = json.loads((folder / "attack.json").read_text())
    torch.set_num_threads(about["threads"])
    view = View.load(folder)
    challenges = []
    for unit, *rest in tree.load(folder / "challenges.safetensors"):
        challenges.append(Challenge(tuple(Slot(*slot) for slot in unit), *rest))
    attack = load("attacks", about["attack"])(**about["parameters"])
    guesses = attack.run(view, challenges, torch.Generator().manual_seed(about["seed"]))
    tree.save([_fields(guess) for guess in guesses], folder / "guesses.safetensors")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
