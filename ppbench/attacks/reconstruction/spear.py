"""SPEAR: whole batches, exact, from the gradient of a first linear layer and a ReLU (Dimitrov et al., 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.analytic import (
    AnalyticInversion,
    FirstLayer,
    LayerRows,
    first_layer,
    guessed_labels,
    mean_image,
    trained_layer,
)
from ppbench.attacks.reconstruction.directions import (
    LEAST_SINGULAR,
    DirectionCandidates,
    GradientSpan,
    PublicLayer,
    span_of,
)
from ppbench.attacks.reconstruction.dlg import match_gradients
from ppbench.attacks.reconstruction.search.priors import TotalVariation
from ppbench.attacks.reconstruction.search.problem import discrepancy
from ppbench.attacks.reconstruction.search.starts import PosedVictim, Starts
from ppbench.base.tree import Params, finite, tree_map
from ppbench.federation.bounds import NonNegative, PositiveInt
from ppbench.federation.evidence import Evidence, Mappable, simulation
from ppbench.federation.plan import Plan
from ppbench.metrics.modality import modality_in

# -- The inputs of a batch, exact, from the gradient of one linear layer z = W x + b with a ReLU behind it --
# The gradients of weights and biases are sums over the batch of k examples: [dW, db] = Delta [X, 1], with Delta =
# dL/dz [m, k] zero wherever a unit does not fire. The left side has rank k, so that Delta = U Q and [X, 1] = Q^-1 S
# V^T for its singular vectors and an unknown Q [k, k]; a column of Q is the one vector that is orthogonal to all
# rows of U of units that its example does not fire (Dimitrov et al., SPEAR, NeurIPS 2024). As there, subsets of k -
# 1 rows are drawn, and directions that vanish on more rows than that are candidates. Three things here are not in
# the paper:
#
# - Rows are also drawn by corners: inputs of the row space, in the data range, that are least in a random direction.
#   Real inputs lie near such corners, and rows of units that a corner does not fire are right far more often.
# - A candidate counts only if some input of the row space fires exactly the units that it is not zero on.
# - A partly wrong basis has some right inputs. Their firing gives their own columns, so a basis is mended in turns
# until
#   each input fires the units of its column: then it explains all observations.
#
# Tolerances are those of the rounding in the observation: its residual beyond the rank.

MENDS = 20
"""Turns of mending a basis, at most."""
VAIN = 20_000
"""Draws without any candidate after which the search ends."""
STALE, NEARLY = 3, 0.97
"""Rounds without progress after which the search ends, if inputs agree with so many units on average."""


@dataclass(frozen=True)
class Separation:
    """The examples of a batch: inputs [k, D] and cotangents [m, k] float64, on the observation's scale.

    agreement: [k] shares of units where firing agrees with a nonzero cotangent; 1 for a right input.
    draws: number of subsets of rows that were tried.
    """

    inputs: Tensor
    cotangents: Tensor
    agreement: Tensor
    draws: int


def separate(
    weight_grad: Tensor, bias_grad: Tensor, layer: PublicLayer, count: int, generator: torch.Generator, draws: int
) -> Separation | None:
    """Return the examples whose gradients sum to [m, D] and [m], or None if they cannot be separated.

    Equal inputs are one example. `count` is the largest number of examples, `draws` the largest number of subsets of
    rows to try; `agreement` of the result shows whether they sufficed. None: no gap in the singular values up to
    `count` (noise), too few units that fire, or fewer than `rank - 1` candidates among all draws.
    """
    span = span_of(torch.cat([weight_grad, bias_grad[:, None]], 1).double(), layer, count)
    if span is None:
        return None
    search, best, stale = DirectionCandidates(span, layer, generator), None, 0
    while search.draws < draws:
        search.more()
        stale += 1
        for basis in search.bases():
            mended = _mended(span, basis)
            if best is None or mended[1].sum() > best[1].sum():
                best, stale = mended, 0
        if best is None and search.draws >= VAIN and not len(search.directions):
            break
        if best is not None and bool((best[1] == 1).all() or (stale >= STALE and best[1].mean() >= NEARLY)):
            break
    if best is None:
        return None
    basis, agreement = best
    full = torch.linalg.inv(basis).T @ span.right
    cotangents = span.left @ basis.T * full[:, -1]
    return Separation(full[:, :-1] / full[:, -1:], cotangents, agreement, search.draws)


def _mended(span: GradientSpan, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best basis [k, k] and its agreement [k], replacing columns by those of the units that inputs fire."""
    best: tuple[Tensor, Tensor] | None = None
    for _ in range(MENDS):
        silent = (span.inputs(basis) @ span.firing <= 0)[:, span.live]
        agreement = (silent == span.zeros(basis)).double().mean(1)
        if best is None or agreement.sum() > best[1].sum():
            best = basis, agreement
        q, only = span.orthogonal(silent)
        before = basis
        for i in (only & (agreement < 1)).nonzero()[:, 0].tolist():
            changed = basis.clone()
            changed[i] = q[i]
            if float(torch.linalg.svdvals(changed)[-1]) > LEAST_SINGULAR:
                basis = changed
        if torch.equal(basis, before):
            break
    assert best is not None  # the loop runs at least once
    return best


IN_SPAN = 1e-4
"""Share of a vector outside a space that counts as rounding: 1e-6 in float32; 1e-2 for a wrong image."""


def tapped(plan: Plan) -> FirstLayer | None:
    """Return the linear layer directly behind the first Flatten if a ReLU directly follows it, else None."""
    layers = list(plan.net.module.layers or ())
    for flat, layer, behind in zip(layers, layers[1:], layers[2:], strict=False):
        if isinstance(flat, nn.Flatten):
            if not (isinstance(layer, nn.Linear) and isinstance(behind, nn.ReLU)):
                return None
            return trained_layer(plan, layer)
    return None


def labels_of_inputs(plan: Plan, params: Params, observed: Params, inputs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return labels [k] int64 of known inputs [k, F] of the layer, and how often each is in the batch, at least once.

    The head's gradient is dW = (1/N) sum_i n_i a_i f_i^T with known features f_i and a_i = output - onehot(y_i), where
    the output is softmax'ed for cross-entropy. Solved for n_i a_i, the least entry is at the label and gives n_i.
    """
    with torch.no_grad():
        wide = {name: value.double() for name, value in params.items()}
        features = plan.net.behind_flat(wide, inputs)
        output = plan.net.head(wide, features)
    gradient = observed["head.weight"].double()
    if "head.bias" in observed:
        gradient = torch.cat([gradient, observed["head.bias"].double()[:, None]], 1)
        features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
    weighted = count * torch.linalg.lstsq(features.T, gradient.T).solution
    output = output.softmax(-1) if plan.by_softmax else output
    labels = (weighted - output).argmin(1)
    least = (output - one_hot(labels, output.shape[1])).gather(1, labels[:, None])[:, 0]
    counts = weighted.gather(1, labels[:, None])[:, 0] / least
    return labels, counts.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0).round().clamp(1, count).long()


@dataclass(frozen=True)
class Spear(AnalyticInversion):
    """Exact inversion of batches: the cotangents of a ReLU layer are sparse, which separates the batch's examples.

    If `separate` succeeds, each input is exact up to the rounding of the upload. Uncertain inputs (one fires
    all units that another does) are computed from what the gradients of the others leave unexplained. Otherwise, for
    single examples and for layers without biases, the answer is that of `analytic`.

    Attributes:
        draws: subsets of rows that are tried, at most: 100,000 take some 6 s, batches of 8 need 5,000 to 20,000.
    """

    name: ClassVar[str] = "spear"
    separates_by: ClassVar[Literal["any", "classes", "softmax"]] = "classes"
    reference: ClassVar[str] = (
        "Dimitrov et al., SPEAR: Exact Gradient Inversion of Batches in Federated Learning, NeurIPS 2024"
    )

    draws: PositiveInt = 100_000

    def suits(self, plan: Plan) -> bool:
        """Return whether the network of `plan` begins with a linear layer on the flattened input, and a ReLU."""
        return first_layer(plan) is not None and tapped(plan) is not None

    def _answer(self, victim: PosedVictim, layer: FirstLayer | None) -> Guess:
        if victim.evidence is None or layer is None or victim.size[0] < 2:
            return super()._answer(victim, layer)
        separation = separated_examples(victim, layer, victim.plan.data_range, self.draws)
        if separation is None:
            return super()._answer(victim, layer)
        images = separation.inputs.nan_to_num().clamp(*victim.plan.data_range)
        order, y = arranged(victim, victim.evidence, images, victim.size[0])
        x = images[order].view(victim.size)
        mismatch = batch_mismatch(victim.evidence, victim.plan, x, y)
        guess = Guess(x=x.float(), y=y, confidence=mismatch, evaluations=1)
        if bool((separation.agreement == 1).all()):
            return guess
        return self._peeled(victim, layer, guess, separation.cotangents)

    def _peeled(self, victim: PosedVictim, layer: FirstLayer, guess: Guess, cotangents: Tensor) -> Guess:
        """Return the guess with uncertain images computed from what the certain ones leave unexplained.

        An image is certain if its own gradient lies in the span of the `cotangents` [m, k]; wrong ones do not.
        """
        evidence, plan = victim.evidence, victim.plan
        if evidence is None or evidence.params is None or layer.bias is None or guess.x is None or guess.y is None:
            return guess
        x, y = (t.to(evidence.device) for t in (guess.x.double(), one_hot(guess.y, plan.spec.classes).double()))
        alone = simulation(plan, evidence.params)
        own = [{n: v.detach().cpu() for n, v in alone(x[None, [i]], y[None, [i]]).items()} for i in range(len(x))]
        certain = in_span(torch.stack([one[layer.bias] for one in own], 1), cotangents)
        rest = int((~certain).sum())
        if not 0 < rest < len(certain):
            return replace(guess, evaluations=2)
        left = {n: len(x) * v.double().cpu() for n, v in evidence.observed.items()}
        for i in certain.nonzero()[:, 0].tolist():
            left = {n: v - own[i][n] for n, v in left.items()}
        unexplained = {n: (v / rest).to(evidence.device) for n, v in left.items()}
        remainder = Evidence(evidence.unit[:1], unexplained, alone, evidence.params, evidence.weight)
        challenge = replace(victim.challenge, unit=evidence.unit[:1], batch=rest, y=None)
        inner = self._answer(replace(victim, evidence=remainder, challenge=challenge), layer)
        if inner.x is None or inner.y is None:
            return guess
        images, labels = guess.x.clone(), guess.y.clone()
        images[~certain], labels[~certain] = inner.x, inner.y
        mismatch, spent = batch_mismatch(evidence, plan, images, labels), 2 + inner.evaluations
        if mismatch is None or (guess.confidence is not None and guess.confidence <= mismatch):
            return replace(guess, evaluations=spent)
        return Guess(x=images, y=labels, confidence=mismatch, evaluations=spent)


def in_span(vectors: Tensor, span: Tensor) -> Tensor:
    """Return [n] bool: vectors [m, n] that lie in the span of the columns of `span` [m, k], up to rounding."""
    basis = torch.linalg.qr(span / span.norm(dim=0).clamp(min=1e-300)).Q
    outside: Tensor = (vectors - basis @ (basis.T @ vectors)).norm(dim=0)
    inside: Tensor = outside <= IN_SPAN * vectors.norm(dim=0)
    return inside


def separated_examples(
    victim: PosedVictim, layer: FirstLayer, bounds: tuple[float, float], draws: int
) -> Separation | None:
    """Return the inputs of `layer`, within `bounds`, in a victim's upload; None if they cannot be separated."""
    read = read_layer(layer, victim.evidence, bounds)
    if read is None:
        return None
    rows, known = read
    return separate(rows.weight, rows.bias, known, victim.size[0], victim.generator, draws)


def read_layer(
    layer: FirstLayer | None, evidence: Evidence | None, bounds: tuple[float, float]
) -> tuple[LayerRows, PublicLayer] | None:
    """Return a layer's gradient and its public values, inputs within `bounds`; None unless all of both are finite."""
    rows = None if layer is None or evidence is None else layer.rows(evidence)
    if layer is None or evidence is None or evidence.params is None or rows is None or layer.bias is None:
        return None
    weight, bias = (evidence.params[name].detach().double().cpu() for name in (layer.weight, layer.bias))
    whole = bool((rows.seen > 0).all() and (rows.seen_bias > 0).all()) and finite((weight, bias))
    return (rows, PublicLayer(weight, bias, *bounds)) if whole else None


def arranged(victim: PosedVictim, evidence: Evidence, inputs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the row of the layer's inputs [k, F] of each of `count` examples, and their labels, both [count] int64."""
    labels, counts = torch.zeros(0, dtype=torch.int64), torch.ones(len(inputs), dtype=torch.int64)
    params, head = evidence.params, [v for n, v in evidence.observed.items() if n.startswith("head.")]
    needed = [inputs, *head, *({} if params is None else params).values()]
    if params is not None and "head.weight" in evidence.observed and victim.plan.spec.classes > 1 and finite(needed):
        labels, counts = labels_of_inputs(victim.plan, _home(params), _home(evidence.observed), inputs, count)
    order = torch.cat([torch.arange(len(counts)), torch.arange(len(counts)).repeat_interleave(counts - 1)])
    order = order[torch.arange(count) % len(order)]
    return order, labels[order] if len(labels) else guessed_labels(victim)


def batch_mismatch(evidence: Evidence, plan: Plan, x: Tensor, y: Tensor) -> float | None:
    """Return the mismatch of images x [N, *shape] and labels y [N] relative to an all-zero update; None: not finite."""
    targets = one_hot(y, plan.spec.classes).double().to(evidence.device)
    scale = float(evidence.scale())
    with torch.no_grad():
        mismatch = float(discrepancy(evidence, x.double().to(evidence.device), targets, targets.new_zeros(0)))
    return mismatch / scale if scale > 0 and math.isfinite(mismatch) else None


def _home(tree: Params) -> Params:
    return {name: value.detach().cpu() for name, value in tree.items()}


# -- Exact features of a batch from the first linear layer behind convolutions, then images with these features --

STOP = 1e-12
"""Relative mismatch at which features, or the gradient, count as explained."""
FEATURES = "features"


@dataclass(frozen=True, eq=False)
class FlatFeatures(Mappable):
    """The input of the linear layer: the flat features of a batch, named "features"."""

    plan: Plan

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return the flat features [U * B, F] of a batch x [U, B, *shape], in the dtype of x; labels are ignored."""
        params = {name: value.to(x.dtype) for name, value in self.params.items()}
        return {FEATURES: self.plan.net.flat_features(params, x.flatten(0, 1))}


def feature_bounds(plan: Plan) -> tuple[float, float]:
    """Return the range of the flat features: from 0 if the last layer, except for pools, is a ReLU; else unlimited."""
    pools = nn.MaxPool2d | nn.AvgPool2d | nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d | nn.Dropout | nn.Identity
    layers = list(plan.net.module.layers or ())[: plan.net.flat_at]
    last = next((layer for layer in reversed(layers) if not isinstance(layer, pools)), None)
    return (0.0 if isinstance(last, nn.ReLU) else -math.inf), math.inf


@dataclass(frozen=True)
class SpearFeatures(Spear):
    """SPEAR behind convolutions: the exact features of each example, then images with these features and the gradient.

    The examples' features are separated at the first linear layer, if a ReLU follows. Each image is first searched
    alone by its features with a total variation, then all together by the whole gradient.

    Attributes:
        budget: gradient evaluations per victim: half of them for the features, the rest for the gradient.
        tv: weight of the total variation while features are matched (relative mismatch is 1 at first).
    """

    name: ClassVar[str] = "spear_features"
    separates_by: ClassVar[Literal["any", "classes", "softmax"]] = "softmax"
    standard: ClassVar[bool] = False

    budget: PositiveInt = 1000
    tv: NonNegative = 1e-4

    def suits(self, plan: Plan) -> bool:
        """Return whether convolutions come before a linear layer with a ReLU."""
        return plan.spec.classes > 1 and first_layer(plan) is None and tapped(plan) is not None

    def _answer(self, victim: PosedVictim, layer: FirstLayer | None) -> Guess:
        evidence, layer = victim.evidence, tapped(victim.plan)
        inputs = None if layer is None else self._inputs(victim, layer)
        if evidence is None or evidence.params is None or inputs is None:
            return super()._answer(victim, None)
        order, labels = arranged(victim, evidence, inputs, victim.size[0])
        x, spent = self._by_features(victim, evidence.params, inputs[order])
        mismatch = batch_mismatch(evidence, victim.plan, x, labels)
        y = one_hot(labels, victim.plan.spec.classes)[None].to(x)
        if mismatch is not None and mismatch > STOP and self.budget > spent:
            starts = Starts(x[None].to(evidence.device), y.to(evidence.device), False)
            limit, stop = torch.tensor([self.budget - spent]), torch.tensor([STOP])
            matches = match_gradients([evidence], starts, victim.plan, budget=limit, stop=stop)
            spent += int(matches.evaluations)
            if float(matches.mismatch) < mismatch:
                x, mismatch = matches.ends.x[0].cpu(), float(matches.mismatch)
        return Guess(x=x.float(), y=labels, confidence=mismatch, evaluations=spent + 1)

    def _inputs(self, victim: PosedVictim, layer: FirstLayer) -> Tensor | None:
        """Return the flat features [k, F] float64 of the batch's examples, None if they cannot be separated."""
        if victim.size[0] > 1:
            separation = separated_examples(victim, layer, feature_bounds(victim.plan), self.draws)
            return None if separation is None else separation.inputs
        rows = None if victim.evidence is None else layer.rows(victim.evidence)
        image = None if rows is None else mean_image(rows)
        return None if image is None else image[None]

    def _by_features(self, victim: PosedVictim, params: Params, inputs: Tensor) -> tuple[Tensor, int]:
        """Return images [N, *shape] float32 with the features `inputs` [N, F], and the most evaluations of any."""
        plan, device = victim.plan, next(iter(params.values())).device
        simulate = FlatFeatures(tree_map(lambda t: t.detach(), params), plan)
        unit = victim.challenge.unit[:1]
        targets = [Evidence(unit, {FEATURES: features[None].to(device)}, simulate) for features in inputs.nan_to_num()]
        x = victim.image("grey").to(device)[:, None]
        starts = Starts(x, x.new_zeros(len(x), 1, plan.spec.classes), False)
        limit, stop = torch.full((len(x),), max(1, self.budget // 2)), torch.full((len(x),), STOP)
        prior = TotalVariation(self.tv if modality_in(plan).smooth else 0.0) if self.tv else None
        matches = match_gradients(targets, starts, plan, budget=limit, stop=stop, prior=prior)
        return matches.ends.x[:, 0].cpu(), int(matches.evaluations.max())
