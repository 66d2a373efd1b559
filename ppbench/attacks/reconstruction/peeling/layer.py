"""One block's input from its output and its weights' gradient, where neither says which pixel of a tile was largest.

The gradient of a convolution's weights is the input, correlated with what reaches its output; that is known, but for
its places: pooling hands it to the largest of each tile. Given these places the input solves linear equations. So the
largest is replaced by a mean that weights by exp(z / temperature), and the temperature falls: places settle by and by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

from ppbench.attacks.reconstruction.peeling.traced import Block, pooled, spread
from ppbench.attacks.reconstruction.search.lbfgs import Settings, minimize

TEMPERATURES = (3.0, 1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.015)
"""Of the root mean square of what a block gives."""
SMOOTH = 0.03
"""Weight of the total variation of a block's input at first; it falls to 0 with the temperature."""
NEGATIVE = 10.0
"""Weight of what is below 0 in an input that a ReLU gave."""
DENSE = 4096
"""Numbers in an input, up to which its equations are solved directly."""
RANK = 1e-10
"""Share of the largest eigenvalue below which equations say nothing."""
UNSEEN = 1e-2
"""Share of an input's number that lies where equations say nothing, from which on it counts as unknown."""
LEAST, MOST = 1e-6, 1e-2
"""Shares of the largest output between which the one lies that a ReLU's output must exceed to count as more than 0."""
DOUBT = 10.0
"""How many times the root of the relative mismatch that share is."""
SETTINGS = Settings(history=50)

Search = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Known:
    """What is known of a block's output, by victim: values [V, C, H, W], cotangents alike, and which are `seen`.

    Values that are seen and 0 are outputs of a ReLU that did not fire, so no more than 0 before it.
    """

    values: Tensor
    cotangents: Tensor
    seen: Tensor

    @property
    def fires(self) -> Tensor:
        """[V, C, H, W] bool: seen, and more than 0."""
        return self.seen & (self.values > 0)


def cut(values: Tensor, share: Tensor) -> Tensor:
    """Return values [V, ...] with 0 for those that are no more than `share` [V] of the largest of a victim."""
    least = share * values.flatten(1).amax(1)
    return torch.where(values > least.view(-1, *[1] * (values.dim() - 1)), values, 0.0)


@dataclass(frozen=True)
class Layer:
    """A block with its weights, all float64, and by victim what is known: its output, its weights' gradient [V, O, K].

    weight: [O, I, k, k]; bias: [O].
    """

    block: Block
    weight: Tensor
    bias: Tensor
    known: Known
    slope: Tensor

    def convolved(self, u: Tensor) -> Tensor:
        """Return what the convolution gives of inputs u [S, I, H, W]."""
        return F.conv2d(u, self.weight, self.bias, self.block.stride, self.block.padding)

    def shares(self, tiles: Tensor, index: Tensor, temperature: float) -> Tensor:
        """Return what share of each tile's output every place has; all of it the largest at temperature 0."""
        if temperature == 0:
            return F.one_hot(tiles.argmax(-1), tiles.shape[-1]).to(tiles)
        size = self.known.values[index].square().flatten(1).mean(1).sqrt()[:, None, None, None, None]
        return torch.softmax(tiles / (temperature * size).clamp(min=1e-300), -1)

    def gradient(self, u: Tensor, shares: Tensor, index: Tensor) -> Tensor:
        """Return the weights' gradient [S, O, K] of inputs u, where cotangents have these shares."""
        return torch.einsum("sol,skl->sok", self.cotangent(shares, index).flatten(2), self._patches(u))

    def _patches(self, u: Tensor) -> Tensor:
        return F.unfold(u, self.weight.shape[2:], padding=self.block.padding, stride=self.block.stride)

    def cotangent(self, shares: Tensor, index: Tensor) -> Tensor:
        """Return what reaches the convolution's output, [S, O, h, w]."""
        known = self.known
        reaching = known.cotangents[index] * known.fires[index]
        high, wide = self._size()
        return spread(self.block, shares * reaching[..., None], (high, wide))

    def _size(self) -> tuple[int, int]:
        sizes = zip(self.block.inputs[1:], self.weight.shape[2:], self.block.padding, self.block.stride, strict=True)
        high, wide = ((size + 2 * pad - kernel) // stride + 1 for size, kernel, pad, stride in sizes)
        return high, wide

    def mismatch(self, u: Tensor, index: Tensor, temperature: float) -> Tensor:
        """Return the relative squared mismatch [S] of output and gradient of inputs u [S, I, H, W]."""
        tiles = pooled(self.block, self.convolved(u))
        shares = self.shares(tiles, index, temperature)
        given, known = (shares * tiles).sum(-1), self.known
        values, fires, seen = known.values[index], known.fires[index], known.seen[index]
        apart = torch.where(fires, given - values, torch.relu(given) * seen).square().flatten(1).sum(1)
        wanted = self.slope[index]
        bent = (self.gradient(u, shares, index) - wanted).square().flatten(1).sum(1)
        return apart / _norm(values) + bent / _norm(wanted)

    def below(self, u: Tensor, seen: Tensor) -> Known:
        """Return what is known of the output of the block before, of this one's inputs u [V, I, H, W]."""
        index = torch.arange(len(u), device=u.device)
        doubt = (DOUBT * self.mismatch(u, index, 0).sqrt()).clamp(LEAST, MOST)
        shares = self.shares(pooled(self.block, self.convolved(u)), index, 0)
        reaching = self.cotangent(shares, index)
        size = (len(u), *self.block.inputs)
        back = conv2d_input(size, self.weight, reaching, self.block.stride, self.block.padding)
        return Known(cut(u, doubt), back, seen)

    def solved(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs that solve the equations that hold for the places of u, and which numbers are told by them.

        Of inputs of more than `DENSE` numbers, those of u, all of them.
        """
        if u[0].numel() > DENSE:
            return u.clamp(min=0), torch.ones_like(u, dtype=torch.bool)
        found = [self._solved(one[None], torch.tensor([v], device=u.device)) for v, one in enumerate(u)]
        return torch.cat([value for value, _ in found]), torch.cat([seen for _, seen in found])

    def _solved(self, u: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        count = u.numel()
        shares = self.shares(pooled(self.block, self.convolved(u)), index, 0)
        fires = self.known.fires[index][0]
        basis = torch.eye(count, dtype=u.dtype, device=u.device).view(count, *self.block.inputs)
        bare = replace(self, bias=torch.zeros_like(self.bias))
        columns, ends = [], self.known.values[index] - (shares * self.bias[:, None, None, None]).sum(-1)
        for part in basis.split(256):
            where = index.expand(len(part))
            values = (shares * pooled(self.block, bare.convolved(part))).sum(-1)[:, fires]
            slopes = self.gradient(part, shares.expand(len(part), *shares.shape[1:]), where).flatten(1)
            columns.append(torch.cat([values / _norm(ends) ** 0.5, slopes / _norm(self.slope[index]) ** 0.5], 1))
        rows = torch.cat(columns)  # [count, equations]
        wanted = torch.cat(
            [ends[0][fires] / _norm(ends) ** 0.5, self.slope[index].flatten() / _norm(self.slope[index]) ** 0.5]
        )
        start = u.flatten()
        values, vectors = torch.linalg.eigh(rows @ rows.T)
        told = values > RANK * values[-1]
        pull = vectors.T @ (rows @ (wanted - start @ rows))
        step = vectors @ torch.where(told, pull / values.clamp(min=1e-300), 0.0)
        free = vectors[:, ~told].square().sum(1)
        return (start + step).view_as(u).clamp(min=0), (free < UNSEEN).view_as(u)


def inner(layer: Layer, generator: torch.Generator, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs [V, I, H, W] of a block that a ReLU gave, which numbers are told, and evaluations spent [V]."""
    victims, size = len(layer.known.values), layer.block.inputs
    draws = torch.rand(victims, *size, generator=generator, dtype=torch.float64).to(layer.weight.device)
    level = layer.known.values.flatten(1).mean(1)[:, None, None, None]
    u, spent = draws * level, torch.zeros(victims, dtype=torch.int64)
    for step, temperature in enumerate(TEMPERATURES):
        smooth = SMOOTH * (1 - step / (len(TEMPERATURES) - 1)) ** 2

        def penalized(u: Tensor, index: Tensor, t: float = temperature, smooth: float = smooth) -> Tensor:
            size = level[index].flatten()
            below = torch.relu(-u).square().flatten(1).mean(1) / size.square()
            rough = (u.diff(dim=-1).abs().flatten(1).sum(1) + u.diff(dim=-2).abs().flatten(1).sum(1)) / u[0].numel()
            return layer.mismatch(u, index, t) + NEGATIVE * below + smooth * rough / size

        u, used = descended(penalized, u, part_of(budget, step, len(TEMPERATURES)))
        spent += used
    value, seen = layer.solved(u)
    return value, seen, spent


def descended(function: Callable[[Tensor, Tensor], Tensor], start: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Return where L-BFGS leads by a function of (inputs [S, ...], index) from `start`, and evaluations spent [V]."""
    if not budget:
        return start, torch.zeros(len(start), dtype=torch.int64)

    def slopes(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            loss = function(leaf.view(len(z), *start.shape[1:]), index)
            (slope,) = torch.autograd.grad(loss.sum(), leaf)
        return loss.detach(), slope

    limit, stop = torch.full((len(start),), budget), torch.zeros(len(start), dtype=torch.float64)
    found = minimize(slopes, start.flatten(1), budget=limit, stop=stop, settings=SETTINGS)
    return found.z.view_as(start), found.evaluations


def part_of(budget: int, step: int, steps: int) -> int:
    """Return what one of so many steps may spend of a budget; all of them together spend it."""
    return budget * (step + 1) // steps - budget * step // steps


def _norm(values: Tensor) -> Tensor:
    """Return the squared norm of each row's numbers, not 0."""
    return values.square().flatten(1).sum(1).clamp(min=1e-300)
