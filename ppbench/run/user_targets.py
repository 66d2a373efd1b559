"""Which labels, and which loss, attacks on a user's gradient are granted, and what the labels of their answers are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Guess
from ppbench.base.errors import UsageError, shown
from ppbench.base.tree import Params
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.nets.classifier import HEAD_NAMES
from ppbench.nets.model_object import HeldNetwork
from ppbench.nets.net import LossName, OwnLoss
from ppbench.run.user_gradients import fitted_label, scale_of, sign_of
from ppbench.run.user_inputs import UserLoss, int_between, label_rows, one_hot_of, to_dense

MAX_BATCH = 100_000
"""Most examples in a batch."""


@dataclass(frozen=True)
class Targets:
    """The loss that attacks simulate, the labels that they are granted, and the labels of their answer.

    Attributes:
        loss: for the plan. batch: examples. y: targets [B, C] that are granted; None: classes that attacks infer.
        rows: the true targets [B, C] behind `y`; None: `y` are classes, or the labels do not matter.
        slope: dL/dz [C] of one example, which stands in for its unknown label; None: labels are known or inferred.
        scale: the factor of the gradient, 1 where none fits; unexplained: whether a fit was tried, and none fits.
        word: of the loss of a batch whose inputs show its rows (`rows_behind`) where they can be separated; else "".
    """

    loss: LossName | OwnLoss
    batch: int
    y: Tensor | None = None
    rows: Tensor | None = None
    slope: Tensor | None = None
    scale: float = 1.0
    unexplained: bool = False
    word: str = ""

    def rows_for(self, guess: Guess, plan: Plan) -> Tensor | None:
        """Return the targets [B, C] that go with an answer, its labels [B] or its texts [B, L]; None without any."""
        if plan.next_token:
            return guess.x
        if self.y is not None and (self.rows is not None or self.slope is not None):
            return self.y
        return None if guess.y is None else one_hot(guess.y, plan.spec.classes).float()

    def labels_for(self, guess: Guess, network: HeldNetwork, word: str) -> Tensor | None:
        """Return the labels of an answer: classes [B] int64, or numbers [B, C], [B] of one output; None if unknown."""
        if self.slope is not None and word == "mse" and guess.x is not None:
            with torch.no_grad():
                outputs = network.spec.net(network.spec.start, guess.x.cpu().float())
            rows: Tensor | None = outputs - self.slope * outputs.shape[1] / 2
        else:
            rows = self.rows
        if rows is None:
            return None if self.slope is not None else guess.y
        return rows[:, 0] if rows.shape[1] == 1 else rows


def targets_of(
    loss: UserLoss, labels: Any, batch: int | None, gradient: Params, network: HeldNetwork, steps: bool
) -> Targets:
    """Return what attacks are granted. steps: whether the gradient is an update of several local steps.

    A sum over the batch is divided out first, as far as the loss says that it is one, and is part of the scale.
    UsageError: labels do not fit loss, network or batch; or they are needed and not given.
    """
    if not loss.is_sum:
        return _targets_of_mean(loss, labels, batch, gradient, network, steps)
    if steps:
        raise UsageError("Local steps are simulated on the mean loss; give it, and lr times the size of a batch.")
    classes, known = network.spec.classes, labels is not None and loss.weights is not None
    rows = one_hot_of(labels, classes) if known else None
    factor = loss.sum_over_mean(examples_in(labels, batch), rows, classes)
    mean = {name: value / factor for name, value in gradient.items()}
    targets = _targets_of_mean(loss, labels, batch, mean, network, steps)
    return replace(targets, scale=targets.scale * factor)


def _targets_of_mean(
    loss: UserLoss, labels: Any, batch: int | None, gradient: Params, network: HeldNetwork, steps: bool
) -> Targets:
    """Return what attacks are granted, of a mean loss."""
    if loss.targets == "tokens":
        if labels is not None:
            raise UsageError(f"Under loss={loss.word!r} texts are their own targets; leave out labels=.")
        return Targets(loss.for_plan(network), _batch(batch, None))
    spec, integers = network.spec, _are_integers(labels)
    if loss.targets == "classes" or (loss.targets == "any" and integers and spec.classes > 1):
        plan_loss = loss.for_plan(network, indices=loss.targets == "any")
        y = None if labels is None else one_hot_of(labels, spec.classes)
        count = _batch(batch, None if y is None else len(y))
        return _scaled(Targets(plan_loss, count, y), gradient, spec.start, steps)
    plan_loss = (
        OwnLoss(loss.word, _uncomputed) if labels is None and loss.function is not None else loss.for_plan(network)
    )
    assert isinstance(plan_loss, OwnLoss)  # only classes have losses by name
    if labels is not None:
        rows = label_rows(labels, loss.targets, spec.classes)
        count = _batch(batch, len(rows))
        return _row_targets(plan_loss, rows, gradient, spec.start, steps)
    count = _batch(batch, None)
    shown_by_head = not steps and {*HEAD_NAMES} <= gradient.keys()
    if count > 1 and shown_by_head and loss.function is None:
        return Targets(plan_loss, count, word=loss.word)
    if count > 1 or not shown_by_head:
        where = "of one example, by a trained last nn.Linear with a bias"
        words = f"Under loss={loss.word!r}" if loss.function is None else "Under a loss that is a function"
        raise UsageError(f"{words} labels can be inferred {where} alone; give labels=.")
    return _unlabeled(loss, plan_loss, gradient, spec.start)


def _uncomputed(z: Tensor, y: Tensor) -> Tensor:
    """Stand in for a user's function without labels: the gradient shows its slope (`Targets.slope`)."""
    raise AssertionError("a function cannot be computed without labels")


def _are_integers(labels: Any) -> bool:
    numbers = to_dense(labels)
    return numbers is not None and numbers.dim() < 2 and not numbers.is_floating_point()


def examples_in(labels: Any, batch: int | None) -> int:
    """Return the number of examples that labels, or else `batch`, state; 1 if neither does."""
    numbers = None if labels is None else to_dense(labels)
    if numbers is not None and numbers.dim():
        return max(len(numbers), 1)
    return 1 if batch is None else _batch(batch, None)


def _batch(batch: int | None, labels: int | None) -> int:
    """Return the number of examples; UsageError: it is none, or not that of the labels."""
    count = int_between("batch", (1 if labels is None else labels) if batch is None else batch, 1, MAX_BATCH)
    if labels is not None and count != labels:
        raise UsageError(f"batch={shown(batch)} cannot be used; there are {labels} labels.")
    return count


def _scaled(targets: Targets, gradient: Params, start: Params, steps: bool) -> Targets:
    """Return targets of classes with the factor that the last layer shows."""
    if steps:
        return replace(targets, scale=sign_of(gradient, targets.batch, targets.y))
    if not isinstance(targets.loss, OwnLoss):
        fitted = scale_of(gradient, start, targets.batch, targets.y)
    elif targets.batch > 1 or not {*HEAD_NAMES} <= gradient.keys():
        return targets
    else:
        rows = torch.eye(len(gradient["head.bias"])) if targets.y is None else targets.y
        fit = fitted_label(gradient, start, targets.loss, rows)
        fitted = None if fit is None else fit[0]
    return replace(targets, scale=1.0 if fitted is None else fitted, unexplained=fitted is None)


def _row_targets(loss: OwnLoss, rows: Tensor, gradient: Params, start: Params, steps: bool) -> Targets:
    """Return targets of known rows: of one example as the only target, under a class of its own; else as they are."""
    shown_by_head = not steps and {*HEAD_NAMES} <= gradient.keys()
    if len(rows) > 1:
        return Targets(loss, len(rows), rows, rows, word=loss.name if shown_by_head and loss.name in WORDS else "")
    targets = replace(_single(loss, rows[0], gradient), rows=rows)
    if not shown_by_head:
        return targets
    fit = fitted_label(gradient, start, loss, rows)
    return replace(targets, scale=1.0 if fit is None else fit[0], unexplained=fit is None)


def _single(loss: OwnLoss, row: Tensor, gradient: Params) -> Targets:
    """Return targets of one example whose target is `row` [C].

    Attacks get a one-hot label, at the largest entry of the bias's gradient, by which some divide; the loss puts the
    row in its place.
    """
    bias = gradient.get("head.bias")
    place = 0 if bias is None else int(bias.abs().argmax())
    table = torch.zeros(len(row), len(row))
    table[place] = row

    def losses(z: Tensor, y: Tensor) -> Tensor:
        return loss.function(z, y @ table.to(y))

    return Targets(replace(loss, function=losses), 1, torch.eye(len(row))[[place]])


def _unlabeled(loss: UserLoss, plan_loss: OwnLoss, gradient: Params, start: Params) -> Targets:
    """Return targets of one example with an unknown label that is no class: signs, or the known cotangent itself."""
    bias = gradient["head.bias"].detach().cpu()
    if loss.targets == "multi-hot":  # the bias's gradient is sigmoid(z) - y: below 0 where the label is 1
        rows = torch.stack([(bias < 0).float(), (bias > 0).float()])
        fit = None if len(bias) == 1 else fitted_label(gradient, start, plan_loss, rows)
        row = rows[[0 if fit is None else fit[1]]]
        scale, lost = (1.0, len(bias) > 1) if fit is None else (fit[0], False)
        return replace(_single(plan_loss, row[0], gradient), rows=row, scale=scale, unexplained=lost)
    linear = replace(plan_loss, function=lambda z, y: (z * y).sum(-1))
    return replace(_single(linear, bias, gradient), slope=bias)


WORDS = ("bce", "mse")
"""Losses without classes, by name."""
HARD_LABEL = 1e-3
"""Distance from 0 or 1 up to which a label of "bce" is that: half precision leaves this."""


def rows_behind(evidence: Evidence, plan: Plan, x: Tensor, word: str) -> Tensor:
    """Return the labels [B, C] float32 of a batch's inputs x [B, *shape] under the loss `word`, "bce" or "mse".

    The head's gradient is A^T [features, 1]: known features give A, the loss's slopes, from which outputs give labels.
    """
    params = {name: value.detach().double().cpu() for name, value in (evidence.params or {}).items()}
    weight, bias = (evidence.observed[name].detach().double().cpu() for name in HEAD_NAMES)
    with torch.no_grad():
        features = plan.net.features(params, x.double().cpu())
        outputs = plan.net.head(params, features)
    known = torch.cat([features, torch.ones_like(features[:, :1])], 1)
    slopes = torch.linalg.lstsq(known.T, torch.cat([weight, bias[:, None]], 1).T).solution * outputs.numel()
    if word == "mse":
        numbers: Tensor = (outputs - slopes / 2).float()
        return numbers
    rows = outputs.sigmoid() - slopes
    whole = rows.round()
    labels: Tensor = torch.where((rows - whole).abs() < HARD_LABEL, whole, rows).clamp(0, 1).abs().float()  # no -0
    return labels
