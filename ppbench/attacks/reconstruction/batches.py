"""Batches read off one gradient: examples separated at the head, images by linear systems, then Gauss and Newton.

With cross-entropy the gradient of the head [C, D + 1] (last column: bias) is A^T [F, 1], of rank B < C: features F and
cotangents A of the logits are known up to a B x B mixture. Rows of A are softmax(logits of F) - onehot, which fixes the
mixture. Going down, the inputs of all examples solve linear systems that share the weights' gradient. Their errors
grow where examples are alike or hardly contribute, so the images and all cotangents are at last corrected together by
the whole gradient. There no loss enters: cotangents are unknowns, as float32 rounds those of a trained network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.func import grad, jacfwd, vmap
from torch.nn.functional import one_hot

from ppbench.adversary.attack import SolvedLayer
from ppbench.attacks.reconstruction.features import recover_features
from ppbench.attacks.reconstruction.gauss_newton import Minimum, gauss_newton_minimum
from ppbench.attacks.reconstruction.linear_systems import CERTAIN, LayerSystem, Prior
from ppbench.attacks.reconstruction.stage_inputs import ROUNDING, KnownMaps, StageProblem
from ppbench.attacks.reconstruction.stages import ConvolutionStage, Stages
from ppbench.base.tree import Params
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.metrics.intervals import Floats
from ppbench.nets.classifier import HEAD_NAMES

# -- The examples' features and cotangents, from the gradient of the head --
# Measured against the whole gradient, an example that a trained network is sure of weighs next to nothing. So each
# example is measured by itself: the entries of its cotangent at the other classes, over their sum, are a softmax of the
# other logits. A trained network's features lie near the corners of what the range of the activation allows in the row
# space, and draws of corners are starts.

HEAD_RANK_GAP = 2e-6
"""Singular values below this share of the largest are rounding: float32 leaves 1e-7."""
SEPARATED = 1e-7
"""Squared misfit of separated examples: 1e-9 at the truth, 1e-3 elsewhere."""
HEAD_RESTARTS = 8
"""Restarts of the search for the features of an untrained network."""
SURE = 1e-12
"""Mismatch of the head up to which features of an untrained network are right, if not precise where they are alike."""
KEPT, ROUNDS = 8, 8
"""Mixtures that are kept as the gradient's part grows, and how often it is grown anew, at most."""
SLACK, ALIKE = 0.1, 0.02
"""How far features may lie beyond their range, and relative difference of misfits of one mixture."""
TURNS = 60
"""Steps of an improvement, at most."""
FAINT = 0.1
"""Weight of an example's size, which rounding spoils first."""
JITTER = 0.01
"""Relative distance of starts from corners."""


@dataclass(frozen=True)
class SeparatedExamples:
    """The examples of a batch: features [B, D], cotangents of the logits [B, C] float64, and the spread of their sizes.

    spread: largest over smallest singular value of the head's gradient.
    """

    features: Tensor
    cotangents: Tensor
    spread: float


@dataclass(frozen=True)
class HeadGradient:
    """The head's gradient [C, D + 1] as left [C, k] diag(size) right [k, D + 1], and its weights [C, D] and [C].

    k is the number of examples that are looked for, of a batch of `batch`.
    """

    left: Tensor
    size: Tensor
    right: Tensor
    weight: Tensor
    bias: Tensor
    batch: int

    def examples(self, mix: Tensor) -> SeparatedExamples:
        """Return the examples of a mixture [B, B], whose rows give [F, 1] up to factors."""
        known = mix @ self.right
        scale = known[:, -1:]
        cotangents = scale * (torch.linalg.inv_ex(mix)[0].T * self.size) @ self.left.T
        return SeparatedExamples(known[:, :-1] / scale, cotangents, float("nan"))

    def misfit(self, mix: Tensor, labels: Tensor) -> Tensor:
        """Return how far cotangents are from softmax(logits) - onehot(labels): [B * C + 2 B]."""
        one = self.examples(mix)
        logits, own = one.features @ self.weight.T + self.bias, labels[:, None] == torch.arange(len(self.bias))
        others = torch.where(own, 0.0, one.cotangents)
        total = others.sum(1).abs().clamp(min=1e-300)
        away = torch.logsumexp(torch.where(own, -torch.inf, logits), 1)
        shares = torch.where(own, 0.0, (logits - away[:, None]).exp())
        size = (total * self.batch).log() - (away - torch.logsumexp(logits, 1))
        scale = (mix @ self.right)[:, -1] - 1  # a row's factor means nothing
        return torch.cat([(others / total[:, None] - shares).flatten(), FAINT * torch.asinh(size), FAINT * scale])

    def labels(self, mix: Tensor) -> Tensor:
        """Return the classes [S, B] whose cotangents are least, for mixtures [S, B, B]."""
        return vmap(lambda one: self.examples(one).cotangents)(mix).argmin(2)

    def improved(self, mix: Tensor) -> tuple[Tensor, Tensor]:
        """Return mixtures [S, B, B] by Levenberg and Marquardt's steps, best first, and their misfits [S]."""
        count, values, slopes = mix.shape[1] ** 2, vmap(self.misfit), vmap(jacfwd(self.misfit))
        damping, labels = mix.new_full((len(mix),), 1e-2), self.labels(mix)
        r = values(mix, labels)
        loss = (r * r).sum(1).nan_to_num(nan=torch.inf)
        for _ in range(TURNS):
            j = slopes(mix, labels).reshape(len(mix), -1, count)
            normal = j.mT @ j
            weight = (damping[:, None] * normal.diagonal(dim1=1, dim2=2)).clamp(min=1e-14)
            step = torch.linalg.solve_ex(normal + torch.diag_embed(weight), j.mT @ r[:, :, None])[0].view_as(mix)
            trial = torch.where(step.isfinite().all(2).all(1)[:, None, None], mix - step, mix)
            new = self.labels(trial)
            left = values(trial, new)
            after = (left * left).sum(1).nan_to_num(nan=torch.inf)
            better = after < loss
            mix, labels = torch.where(better[:, None, None], trial, mix), torch.where(better[:, None], new, labels)
            r, loss = torch.where(better[:, None], left, r), torch.where(better, after, loss)
            damping = torch.where(better, 0.3 * damping, 5 * damping).clamp(1e-12, 1e8)
            if float(loss.min()) < 0.01 * SEPARATED:
                break
        order = loss.argsort(stable=True)
        return mix[order], loss[order]

    def rows(self, ends: tuple[float, float], draws: np.random.Generator) -> Floats:
        """Return rows [R, k] of mixtures: of the features of each class, and of corners of what `ends` allow."""
        right, (low, high) = self.right.numpy(), ends
        slack = SLACK * (high - low)
        sides = np.concatenate([right[:, :-1].T, -right[:, :-1].T])
        bounds = np.repeat([high + slack, slack - low], right.shape[1] - 1)
        corners = [
            scipy.optimize.linprog(way, sides, bounds, right[:, -1][None], [1.0], (None, None))
            for way in draws.standard_normal((KEPT * KEPT, len(right)))
        ]
        classes = (self.left * self.size).numpy()
        return np.stack([*(classes / (classes @ right[:, -1:])), *(end.x for end in corners if end.status == 0)])


def _grown(whole: HeadGradient, ends: tuple[float, float], draws: np.random.Generator) -> tuple[Tensor, float]:
    """Return a mixture [B, B] and its misfit, with examples sought one after another in growing parts of the gradient.

    The leading singular vectors hold nearly the largest examples alone, so each round has one example to hit.
    """
    best = [np.zeros((0, 0))]
    for rank in range(1, len(whole.size) + 1):
        head = replace(whole, left=whole.left[:, :rank], size=whole.size[:rank], right=whole.right[:rank])
        rows = head.rows(ends, draws)
        starts = [
            np.concatenate([np.pad(one, ((0, 0), (0, 1))), row[None]])
            for one in best
            for row in rows[draws.choice(len(rows), min(KEPT if rank > 1 else len(rows), len(rows)), replace=False)]
        ]
        mix = torch.from_numpy(np.stack(starts))
        mix, misfits = head.improved(mix + JITTER * mix.std() * torch.from_numpy(draws.standard_normal(mix.shape)))
        apart = torch.cat([misfits.new_ones(1, dtype=torch.bool), misfits[1:] > (1 + ALIKE) * misfits[:-1]])
        best = list(mix[apart & misfits.isfinite()][:KEPT].numpy())
        if not best:
            break
    return mix[0], float(misfits[0])


def separated(
    params: Params, evidence: Evidence, labels: Tensor, ends: tuple[float, float] | None, generator: torch.Generator
) -> SeparatedExamples | None:
    """Return the examples of a batch with likely `labels` [B]; None if the head's gradient does not separate them.

    ends: range of the features, None if it has none.
    """
    weight, bias = (params[name].detach().double().cpu() for name in HEAD_NAMES)
    seen = [evidence.observed[name].detach().double().cpu() for name in HEAD_NAMES]
    gradient, count = torch.cat([seen[0], seen[1][:, None]], 1), len(labels)
    if not count < len(bias) or not bool(gradient.isfinite().all()):
        return None
    left, size, right = torch.linalg.svd(gradient, full_matrices=False)
    if not float(size[count]) <= HEAD_RANK_GAP * float(size[0]):
        return None
    head = HeadGradient(left[:, :count], size[:count], right[:count], weight, bias, count)
    likely = recover_features(params, seen[0], seen[1], labels, generator, restarts=HEAD_RESTARTS)
    features, spread = likely.value.cpu(), float(size[0] / size[count - 1].clamp(min=1e-300))
    outputs = (features @ weight.T + bias).softmax(-1) - one_hot(labels.cpu(), len(bias))
    plain = SeparatedExamples(features, outputs / count, spread)
    first = torch.cat([features, features.new_ones(count, 1)], 1) @ head.right.T
    draws = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
    best, misfits = head.improved(first[None])
    mix, misfit = best[0], float(misfits[0])
    alone = 2 * count <= len(bias)  # an example's own C - 1 - B equations determine its B - 1 numbers
    for _ in range(ROUNDS if alone and ends is not None and likely.residual > SURE else 0):
        if ends is None or misfit < SEPARATED:
            break
        mix, misfit = _grown(head, ends, draws)
    if misfit < SEPARATED:
        return replace(head.examples(mix), spread=spread)
    return plain if likely.exact else None


# -- Images of all examples by linear systems, stage by stage --
# Forward rows are each example's own; the rows of the weights' gradient are sums over the examples.

SUSPECT = 1e-3
"""Relative residual of the last stage's gradient above which the cotangents that reach it count as secret."""
MOST_UNKNOWNS = 4096
"""Numbers of a stage's inputs that are solved for at once, at most: a tenth of a gigabyte of equations."""

MakeProblem = Callable[[ConvolutionStage, KnownMaps], StageProblem]


@dataclass(frozen=True)
class CoupledSystems:
    """The systems of one stage for the inputs of B examples. seen: [O, C, K], roots of the shared rows' precisions."""

    parts: Sequence[LayerSystem]
    seen: Floats

    @cached_property
    def _alone(self) -> list[LayerSystem]:
        """The examples' own rows."""
        return [replace(part, seen=np.zeros_like(self.seen)) for part in self.parts]

    def solve(self) -> tuple[Floats, Floats]:
        """Return the most probable inputs [B, C, HW], and the expected error [B] of a number in each."""
        count, (channels, high, wide) = len(self.parts), self.parts[0].stage.inputs
        factor = torch.linalg.cholesky(torch.from_numpy(self._normal()))
        u = np.full((count, channels, high * wide), self.parts[0].prior.middle)
        for _ in range(3):  # twice refined
            slope = torch.from_numpy(self._slope(u).reshape(-1, 1))
            u = u - torch.cholesky_solve(slope, factor).numpy().reshape(u.shape)
        variance = torch.cholesky_inverse(factor).diagonal().view(count, -1).mean(1)
        return u, np.asarray(variance.sqrt().numpy())

    def gap(self, u: Floats) -> Floats:
        """Return the weights' gradient at inputs [B, C, HW], less the observed one."""
        simulated = [part.convolution.gradient(part.cotangents, one) for part, one in zip(self.parts, u, strict=True)]
        return np.asarray(np.sum(simulated, axis=0) - self.parts[0].gradient)

    def residual(self, u: Floats) -> float:
        """Return the relative residual of the weights' gradient."""
        return float(np.linalg.norm(self.gap(u))) / max(float(np.linalg.norm(self.parts[0].gradient)), 1e-300)

    def _slope(self, u: Floats) -> Floats:
        gap = (self.gap(u) * self.seen**2).swapaxes(0, 1).reshape(u.shape[1], -1)  # [C, O K]
        shared = [gap @ part.reach.reshape(-1, u.shape[2]) for part in self.parts]
        return np.stack([part.slope(one) for part, one in zip(self._alone, u, strict=True)]) + np.stack(shared)

    def _normal(self) -> Floats:
        count, (channels, high, wide) = len(self.parts), self.parts[0].stage.inputs
        pixels = high * wide
        matrix = np.zeros((count, channels, pixels, count, channels, pixels))
        for i, part in enumerate(self._alone):
            matrix[i, :, :, i] = part.normal().reshape(channels, pixels, channels, pixels)
        reach = np.concatenate([part.reach.reshape(-1, pixels) for part in self.parts], 1)
        for channel in range(channels):
            rows = reach * self.seen[:, channel].reshape(-1, 1)
            matrix[:, channel, :, :, channel, :] += (rows.T @ rows).reshape(count, pixels, count, pixels)
        return matrix.reshape(count * channels * pixels, -1)


def descended(
    stages: Stages[ConvolutionStage], examples: SeparatedExamples, head: Tensor, problem: MakeProblem, secret: bool
) -> Floats | None:
    """Return images [B, C, HW] behind features, by the linear systems of each stage; None if the systems contradict.

    head: [C, D], the weights that make cotangents of features. secret: those of features are unknown, and only the
    features are used.
    """
    cotangents = (examples.cotangents @ head).numpy()
    maps = [
        KnownMaps(one, None if secret else by, ROUNDING * float(np.abs(one).max()))
        for one, by in zip(examples.features.numpy(), cotangents, strict=True)
    ]
    for stage in reversed(stages.stages):
        problems = [problem(stage, one) for one in maps]
        systems = [one.linearized() for one in problems]
        sizes = np.array([np.linalg.norm(system.cotangents) for system in systems])
        doubts = np.array([one.known.doubt for one in problems])
        doubt = float(np.linalg.norm(doubts * sizes)) / max(float(np.linalg.norm(sizes)), 1e-300)
        precision = problems[0].gradient.precision(doubt)
        coupled = CoupledSystems(systems, np.zeros_like(precision) if secret else precision)
        u, deviations = coupled.solve()
        if not secret and stage is stages.stages[-1] and coupled.residual(u) > SUSPECT:
            return None
        below = [None if secret else system.convolution.backward(system.cotangents) for system in systems]
        maps = [
            KnownMaps(values, by, max(float(error), ROUNDING))
            for values, by, error in zip(u, below, deviations, strict=True)
        ]
    return np.stack([one.values for one in maps])


# -- Images and cotangents together, by the whole gradient: Levenberg and Marquardt's method with exact slopes --

BATCH_STEPS = 60
"""Steps, at most."""
CONVERGED = 1e-2
"""Relative decrease of the squared residual below which the search ends, once the gradient is explained."""
BATCH_EXPLAINED = 1e-5
"""Relative residual up to which a gradient counts as explained: float32 leaves 1e-7."""
CLOSE = 1e-3
"""Expected error of a pixel, relative to the prior's width, up to which images count as exact."""
MOST_SLOPES = 2**25
"""Entries of the slopes, at most: a quarter of a gigabyte."""


@dataclass(frozen=True)
class WholeGradient:
    """The gradient of a batch as a function of images [B, n], cotangents of logits [B, C], and of features [B, D].

    The last only if `secret`; else they follow from those of the logits. All unknowns are one vector z.
    """

    plan: Plan
    params: Params
    observed: Params
    batch: int
    prior: Prior
    secret: bool

    @property
    def widths(self) -> tuple[int, int, int]:
        """Unknowns of an example: pixels, cotangents of logits, and secret ones of features."""
        classes, features = self.params["head.weight"].shape
        return math.prod(self.plan.spec.shape), classes, features if self.secret else 0

    @cached_property
    def _backbone(self) -> Params:
        return {n: v for n, v in self.params.items() if n not in HEAD_NAMES}

    @cached_property
    def _root(self) -> dict[str, float]:
        """Roots of the precisions of a tensor's entries."""
        sizes = {n: float(v.square().mean().sqrt()) for n, v in self.observed.items()}
        return {n: 1 / (ROUNDING * size) if size > 0 else 0.0 for n, size in sizes.items()}

    @property
    def rows(self) -> int:
        """Number of equations."""
        return sum(value.numel() for value in self.observed.values())

    def parts(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return images [B, n], cotangents of logits [B, C] and of features [B, D]."""
        pixels, classes, features = self.widths
        x, a, w = z.split([self.batch * size for size in (pixels, classes, features)])
        a = a.view(self.batch, classes)
        cotangents = w.view(self.batch, features) if self.secret else a @ self.params["head.weight"]
        return x.view(self.batch, pixels), a, cotangents

    def _one(self, x: Tensor, a: Tensor, w: Tensor) -> Tensor:
        """Return the weighted gradient [rows] of one example."""

        def scalar(weights: Params) -> tuple[Tensor, Tensor]:
            features = self.plan.net.features(weights, x.view(1, *self.plan.spec.shape))[0]
            return (w * features).sum(), features

        own, features = grad(scalar, has_aux=True)(self._backbone)
        own |= {"head.weight": a[:, None] * features, "head.bias": a}
        return torch.cat([self._root[name] * own[name].flatten() for name in self.observed])

    def residual(self, z: Tensor) -> Tensor:
        """Return the weighted difference [rows] to the observed gradient; 1 is rounding."""
        seen = torch.cat([self._root[name] * value.flatten() for name, value in self.observed.items()])
        return vmap(self._one)(*self.parts(z)).sum(0) - seen

    def slopes(self, z: Tensor) -> Tensor:
        """Return the derivatives [rows, unknowns] of `residual`."""

        def one(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
            return self._one(x, a, w if self.secret else a @ self.params["head.weight"])

        kinds = (0, 1, 2) if self.secret else (0, 1)
        slopes = vmap(jacfwd(one, argnums=kinds))(*self.parts(z))
        return torch.cat([part.movedim(0, 1).flatten(1) for part in slopes], 1)

    def off(self, z: Tensor) -> Tensor:
        """Return how far pixels are from the prior's middle, others 0, in its squared widths."""
        pixels = self.batch * self.widths[0]
        return torch.cat([(z[:pixels] - self.prior.middle) / self.prior.width**2, torch.zeros_like(z[pixels:])])

    def objective(self, z: Tensor, residual: Tensor) -> float:
        """Return the squared residual, with that of the prior."""
        off = self.off(z)
        return float((residual * residual).sum() + (off * off).sum() * self.prior.width**2)

    def linearized(self, z: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normal matrix, with the prior's, and half the objective's gradient."""
        slopes = self.slopes(z)
        normal: Tensor = slopes.T @ slopes
        normal.diagonal()[: self.batch * self.widths[0]] += self.prior.width**-2
        return normal, slopes.T @ residual + self.off(z)


def corrected(whole: WholeGradient, z: Tensor) -> Minimum:
    """Return where damped Gauss-Newton steps from z end."""
    enough = whole.rows * (BATCH_EXPLAINED / ROUNDING) ** 2
    return gauss_newton_minimum(whole, z, cost=sum(whole.widths), steps=BATCH_STEPS, progress=CONVERGED, enough=enough)


@dataclass(frozen=True)
class RebuiltBatch:
    """Images [B, *shape] float64 of a batch with labels [B], how well they were determined, evaluations spent."""

    images: Tensor
    labels: Tensor
    layers: tuple[SolvedLayer, ...]
    evaluations: int


def rebuilt_batch(
    stages: Stages[ConvolutionStage],
    evidence: Evidence,
    plan: Plan,
    labels: Tensor,
    problem: MakeProblem,
    generator: torch.Generator,
) -> RebuiltBatch | None:
    """Return the batch behind one gradient, with likely `labels` [B]; None if its head does not separate it.

    problem: makes the systems of a stage from its output.
    """
    params = {} if evidence.params is None else evidence.params
    plain = evidence.weight is None and evidence.noise is None and evidence.observed.keys() == params.keys()
    if not plain or not stages.stages or (stages.weight, stages.bias) != HEAD_NAMES:
        return None
    whole = WholeGradient(plan, _wide(params), _wide(evidence.observed), len(labels), _pixels(plan), False)
    unknowns = len(labels) * (sum(whole.widths) + params["head.weight"].shape[1])
    if (
        unknowns * whole.rows > MOST_SLOPES
        or len(labels) * max(math.prod(s.inputs) for s in stages.stages) > MOST_UNKNOWNS
    ):
        return None
    examples = separated(params, evidence, labels, stages.stages[-1].activation.ends, generator)
    if examples is None:
        return None
    head = whole.params["head.weight"]
    images = descended(stages, examples, head, problem, secret=False)
    if images is None:
        whole = replace(whole, secret=True)
        images = descended(stages, examples, head, problem, secret=True)
    if images is None:
        return None
    unknown = [torch.from_numpy(images), examples.cotangents, *([examples.cotangents @ head] if whole.secret else [])]
    end = corrected(whole, torch.cat([part.flatten() for part in unknown]))
    x, cotangents, _ = whole.parts(end.z)
    spent = end.evaluations + sum(whole.widths)  # the reports linearize once more
    return RebuiltBatch(
        x.view(-1, *plan.spec.shape), cotangents.argmin(1), _reports(stages, whole, end, examples), spent
    )


def _wide(tree: Params) -> Params:
    return {name: value.detach().double().cpu() for name, value in tree.items()}


def _pixels(plan: Plan) -> Prior:
    low, high = plan.data_range
    return Prior((low + high) / 2, (high - low) / 2)


def _reports(
    stages: Stages[ConvolutionStage], whole: WholeGradient, end: Minimum, examples: SeparatedExamples
) -> tuple[SolvedLayer, ...]:
    """Return how well features and images were determined, both by the whole gradient."""
    normal = whole.linearized(end.z, end.residual)[0]
    values = torch.linalg.eigvalsh(normal)
    pixels = whole.batch * whole.widths[0]
    excess = max(1.0, float((end.residual**2).sum()) / max(whole.rows - len(end.z), 1))
    variance = torch.linalg.inv(normal).diagonal()[:pixels]
    determined = int((variance < CERTAIN * whole.prior.width**2).sum())
    deviation = (excess * float(variance.view(whole.batch, -1).mean(1).max())) ** 0.5
    residual = ROUNDING * float((end.residual**2).mean().sqrt())
    exact = determined == pixels and residual <= BATCH_EXPLAINED and deviation <= CLOSE * whole.prior.width
    condition = float((values[-1] / values[0]).sqrt()) if float(values[0]) > 0 else 1e150
    head = examples.features.numel() + examples.cotangents.numel()
    layers = (stages.weight, head, head, examples.spread), (stages.stages[0].weight, pixels, determined, condition)
    return tuple(
        SolvedLayer(name=name, unknowns=count, determined=known, condition=size, residual=residual, exact=exact)
        for name, count, known, size in layers
    )
