"""One block's input from its output and its weights' gradient, although neither shows the largest pixel of a tile.

The gradient of a convolution's weights is the input, correlated with the cotangent of its output. This is known except
for its places: pooling routes it to the largest pixel of each tile. For known places the input solves linear equations.
So the largest is replaced by a mean with weights exp(z / temperature), and the temperature falls: places settle
gradually.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

from ppbench.attacks.reconstruction.search.lbfgs import LBFGSSettings, minimize
from ppbench.attacks.reconstruction.stages import (
    ELEMENTWISE,
    Elementwise,
    MapShape,
    Stages,
    Window,
    activation_of,
    convolution_window,
    pooling_window,
    read_stages,
)
from ppbench.attacks.reconstruction.walk import Call
from ppbench.base.tree import Params
from ppbench.federation.plan import Plan

# -- The blocks that a network begins with --

RECTIFIED = (0.0, torch.inf)
"""Least and greatest output of a ReLU."""


@dataclass(frozen=True)
class ConvBlock:
    """A convolution, an activation, and a max pooling of square tiles. name: of its weight; bias: None for none.

    inputs, convolved, outputs: shapes [C, H, W]. side: of the tiles, 1 without pooling. activation: one that rises;
    None for ReLU.
    """

    name: str
    bias: str | None
    window: Window
    side: int
    inputs: MapShape
    convolved: MapShape
    outputs: MapShape
    activation: Elementwise | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """Least and greatest value of an output."""
        if self.activation is None:
            return RECTIFIED
        return self.activation.ends or (-torch.inf, torch.inf)


def chain_of(plan: Plan, params: Params) -> Stages[ConvBlock] | None:
    """Return the blocks that the network begins with, up to a linear layer; None for another network.

    None also where activations rise and nothing is pooled: linear systems are exact there (`closed_form`).
    """
    chain = read_stages(plan, params, _block) if len(plan.spec.shape) == 3 else None
    hidden = chain is not None and any(block.activation is None or block.side > 1 for block in chain.stages)
    return chain if hidden else None


def _block(conv: Call, after: Sequence[Call]) -> ConvBlock | None:
    """Return the block of a convolution and the calls up to the next layer; None if these are others."""
    act, pool = _activation_and_pool(after)
    window, weight = convolution_window(conv), conv.parameters.get("weight")
    if window is None or window.dilation != (1, 1) or weight is None or act is None or conv.is_frozen("bias"):
        return None  # with a frozen bias the layer's output does not follow from its weights alone
    rising = None if act.name == "relu" else activation_of(act)
    side = 1 if pool is None else _tiles(pool)
    if side is None or (act.name != "relu" and (rising is None or not rising.rises)):
        return None
    shapes = conv.inputs, conv.outputs, after[-1].outputs
    return ConvBlock(weight, conv.parameters.get("bias"), window, side, *shapes, rising)  # type: ignore[arg-type]  # three


def _activation_and_pool(after: Sequence[Call]) -> tuple[Call | None, Call | None]:
    """Return the activation and the max pooling, in either order, that calls consist of; no activation if of others.

    The largest value of a tile is that of its largest input.
    """
    act = next((call for call in after if call.name in ELEMENTWISE), None)
    pool = next((call for call in after if call.name == "max_pool2d"), None)
    return (act if len(after) == 1 + (pool is not None) else None), pool


def _tiles(pool: Call) -> int | None:
    """Return the side of a pooling's square tiles, None if its windows overlap or are padded."""
    window = pooling_window(pool.arguments)
    side = 0 if window is None else window.kernel[0]
    return side if window is not None and window.kernel == window.stride == (side, side) else None


def tiled(block: ConvBlock, z: Tensor) -> Tensor:
    """Return a convolution's output z [S, C, h, w] in tiles [S, C, H, W, side * side]; the remainder is cut off."""
    side, (_, high, wide) = block.side, block.outputs
    cut = z[..., : high * side, : wide * side]
    tiles = cut.unflatten(-1, (wide, side)).unflatten(-3, (high, side))
    flat: Tensor = tiles.transpose(-2, -3).flatten(-2)
    return flat


def untiled(block: ConvBlock, tiles: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the inverse of `tiled`: [S, C, *size], 0 outside of tiles."""
    side = block.side
    whole = tiles.unflatten(-1, (side, side)).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    padded: Tensor = F.pad(whole, (0, size[1] - whole.shape[-1], 0, size[0] - whole.shape[-2]))
    return padded


TEMPERATURES = (3.0, 1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.015)
"""In units of the root mean square of a block's output."""
SMOOTH = 0.03
"""Weight of the total variation of a block's input at first; it falls to 0 with the temperature."""
NEGATIVE = 10.0
"""Weight of parts of an input that its activation cannot have, as negative ones behind a ReLU."""
DENSE = 4096
"""The equations of an input with at most so many numbers are solved directly."""
RANK = 1e-10
"""Eigenvalues below this share of the largest determine nothing."""
UNSEEN = 1e-2
"""A number of an input is unknown if at least this share of it lies in the undetermined space."""
LEAST, MOST = 1e-6, 1e-2
"""Limits of the share of the largest output that a ReLU's output must exceed to count as more than 0."""
DOUBT = 10.0
"""That share, in units of the root of the relative mismatch."""
PEEL_SETTINGS = LBFGSSettings(history=50)

Search = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True)
class KnownOutput:
    """A block's output by victim, as far as known: values and cotangents [V, C, H, W], and which values are `seen`.

    Values that are seen and 0 are outputs of a ReLU that did not fire, so at most 0 before it. rises: behind or before
    an activation that rises, so that all units fire.
    """

    values: Tensor
    cotangents: Tensor
    seen: Tensor
    rises: bool = False

    @property
    def fires(self) -> Tensor:
        """[V, C, H, W] bool: seen and, behind a ReLU, larger than 0."""
        return self.seen if self.rises else self.seen & (self.values > 0)

    def before(self, activation: Elementwise | None) -> KnownOutput:
        """Return what is known of the inputs of an activation; of a ReLU's the same."""
        if activation is None:
            return self
        inner = activation.inverse(self.values)
        return KnownOutput(inner, self.cotangents * activation.slope(inner), self.seen, True)

    @property
    def level(self) -> Tensor:
        """The typical size [V, 1, 1, 1] of values."""
        flat = self.values.flatten(1)
        return (flat.square().mean(1).sqrt() if self.rises else flat.mean(1))[:, None, None, None]


def cut_small(values: Tensor, share: Tensor) -> Tensor:
    """Return values [V, ...] with 0 for those of at most `share` [V] of a victim's largest."""
    least = share * values.flatten(1).amax(1)
    return torch.where(values > least.view(-1, *[1] * (values.dim() - 1)), values, 0.0)


@dataclass(frozen=True)
class PeeledLayer:
    """A block with its weights, its known output and its weights' gradient [V, O, K] by victim, all float64.

    weight: [O, I, k, k]; bias: [O]. known: before an activation that rises. ends: least and greatest number of inputs.
    """

    block: ConvBlock
    weight: Tensor
    bias: Tensor
    known: KnownOutput
    slope: Tensor
    ends: tuple[float, float]

    def convolved(self, u: Tensor) -> Tensor:
        """Return the convolution's outputs for inputs u [S, I, H, W]."""
        return F.conv2d(u, self.weight, self.bias, self.block.window.stride, self.block.window.padding)

    def shares(self, tiles: Tensor, index: Tensor, temperature: float) -> Tensor:
        """Return the share of every place in its tile's output; the largest has all of it at temperature 0."""
        if temperature == 0:
            return F.one_hot(tiles.argmax(-1), tiles.shape[-1]).to(tiles)
        size = self.known.values[index].square().flatten(1).mean(1).sqrt()[:, None, None, None, None]
        return torch.softmax(tiles / (temperature * size).clamp(min=1e-300), -1)

    def gradient(self, u: Tensor, shares: Tensor, index: Tensor) -> Tensor:
        """Return the weights' gradient [S, O, K] for inputs u, with cotangents divided by these shares."""
        return torch.einsum("sol,skl->sok", self.cotangent(shares, index).flatten(2), self._patches(u))

    def _patches(self, u: Tensor) -> Tensor:
        window = self.block.window
        return F.unfold(u, window.kernel, padding=window.padding, stride=window.stride)

    def cotangent(self, shares: Tensor, index: Tensor) -> Tensor:
        """Return the cotangent of the convolution's output [S, O, h, w]."""
        known = self.known
        reaching = known.cotangents[index] * known.fires[index]
        return untiled(self.block, shares * reaching[..., None], self.block.convolved[1:])

    def mismatch(self, u: Tensor, index: Tensor, temperature: float) -> Tensor:
        """Return the relative squared mismatch [S] of output and gradient for inputs u [S, I, H, W]."""
        tiles = tiled(self.block, self.convolved(u))
        shares = self.shares(tiles, index, temperature)
        outputs, known = (shares * tiles).sum(-1), self.known
        values, fires, seen = known.values[index], known.fires[index], known.seen[index]
        output_gap = torch.where(fires, outputs - values, torch.relu(outputs) * seen).square().flatten(1).sum(1)
        observed = self.slope[index]
        gradient_gap = (self.gradient(u, shares, index) - observed).square().flatten(1).sum(1)
        return output_gap / _norm(values) + gradient_gap / _norm(observed)

    def below(self, u: Tensor, seen: Tensor) -> KnownOutput:
        """Return the output of the block before, from this one's inputs u [V, I, H, W]."""
        index = torch.arange(len(u), device=u.device)
        doubt = (DOUBT * self.mismatch(u, index, 0).sqrt()).clamp(LEAST, MOST)
        shares = self.shares(tiled(self.block, self.convolved(u)), index, 0)
        reaching = self.cotangent(shares, index)
        size, window = (len(u), *self.block.inputs), self.block.window
        back = conv2d_input(size, self.weight, reaching, window.stride, window.padding)
        return KnownOutput(cut_small(u, doubt) if self.ends == RECTIFIED else u, back, seen)

    def solved(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs that solve the equations for the places of u, and which numbers these determine.

        For inputs of more than `DENSE` numbers: u within its limits, and all numbers.
        """
        if u[0].numel() > DENSE:
            return u.clamp(*self.ends), torch.ones_like(u, dtype=torch.bool)
        solutions = [self._solved(one[None], torch.tensor([v], device=u.device)) for v, one in enumerate(u)]
        return torch.cat([value for value, _ in solutions]), torch.cat([seen for _, seen in solutions])

    def _solved(self, u: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        count = u.numel()
        shares = self.shares(tiled(self.block, self.convolved(u)), index, 0)
        fires = self.known.fires[index][0]
        basis = torch.eye(count, dtype=u.dtype, device=u.device).view(count, *self.block.inputs)
        unbiased = replace(self, bias=torch.zeros_like(self.bias))
        columns, ends = [], self.known.values[index] - (shares * self.bias[:, None, None, None]).sum(-1)
        for part in basis.split(256):
            rows_of_part = index.expand(len(part))
            values = (shares * tiled(self.block, unbiased.convolved(part))).sum(-1)[:, fires]
            slopes = self.gradient(part, shares.expand(len(part), *shares.shape[1:]), rows_of_part).flatten(1)
            columns.append(torch.cat([values / _norm(ends) ** 0.5, slopes / _norm(self.slope[index]) ** 0.5], 1))
        rows = torch.cat(columns)  # [count, equations]
        right = torch.cat(
            [ends[0][fires] / _norm(ends) ** 0.5, self.slope[index].flatten() / _norm(self.slope[index]) ** 0.5]
        )
        start = u.flatten()
        values, vectors = torch.linalg.eigh(rows @ rows.T)
        determined = values > RANK * values[-1]
        pull = vectors.T @ (rows @ (right - start @ rows))
        step = vectors @ torch.where(determined, pull / values.clamp(min=1e-300), 0.0)
        free = vectors[:, ~determined].square().sum(1)
        return (start + step).view_as(u).clamp(*self.ends), (free < UNSEEN).view_as(u)


def inner_inputs(layer: PeeledLayer, generator: torch.Generator, budget: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inputs [V, I, H, W] of a block behind another, which numbers are determined, evaluations spent [V]."""
    victims, size = len(layer.known.values), layer.block.inputs
    draws = torch.rand(victims, *size, generator=generator, dtype=torch.float64).to(layer.weight.device)
    level, (low, high) = layer.known.level, layer.ends
    u, spent = (draws if low == 0 else 2 * draws - 1) * level.clamp(max=high), torch.zeros(victims, dtype=torch.int64)
    for step, temperature in enumerate(TEMPERATURES):
        smooth = SMOOTH * (1 - step / (len(TEMPERATURES) - 1)) ** 2

        def penalized(u: Tensor, index: Tensor, t: float = temperature, smooth: float = smooth) -> Tensor:
            size = level[index].flatten()
            outside = torch.relu(low - u) + torch.relu(u - high)
            below = outside.square().flatten(1).mean(1) / size.square()
            rough = (u.diff(dim=-1).abs().flatten(1).sum(1) + u.diff(dim=-2).abs().flatten(1).sum(1)) / u[0].numel()
            return layer.mismatch(u, index, t) + NEGATIVE * below + smooth * rough / size

        u, used = minimized(penalized, u, part_of(budget, step, len(TEMPERATURES)))
        spent += used
    value, seen = layer.solved(u)
    return value, seen, spent


def minimized(function: Callable[[Tensor, Tensor], Tensor], start: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Return the end of L-BFGS on a function of (inputs [S, ...], index) from `start`, and evaluations spent [V]."""
    if not budget:
        return start, torch.zeros(len(start), dtype=torch.int64)

    def slopes(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            loss = function(leaf.view(len(z), *start.shape[1:]), index)
            (slope,) = torch.autograd.grad(loss.sum(), leaf)
        return loss.detach(), slope

    limit, stop = torch.full((len(start),), budget), torch.zeros(len(start), dtype=torch.float64)
    minima = minimize(slopes, start.flatten(1), budget=limit, stop=stop, settings=PEEL_SETTINGS)
    return minima.z.view_as(start), minima.evaluations


def part_of(budget: int, step: int, steps: int) -> int:
    """Return the part of a budget for one of `steps`; all parts together are the budget."""
    return budget * (step + 1) // steps - budget * step // steps


def _norm(values: Tensor) -> Tensor:
    """Return the squared norm of each row's numbers, not 0."""
    return values.square().flatten(1).sum(1).clamp(min=1e-300)
