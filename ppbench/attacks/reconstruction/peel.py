"""Inversion layer by layer, from the first linear layer down, of networks of convolutions and max pooling.

Searches of the image by the whole gradient stop at once in such networks, as the firing units and the largest pixel of
a tile change abruptly. Here each layer's input is searched alone, from its exact output, its weights' gradient, and the
cotangent from above, which is exact too once the layer above is solved.

The gradient of a convolution's weights is the input, correlated with the cotangent of its output. This is known except
for its places: pooling routes it to the largest pixel of each tile. For known places the input solves linear equations.
So the largest is replaced by a mean with weights exp(z / temperature), and the temperature falls: places settle
gradually.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.reconstruction.analytic import guessed_labels
from ppbench.attacks.reconstruction.search.lbfgs import LBFGSSettings, minimize
from ppbench.attacks.reconstruction.search.starts import posed, usable
from ppbench.attacks.reconstruction.spear import batch_mismatch
from ppbench.attacks.reconstruction.stages import (
    ELEMENTWISE,
    Call,
    Elementwise,
    MapShape,
    Stages,
    Window,
    activation_of,
    convolution_window,
    pooling_window,
    read_stages,
)
from ppbench.base.tree import Params
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.nets.net import initial

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
    return F.pad(whole, (0, size[1] - whole.shape[-1], 0, size[0] - whole.shape[-2]))


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
        window = self.block.window
        patches = F.unfold(u, window.kernel, padding=window.padding, stride=window.stride)
        return torch.einsum("sol,skl->sok", self.cotangent(shares, index).flatten(2), patches)

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


# -- The image that enters the first block: searched like an inner input, but by its spectrum, with a prior on images
# --

IMAGE_TEMPERATURES = (3.0, 1.0, 0.5, 0.25, 0.12, 0.06)
FIRST, LAST = 3.0, 1e-4
"""Weights of the total variation, at first and at last."""
COLOR = 3.0
"""Weight of the variation of color differences, relative to that of their mean."""
PALE = 5.0
"""Factor by which their spectrum is smaller."""
SMOOTHED_STEP = 1e-4
"""Squared step of a pixel, relative to the data range, below which variation is smoothed."""
START_SIZE = 0.1


@dataclass(frozen=True)
class Spectrum:
    """Images by their Fourier coefficients in units of 1 / frequency, as in natural images, on twice the grid.

    So searches move large and small shapes alike; any image is possible. shape: [C, H, W]; middle, width: of the data
    range.
    """

    shape: tuple[int, int, int]
    middle: float
    width: float

    @property
    def start(self) -> tuple[int, int, int]:
        """Shape of the numbers that encode an image."""
        return self.shape[0], 2 * self.shape[1], 2 * self.shape[2]

    def images(self, z: Tensor) -> Tensor:
        """Return the images [S, *shape] for numbers z [S, *start]."""
        _, high, wide = self.start
        weights = _amplitudes(self.shape[0], high, wide).to(z)
        parts = torch.fft.irfft2(torch.fft.rfft2(z) * weights, s=(high, wide))[..., : self.shape[1], : self.shape[2]]
        mixed = torch.einsum("kc,skij->scij", opponents(self.shape[0]).to(z), parts)
        return self.middle + self.width * mixed


@cache
def _amplitudes(channels: int, high: int, wide: int) -> Tensor:
    rows, columns = torch.fft.fftfreq(high, dtype=torch.float64), torch.fft.rfftfreq(wide, dtype=torch.float64)
    size = max(high, wide)
    one = 4 / size / ((rows[:, None].square() + columns.square()).sqrt() + 1 / size)
    share = torch.tensor([1.0] + [1 / PALE] * (channels - 1), dtype=torch.float64)
    weights: Tensor = share[:, None, None] * one
    return weights


@cache
def opponents(channels: int) -> Tensor:
    """Return the orthonormal color axes [C, C]: the mean of colors first, then their differences."""
    axes = [[1.0] * channels, *([1.0] * k + [-float(k)] + [0.0] * (channels - k - 1) for k in range(1, channels))]
    matrix = torch.tensor(axes, dtype=torch.float64)
    unit: Tensor = matrix / matrix.norm(dim=1, keepdim=True)
    return unit


def opponent_variation(images: Tensor, width: float) -> Tensor:
    """Return the smoothed total variation [S] of images [S, C, H, W] along `opponents`, per number."""
    parts = torch.einsum("kc,scij->skij", opponents(images.shape[1]).to(images), images / width)
    down, right = parts[..., 1:, :-1] - parts[..., :-1, :-1], parts[..., :-1, 1:] - parts[..., :-1, :-1]
    rough = (down.square() + right.square() + SMOOTHED_STEP).sqrt().mean((2, 3))
    weights = torch.tensor([1.0] + [COLOR] * (images.shape[1] - 1)).to(images)
    return (rough * weights).mean(1)


def first_images(
    layer: PeeledLayer, data_range: tuple[float, float], generator: torch.Generator, budget: int
) -> tuple[Tensor, Tensor]:
    """Return the images [V, C, H, W] that enter the first block, and evaluations spent [V]."""
    low, high = data_range
    space = Spectrum(layer.block.inputs, (low + high) / 2, high - low)
    victims = len(layer.known.values)
    draws = torch.randn(victims, *space.start, generator=generator, dtype=torch.float64)
    z = START_SIZE * draws.to(layer.weight.device)
    spent = torch.zeros(victims, dtype=torch.int64)
    for step, temperature in enumerate(IMAGE_TEMPERATURES):
        weight = FIRST * (LAST / FIRST) ** (step / (len(IMAGE_TEMPERATURES) - 1))

        def penalized(z: Tensor, index: Tensor, t: float = temperature, weight: float = weight) -> Tensor:
            images = space.images(z)
            outside = torch.relu(low - images).square() + torch.relu(images - high).square()
            beyond = outside.flatten(1).sum(1) / space.width**2
            return layer.mismatch(images, index, t) + beyond + weight * opponent_variation(images, space.width)

        z, used = minimized(penalized, z, part_of(budget, step, len(IMAGE_TEMPERATURES)))
        spent += used
    return space.images(z).clamp(low, high), spent


ZERO_SHARE = 1e-5
"""Features up to this share of the largest one count as 0: the rounding of float32 weights."""


@dataclass(frozen=True)
class Peel(Attack):
    """Networks of convolutions and max pooling inverted layer by layer, at falling temperatures; single images.

    Activations are ReLU or rise everywhere (tanh, sigmoid, leaky ReLU), before or behind the pooling.

    Attributes:
        budget: gradient evaluations per victim; half of them for the image, the rest for the layers behind.
    """

    budget: PositiveInt = 2000

    name: ClassVar[str] = "peel"
    kind: ClassVar[Kind] = "reconstruction"
    reference: ClassVar[str] = "this project; the first linear layer as in Phong et al. 2018"

    def suits(self, plan: Plan) -> bool:
        """Return whether the network begins with convolutions, each with an activation, followed by a linear layer."""
        return super().suits(plan) and _begins_with_blocks(plan)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge; grey images with labels for batches or without usable evidence."""
        victims = posed(view.defense.evidence(view), view.plan, challenges, generator)
        guesses = [Guess(x=victim.image("grey"), y=guessed_labels(victim).cpu(), evaluations=1) for victim in victims]
        groups: dict[int, list[tuple[int, Evidence]]] = {}
        for i, victim in enumerate(victims):
            evidence = victim.evidence
            if evidence is not None and evidence.params is not None and victim.size[0] == 1 and usable(evidence):
                groups.setdefault(id(evidence.params), []).append((i, evidence))
        for group in groups.values():
            some = [evidence for _, evidence in group]
            for (i, evidence), (image, spent) in zip(group, self._images(some, view.plan, generator), strict=False):
                label = guesses[i].y
                mismatch = None if label is None else batch_mismatch(evidence, view.plan, image, label)
                guesses[i] = Guess(x=image, y=label, confidence=mismatch, evaluations=spent + 1)
        return guesses

    def _images(
        self, group: Sequence[Evidence], plan: Plan, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, int]]:
        """Yield an image [1, *shape] on the CPU, and evaluations spent, for each evidence; the group shares weights.

        Yields nothing if not all layers are observed.
        """
        params = {name: value.detach().double() for name, value in (group[0].params or {}).items()}
        observed = [{name: value.detach().double() for name, value in evidence.observed.items()} for evidence in group]
        chain = chain_of(plan, params)
        if chain is None:
            return
        needed = {chain.weight, chain.bias, *(block.name for block in chain.stages)}
        if not all(needed <= seen.keys() for seen in observed):
            return
        known, spent = _features(chain, params, observed), torch.zeros(len(group), dtype=torch.int64)
        for before, block in reversed([*zip(chain.stages[:-1], chain.stages[1:], strict=True)]):
            layer = _layer(block, params, observed, known, before.ends)
            inputs, seen, used = inner_inputs(layer, generator, self.budget // 2 // (len(chain.stages) - 1))
            known, spent = layer.below(inputs, seen), spent + used
        layer = _layer(chain.stages[0], params, observed, known, plan.data_range)
        images, used = first_images(layer, plan.data_range, generator, self.budget // 2)
        for image, count in zip(images, spent + used, strict=True):
            yield image[None].float().cpu(), int(count)


@lru_cache(maxsize=64)
def _begins_with_blocks(plan: Plan) -> bool:
    """Return whether a plan's network is such a chain; cached, since every cell needs it and it runs the network."""
    return chain_of(plan, initial(plan.spec, 0)) is not None


def _features(chain: Stages[ConvBlock], params: Params, observed: Sequence[Params]) -> KnownOutput:
    """Return the last block's output: row i of dL/dW is the features times entry i of dL/db."""
    weights = torch.stack([seen[chain.weight] for seen in observed])
    biases = torch.stack([seen[chain.bias] for seen in observed])
    flat = torch.einsum("vhd,vh->vd", weights, biases) / biases.square().sum(1, keepdim=True).clamp(min=1e-300)
    if chain.stages[-1].activation is None:
        flat = cut_small(flat, flat.new_full((len(flat),), ZERO_SHARE))
    shape = (len(observed), *chain.stages[-1].outputs)
    values = flat.view(shape)
    return KnownOutput(values, (biases @ params[chain.weight]).view(shape), torch.ones_like(values, dtype=torch.bool))


def _layer(
    block: ConvBlock, params: Params, observed: Sequence[Params], known: KnownOutput, ends: tuple[float, float]
) -> PeeledLayer:
    weight = params[block.name]
    bias = params[block.bias] if block.bias is not None else weight.new_zeros(len(weight))
    slope = torch.stack([seen[block.name].flatten(1) for seen in observed])
    return PeeledLayer(block, weight, bias, known.before(block.activation), slope, ends)
