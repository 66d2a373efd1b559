"""What tracing attacks must keep: perfect reconstructions are all traced, noise by chance, bad numbers answered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ppbench.adversary.attack import Challenge
from ppbench.federation.view import View
from ppbench.testing.scene import CLIENTS, SHAPE, Change
from ppbench.testing.worlds import POISONS, TWO_GUESSES, Duel, Witness, content, seeded, silenced, within_chance

TIMES = 60


def trace(duel: Duel, rebuilt: Change, rounds: int = 1) -> tuple[View, Challenge]:
    """Return a question about one image of each client and of `rounds` probes; `rebuilt` makes its reconstructions."""
    world = duel.probe(CLIENTS * rounds)
    truth = torch.cat([world.victims.truth(unit).x for unit in world.victims.units])
    unit = tuple(slot for unit in world.victims.units for slot in unit)
    return world.view, Challenge(unit, 1, x=truth, reconstructions=rebuilt(truth.clone()))


def traces_perfect_reconstructions(duel: Duel) -> Iterator[str]:
    """Ask whether the truth itself is traced to its owners."""
    view, asked = trace(duel, lambda x: x, 6)
    owner = duel.attack.run(view, [asked], seeded())[0].owner
    if owner is None or tuple(owner.shape) != (24,) or owner.dtype != torch.int64:
        yield "24 images are not answered by an int64 owner of shape (24,)"
    elif owner.tolist() != [slot.client for slot in asked.unit]:
        right = sum(a == slot.client for a, slot in zip(owner.tolist(), asked.unit, strict=True))
        yield f"of 24 perfect reconstructions {right} are traced to their owners; all can be"


def traces_noise_by_chance(duel: Duel) -> Iterator[str]:
    """Ask whether noise is traced by chance: one image and one reconstruction a client, 60 times, 1 hit of 4 each.

    Hits are the fixed points of a map composed with a random permutation: mean 1, variance at most 1; the binomial's
    .75 is as wide to within a fifth of a standard deviation.
    """
    hits, noise = 0, seeded(3)
    view, asked = trace(duel, lambda x: x)
    for _ in range(TIMES):
        drawn = torch.rand(CLIENTS, *SHAPE, generator=noise)
        owner = duel.attack.run(view, [replace(asked, reconstructions=drawn)], seeded())[0].owner
        told = [] if owner is None else owner.tolist()
        hits += sum(o == slot.client for o, slot in zip(told, asked.unit, strict=False))
    if not within_chance(hits, TIMES * CLIENTS, 1 / CLIENTS):
        yield f"of noise {hits} of {TIMES * CLIENTS} images are traced, where chance is {TIMES}; nothing tells them"


def survives_poisoned_reconstructions(duel: Duel, poison: str) -> Iterator[str]:
    """Ask whether reconstructions of one bad number are answered, the same each time, and all is left as it was."""
    view, asked = trace(duel, POISONS[poison])
    witness = Witness(view, [asked])
    for seen in (view, silenced(view)):
        first, again = (duel.attack.run(seen, [asked], seeded(0))[0] for _ in range(2))
        owner = first.owner
        if owner is None or tuple(owner.shape) != (CLIENTS,) or owner.dtype != torch.int64:
            yield f"{CLIENTS} images are not answered by an int64 owner of shape ({CLIENTS},)"
        elif not set(owner.tolist()) <= {-1, *range(CLIENTS)}:
            yield f"owners {owner.tolist()} are told; clients 0 to {CLIENTS - 1}, or -1, are right"
        if content(first) != content(again):
            yield TWO_GUESSES
    yield from witness.violations()
