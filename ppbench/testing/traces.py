"""Properties of tracing attacks: perfect reconstructions are all traced, noise by chance, bad numbers survived."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ppbench.adversary.attack import Challenge
from ppbench.federation.view import View
from ppbench.testing.scene import SCENE_CLIENTS, SHAPE, TensorChange
from ppbench.testing.worlds import POISONS, TWO_GUESSES, Duel, Witness, guess_content, seeded, silenced, within_chance

NOISE_DRAWS = 60


def tracing_question(duel: Duel, rebuilt: TensorChange, rounds: int = 1) -> tuple[View, Challenge]:
    """Return a view and a challenge about one image per client and probe, of `rounds` probes.

    rebuilt: makes the reconstructions of the true images.
    """
    world = duel.probe(SCENE_CLIENTS * rounds)
    truth = torch.cat([world.victims.truth(unit).x for unit in world.victims.units])
    unit = tuple(slot for unit in world.victims.units for slot in unit)
    return world.view, Challenge(unit, 1, x=truth, reconstructions=rebuilt(truth.clone()))


def traces_perfect_reconstructions(duel: Duel) -> Iterator[str]:
    """Check that the true images are traced to their owners."""
    view, challenge = tracing_question(duel, lambda x: x, 6)
    owner = duel.attack.run(view, [challenge], seeded())[0].owner
    if owner is None or tuple(owner.shape) != (24,) or owner.dtype != torch.int64:
        yield "24 images are not answered by an int64 owner of shape (24,)"
    elif owner.tolist() != [slot.client for slot in challenge.unit]:
        right = sum(a == slot.client for a, slot in zip(owner.tolist(), challenge.unit, strict=True))
        yield f"of 24 perfect reconstructions {right} are traced to their owners; all can be"


def traces_noise_by_chance(duel: Duel) -> Iterator[str]:
    """Check that noise is traced by chance: one image and one reconstruction per client, 60 times, 1 hit of 4 each.

    Hits are the fixed points of a map composed with a random permutation: mean 1, variance at most 1, near the
    binomial's 0.75.
    """
    hits, noise = 0, seeded(3)
    view, challenge = tracing_question(duel, lambda x: x)
    for _ in range(NOISE_DRAWS):
        drawn = torch.rand(SCENE_CLIENTS, *SHAPE, generator=noise)
        owner = duel.attack.run(view, [replace(challenge, reconstructions=drawn)], seeded())[0].owner
        answers = [] if owner is None else owner.tolist()
        hits += sum(o == slot.client for o, slot in zip(answers, challenge.unit, strict=False))
    if not within_chance(hits, NOISE_DRAWS * SCENE_CLIENTS, 1 / SCENE_CLIENTS):
        images = NOISE_DRAWS * SCENE_CLIENTS
        yield f"of noise {hits} of {images} images are traced, where chance is {NOISE_DRAWS}; nothing reveals them"


def survives_poisoned_reconstructions(duel: Duel, poison: str) -> Iterator[str]:
    """Check that reconstructions of one bad number give the same answer each time, without side effects."""
    view, challenge = tracing_question(duel, POISONS[poison])
    witness = Witness(view, [challenge])
    for seen in (view, silenced(view)):
        first, again = (duel.attack.run(seen, [challenge], seeded(0))[0] for _ in range(2))
        owner = first.owner
        if owner is None or tuple(owner.shape) != (SCENE_CLIENTS,) or owner.dtype != torch.int64:
            yield f"{SCENE_CLIENTS} images are not answered by an int64 owner of shape ({SCENE_CLIENTS},)"
        elif not set(owner.tolist()) <= {-1, *range(SCENE_CLIENTS)}:
            yield f"owners {owner.tolist()} are answered; clients 0 to {SCENE_CLIENTS - 1}, or -1, are right"
        if guess_content(first) != guess_content(again):
            yield TWO_GUESSES
    yield from witness.violations()
