"""Inversion layer by layer, from the first linear layer down, of networks of convolutions and max pooling.

Searches of the image by the whole gradient stop at once in such networks, as the firing units and the largest pixel of
a tile change abruptly. Here each layer's input is searched alone, from its exact output, its weights' gradient, and the
cotangent from above, which is exact too once the layer above is solved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.reconstruction.analytic import guessed_labels
from ppbench.attacks.reconstruction.peeling import (
    ConvBlock,
    KnownOutput,
    PeeledLayer,
    chain_of,
    cut_small,
    inner_inputs,
    minimized,
    part_of,
)
from ppbench.attacks.reconstruction.search.starts import posed, usable
from ppbench.attacks.reconstruction.spear import batch_mismatch
from ppbench.attacks.reconstruction.stages import Stages
from ppbench.base.tree import Params
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.nets.net import initial

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
        if chain is None or not all(_holds(chain, seen) for seen in observed):
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


def _holds(chain: Stages[ConvBlock], seen: Params) -> bool:
    """Return whether all tensors that layers are read from were observed."""
    return {chain.weight, chain.bias, *(block.name for block in chain.stages)} <= seen.keys()


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
