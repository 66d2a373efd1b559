"""Noise of a round of local steps, drawn a step at a time: the very numbers that one call for all steps would give.

A client's noise for all steps is steps times as large as its model, and under vmap all clients' would be there at once.
So what is kept of a large parameter is where the client's generator stood at each step, and a step's numbers are drawn
from there when it comes. That is a pure function of the states, so it passes vmap: outside of it, a client at a time.
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
FEW = 4096
"""Numbers a step below which a parameter's are drawn at once: the state of a generator takes 5,056 bytes."""
BLOCK = 16
"""Normal numbers that torch makes together, of as many uniform ones; the last of an odd count are made anew."""
SKIPPED = 2**22
"""Numbers that are passed over at a time."""


@node
class Later:
    """Noise of one parameter that is not drawn yet.

    states: [steps, S] uint8, the generator's where the numbers of each step begin. last: [steps, 16] float32, the last
    numbers of all, where torch makes these anew, else [steps, 0]. steps, shape, law: see `noise`.
    """

    states: Tensor
    last: Tensor
    steps: int
    shape: tuple[int, ...]
    law: Law

    def at(self, t: int) -> Tensor:
        """Return the noise of step `t` [*shape], float32, where `states` lie."""
        count = math.prod(self.shape)
        piece = Piece(self.law, t * count, count, self.steps * count)
        return _drawn(self.states[t], self.last[t], piece).view(self.shape)


def noise(generator: Generator, steps: int, shape: tuple[int, ...], law: Law = "gaussian") -> Tree:
    """Return noise of scale 1 for `steps` local steps, float32 [steps, *shape], or what gives it step by step.

    To be read by `at_step`, as `contract.at` does. The numbers, and where the generator stands afterwards, are those of
    one draw of all.
    """
    count = math.prod(shape)
    if count < FEW or not replayed(law):
        return whole(generator, (steps, *shape), law)
    return Later(*_passed(generator, steps, count, law), steps, tuple(shape), law)


def whole(generator: Generator, shape: tuple[int, ...], law: Law) -> Tensor:
    """Return noise of scale 1, float32, drawn at once: standard normal, or Laplace's, by its inverse distribution."""
    if law == "gaussian":
        return torch.randn(shape, generator=generator, dtype=torch.float32)
    u = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    return (-u.sign() * torch.log1p(-2 * u.abs().clamp(max=0.5 - 1e-16))).float()


def at_step(tree: Tree, t: int) -> Tree:
    """Return the noise of local step `t`, of a tree with leading axis steps, or a dict of such and of `Later`."""
    if isinstance(tree, dict):
        return {name: at_step(value, t) for name, value in tree.items()}
    return tree.at(t) if isinstance(tree, Later) else tree_map(lambda leaf: leaf[t], tree)


@dataclass(frozen=True)
class Piece:
    """Numbers `first` to `first + count` of `total` that are drawn by one call."""

    law: Law
    first: int
    count: int
    total: int

    def drawn(self, state: Tensor, last: Tensor) -> Tensor:
        """Return them, float32 [count], of a step's `Later.states` and `Later.last`."""
        generator = _at(state)
        if self.law == "laplace":
            return whole(generator, (self.count,), "laplace").to(state.device)
        lead, anew = self.first % BLOCK, self.total - len(last)
        size = -(-(lead + self.count) // BLOCK) * BLOCK
        found = whole(generator, (size,), "gaussian")[lead : lead + self.count]
        begin, end = max(self.first, anew), self.first + self.count
        if begin < end:
            found[begin - self.first :] = last[begin - anew : end - anew].cpu()
        return found.to(state.device)


def _at(state: Tensor) -> Generator:
    """Return a generator that stands where one did."""
    generator = Generator()
    generator.set_state(state.cpu().clone())  # torch 2.13 crashes on one that is part of another tensor
    return generator


def _passed(generator: Generator, steps: int, count: int, law: Law) -> tuple[Tensor, Tensor]:
    """Return `states` and `last` of a `Later`, and leave the generator where one draw of all numbers does."""
    each, block = (2, 1) if law == "laplace" else (1, BLOCK)  # a float64 takes two of the generator's numbers
    begins = [t * count // block * block for t in range(steps)]
    states, stood = [], 0
    for begin in begins:
        _skip(generator, each * (begin - stood))
        states.append(generator.get_state())
        stood = begin
    _skip(generator, each * (steps * count - stood))
    anew = BLOCK if steps * count % block else 0
    return torch.stack(states), whole(generator, (anew,), law).expand(steps, anew)


def _skip(generator: Generator, count: int) -> None:
    """Pass over `count` numbers of the generator, in a fifth of the time in which normal ones are made of them."""
    for begin in range(0, count, SKIPPED):
        torch.empty(min(SKIPPED, count - begin), dtype=torch.uint8).random_(generator=generator)


@cache
def replayed(law: Law) -> bool:
    """Return whether this torch draws as we take it to: if another does not, noise is drawn at once, as ever."""
    one, other, steps, count = Generator().manual_seed(0), Generator().manual_seed(0), 3, FEW + 5
    right = whole(one, (steps, count), law)
    later = Later(*_passed(other, steps, count, law), steps, (count,), law)
    same = all(torch.equal(later.at(t), right[t]) for t in range(steps))
    return same and torch.equal(one.get_state(), other.get_state())


def _drawn(state: Tensor, last: Tensor, piece: Piece) -> Tensor:
    found: Tensor = _Drawn.apply(state, last, piece)  # type: ignore[no-untyped-call]
    return found


class _Drawn(torch.autograd.Function):
    """A `Piece` of a client's noise, or, under vmap, of each client's."""

    @staticmethod
    def forward(state: Tensor, last: Tensor, piece: Piece) -> Tensor:
        return piece.drawn(state, last)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: numbers that are drawn have no derivative."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, state: Tensor, last: Tensor, piece: Piece) -> tuple[Tensor, int]:
        def of(leaf: Tensor, dim: int | None, client: int) -> Tensor:
            return leaf if dim is None else leaf.select(dim, client)

        rows = [
            _drawn(of(state, in_dims[0], client), of(last, in_dims[1], client), piece)
            for client in range(info.batch_size)
        ]
        return torch.stack(rows), 0
