"""Images read off one gradient by linear systems, layer by layer from the head down, without a search.

The first linear layer's gradient gives the features and their cotangent. Below it each convolution's input solves two
linear systems at once (`linear_systems`; R-GAP, Zhu and Blaschko, ICLR 2021). No loss enters, so an unknown one, softer
labels, a temperature and an unknown factor of the whole gradient change nothing. Where the head's gradient does not
give the cotangent, because part of the loss is secret, it is an unknown of the same systems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind, SolvedLayer
from ppbench.attacks.reconstruction.analytic import FirstLayer, guessed_labels, mean_image
from ppbench.attacks.reconstruction.batches import SUSPECT, RebuiltBatch, rebuilt_batch
from ppbench.attacks.reconstruction.gauss_newton import MOST_REFINED, GradientProblem, image_prior
from ppbench.attacks.reconstruction.linear_systems import Prior, Solution
from ppbench.attacks.reconstruction.patch_tokens import FirstBlock, first_block, patch_batch
from ppbench.attacks.reconstruction.search.starts import PosedVictim, posed
from ppbench.attacks.reconstruction.spear import batch_mismatch
from ppbench.attacks.reconstruction.stage_inputs import ROUNDING, KnownMaps, StageGradient, StageProblem
from ppbench.attacks.reconstruction.stages import ConvolutionStage, Stages, pair, stages_of, walk
from ppbench.base.tree import Params, Recent, values_digest
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Noise, Plan
from ppbench.federation.view import View
from ppbench.metrics.intervals import Floats
from ppbench.nets.classifier import HEAD_NAMES
from ppbench.nets.net import initial

EXPLAINED = 1e-3
"""Relative residual, and expected error relative to the prior's width, up to which a layer counts as solved."""
NOISY = 1e-6
"""Relative residual of the head's gradient above which it is noisy: rounding leaves 1e-7."""
MOST_UNKNOWNS, MOST_OPEN = 8192, 4096
"""Numbers of a layer's input that are solved for at once, at most (half a gigabyte); and where fewer are determined."""
TOKENS_EXPLAINED = 2e-4
"""Relative residual of the whole gradient up to which images of tokens count as exact: 54 dB and more."""
LOUD = 0.1
"""Noise relative to the gradient up to which the whole gradient is solved at once."""


@dataclass(frozen=True)
class Rebuilt:
    """The input [1, *shape] float64 of a network, and how well each layer was determined, from the head down.

    secret: whether part of the loss is. noise: that of the gradient, declared or seen in the head. is_image: whether
    convolutions read it.
    """

    image: Tensor
    layers: tuple[SolvedLayer, ...]
    secret: bool = False
    noise: Noise | None = None
    is_image: bool = True


SOLVED_INPUTS: Recent[Rebuilt | None] = Recent(256)
"""What was solved last, by evidence: `adaptive_spn` and `adaptive_server` ask the same first."""

SOLVED_BATCHES: Recent[RebuiltBatch | None] = Recent(64)
"""The same of batches."""


@dataclass(frozen=True)
class ClosedForm(Attack):
    """Images by linear systems: convolutions, monotone activations, average pooling; patches of transformers.

    Networks of convolutions, each with an activation and a pooling by means, up to a linear layer with a bias; and
    vision transformers, single images with a learned position embedding, others and batches where blocks normalize
    first (`patch_tokens`). Each guess states which layers were exact, with condition
    numbers. Where a layer is not determined, its numbers are those of a prior, and the layers below suffer: then Gauss
    and Newton's method on the whole gradient follows, for images of at most `MOST_REFINED` numbers. Batches of fewer
    images than classes are read where the first linear layer is the head (`batches`).

    Residual sums v = x + K2 a with a = act(K1 x) are left to searches. The gradient of K2 (k x k, C outputs) gives
    k^2 C equations for the H W numbers of a channel of a. Only from k^2 C = H W on are a, and x = v - K2 a, linear (16
    channels of 3 x 3: 144 equations, for maps of 8 x 8, not of 16 x 16); else K1 (v - K2 a) = act^-1(a) is not.

    Attributes:
        largest_batch: images of a batch, at most, that are solved together; larger batches get grey images.
    """

    name: ClassVar[str] = "closed_form"
    separates_by: ClassVar[Literal["any", "classes", "softmax"]] = "softmax"
    version: ClassVar[str] = "3"
    exact: ClassVar[bool] = True
    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "client/1", "collusion/1")
    reference: ClassVar[str] = "this project; both systems as in Zhu and Blaschko, R-GAP, ICLR 2021"

    largest_batch: PositiveInt = 8

    def suits(self, plan: Plan) -> bool:
        """Return whether the network is one that the class describes."""
        return super().suits(plan) and _suits(plan)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge; grey images with labels where nothing was read."""
        victims = posed(self.evidence(view), view.plan, challenges, generator)
        return [_guess(victim, self.largest_batch, refines=True) for victim in victims]

    def answer(
        self,
        evidence: Sequence[Evidence],
        plan: Plan,
        challenges: Sequence[Challenge],
        generator: torch.Generator,
        *,
        refines: bool = False,
    ) -> list[Guess]:
        """Return the guesses by linear systems from given evidence, for instance that of another attack.

        refines: whether Gauss and Newton's method on the whole gradient follows where a layer is not determined.
        """
        victims = posed(evidence, plan, challenges, generator)
        return [_guess(victim, self.largest_batch, refines=refines) for victim in victims]


SMALL = 4
"""Images of a batch, at most, that adaptive attacks solve before they search: 8 take up to a minute."""


@lru_cache(maxsize=64)
def _suits(plan: Plan) -> bool:
    """Return whether a plan's network can be read; cached, since every cell needs it and it runs the network."""
    params = initial(plan.spec, 0)
    if plan.net.pixelwise or stages_of(plan, params) is not None:
        return not plan.net.pixelwise
    embedding = patch_embedding(plan, params)
    return embedding is not None and (bool(embedding.positions) or block_behind(embedding, plan, params) is not None)


def _guess(victim: PosedVictim, largest_batch: int, *, refines: bool) -> Guess:
    start, labels, evidence = victim.image("grey"), guessed_labels(victim), victim.evidence
    blind = Guess(x=start, y=labels, evaluations=1)
    if evidence is None or evidence.params is None or not _suits(victim.plan):
        return blind
    if victim.size[0] > 1:
        return (_batch_guess(victim, evidence, labels) if victim.size[0] <= largest_batch else None) or blind
    key = values_digest(evidence.params, evidence.observed, evidence.weight or {}), evidence.noise, victim.plan
    rebuilt = SOLVED_INPUTS.of(key, partial(rebuilt_input, evidence, victim.plan))
    if rebuilt is None or not bool(rebuilt.image.isfinite().all()):
        return blind
    image, spent = rebuilt.image.clamp(*victim.plan.data_range), 2
    if refines and not all(layer.exact for layer in rebuilt.layers) and _is_refinable(rebuilt, evidence):
        image, more = _refined(rebuilt, evidence, victim.plan, labels)
        spent += more
    mismatch = batch_mismatch(evidence, victim.plan, image.float(), labels)
    if rebuilt.secret:
        mismatch = max(layer.residual for layer in rebuilt.layers) ** 2
    return Guess(x=image.float(), y=labels, confidence=mismatch, evaluations=spent, layers=rebuilt.layers)


def _is_refinable(rebuilt: Rebuilt, evidence: Evidence) -> bool:
    """Return whether the whole gradient is simulated, of a small image, and shows more than noise."""
    if rebuilt.secret or not rebuilt.is_image or evidence.nuisance or rebuilt.image.numel() > MOST_REFINED:
        return False
    whole = torch.cat([value.double().flatten() for value in evidence.observed.values()])
    noise = 0.0 if rebuilt.noise is None else rebuilt.noise.std
    return bool(whole.isfinite().all()) and noise <= LOUD * float(whole.square().mean().sqrt())


def _refined(rebuilt: Rebuilt, evidence: Evidence, plan: Plan, labels: Tensor) -> tuple[Tensor, int]:
    """Return the most probable image near the rebuilt one, that itself if none explains more, and evaluations spent."""
    y = one_hot(labels, plan.spec.classes).double()
    problem = GradientProblem(evidence, y, rebuilt.noise, plan.spec.shape, image_prior(plan), plan.data_range)
    start = rebuilt.image.clamp(*plan.data_range)
    try:
        answer = problem.refined(start)
    except RuntimeError:  # an operation without a forward derivative
        return start, 0
    return (answer.image.clamp(*plan.data_range) if answer.explains else start), answer.evaluations


def _batch_guess(victim: PosedVictim, evidence: Evidence, labels: Tensor) -> Guess | None:
    """Return the guess of a batch with likely `labels`; None if its examples were not separated."""
    plan, params = victim.plan, evidence.params or {}
    chain = stages_of(plan, params)
    if chain is None:
        return _token_guess(victim, evidence, labels)

    def problem(stage: ConvolutionStage, known: KnownMaps) -> StageProblem:
        prior = image_prior(plan) if stage is chain.stages[0] else _prior(chain, stage)
        return _problem(stage, params, evidence, known.shaped(len(params[stage.weight])), prior)

    def solved() -> RebuiltBatch | None:
        draws = torch.Generator().manual_seed(0)  # a solver's starts: one gradient has one answer, whoever asks
        try:
            with np.errstate(all="ignore"):
                return rebuilt_batch(chain, evidence, plan, labels, problem, draws)
        except (np.linalg.LinAlgError, RuntimeError):  # torch raises a kind of the latter
            return None

    known = values_digest(evidence.params or {}, evidence.observed, evidence.weight or {})
    batch = SOLVED_BATCHES.of((known, evidence.noise, plan, tuple(labels.tolist())), solved)
    if batch is None or not bool(batch.images.isfinite().all()):
        return None
    image = batch.images.clamp(*plan.data_range).float()
    mismatch = batch.layers[-1].residual ** 2
    return Guess(x=image, y=batch.labels, confidence=mismatch, evaluations=batch.evaluations, layers=batch.layers)


def rebuilt_input(evidence: Evidence, plan: Plan) -> Rebuilt | None:
    """Return the input behind one gradient of one example; None if its first linear layer shows no features."""
    params = {} if evidence.params is None else evidence.params
    chain = stages_of(plan, params) if params else None
    if chain is None:
        embedding = patch_embedding(plan, params) if params else None
        if embedding is None:
            return None
        learned = patch_image(embedding, evidence, sum(plan.data_range) / 2) if embedding.positions else None
        if learned is not None:
            return learned
        batch = token_batch(evidence, plan, torch.zeros(1, dtype=torch.int64))
        return None if batch is None else Rebuilt(batch.images, batch.layers, noise=evidence.noise, is_image=False)
    head = _read_head(chain, params, evidence)
    if head is None:
        return None
    if not chain.stages:
        image = torch.from_numpy(head.known.values).view(1, *plan.spec.shape)
        return Rebuilt(image, (head.layer,), noise=head.noise, is_image=False)
    try:
        with np.errstate(all="ignore"):  # a poisoned gradient overflows
            return _descended(chain, params, evidence, plan, head)
    except np.linalg.LinAlgError:
        return None


@dataclass(frozen=True)
class Head:
    """The flat input of the first linear layer with its cotangents [1, D], how well it was determined, and the noise.

    noise: the declared law, or one that the layer's gradient shows; None if there is none.
    """

    known: KnownMaps
    layer: SolvedLayer
    noise: Noise | None


def _read_head(chain: Stages[ConvolutionStage], params: Params, evidence: Evidence) -> Head | None:
    """Return what the first linear layer's gradient shows; None if its rows are noise.

    Row i of the weight's gradient is the input times entry i of the bias's.
    """
    rows = FirstLayer(chain.weight, chain.bias).rows(evidence)
    values = None if rows is None else mean_image(rows)
    if rows is None or values is None:
        return None
    used = rows.seen * rows.alive[:, None]
    gap = used * (rows.weight - rows.bias[:, None] * values)
    residual = float(gap.norm() / (used * rows.weight).norm().clamp(min=1e-300))
    noise, free = evidence.noise, max(int((used > 0).sum()) - len(values), 1)
    if noise is None and residual > NOISY:
        noise = Noise("gaussian", float(gap.norm()) / free**0.5)
    size, energy = float(values.square().mean().sqrt()), float((rows.bias * rows.alive).norm())
    deviation = math.hypot(0.0 if noise is None else noise.of(chain.weight) / max(energy, 1e-300), ROUNDING * size)
    determined = int((used > 0).any(0).sum())  # hidden columns show nothing of their features
    layer = SolvedLayer(
        name=chain.weight,
        unknowns=len(values),
        determined=determined,
        condition=1.0,
        residual=residual,
        exact=noise is None and determined == len(values) and deviation <= EXPLAINED * size,
    )
    cotangents = rows.bias @ params[chain.weight].detach().double().cpu()
    return Head(KnownMaps(values[None].numpy(), cotangents[None].numpy(), deviation), layer, noise)


def _descended(
    chain: Stages[ConvolutionStage], params: Params, evidence: Evidence, plan: Plan, head: Head
) -> Rebuilt | None:
    """Return the input of the first of some stages from the last one's output; None if a layer is too large."""
    evidence, layers, known, hidden = replace(evidence, noise=head.noise), [head.layer], head.known, False
    for stage in reversed(chain.stages):
        if stage.weight not in evidence.observed or not _is_solvable(stage, params[stage.weight].numel()):
            return None
        prior = image_prior(plan) if stage is chain.stages[0] else _prior(chain, stage)
        problem = _problem(stage, params, evidence, known.shaped(len(params[stage.weight])), prior)
        solution, below = problem.solved()
        doubtful = solution.backward > SUSPECT and 2 * solution.determined > solution.u.size
        if len(layers) == 1 and layers[0].exact and doubtful:
            other, other_below = replace(problem, known=replace(problem.known, cotangents=None)).solved()
            if other.backward < SUSPECT * solution.backward:
                solution, below, hidden = other, other_below, True
        layers.append(_report(stage, solution, prior, layers[-1].exact))
        known = KnownMaps(solution.u, below, max(solution.deviation, ROUNDING))
    return Rebuilt(torch.from_numpy(known.values).view(1, *plan.spec.shape), tuple(layers), hidden, head.noise)


def _is_solvable(stage: ConvolutionStage, weights: int) -> bool:
    """Return whether a stage's systems are small enough; large ones must have as many equations as unknowns."""
    unknowns = math.prod(stage.inputs)
    return unknowns <= (MOST_UNKNOWNS if math.prod(stage.outputs) + weights >= unknowns else MOST_OPEN)


def _problem(
    stage: ConvolutionStage, params: Params, evidence: Evidence, known: KnownMaps, prior: Prior
) -> StageProblem:
    weight = _numbers(params[stage.weight]).reshape(*params[stage.weight].shape[:2], -1)
    bias = np.zeros(len(weight)) if stage.bias is None else _numbers(params[stage.bias])
    observed = _numbers(evidence.observed[stage.weight]).reshape(weight.shape)
    seen = np.isfinite(observed).astype(np.float64)
    if evidence.weight is not None:
        seen *= _numbers(evidence.weight[stage.weight].expand_as(evidence.observed[stage.weight])).reshape(seen.shape)
    sums = None if stage.bias is None else evidence.observed.get(stage.bias)
    whole = sums is not None and bool(sums.isfinite().all()) and evidence.weight is None
    gradient = StageGradient(
        stage.weight,
        np.where(seen > 0, observed, 0.0),
        _numbers(sums) if whole and sums is not None else None,
        seen,
        evidence.noise,
    )
    return StageProblem(stage, weight, bias, gradient, known, prior)


def _numbers(value: Tensor) -> Floats:
    return np.asarray(value.detach().double().cpu().numpy())


def _prior(chain: Stages[ConvolutionStage], stage: ConvolutionStage) -> Prior:
    """Return what is known of a stage's input, the output of the stage before."""
    ends = chain.stages[chain.stages.index(stage) - 1].activation.ends
    return Prior(0.0, 1.0) if ends is None else Prior(sum(ends) / 2, (ends[1] - ends[0]) / 2)


def _report(stage: ConvolutionStage, solution: Solution, prior: Prior, above: bool) -> SolvedLayer:
    """Return how well a stage's input was determined; it is exact only if the layer above was."""
    solved = solution.determined == solution.u.size and solution.residual <= EXPLAINED
    exact = above and solved and solution.deviation <= EXPLAINED * prior.width
    return SolvedLayer(
        name=stage.weight,
        unknowns=solution.u.size,
        determined=solution.determined,
        condition=solution.condition,
        residual=solution.residual,
        exact=exact,
    )


# -- Batches of vision transformers, and those without a learned position embedding: token by token --


def block_behind(embedding: PatchEmbedding, plan: Plan, params: Params) -> FirstBlock | None:
    """Return the block behind a patch embedding, None if it is none whose tokens can be read."""
    try:
        return first_block(plan, params, embedding.weight, embedding.kernel)
    except RuntimeError:  # a network that takes one image at a time
        return None


def token_batch(evidence: Evidence, plan: Plan, labels: Tensor) -> RebuiltBatch | None:
    """Return the images of a transformer's batch with likely `labels` [B]; None if its tokens were not separated.

    They are exact if they explain the whole gradient, with the labels that the head's gradient shows.
    """
    params = {} if evidence.params is None else evidence.params
    plain = evidence.weight is None and evidence.noise is None and evidence.observed.keys() == params.keys()
    embedding = patch_embedding(plan, params) if plain else None
    block = None if embedding is None else block_behind(embedding, plan, params)
    if embedding is None or block is None:
        return None
    gradient = {name: value.detach().double().cpu() for name, value in evidence.observed.items()}
    try:
        rebuilt = patch_batch(block, gradient, len(labels), plan.spec.shape, plan.data_range)
    except RuntimeError:  # torch raises a kind of it where a decomposition fails
        return None
    if rebuilt is None:
        return None
    images, spread = rebuilt
    labels = _labels_of(images, plan, params, gradient, labels)
    mismatch = batch_mismatch(evidence, plan, images, labels)
    residual = math.inf if mismatch is None else mismatch**0.5
    layer = SolvedLayer(
        name=embedding.weight,
        unknowns=images.numel(),
        determined=images.numel(),
        condition=spread,
        residual=min(residual, 1e300),
        exact=residual <= TOKENS_EXPLAINED,
    )
    return RebuiltBatch(images, labels, (layer,), 1)


def _labels_of(images: Tensor, plan: Plan, params: Params, gradient: Params, likely: Tensor) -> Tensor:
    """Return the labels [B] of images whose cotangents of the logits the head's gradient shows, else `likely` ones."""
    if not all(name in gradient for name in HEAD_NAMES) or plan.spec.classes < 2:
        return likely
    home = {name: value.detach().cpu() for name, value in params.items()}
    with torch.no_grad():
        features = plan.net.features(home, images.to(home[HEAD_NAMES[0]])).double()
    known = torch.cat([features, torch.ones_like(features[:, :1])], 1)
    seen = torch.cat([gradient[HEAD_NAMES[0]], gradient[HEAD_NAMES[1]][:, None]], 1)
    labels: Tensor = torch.linalg.lstsq(known.T, seen.T).solution.argmin(1)
    return labels


def _token_guess(victim: PosedVictim, evidence: Evidence, labels: Tensor) -> Guess | None:
    """Return the guess of a transformer's batch with likely `labels`; None if its tokens were not separated."""
    plan = victim.plan
    known = values_digest(evidence.params or {}, evidence.observed, evidence.weight or {})
    key = (known, evidence.noise, plan, tuple(labels.tolist()))
    batch = SOLVED_BATCHES.of(key, partial(token_batch, evidence, plan, labels))
    if batch is None or not bool(batch.images.isfinite().all()):
        return None
    image, residual = batch.images.clamp(*plan.data_range).float(), batch.layers[-1].residual
    return Guess(x=image, y=batch.labels, confidence=residual**2, evaluations=batch.evaluations, layers=batch.layers)


# -- Vision transformers with a learned position embedding --
# The embedding of a patch is its projection plus a row of the position embedding, so that the row's gradient G_n is the
# cotangent of patch n, and the projection's gradient is dW = sum_n G_n x_n^T: linear in the patches x_n.

SAME_SUM = 1e-4
"""Relative distance up to which the projection's bias has the summed gradient of the rows: it then is their sum."""
CUT = 1e-7
"""Singular values below this share of the largest are rounding."""


@dataclass(frozen=True)
class PatchEmbedding:
    """The projection of patches that do not overlap (weight and bias), and the position embeddings it may have.

    kernel: of a patch. positions: names of parameters [..., at least N, D]. rows, columns: of patches, N together.
    """

    weight: str
    bias: str | None
    kernel: tuple[int, int]
    positions: tuple[str, ...]
    rows: int
    columns: int

    @property
    def count(self) -> int:
        """Number of patches."""
        return self.rows * self.columns


def patch_embedding(plan: Plan, params: Params) -> PatchEmbedding | None:
    """Return the patch embedding that a network begins with; None if it begins otherwise."""
    calls = walk(plan, params)
    if not calls or calls[0].name != "conv2d" or "weight" not in calls[0].parameters:
        return None
    conv, named = calls[0], calls[0].arguments
    name = conv.parameters["weight"]
    kernel = (params[name].shape[2], params[name].shape[3])
    plain = pair(named.get("padding", 0)) == (0, 0) and named.get("groups", 1) == 1 and not conv.is_frozen("bias")
    if pair(named.get("stride", 1)) != kernel or not plain or kernel == (1, 1):
        return None
    width, rows, columns = conv.outputs
    positions = tuple(
        n
        for n, value in params.items()
        if n != name
        and value.dim() > 1
        and value.shape[-1] == width
        and rows * columns <= value[..., 0].numel()
        and value.shape[-2] == value[..., 0].numel() <= rows * columns + 16
    )
    return PatchEmbedding(name, conv.parameters.get("bias"), kernel, positions, rows, columns)


def patch_image(embedding: PatchEmbedding, evidence: Evidence, middle: float) -> Rebuilt | None:
    """Return the best explained image; None if no position embedding's gradient fits the projection's.

    middle: of the data range, what the image is where nothing determines it.
    """
    seen = {n: value.detach().double().cpu() for n, value in evidence.observed.items()}
    if embedding.weight not in seen or evidence.weight is not None or not bool(seen[embedding.weight].isfinite().all()):
        return None
    answers = [_solved(embedding, seen[embedding.weight], rows, middle) for rows in _cotangents(embedding, seen)]
    best = min(answers, key=lambda answer: answer.layers[0].residual, default=None)
    return None if best is None else replace(best, noise=evidence.noise)


def _cotangents(embedding: PatchEmbedding, seen: Params) -> Iterator[Tensor]:
    """Yield the gradients [N, D] of rows that may be those of the patches: the last ones, else the first."""
    sums = None if embedding.bias is None else seen.get(embedding.bias)
    for name in embedding.positions:
        rows = seen.get(name)
        if rows is None or not bool(rows.isfinite().all()):
            continue
        rows = rows.reshape(-1, rows.shape[-1])
        for part in (rows[-embedding.count :], rows[: embedding.count])[: 1 + (len(rows) > embedding.count)]:
            if sums is None or float((part.sum(0) - sums).norm()) <= SAME_SUM * float(sums.norm()):
                yield part


def _solved(embedding: PatchEmbedding, gradient: Tensor, cotangents: Tensor, middle: float) -> Rebuilt:
    """Return the image whose patches give the projection's gradient [D, C, p, q] with cotangents [N, D]."""
    left, size, right = torch.linalg.svd(cotangents.T, full_matrices=False)
    known = size > CUT * size[0].clamp(min=1e-300)
    flat = gradient.flatten(1)
    left_over = flat - middle * cotangents.sum(0)[:, None]
    step = torch.where(known[:, None], (left.T @ left_over) / size.clamp(min=1e-300)[:, None], 0.0)
    patches = middle + right.T @ step
    gap = float((cotangents.T @ patches - flat).norm() / flat.norm().clamp(min=1e-300))
    channels, high, wide = gradient.shape[1:]
    grid = patches.view(embedding.rows, embedding.columns, channels, high, wide)
    image = grid.permute(2, 0, 3, 1, 4).reshape(1, channels, embedding.rows * high, embedding.columns * wide)
    rank, numbers = int(known.sum()), channels * high * wide
    condition = float(size[0] / size[-1]) if len(size) == embedding.count and float(size[-1]) > 0 else 1e300
    layer = SolvedLayer(
        name=embedding.weight,
        unknowns=embedding.count * numbers,
        determined=rank * numbers,
        condition=min(condition, 1e300),
        residual=gap,
        exact=rank == embedding.count and gap <= EXPLAINED and len(gradient) > rank,
    )
    return Rebuilt(image, (layer,))
