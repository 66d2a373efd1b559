"""What tracing attacks must keep: perfect reconstructions are all traced, noise by chance, bad numbers answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ppbench.adversary.attack import Challenge
from ppbench.testing.scene import CLIENTS, Change
from ppbench.testing.worlds import POISONS, Duel, World, content, everything, seeded, silenced, within_chance

TIMES = 60


@dataclass(frozen=True)
class Question:
    """One image of each client and probe, and reconstructions of them."""

    world: World
    asked: Challenge


def trace(duel: Duel, rebuilt: Change, rounds: int = 1) -> Question:
    """Return a question about one image of each client and of `rounds` probes; `rebuilt` makes its reconstructions."""
    world = duel.probe(CLIENTS * rounds)
    truth = torch.cat([world.victims.truth(unit).x for unit in world.victims.units])
    unit = tuple(slot for unit in world.victims.units for slot in unit)
    return Question(world, Challenge(unit, 1, x=truth, reconstructions=rebuilt(truth.clone())))


def traces_perfect_reconstructions(duel: Duel) -> Iterator[str]:
    """Ask whether the truth itself is traced to its owners."""
    question = trace(duel, lambda x: x, 6)
    owner = duel.attack.run(question.world.view, [question.asked], seeded())[0].owner
    if owner is None or tuple(owner.shape) != (24,) or owner.dtype != torch.int64:
        yield "24 images are not answered by an int64 owner of shape (24,)"
    elif owner.tolist() != [slot.client for slot in question.asked.unit]:
        right = sum(a == slot.client for a, slot in zip(owner.tolist(), question.asked.unit, strict=True))
        yield f"of 24 perfect reconstructions {right} are traced to their owners; all can be"


def traces_noise_by_chance(duel: Duel) -> Iterator[str]:
    """Ask whether noise is traced by chance: one image and one reconstruction a client, 60 times, 1 hit of 4 each.

    The reconstructions are drawn alike, so hits are the fixed points of a map composed with a random permutation: mean
    1, variance at most 1 (a permutation; 0 where all images have one nearest). The binomial's .75 is as wide to within
    a fifth of a standard deviation.
    """
    hits, noise = 0, seeded(3)
    for _ in range(TIMES):
        question = trace(duel, lambda x: torch.rand(x.shape, generator=noise))
        owner = duel.attack.run(question.world.view, [question.asked], seeded())[0].owner
        told = [] if owner is None else owner.tolist()
        hits += sum(o == slot.client for o, slot in zip(told, question.asked.unit, strict=False))
    if not within_chance(hits, TIMES * CLIENTS, 1 / CLIENTS):
        yield f"of noise {hits} of {TIMES * CLIENTS} images are traced, where chance is {TIMES}; nothing tells them"


def survives_poisoned_reconstructions(duel: Duel, poison: str) -> Iterator[str]:
    """Ask whether reconstructions of one bad number are answered, the same each time, and all is left as it was."""
    question = trace(duel, POISONS[poison])
    view, asked = question.world.view, question.asked
    before = everything(view, [asked])
    for seen in (view, silenced(view)):
        first, again = (duel.attack.run(seen, [asked], seeded(0))[0] for _ in range(2))
        owner = first.owner
        if owner is None or tuple(owner.shape) != (CLIENTS,) or owner.dtype != torch.int64:
            yield f"{CLIENTS} images are not answered by an int64 owner of shape ({CLIENTS},)"
        elif not set(owner.tolist()) <= {-1, *range(CLIENTS)}:
            yield f"owners {owner.tolist()} are told; clients 0 to {CLIENTS - 1}, or -1, are right"
        if content(first) != content(again):
            yield "one seed gives two answers; draw from the generator that `run` is given"
    if everything(view, [asked]) != before:
        yield "it changes what it was handed; copy before you write"
