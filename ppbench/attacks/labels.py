"""Labels from the gradient of the head: exact for one example, counts for a batch, without any optimization.

With cross-entropy the gradient of the head's bias is the mean of p - onehot(y): only a class that is present can have a
negative entry (iDLG, Zhao et al. 2020), and batch times the gradient counts the labels up to the predictions p. Smooth
random images estimate p for a network that predicts much the same for all images, as before training. The set of
possible classes is exact (`possible_classes`). Without a bias, row c of the weight's gradient sums to the mean of
alpha (p_c - onehot(y)_c), alpha the sum of an example's features. Under the squared loss the exact identities of
`label_histogram` come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, islice
from typing import ClassVar, Final, NamedTuple

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.reconstruction.features import recover_features
from ppbench.base.tree import Params, Recent, values_digest
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.metrics.modality import modality_from
from ppbench.nets.net import OwnLoss

# -- Multisets of labels in the order of their distance from estimated counts --

MOST_MULTISETS = 20_000
"""Multisets that are sorted, at most; if there are more, only the first is returned."""


def greedy_multiset(counts: Tensor, present: Tensor, batch: int) -> Tensor:
    """Return `batch` labels [batch] int64, sorted: one of each present class, then the class with the largest rest.

    counts [C] float64: estimated examples per class, need not be whole. present [C] bool: classes known to occur; if
    these are more than `batch`, those with the largest counts are used.
    """
    chosen = sorted(present.nonzero()[:, 0].tolist(), key=lambda c: -float(counts[c]))[:batch]
    left = counts.clone()
    left[chosen] -= 1
    while len(chosen) < batch:
        best = int(left.argmax())
        left[best] -= 1
        chosen.append(best)
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def likely_multisets(counts: Tensor, present: Tensor, batch: int) -> Iterator[Tensor]:
    """Yield multisets of labels [batch] int64, sorted, `greedy_multiset` first, then by distance from the counts.

    Same arguments; classes with counts of -inf are in no multiset, those present in all.
    """
    first = greedy_multiset(counts, present, batch)
    yield first
    certain, possible = present.nonzero()[:, 0].tolist(), counts.isfinite().nonzero()[:, 0].tolist()
    free = batch - len(certain)
    if free <= 0 or not possible or math.comb(len(possible) + free - 1, free) > MOST_MULTISETS:
        return
    rest = torch.tensor(list(combinations_with_replacement(possible, free)))
    every = torch.cat([torch.tensor(certain, dtype=torch.int64).expand(len(rest), -1), rest], 1).sort(1).values
    tallies = torch.nn.functional.one_hot(every, len(counts)).sum(1)
    distances = (tallies - counts.nan_to_num(neginf=0.0)).square().sum(1)
    for place in distances.argsort(stable=True).tolist():
        if not torch.equal(every[place], first):
            yield every[place]


# -- Which classes a batch may hold, from the column space of the head's gradient alone: exact for all predictions --
# With cross-entropy the head's gradient is A^T F / B, row i of A [B, C] being p_i - onehot(y_i): less than 0 at the
# label and nowhere else. If B < C its columns span the rows of A, so that a class is in the batch only if some
# vector of that span is negative there alone: a linear program for each class (Dang et al., Revealing and Protecting
# Labels in Distributed Training, NeurIPS 2021, search such a vector by a perceptron). A trained network's
# predictions, on which counts of labels otherwise depend, are not needed.

RANK_TOLERANCE = 2e-6
"""Smallest singular value, relative to the largest, of a direction that counts: float32 rounding gives up to 6e-8."""
SIGN_SLACK: Final = 1e-3
"""How far below 0 other entries may lie, in units of the label's: directions too small to count are missing."""


def exact_span(weight_gradient: Tensor, bias_gradient: Tensor | None, batch: int) -> NDArray[np.float64] | None:
    """Return an orthonormal basis [C, rank] of the columns of the head's gradient; None if these exclude no class.

    That is so if the gradient is noisy (its rank larger than the batch), or if there are as many examples as classes.

    Args:
        weight_gradient: [C, D] of the head, under cross-entropy, finite.
        bias_gradient: [C], or None for a head without bias.
        batch: number of examples B.
    """
    parts = [weight_gradient] if bias_gradient is None else [weight_gradient, bias_gradient[:, None]]
    left, sizes, _ = torch.linalg.svd(
        torch.cat([part.detach().double().cpu() for part in parts], 1), full_matrices=False
    )
    rank = int((sizes > RANK_TOLERANCE * sizes[0]).sum())
    if rank > batch or batch >= len(left):
        return None
    basis: NDArray[np.float64] = left[:, :rank].numpy()
    return basis


def possible_classes(span: NDArray[np.float64]) -> Tensor:
    """Return [C] bool: the classes that a batch may hold if its head's gradient has columns in this `exact_span`."""
    return torch.tensor([_largest_least(span, label) > -SIGN_SLACK for label in range(len(span))])


def _largest_least(span: NDArray[np.float64], label: int) -> float:
    """Return the largest least other entry over vectors of a span that are -1 at the label; -inf if none is."""
    others = np.delete(span, label, 0)
    result = scipy.optimize.linprog(
        np.append(np.zeros(span.shape[1]), -1.0),
        A_ub=np.hstack([-others, np.ones((len(others), 1))]),
        b_ub=np.zeros(len(others)),
        A_eq=np.append(span[label], 0.0)[None],
        b_eq=[-1.0],
        bounds=[(None, None)] * span.shape[1] + [(-1, 1)],
    )
    return float(result.x[-1]) if result.status == 0 else -np.inf


ZERO_ROUNDING = 5e-6
"""Size up to which an entry of A counts as zero, in units of K's terms (root of the sum of squares, largest entry).

Measured on float32 gradients of seven small networks: at most 5e-7 between absent classes, 7e-3 at the median
elsewhere. With noise above it, `label_histogram` returns None.
"""
EIGENVALUE = 1e-4
"""Smallest eigenvalue, relative to the largest, of a direction of the outputs that counts."""


@dataclass(frozen=True)
class Histogram:
    """The classes in a batch. present: [C] bool; counts: [C] float64, lower bounds, -inf for absent classes."""

    present: Tensor
    counts: Tensor


def label_histogram(
    params: Params, weight_gradient: Tensor, bias_gradient: Tensor | None, batch: int
) -> Histogram | None:
    """Return the classes in a batch, or None if the gradient is not exact or too many classes may be present.

    With outputs Z [C, B], one-hot Y, gradients G and g of W and b, K := W G^T + b g^T = (Z Z^T - Z Y) / B, so that
    A := K - K^T = P^T - P with P := Z Y / B, whose column j is 0 where no example has class j. So A vanishes between
    absent classes, and P_ij = -A_ij for i absent, j present. With p_j = B P_ij over absent i the count is at least
    p_j^T (Z Z^T)^+ p_j, with equality if the rows of absent classes span the batch.
    """
    if (bias_gradient is None) != ("head.bias" not in params):
        return None
    weights, gradients = [params["head.weight"]], [weight_gradient]
    if bias_gradient is not None:
        weights, gradients = [*weights, params["head.bias"][:, None]], [*gradients, bias_gradient[:, None]]
    w, g = (torch.cat([part.detach().double().cpu() for part in parts], 1) for parts in (weights, gradients))
    k, zero = w @ g.T, ZERO_ROUNDING * float(((w * w) @ (g * g).T).max().sqrt())
    if not k.isfinite().all() or not 0 < zero < math.inf:
        return None
    a = k - k.T
    absent = _absent(a, zero)
    if int(absent.sum()) < 2:  # one class, present or not, has no pair to vanish with
        if bias_gradient is None:
            return None
        absent = (a.sum(1) + g[:, -1]).abs() <= zero * len(a)  # column sums of P less n_j / B
    present = ~absent
    if not 0 < int(present.sum()) <= batch:
        return None
    counts = torch.full((len(k),), -torch.inf, dtype=torch.float64)
    counts[present] = _lengths(batch * k[absent][:, absent], -batch * a[absent][:, present])
    return Histogram(present, counts)


def _absent(a: Tensor, zero: float) -> Tensor:
    """Return [C] bool: the classes that remain when those with most entries of A above `zero` are removed in turn."""
    left = torch.ones(len(a), dtype=torch.bool)
    size = a.abs() / a.abs().sum().clamp(min=1e-300)
    while True:
        rows = left.nonzero()[:, 0]
        above = a[rows][:, rows].abs() > zero
        if not above.any():
            return left
        left[rows[(above.sum(1) + size[rows][:, rows].sum(1)).argmax()]] = False


def _lengths(gram: Tensor, products: Tensor) -> Tensor:
    """Return the squared lengths [S] of vectors within the span of others, from Gram matrix [R, R], products [R, S]."""
    if len(gram) == 0:
        return torch.zeros(products.shape[1], dtype=products.dtype)
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    keep = values > EIGENVALUE * values[-1].clamp(min=0)
    lengths: Tensor = ((vectors[:, keep].T @ products) ** 2 / values[keep][:, None]).sum(0)
    return lengths


TRIED = 48
"""Examples, at most, in all the multisets for which features that explain the head's gradient are searched."""
IMAGES, PATCHES = 256, 4
"""Number of random images for estimates of predictions, and of their smooth patches along a side."""
FAR_CONTRAST = 3.0
"""Factor on the distance from grey of the images that measure whether predictions vary."""
LABELS_EXPLAINED: Recent[Tensor] = Recent(256)
"""The labels chosen last by features, of which most attacks on a batch ask first; nothing is drawn for them."""
VARIED = 0.33
"""Predictions whose mean distance (total variation) from their mean is larger vary too much for their mean to be used.

Measured on digits and CIFAR-10, four networks each: 0 to 0.17 with random weights, 0.54 to 0.81 with trained ones.
"""


def recover_labels(
    plan: Plan,
    params: Params,
    head_weight_grad: Tensor | None,
    head_bias_grad: Tensor | None,
    batch: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the labels [batch] int64 of a batch as a sorted multiset.

    One example: the smallest entry of the signal, which is the bias gradient or else the row sums of the weight's (the
    sign rule of iDLG). More examples, with cross-entropy: one label for each class with a negative signal, then, one by
    one, the possible class with the largest rest of its count batch * (mean prediction - signal). If predictions vary
    and features explain an exact gradient under other labels only, those labels. With the squared loss
    `label_histogram` decides if it can. A gradient that is constant or not finite gives labels drawn from `generator`.

    Args:
        plan: the public plan; its network, loss, data range and number of classes are used.
        params: the public weights at which the gradient was taken.
        head_weight_grad: [C, D], mean over the batch; with a bias and cross-entropy only checked. None: it is frozen.
        head_bias_grad: [C], mean over the batch; None: no bias, or a frozen one. One of the two gradients is needed.
        batch: number of examples B.
        generator: source of the random images and of labels that cannot be recovered.
    """
    classes = plan.spec.classes
    raw = _signal(head_weight_grad, head_bias_grad)
    readable = head_weight_grad is None or bool(head_weight_grad.isfinite().all())
    if not raw.isfinite().all() or not readable or raw.max() == raw.min():
        return torch.randint(0, classes, (batch,), generator=generator).sort().values
    if plan.loss == "squared" and head_weight_grad is not None and not _head_is_frozen(plan):
        histogram = label_histogram(params, head_weight_grad, head_bias_grad, batch)
        if histogram is not None:
            return greedy_multiset(histogram.counts, histogram.present, batch)
    if batch == 1:
        return single_label(raw, positive=head_bias_grad is not None or plan.loss != "cross_entropy")
    return _batch_labels(plan, params, raw, (head_weight_grad, head_bias_grad), batch, generator)


def _head_is_frozen(plan: Plan) -> bool:
    return not {"head.weight", "head.bias"}.isdisjoint(plan.net.frozen_parameters)


def _batch_labels(
    plan: Plan,
    params: Params,
    raw: Tensor,
    head_grads: tuple[Tensor | None, Tensor | None],
    batch: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the labels of several examples, as `recover_labels` describes it; raw: the signal [C] of `head_grads`."""
    weight_grad, bias_grad = head_grads
    prediction, alpha, varied = typical_means(plan, params, generator)
    signal = raw if bias_grad is not None else raw / alpha
    excess = prediction - signal
    counts = batch * (plan.loss.counts(excess) if isinstance(plan.loss, OwnLoss) else excess)
    if plan.loss != "cross_entropy":
        return greedy_multiset(counts, torch.zeros(plan.spec.classes, dtype=torch.bool), batch)
    present = signal < 0
    span = None if weight_grad is None else exact_span(weight_grad, bias_grad, batch)
    if weight_grad is None or span is None:
        return greedy_multiset(counts, present, batch)
    likely = likely_multisets(counts.masked_fill(~possible_classes(span) & ~present, -math.inf), present, batch)
    if bias_grad is None or _head_is_frozen(plan) or not varied:
        return next(likely)
    return _explaining_multiset(likely, params, weight_grad, bias_grad, batch, generator)


def _explaining_multiset(
    likely: Iterator[Tensor],
    params: Params,
    weight_grad: Tensor,
    bias_grad: Tensor,
    batch: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the first of the likeliest multisets under which features explain the head's gradient, else the first."""
    tried = list(islice(likely, max(1, TRIED // batch)))
    heads = (params["head.weight"], params["head.bias"], weight_grad, bias_grad)
    weight, bias, dw, db = (tensor.detach().cpu() for tensor in heads)
    public, seen = {"head.weight": weight, "head.bias": bias}, {"weight": dw, "bias": db}
    explain = (labels for labels in tried if recover_features(public, dw, db, labels, generator, restarts=0).exact)
    key = values_digest(public, seen, {"tried": torch.stack(tried)})
    return LABELS_EXPLAINED.of(key, lambda: next(explain, tried[0]))


def _signal(weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the signal of labels [C] float64, on the CPU: the bias's gradient, else the row sums of the weight's."""
    if bias is not None:
        return bias.detach().double().cpu()
    if weight is None:
        raise ValueError("a head's gradient is that of a weight, of a bias, or of both")
    return weight.detach().sum(1).double().cpu()


def single_label(signal: Tensor, positive: bool = True) -> Tensor:
    """Return the label [1] int64, on the CPU, of one example: the smallest entry of its signal [C], alpha (p - onehot).

    If alpha is not known to be `positive` (features of either sign, no head bias), a single positive entry among three
    or more shows that it is negative: then the largest entry.
    """
    flipped = not positive and len(signal) > 2 and int((signal > 0).sum()) == 1 and bool((signal != 0).all())
    return (signal.argmax(keepdim=True) if flipped else signal.argmin(keepdim=True)).cpu()


class Typical(NamedTuple):
    """A typical example's prediction [C] float64, the mean sum of features, and whether predictions are `VARIED`."""

    prediction: Tensor
    alpha: float
    varied: bool


def typical_means(plan: Plan, params: Params, generator: torch.Generator) -> Typical:
    """Return the network's mean prediction and features on random images.

    With cross-entropy the prediction is 1 / C for each class if the mean is not finite or predictions are `VARIED`.
    """
    low, high = plan.data_range
    like, images = next(iter(params.values())), random_images(plan.spec.shape, generator)

    def guesses(x: Tensor) -> tuple[Tensor, float]:
        with torch.no_grad():
            features = plan.net.features(params, (x * (high - low) + low).to(like.device, like.dtype))
            outputs = plan.net.head(params, features).double()
        shares = (outputs.softmax(-1) if plan.by_softmax else outputs).cpu()
        return shares, float(features.double().sum(1).mean())

    (shares, alpha), (contrasted, _) = (guesses((0.5 + c * (images - 0.5)).clamp(0, 1)) for c in (1.0, FAR_CONTRAST))
    mean, variation = shares.mean(0), float((contrasted - contrasted.mean(0)).abs().sum(1).mean()) / 2
    varied = plan.loss == "cross_entropy" and variation > VARIED
    if varied or not mean.isfinite().all():
        mean = torch.full_like(mean, 1 / plan.spec.classes)
    return Typical(mean, alpha if math.isfinite(alpha) and alpha != 0 else 1.0, varied)


def random_images(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return [IMAGES, *shape] float32 in [0, 1): smooth patches of colour; noise if examples are no images."""
    if not modality_from(shape).smooth:
        return torch.rand(IMAGES, *shape, generator=generator)
    coarse = torch.rand(IMAGES, shape[0], PATCHES, PATCHES, generator=generator)
    return interpolate(coarse, size=shape[1:], mode="bilinear", align_corners=False)


def read_labels(evidence: Evidence | None, plan: Plan, batch: int, generator: torch.Generator) -> Tensor:
    """Return labels [batch] int64, sorted, from evidence; drawn at random if it has no gradient of the head."""
    seen = {} if evidence is None else evidence.observed
    weight, bias = seen.get("head.weight"), seen.get("head.bias")
    if evidence is None or evidence.params is None or (weight is None and bias is None):
        return torch.randint(0, plan.spec.classes, (batch,), generator=generator).sort().values
    return recover_labels(plan, evidence.params, weight, bias, batch, generator)


Reader = Callable[[Challenge], Tensor | None]
"""Maps a challenge to its labels [U * B] int64, sorted; None: they are read off the head's gradient."""


@dataclass(frozen=True)
class LabelRecovery(Attack):
    """Labels of a batch from the head's gradient alone."""

    name: ClassVar[str] = "label_recovery"
    kind: ClassVar[Kind] = "label"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "client/1", "collusion/1")
    reference: ClassVar[str] = "Zhao et al., iDLG: Improved Deep Leakage from Gradients, 2020"

    def suits(self, plan: Plan) -> bool:
        """Return whether there are classes (a regression has none), and the head is not frozen."""
        return plan.spec.classes > 1 and not {"head.weight", "head.bias"}.isdisjoint(plan.net.names)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return the labels [U * B] int64 of every challenge, as a sorted multiset. Granted labels are not used."""
        plain = {evidence.unit: evidence for evidence in self.evidence(view)}
        labels_of, guesses = self.reader(view, challenges, generator), []
        for challenge in challenges:
            labels = labels_of(challenge)
            if labels is None:
                count = len(challenge.unit) * challenge.batch
                labels = read_labels(plain.get(challenge.unit), view.plan, count, generator)
            guesses.append(Guess(y=labels, evaluations=1))
        return guesses

    def reader(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Reader:
        """Return an adaptive attack's function from a challenge to labels or None. Default: always None."""
        return lambda challenge: None
