"""Labels from the gradient of the head: exact for one example, counts for a batch, without any optimization.

With a cross-entropy loss the gradient of the head's bias is the mean of p - onehot(y) over the batch: only a class that
is present can have a negative entry (iDLG, Zhao et al. 2020), and batch times the gradient counts the labels up to the
predictions p, which uniform noise images estimate well enough while the model is far from confident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.adversary.evidence import Evidence
from ppbench.adversary.view import View
from ppbench.federation.plan import Plan
from ppbench.federation.tree import Params

NOISE_IMAGES = 256


def recover_labels(
    plan: Plan,
    params: Params,
    head_weight_grad: Tensor,
    head_bias_grad: Tensor,
    batch: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the labels [batch] int64 of a batch as a sorted multiset.

    One example: the smallest entry of the bias gradient (the sign rule of iDLG). More: one label for each class with a
    negative entry, then, one by one, the class whose count batch * (mean prediction - bias gradient) is served least.
    A gradient that is not finite, or says nothing (all entries equal), gives labels drawn from `generator`.

    Args:
        plan: the public plan; its network, data range and number of classes are used.
        params: the public weights at which the gradient was taken.
        head_weight_grad: [C, D], the gradient of `head.weight`; only checked: labels need the bias alone.
        head_bias_grad: [C], the gradient of `head.bias`, mean over the batch.
        batch: number of examples B.
        generator: source of the noise images and of labels that cannot be recovered.
    """
    classes = plan.spec.classes
    bias = head_bias_grad.detach().double().cpu()
    if not bias.isfinite().all() or not head_weight_grad.isfinite().all() or bias.max() == bias.min():
        return torch.randint(0, classes, (batch,), generator=generator).sort().values
    if batch == 1:
        return bias.argmin(keepdim=True)
    counts = batch * (mean_prediction(plan, params, generator) - bias)
    return greedy_multiset(counts, bias < 0, batch)


def mean_prediction(plan: Plan, params: Params, generator: torch.Generator) -> Tensor:
    """Return the mean softmax prediction [C] float64 on uniform noise images in the plan's data range."""
    low, high = plan.data_range
    noise = torch.rand(NOISE_IMAGES, *plan.spec.shape, generator=generator) * (high - low) + low
    like = params["head.weight"]
    with torch.no_grad():
        logits = plan.net(params, noise.to(like.device, like.dtype))
    mean = logits.double().softmax(-1).mean(0).cpu()
    return mean if mean.isfinite().all() else torch.full_like(mean, 1 / plan.spec.classes)


def greedy_multiset(counts: Tensor, present: Tensor, batch: int) -> Tensor:
    """Return `batch` labels [batch] int64, sorted: one of each present class, then the class least served so far.

    Args:
        counts: [C] float64, estimated number of examples a class; need not be whole, nor sum to `batch`.
        present: [C] bool, classes known to occur; where they are more than `batch`, those with the largest counts.
        batch: number of labels.
    """
    chosen = sorted(present.nonzero()[:, 0].tolist(), key=lambda c: -float(counts[c]))[:batch]
    left = counts.clone()
    left[chosen] -= 1
    while len(chosen) < batch:
        best = int(left.argmax())
        left[best] -= 1
        chosen.append(best)
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def read_labels(evidence: Evidence | None, plan: Plan, batch: int, generator: torch.Generator) -> Tensor:
    """Return the labels [batch] int64 that one piece of evidence tells, as a sorted multiset.

    Evidence that is missing, or that is not a gradient at public weights, gives labels drawn from `generator`.
    """
    if evidence is None or evidence.params is None or not {"head.weight", "head.bias"} <= evidence.observed.keys():
        return torch.randint(0, plan.spec.classes, (batch,), generator=generator).sort().values
    weight, bias = evidence.observed["head.weight"], evidence.observed["head.bias"]
    return recover_labels(plan, evidence.params, weight, bias, batch, generator)


@dataclass(frozen=True)
class LabelRecovery(Attack):
    """Labels of a batch from the head's gradient alone."""

    name: ClassVar[str] = "label_recovery"
    kind: ClassVar[Kind] = "label"
    reference: ClassVar[str] = "Zhao et al., iDLG: Improved Deep Leakage from Gradients, 2020"

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return the labels [U * B] int64 of every challenge, as a sorted multiset. Granted labels are not used."""
        found = {evidence.unit: evidence for evidence in view.defense.evidence(view)}
        guesses = []
        for asked in challenges:
            batch = len(asked.unit) * asked.batch
            guesses.append(Guess(y=read_labels(found.get(asked.unit), view.plan, batch, generator), evaluations=1))
        return guesses
