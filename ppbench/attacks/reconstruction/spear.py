"""SPEAR: whole batches, exact, from the gradient of a first linear layer and a ReLU (Dimitrov et al., 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.analytic import AnalyticInversion, guessed_labels
from ppbench.attacks.reconstruction.directions import PublicLayer
from ppbench.attacks.reconstruction.rows import FirstLayer, first_layer, trained_layer
from ppbench.attacks.reconstruction.search.problem import discrepancy
from ppbench.attacks.reconstruction.search.starts import Victim
from ppbench.attacks.reconstruction.separation import Separation, separate
from ppbench.base.tree import Params, finite
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.plan import Plan

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
    output = output.softmax(-1) if plan.loss == "cross_entropy" else output
    labels = (weighted - output).argmin(1)
    least = (output - one_hot(labels, output.shape[1])).gather(1, labels[:, None])[:, 0]
    counts = weighted.gather(1, labels[:, None])[:, 0] / least
    return labels, counts.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0).round().clamp(1, count).long()


@dataclass(frozen=True)
class Spear(AnalyticInversion):
    """Exact inversion of batches: the cotangents of a ReLU layer are sparse, which separates the batch's examples.

    If `separation.separate` succeeds, each input is exact up to the rounding of the upload. Uncertain inputs (one fires
    all units that another does) are computed from what the gradients of the others leave unexplained. Otherwise, for
    single examples and for layers without biases, the answer is that of `analytic`.

    Attributes:
        draws: subsets of rows that are tried, at most: 100,000 take some 6 s, batches of 8 need 5,000 to 20,000.
    """

    name: ClassVar[str] = "spear"
    reference: ClassVar[str] = (
        "Dimitrov et al., SPEAR: Exact Gradient Inversion of Batches in Federated Learning, NeurIPS 2024"
    )

    draws: PositiveInt = 100_000

    def suits(self, plan: Plan) -> bool:
        """Return whether the network of `plan` begins with a linear layer on the flattened input, and a ReLU."""
        return first_layer(plan) is not None and tapped(plan) is not None

    def _answer(self, victim: Victim, layer: FirstLayer | None) -> Guess:
        if victim.evidence is None or layer is None or victim.size[0] < 2:
            return super()._answer(victim, layer)
        separation = separated_examples(victim, layer, victim.plan.data_range, self.draws)
        if separation is None:
            return super()._answer(victim, layer)
        guess = self._batch(victim, victim.evidence, separation)
        if bool((separation.agreement == 1).all()):
            return guess
        return self._peeled(victim, layer, guess, separation.cotangents)

    def _batch(self, victim: Victim, evidence: Evidence, separation: Separation) -> Guess:
        """Return the guess that a separation gives."""
        count, (low, high) = victim.size[0], victim.plan.data_range
        images = separation.inputs.nan_to_num().clamp(low, high)
        order, y = arranged(victim, evidence, images, count)
        x = images[order].view(victim.size)
        mismatch = batch_mismatch(evidence, victim.plan, x, y)
        return Guess(x=x.float(), y=y, confidence=mismatch, evaluations=1)

    def _peeled(self, victim: Victim, layer: FirstLayer, guess: Guess, cotangents: Tensor) -> Guess:
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


def separated_examples(victim: Victim, layer: FirstLayer, bounds: tuple[float, float], draws: int) -> Separation | None:
    """Return the inputs of `layer`, within `bounds`, in a victim's upload; None if they cannot be separated."""
    evidence = victim.evidence
    rows = None if evidence is None else layer.rows(evidence)
    if evidence is None or evidence.params is None or rows is None or layer.bias is None:
        return None
    weight, bias = (evidence.params[name].detach().double().cpu() for name in (layer.weight, layer.bias))
    whole = (rows.seen > 0).all() and (rows.seen_bias > 0).all() and weight.isfinite().all() and bias.isfinite().all()
    if not bool(whole):
        return None
    known = PublicLayer(weight, bias, *bounds)
    return separate(rows.weight, rows.bias, known, victim.size[0], victim.generator, draws)


def arranged(victim: Victim, evidence: Evidence, inputs: Tensor, count: int) -> tuple[Tensor, Tensor]:
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
