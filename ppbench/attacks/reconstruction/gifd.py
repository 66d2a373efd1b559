"""GIFD, gradient inversion by feature domain optimization (Fang, Chen, Wang and Xia, ICCV 2023), and its forerunners.

First the latent of a generator is searched, then the map that enters each next block, then the pixels. Unlike in the
paper's release, most steps are for the last map, total variation fades with the mismatch (see `IG`), radii are
relative, there is no penalty on ||x||, and labels are not sorted like the true ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.attacks.reconstruction.generator import (
    SMALLEST_MAP,
    Decoder,
    Generator,
    GeneratorWeights,
    Maps,
    check_apart,
    file_digest,
    read_generator,
)
from ppbench.attacks.reconstruction.generator_training import Training, trained_generator
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.search.descent import (
    DescentSchedule,
    SearchHistory,
    ValueFunction,
    descent_of,
    evidence_of,
)
from ppbench.attacks.reconstruction.search.problem import Problem, RowValue, Space
from ppbench.attacks.reconstruction.search.starts import PosedVictim
from ppbench.base.errors import UsageError
from ppbench.base.tree import moved
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
    standard: ClassVar[bool] = False
    reference: ClassVar[str] = "Fang et al., GIFD: Gradient Inversion by Feature Domain Optimization, ICCV 2023"

    method: Method = "gifd"
    generator: str = ""
    steps: PositiveInt = 4000
    seed: RandomSeed = 0
    rho: NonNegative = 0.5
    lr: Positive = 0.01
    tv: NonNegative = 0.6
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
