"""GIFD, gradient inversion by feature domain optimization (Fang, Chen, Wang and Xia, ICCV 2023), and its forerunners.

First the latent of a generator is searched, then the map that enters each next block, then the pixels. Unlike in the
paper's release, most steps are for the last map, total variation fades with the mismatch (see `IG`), radii are
relative, there is no penalty on ||x||, and labels are not sorted like the true ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import conv2d, leaky_relu, linear, mse_loss

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.attacks.reconstruction.generator import (
    FORMAT,
    SLOPE,
    SMALLEST_MAP,
    Architecture,
    Decoder,
    Generator,
    GeneratorWeights,
    Maps,
    Provenance,
    architecture,
    cache_folder,
    cached,
    check_apart,
    file_digest,
    file_name,
    fingerprints,
    initial_weights,
    read_generator,
)
from ppbench.attacks.reconstruction.ig import IG, NoEvaluations, Zero
from ppbench.attacks.reconstruction.search.descent import (
    DescentSchedule,
    SearchHistory,
    ValueFunction,
    descent_of,
    evidence_of,
)
from ppbench.attacks.reconstruction.search.problem import Problem, RowValue, Space
from ppbench.attacks.reconstruction.search.starts import PosedVictim
from ppbench.base.device import one_thread
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params, moved
from ppbench.federation.bounds import NonNegative, Positive, PositiveInt, RandomSeed, UnitInterval
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.metrics.modality import modality_in
from ppbench.records.scores import Scalar

Method = Literal["gifd", "ggl", "gias"]
EPOCHS, LEAST = 40, 1000
"""A generator's training sees an image at most `EPOCHS` times, but takes at least `LEAST` steps if allowed."""


@dataclass(frozen=True)
class GIFD(IG):
    """Search through a generator, stage by stage; starts share the budget, and stages share it as in `shares`.

    Attributes (and those of `IG`; `lr` is that of the pixel stage):
        method: "gifd": latent, maps, pixels. "ggl": the latent alone. "gias": the latent, then the generator's weights.
        generator: a .safetensors file; "" trains one on the view's public examples, once, in at most
            `steps` of 32 images each (few images are seen 40 times, but in 1000 steps), from `seed`.
        rho: how far a map may move from its start in a stage: the radius of an l1 ball, relative to its l1 norm.
        latent, last, pixels: shares of the evaluations for the latent, for the map that enters the last block and for
            the pixels; the maps between share the rest.
        map_lr: learning rate of latent and maps, in units of a map's usual size (root mean square 1).
        weight_lr: learning rate of the generator's weights ("gias").
        signed: whether Adam gets the sign of the gradient; not in the paper.
        spread: weight of the latent's mean square ("ggl"), whose law is N(0, 1), in units of the present mismatch.
    """

    name: ClassVar[str] = "gifd"
    version: ClassVar[str] = "3"
    standard: ClassVar[bool] = False
    reference: ClassVar[str] = "Fang et al., GIFD: Gradient Inversion by Feature Domain Optimization, ICCV 2023"

    method: Method = "gifd"
    generator: str = ""
    steps: PositiveInt = 4000
    seed: RandomSeed = 0
    rho: NonNegative = 0.5
    lr: Positive = 0.01
    tv: NonNegative = 0.6
    soften: Zero = 0.0
    finish: NoEvaluations = 0
    latent: UnitInterval = 0.05
    last: UnitInterval = 0.7
    pixels: UnitInterval = 0.05
    map_lr: Positive = 0.2
    weight_lr: Positive = 1e-3
    signed: bool = False
    spread: NonNegative = 0.05

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge, as `ImageSearch.run` does; raises as `prior` does."""
        self.check()
        prior = self.prior(view)
        return self.answer(
            self.evidence(view), view.plan, challenges, generator, lambda block: self.through(prior.decoder, block)
        )

    def prior(self, view: View) -> Generator:
        """Return the generator from the file, or trained on the view's public examples (UsageError without both)."""
        if self.generator:
            generator = read_generator(Path(self.generator))
            check_fits(generator, view.plan, self.generator)
            return generator
        if view.public is None or not len(view.public.x):
            raise UsageError(
                f"Attack {self.name!r} needs a generator, and there are no public examples to train one on; use "
                f"--public 0.5, or {self.name}.generator=PATH."
            )
        images = view.public.x
        steps = min(self.steps, max(LEAST, EPOCHS * len(images) // Training.batch))
        return trained_generator(images, view.plan.data_range, Training(steps=steps, seed=self.seed))

    def parameters(self) -> dict[str, Scalar]:
        """Return the fields, a generator file by its digest (UsageError if it cannot be read)."""
        return {**super().parameters(), **({"generator": file_digest(Path(self.generator))} if self.generator else {})}

    @property
    def needs_public(self) -> bool:
        """Whether a generator has to be trained: no file was named."""
        return not self.generator

    def check_held(self, shards: Mapping[int, Tensor]) -> None:
        """Refuse a generator file that was trained on images [N, *shape] of a client (UsageError)."""
        if self.generator:
            check_apart(read_generator(Path(self.generator)), shards, f"The generator {self.generator}")

    def suits(self, plan: Plan) -> bool:
        """Return whether inputs are images that a generator can make, and targets classes or numbers."""
        shape = plan.spec.shape
        return modality_in(plan).drawn and min(shape[1:]) >= 2 * SMALLEST_MAP and super().suits(plan)

    def variants(self) -> Sequence[Attack]:
        """Return this attack, the same on signs (more reliable in few steps), and both a third as smooth."""
        signs = replace(self, signed=not self.signed, map_lr=self.map_lr * (4 if self.signed else 0.25))
        return [self, signs, replace(self, tv=self.tv / 3), replace(signs, tv=self.tv / 3)]

    def through(self, decoder: Decoder, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses for one of `blocks`, searched through `decoder`; each stage's result is one more try."""
        problem = self.problem(victims, [evidence_of(v) for v in victims], self.share)
        sizes = (self.share, victims[0].size[0], decoder.plan.latent)
        at = torch.stack([torch.randn(sizes, generator=victim.generator) for victim in victims]).flatten(0, 1)
        device = problem.starts.x.device  # generators are trained, kept and read on the CPU
        at, decoder = at.to(device), replace(decoder, params=moved(decoder.params, device))
        rest, story = problem.starts.rows(at.flatten(1))[:, at[0].numel() :], SearchHistory(problem.tries)
        for stage, steps in self.shares(decoder.plan.blocks):
            space, start = self.space(decoder, stage, at, problem.space)
            staged = replace(problem, space=space)
            pace = self.pace(stage, decoder.plan.blocks, max(1, steps), victims[0].plan)
            if steps:
                evaluate = near_normal(staged, self.spread) if self.method == "ggl" and self.spread else None
                descent = descent_of(staged, torch.cat([start, rest], 1), pace, evaluate)
                story.add(staged, descent)
                start, rest = descent.z[:, : space.size], descent.z[:, space.size :]
            if isinstance(space, Maps):
                at = space.following(start) if self.method == "gifd" else start.view_as(at)
        return story.guesses()

    def space(self, decoder: Decoder, stage: int, at: Tensor, box: Space) -> tuple[Space, Tensor]:
        """Return the space that `stage` searches (at last `box`), and its first rows from the last stage's end `at`."""
        if stage < decoder.plan.blocks:
            return Maps(decoder, stage, at.shape[1], at, self.rho), at.flatten(1)
        if self.method == "gias":
            weights = GeneratorWeights(decoder, at)
            return weights, weights.start()
        return box, at.flatten(1)

    def shares(self, blocks: int) -> list[tuple[int, int]]:
        """Return the stages of a search and the evaluations per row in each; together `budget // tries`.

        Stage k < `blocks` is the input of block k, stage `blocks` the pixels, or the weights.
        """
        total, between = self.budget // self.share, blocks - 2
        if self.method == "ggl":
            return [(0, total)]
        first = min(total, math.ceil(self.latent * total))
        if self.method == "gias":
            return [(0, first), (blocks, total - first)]
        final = min(total - first, int(self.pixels * total))
        rest = total - first - final
        each = max(0, rest - int(self.last * total)) // between if between else 0
        return list(enumerate([first, *[each] * between, rest - each * between, final]))

    def pace(self, stage: int, blocks: int, steps: int, plan: Plan) -> DescentSchedule:
        """Return the schedule of a stage: warm-up and decay of the paper."""
        whole = replace(self.schedule(steps, plan), shape="warm", by="sign" if self.signed else "slope")
        if stage < blocks:
            return replace(whole, lr=self.map_lr)
        return replace(whole, lr=self.weight_lr) if self.method == "gias" else whole


@dataclass(frozen=True)
class GGL(GIFD):
    """Generative gradient leakage: the latent alone, kept near its law."""

    name: ClassVar[str] = "ggl"
    reference: ClassVar[str] = "Li et al., Auditing Privacy Defenses by Generative Gradient Leakage, CVPR 2022"

    method: Method = "ggl"


@dataclass(frozen=True)
class GIAS(GIFD):
    """Gradient inversion in alternative spaces: the latent, then the generator's weights, a copy for each victim."""

    name: ClassVar[str] = "gias"
    reference: ClassVar[str] = "Jeon et al., Gradient Inversion with Generative Image Prior, NeurIPS 2021"

    method: Method = "gias"
    latent: UnitInterval = 0.3


def check_fits(generator: Generator, plan: Plan, path: str) -> None:
    """Refuse a generator of images of another shape or data range than the federation's (UsageError)."""
    decoder, shape, (low, high) = generator.decoder, tuple(plan.spec.shape), plan.data_range
    wrong = ""
    if decoder.plan.shape != shape:
        wrong = f"images of shape {decoder.plan.shape}, and the network takes {shape}"
    elif (decoder.low, decoder.high) != (float(low), float(high)):
        wrong = f"pixels in [{decoder.low:g}, {decoder.high:g}], and the data lie in [{low:g}, {high:g}]"
    if wrong:
        raise UsageError(f"The generator {path} makes {wrong}; give one for these.")


def near_normal(problem: Problem, spread: float) -> ValueFunction:
    """Return `problem` with a penalty that draws the numbers of its space to N(0, 1), `spread` times the mismatch."""

    def evaluate(z: Tensor, index: Tensor) -> RowValue:
        value, own = problem(z, index), z[:, : problem.space.size]
        slope, weight = value.gradient.clone(), spread * value.score
        slope[:, : problem.space.size] += 2 * weight[:, None] / problem.space.size * own
        return RowValue(value.loss + weight * own.square().mean(1), slope, value.score)

    return evaluate


# -- Training of a generator: the decoder of an autoencoder on public images; seconds to minutes on a core --
# The map before every block is searched too, so each is trained to be a code: a step decodes from one stage, whose code
# is blurred by noise. Codes are scaled to mean square 1 at the end, so that one learning rate fits all stages.

LATENT_NOISE = 0.05
MEASURED, CLOSEST, REFINED = 500, 16, 200
"""Held-out images, at most; those whose best latent is searched; and the steps of that search."""


@dataclass(frozen=True)
class Training:
    """How a generator is trained: `steps` of Adam with a cosine-decayed rate, on `batch` images each.

    noise: standard deviation of the noise on maps; penalty: weight of their mean square, which limits codes.
    """

    steps: int = 4000
    batch: int = 32
    lr: float = 2e-3
    noise: float = 0.5
    penalty: float = 1e-3
    seed: int = 0


def trained_generator(
    images: Tensor,
    data_range: tuple[float, float],
    training: Training,
    split: str = "public examples",
    folder: Path | None = None,
) -> Generator:
    """Return a decoder trained on images [N, *shape]: from the cache `folder`, or now; deterministic on one machine.

    A tenth, at most 500, is held out; `split` describes the images. UsageError: below 8x8 pixels, or not writable.
    """
    plan = architecture(tuple(images.shape[1:]))
    data = images_digest(images)
    name = file_name(data, split, data_range, asdict(plan), asdict(training))
    path = (cache_folder() if folder is None else folder) / name
    return cached(path, lambda: fresh(images, data, plan, data_range, training, split))


def images_digest(images: Tensor) -> str:
    """Return the SHA-256 of the shape and pixels of images, in hexadecimal."""
    hashed = hashlib.sha256(repr((tuple(images.shape), str(images.dtype))).encode())
    hashed.update(images.detach().cpu().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def fresh(
    images: Tensor, data: str, plan: Architecture, data_range: tuple[float, float], training: Training, split: str
) -> Generator:
    """Return a newly trained generator, on one thread: sums in another order would give another file."""
    with one_thread():
        generator = torch.Generator().manual_seed(training.seed)
        order = torch.randperm(len(images), generator=generator)
        count = min(MEASURED, max(1, len(images) // 10)) if len(images) > 1 else 0
        left_out, kept = images[order[:count]].float(), images[order[count:]].float()
        low, high = map(float, data_range)
        pair = Autoencoder(plan, low, high, generator)
        pair.fit(kept, training, generator)
        decoder, encode = pair.finished(kept[: 4 * MEASURED])
        test = left_out if count else kept
        ceiling, best = measured(decoder, encode(test), test)
    about = Provenance(
        FORMAT, plan, (low, high), data, split, len(kept), training.steps, training.batch, training.lr,
        training.noise, training.seed, ceiling, best, count,
    )  # fmt: skip
    return Generator(decoder, about, fingerprints(kept, low, high))


def measured(decoder: Decoder, latents: Tensor, images: Tensor) -> tuple[float, float]:
    """Return the median PSNR in decibels of images decoded from latents [N, L], and from optimized ones nearby."""
    peak = decoder.high - decoder.low

    def quality(z: Tensor, x: Tensor) -> Tensor:
        return -10 * torch.log10(((decoder.decode(z) - x) / peak).square().flatten(1).mean(1).clamp(min=1e-10))

    z, x = latents[:CLOSEST].clone().requires_grad_(), images[:CLOSEST]
    adam = torch.optim.Adam([z], lr=0.05)
    with torch.enable_grad():
        for _ in range(REFINED):
            adam.zero_grad()
            (-quality(z, x).sum()).backward()
            adam.step()
    with torch.no_grad():
        return float(quality(latents, images).median()), float(quality(z, x).median())


class Autoencoder:
    """A decoder and its encoder in training. Images are padded to a multiple of the smallest map."""

    def __init__(self, plan: Architecture, low: float, high: float, generator: torch.Generator) -> None:
        self.plan, self.low, self.high = plan, low, high
        self.params = initial_weights(plan, generator)
        self.encoder = Params()
        wide = (*plan.widths, plan.shape[0])
        for k, (out, into) in enumerate(zip(plan.widths, wide[1:], strict=True), start=1):
            self._layer(f"down{k}", (out, into, 4, 4), generator)
            self._layer(f"code{k}", (out, out, 1, 1), generator)
        self._layer("code0", (plan.latent, math.prod(plan.size(1))), generator)

    def _layer(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> None:
        spread = math.sqrt(2 / math.prod(shape[1:]))
        self.encoder[f"{name}.weight"] = torch.randn(shape, generator=generator) * spread
        self.encoder[f"{name}.bias"] = torch.zeros(shape[0])

    def encode(self, images: Tensor, stage: int) -> Tensor:
        """Return the codes [S, *size(stage)] of images [S, *shape]."""
        params, factor = self.encoder, 2 ** len(self.plan.widths)
        grown = [side * factor - size for side, size in zip(self.plan.base, self.plan.shape[1:], strict=True)]
        h = 2 * (images - self.low) / (self.high - self.low) - 1
        h = torch.nn.functional.pad(h, (0, grown[1], 0, grown[0]))
        for k in range(len(self.plan.widths), max(stage, 1) - 1, -1):
            h = conv2d(h, params[f"down{k}.weight"], params[f"down{k}.bias"], stride=2, padding=1)
            if k == stage:
                return conv2d(h, params[f"code{k}.weight"], params[f"code{k}.bias"])
            h = leaky_relu(h, SLOPE)
        return linear(h.flatten(1), params["code0.weight"], params["code0.bias"])

    def loss(self, images: Tensor, stage: int, training: Training, generator: torch.Generator) -> Tensor:
        """Return the mean squared error, in units of the range, through the noisy code of one stage, plus a penalty."""
        code = self.encode(images, stage)
        noise = torch.randn(code.shape, generator=generator) * (training.noise if stage else LATENT_NOISE)
        decoded = Decoder(self.plan, self.params, self.low, self.high).decode(code + noise, stage)
        weight = training.penalty if stage else 0.01 * training.penalty
        scale = self.high - self.low
        return mse_loss(decoded / scale, images / scale) + weight * code.square().mean()

    def fit(self, images: Tensor, training: Training, generator: torch.Generator) -> None:
        """Train both halves; stages alternate."""
        leaves = [value.requires_grad_() for tree in (self.params, self.encoder) for value in tree.values()]
        adam = torch.optim.Adam(leaves, lr=training.lr)
        with torch.enable_grad():
            for step in range(training.steps):
                decay = 0.5 * (1 + math.cos(math.pi * step / training.steps)) * min(1.0, (step + 1) / 100)
                adam.param_groups[0]["lr"] = training.lr * decay
                rows = torch.randint(len(images), (training.batch,), generator=generator)
                adam.zero_grad()
                self.loss(images[rows], step % self.plan.blocks, training, generator).backward()
                adam.step()
        for leaf in leaves:
            leaf.requires_grad_(False)

    def finished(self, images: Tensor) -> tuple[Decoder, Callable[[Tensor], Tensor]]:
        """Return the decoder for latents of mean 0, variance 1 and maps of mean square 1 on images, and its encoder."""
        codes = self.encode(images, 0).double()
        mean = codes.mean(0)
        values, vectors = torch.linalg.eigh((codes - mean).T @ (codes - mean) / len(codes))
        spread = values.clamp(min=1e-6 * float(values[-1])).sqrt()
        params = {key: value.clone() for key, value in self.params.items()}
        weight = params["block0.weight"].double()
        params["block0.bias"] += (weight @ mean).float()
        params["block0.weight"] = (weight @ (vectors * spread)).float()

        def encode(x: Tensor) -> Tensor:
            latents: Tensor = (self.encode(x, 0).double() - mean) @ vectors / spread
            return latents.float()

        decoder, h = Decoder(self.plan, params, self.low, self.high), encode(images)
        for k in range(self.plan.blocks - 1):
            h = decoder.block(k, h)
            size = h.square().mean().sqrt().clamp(min=1e-6)
            h = h / size
            for part in ("weight", "bias"):
                params[f"block{k}.{part}"] /= size
            params[f"block{k + 1}.weight"] *= size
        return decoder, encode
