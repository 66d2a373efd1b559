"""Labels from BAFFLE's loss differences: ten of them give most labels of an untrained model, a hundred all.

A gradient of the cross-entropy is sum_j (p_j - y_j) J_j, with J_j the derivative of logit j by the weights, whose mean
over noise images is near enough: a sketch of K numbers is K linear equations in the C numbers p - y. For one example of
class c they lie in a cone: p_j >= 0 along J_j - J_c for all other j. The class whose cone is nearest is the label. This
needs fewer equations than classes, and no estimate of p, which noise images predict badly once a model is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from scipy.optimize import nnls
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.attacks.adaptive.baffle_sketch import Equations, Sketch, sketches
from ppbench.attacks.label.multisets import greedy_multiset
from ppbench.attacks.label.recovery import LabelRecovery, Reader, single_label, typical_means
from ppbench.base.autodiff import gradients
from ppbench.base.tree import Params
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

NOISE_IMAGES = 64
PRIOR_VARIANCE = 0.1  # prior variance of an entry of p - y
MEAN_ERRORS = (0.05, 0.2, 0.5, 1.0)
NNLS_STEPS = 10_000
HEAD_BIAS = "head.bias"


@dataclass(frozen=True)
class LinearSketch:
    """A sketch as equations A a = s in a = mean (p - y) [C]. a: [M, C], s: [M], of all rounds, float64, on the CPU."""

    a: Tensor
    s: Tensor

    @property
    def gram(self) -> Tensor:
        """A^T A [C, C] plus the ridge of a prior: the sketch's size is that of its noise at most."""
        noise = self.s.square().mean().clamp(min=1e-300)
        return self.a.T @ self.a + torch.eye(self.a.shape[1], dtype=torch.float64) * noise / PRIOR_VARIANCE

    def estimate(self) -> Tensor:
        """Return the posterior mean [C] of the unknowns."""
        mean: Tensor = torch.linalg.solve(self.gram, self.a.T @ self.s)
        return mean

    def alignment(self, unknowns: Tensor) -> Tensor:
        """Return [M] the cosine, up to one factor, of the sketch with that of each of the `unknowns` [M, C]."""
        size = ((unknowns @ self.gram) * unknowns).sum(1).clamp(min=1e-300).sqrt()
        return (unknowns @ (self.a.T @ self.s)) / size

    def nearest_cone(self) -> Tensor:
        """Return the label [1] of one example: the least residual over p_j >= 0, with a penalty on uneven p."""
        classes = self.a.shape[1]
        residuals = []
        for c in range(classes):
            edges = torch.cat([self.a[:, :c], self.a[:, c + 1 :]], 1) - self.a[:, c : c + 1]
            uneven = torch.eye(classes - 1, dtype=torch.float64) - 1 / (classes - 1)
            rows = torch.cat([edges, uneven * edges.norm() / (classes - 1) ** 0.5])
            right = torch.cat([self.s, self.s.new_zeros(classes - 1)])
            residuals.append(float(nnls(rows.numpy(), right.numpy(), maxiter=NNLS_STEPS)[1]))
        return torch.tensor(residuals).argmin(keepdim=True)


def logit_slopes(plan: Plan, params: Params, generator: torch.Generator) -> Tensor:
    """Return the mean derivative [n, C] float32 of the logits by the weights, over uniform noise images."""
    low, high = plan.data_range
    noise = low + (high - low) * torch.rand(NOISE_IMAGES, *plan.spec.shape, generator=generator)
    noise = noise.to(next(iter(params.values())).device)
    rows = gradients(lambda p: plan.net(p, noise).mean(0), params, plan.spec.classes)
    layout = Layout.of(params)
    return torch.stack([layout.pack(row).detach() for row in rows], 1)


def linearized(plan: Plan, rounds: Sequence[Equations], generator: torch.Generator) -> LinearSketch:
    """Return the equations in mean p - y that a sketch's rounds give, A = Z J."""
    parts = [r.z(logit_slopes(plan, r.params, generator)).double() for r in rounds]
    return LinearSketch(torch.cat(parts).cpu(), torch.cat([r.s for r in rounds]).cpu())


def bias_signal(rounds: Sequence[Equations]) -> Tensor:
    """Return Stein's estimate [C] float64, on the CPU, of the gradient of the head's bias, the mean over rounds."""
    estimates = [Layout.of(r.params).unpack(r.z.transposed(r.s) / r.z.count)[HEAD_BIAS].cpu() for r in rounds]
    return torch.stack(estimates).mean(0)


def sketched_labels(
    plan: Plan, sketch: Sketch, batch: int, generator: torch.Generator, method: Literal["cone", "stein"] = "cone"
) -> Tensor | None:
    """Return labels [batch] int64, sorted, from a sketch of `batch` examples' mean gradient; None for a bad sketch.

    A sketch is bad if it is not finite or all 0. The generator draws noise images; "stein" uses the estimated gradient
    of the head's bias alone.
    """
    linear = linearized(plan, sketch.rounds, generator)
    if not bool(linear.a.isfinite().all() & linear.s.isfinite().all() & (linear.s != 0).any()):
        return None
    single = batch == 1 and plan.loss == "cross_entropy"
    if method == "cone" and single:
        return linear.nearest_cone()
    prediction = typical_means(plan, sketch.rounds[0].params, generator).prediction
    if method == "cone" and plan.loss == "cross_entropy":
        return aligned_labels(linear, prediction, batch)
    signal = linear.estimate() if method == "cone" else bias_signal(sketch.rounds)
    return single_label(signal) if single else _labels(batch * (prediction - signal), batch)


def aligned_labels(linear: LinearSketch, prediction: Tensor, batch: int) -> Tensor:
    """Return the multiset of labels [batch] int64, sorted, whose mean p - y points most along the sketch.

    Mean p - y is modelled as u (wrong - counts / batch), with `wrong` even or the typical `prediction` [C]. The search
    exchanges one label at a time, from starts for several u.
    """
    even, estimate = torch.full_like(prediction, 1 / len(prediction)), linear.estimate()
    climbed = []
    for wrong in (even, prediction):
        for u in MEAN_ERRORS:
            start = torch.bincount(_labels(batch * (wrong - estimate / u), batch), minlength=len(wrong))
            climbed.append(_climbed(linear, wrong, start, batch))
    counts = max(climbed, key=lambda pair: pair[1])[0]
    return torch.repeat_interleave(counts)


def _climbed(linear: LinearSketch, wrong: Tensor, counts: Tensor, batch: int) -> tuple[Tensor, float]:
    """Return the counts [C] that no exchange of one label improves, and their alignment."""
    classes = len(counts)
    steps = torch.eye(classes, dtype=torch.int64)
    exchanges = (steps[None] - steps[:, None]).flatten(0, 1)
    best = float(linear.alignment((wrong - counts / batch)[None]))
    while True:
        neighbors = counts + exchanges
        neighbors = neighbors[(neighbors >= 0).all(1)]
        values = linear.alignment(wrong - neighbors / batch)
        if not float(values.max()) > best + abs(best) * 1e-9:
            return counts, best
        counts, best = neighbors[values.argmax()], float(values.max())


def _labels(counts: Tensor, batch: int) -> Tensor:
    return greedy_multiset(counts, torch.zeros(len(counts), dtype=torch.bool), batch)


@dataclass(frozen=True)
class BaffleLabels(LabelRecovery):
    """Labels of examples, batches and cohorts from the joint law of directions and loss differences.

    By "cone", or by "stein": the gradient of the head's bias as the server itself would estimate it, which works before
    training. On other defenses the labels are read as by `label_recovery`.
    """

    method: Literal["cone", "stein"] = "cone"

    name: ClassVar[str] = "baffle_labels"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "collusion/1")
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"baffle"})
    reference: ClassVar[str] = "this project; sign rule of Zhao et al. 2020 on the sketches of Feng et al. 2023"

    def suits(self, plan: Plan) -> bool:
        """Return whether images have classes and, for "stein", the head a trained bias."""
        return (
            plan.spec.classes > 1 and not plan.net.pixelwise and (self.method == "cone" or HEAD_BIAS in plan.net.names)
        )

    def reader(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Reader:
        """Return the labels of units that left a sketch."""
        by_unit = {sketch.unit: sketch for sketch in sketches(view)}

        def labels_of(challenge: Challenge) -> Tensor | None:
            sketch, count = by_unit.get(challenge.unit), len(challenge.unit) * challenge.batch
            return None if sketch is None else sketched_labels(view.plan, sketch, count, generator, self.method)

        return labels_of
