"""Noise of a round of local steps, drawn step by step: exactly the numbers that one call for all steps would give.

A client's noise for all steps is steps times as large as its model, and under vmap all clients' noise would be in
memory at once. So for a large parameter only the states of the client's generator at each step are stored, and each
step draws from its state. That is a pure function of the states, so it works under vmap (client by client outside).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from ppbench.base.tree import Tree, node, tree_map

Law = Literal["gaussian", "laplace"]
EAGER_NUMBERS = 4096
"""Numbers per step below which a parameter's noise is drawn at once: a generator's state takes 5,056 bytes."""
NORMAL_BLOCK = 16
"""torch makes normal numbers in blocks of this size, of as many uniform ones; it redraws the last of an odd count."""
SKIPPED_AT_ONCE = 2**22
"""Numbers that are skipped at a time."""


@node
class DeferredNoise:
    """Noise of one parameter that is not drawn yet.

    states: [steps, S] uint8, the generator's state before the numbers of each step. last: [steps, 16] float32, the last
    numbers of all if torch redraws these, else [steps, 0]. steps, shape, law: see `noise`.
    """

    states: Tensor
    last: Tensor
    steps: int
    shape: tuple[int, ...]
    law: Law

    def at(self, t: int) -> Tensor:
        """Return the noise of step `t` [*shape], float32, on the device of `states`."""
        count = math.prod(self.shape)
        piece = DrawRange(self.law, t * count, count, self.steps * count)
        return _draw(self.states[t], self.last[t], piece).view(self.shape)


def noise(generator: Generator, steps: int, shape: tuple[int, ...], law: Law = "gaussian") -> Tree:
    """Return noise of scale 1 for `steps` local steps, float32 [steps, *shape], or a `DeferredNoise` of it.

    Read it by `at_step`. The numbers, and the generator's state afterwards, are those of one draw of all steps.
    """
    count = math.prod(shape)
    if count < EAGER_NUMBERS or not draws_by_steps(law):
        return drawn_at_once(generator, (steps, *shape), law)
    return DeferredNoise(*_skip_all(generator, steps, count, law), steps, tuple(shape), law)


def drawn_at_once(generator: Generator, shape: tuple[int, ...], law: Law) -> Tensor:
    """Return noise of scale 1, float32 [*shape], drawn at once: standard normal, or Laplace by its inverse CDF."""
    if law == "gaussian":
        return torch.randn(shape, generator=generator, dtype=torch.float32)
    u = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs().clamp(max=0.5 - 1e-16))).float()


def at_step(tree: Tree, t: int) -> Tree:
    """Return the noise of local step `t` from a tree with leading axis steps, `DeferredNoise`, or a dict of these."""
    if isinstance(tree, dict):
        return {name: at_step(value, t) for name, value in tree.items()}
    return tree.at(t) if isinstance(tree, DeferredNoise) else tree_map(lambda leaf: leaf[t], tree)


@dataclass(frozen=True)
class DrawRange:
    """The numbers `first` to `first + count` of the `total` of one draw."""

    law: Law
    first: int
    count: int
    total: int

    def drawn(self, state: Tensor, last: Tensor) -> Tensor:
        """Return the numbers, float32 [count], from a step's entries of `DeferredNoise.states` and `.last`."""
        generator = _generator_at(state)
        if self.law == "laplace":
            return drawn_at_once(generator, (self.count,), "laplace").to(state.device)
        lead, redrawn_from = self.first % NORMAL_BLOCK, self.total - len(last)
        size = -(-(lead + self.count) // NORMAL_BLOCK) * NORMAL_BLOCK
        numbers = drawn_at_once(generator, (size,), "gaussian")[lead : lead + self.count]
        begin, end = max(self.first, redrawn_from), self.first + self.count
        if begin < end:
            numbers[begin - self.first :] = last[begin - redrawn_from : end - redrawn_from].cpu()
        return numbers.to(state.device)


def _generator_at(state: Tensor) -> Generator:
    """Return a generator in a stored state."""
    generator = Generator()
    generator.set_state(state.cpu().clone())  # torch 2.13 crashes on one that is part of another tensor
    return generator


def _skip_all(generator: Generator, steps: int, count: int, law: Law) -> tuple[Tensor, Tensor]:
    """Return `states` and `last` of a `DeferredNoise`; leaves the generator as one draw of all numbers would."""
    per_number, block = (
        (2, 1) if law == "laplace" else (1, NORMAL_BLOCK)
    )  # a float64 takes two of the generator's numbers
    begins = [t * count // block * block for t in range(steps)]
    states, position = [], 0
    for begin in begins:
        _skip(generator, per_number * (begin - position))
        states.append(generator.get_state())
        position = begin
    _skip(generator, per_number * (steps * count - position))
    redrawn = NORMAL_BLOCK if steps * count % block else 0
    return torch.stack(states), drawn_at_once(generator, (redrawn,), law).expand(steps, redrawn)


def _skip(generator: Generator, count: int) -> None:
    """Skip `count` numbers of the generator, in a fifth of the time of drawing normal ones."""
    for begin in range(0, count, SKIPPED_AT_ONCE):
        torch.empty(min(SKIPPED_AT_ONCE, count - begin), dtype=torch.uint8).random_(generator=generator)


@cache
def draws_by_steps(law: Law) -> bool:
    """Return whether drawing step by step gives the same numbers with this torch; if not, noise is drawn at once."""
    at_once, by_steps, steps, count = Generator().manual_seed(0), Generator().manual_seed(0), 3, EAGER_NUMBERS + 5
    expected = drawn_at_once(at_once, (steps, count), law)
    later = DeferredNoise(*_skip_all(by_steps, steps, count, law), steps, (count,), law)
    same = all(torch.equal(later.at(t), expected[t]) for t in range(steps))
    return same and torch.equal(at_once.get_state(), by_steps.get_state())


def _draw(state: Tensor, last: Tensor, piece: DrawRange) -> Tensor:
    numbers: Tensor = _Draw.apply(state, last, piece)  # type: ignore[no-untyped-call]
    return numbers


class _Draw(torch.autograd.Function):
    """A `DrawRange` of a client's noise, or, under vmap, of each client's."""

    @staticmethod
    def forward(state: Tensor, last: Tensor, piece: DrawRange) -> Tensor:
        return piece.drawn(state, last)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: drawn numbers have no derivative."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, state: Tensor, last: Tensor, piece: DrawRange) -> tuple[Tensor, int]:
        def of(leaf: Tensor, dim: int | None, client: int) -> Tensor:
            return leaf if dim is None else leaf.select(dim, client)

        rows = [
            _draw(of(state, in_dims[0], client), of(last, in_dims[1], client), piece)
            for client in range(info.batch_size)
        ]
        return torch.stack(rows), 0
