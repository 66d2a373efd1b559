"""What one model says about a record, in one number; and what the target says about augmented records."""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge, References
from ppbench.adversary.augment import augmentations
from ppbench.attacks.membership.base import FLOOR, log_probabilities, model_outputs
from ppbench.base.errors import UsageError
from ppbench.federation.plan import Plan
from ppbench.federation.view import View


def logit_gap(plan: Plan, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return phi = log p_y - log sum_{j != y} p_j, [..., Q] float64 (Carlini et al. 2022); of squares minus log loss.

    With softmax this is z_y - logsumexp_{j != y} z_j, taken from the logits: p_y / (1 - p_y) would round to infinity.
    Over training runs it is nearly Gaussian. Under the squared loss outputs are no logits, and probabilities made of
    them are clipped: minus the log of the loss is told apart far better (digits MLP, 16 references, TPR of canaries at
    1 % FPR: .55 against .16). Of outputs [..., Q, C] float64 and one-hot labels [Q, C], or targets [Q, 1].
    """
    if plan.spec.classes == 1 or plan.loss != "cross_entropy":
        return -plan.example_loss(outputs, labels).clamp(min=FLOOR).log()
    log_p = log_probabilities(plan, outputs)
    label = labels.argmax(-1, keepdim=True).expand(*log_p.shape[:-1], 1)
    return (log_p.gather(-1, label) - log_p.scatter(-1, label, -torch.inf).logsumexp(-1, keepdim=True))[..., 0]


def log_likelihood(plan: Plan, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return log p(y | x, model) [..., Q] float64, at most 0; shapes as in `logit_gap`.

    A net of one output is taken for the mean of a Gaussian of variance 1: minus its loss, up to a constant.
    """
    if plan.spec.classes == 1:
        return -plan.example_loss(outputs, labels)
    log_p = log_probabilities(plan, outputs)
    label = labels.argmax(-1, keepdim=True).expand(*log_p.shape[:-1], 1)
    return log_p.gather(-1, label)[..., 0]


def references_of(attack: str, challenge: Challenge) -> References:
    """Return the challenge's reference runs; raises UsageError where it has none."""
    if challenge.references is None:
        raise UsageError(
            f"Attack {attack!r} was given no reference runs; it must be asked in an audit with references."
        )
    return challenge.references


def target_outputs(view: View, x: Tensor, count: int) -> Tensor:
    """Return the target's outputs [A, Q, C] float64 on the augmentations of x that references were asked about.

    The last model that the adversary holds computes them, by the defense's own client. NaN where it holds none.
    """
    copies = augmentations(x, count)
    outputs: Tensor = model_outputs(view, copies.flatten(0, 1)).unflatten(0, copies.shape[:2])
    return outputs
