"""The directions along which BAFFLE's clients perturb the model: all parties draw the same ones from a public seed.

Directions are drawn one after another on the CPU, whatever the device and however many are stacked, so that server,
clients and attackers hold the same bits; none is kept, which is what keeps memory proportional to the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from ppbench.base.seeds import Seeds


def directions(seed: int, entries: int, count: int) -> Iterator[Tensor]:
    """Yield z_1, ..., z_count, each [entries] float32, standard normal; a perturbation is sigma times one of them.

    Args:
        seed: the round's public seed, in [0, 2^31).
        entries: number of parameters n.
        count: number of directions; the first ones do not depend on it.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(entries, generator=generator)


def chunks(seed: int, entries: int, count: int, size: int) -> Iterator[Tensor]:
    """Yield the same directions stacked, [size, entries] float32 at a time; the last stack may be smaller."""
    stream = directions(seed, entries, count)
    while some := list(islice(stream, size)):
        yield torch.stack(some)


def step_seeds(seed: int, steps: int) -> Tensor:
    """Return the seeds [steps] int64 of a round's local steps, derived from its public `seed`: the first is `seed`.

    Everybody who knows the seed knows them, and all clients perturb alike in a step of the same number.
    """
    later = (Seeds(seed).seed("baffle", step) >> 32 for step in range(1, steps))
    return torch.tensor([seed, *later], dtype=torch.int64)
