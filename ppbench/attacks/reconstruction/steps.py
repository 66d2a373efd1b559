"""The inputs of many local steps, by rank alone, for any number, order, batch sizes and learning rates of the steps.

A step's gradient of a first linear layer z = W x + b is a sum of d x^T over its examples, and SGD, with or without
momentum, adds multiples of such gradients. So after any number of steps the change of [W, b] is Delta [X, 1], with the
k different inputs X of all steps: its rank is k, and its rows lie in the span of the inputs. The client's secret
hyper-parameters affect Delta only. With a ReLU behind the layer, Delta [m, k] has zeros wherever a unit does not fire
for an example, and these separate its columns, as in SPEAR (Dimitrov et al. 2024). SPEAR also knows which units an
input fires; here weights move between the steps, and zeros alone must suffice. They do: a combination of columns is
zero, except by chance, only where all of them are, so the columns are the basis of the column space with most zeros. A
greedy choice gives such a basis.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.analytic import guessed_labels
from ppbench.attacks.reconstruction.directions import DirectionCandidates, PublicLayer, independent, span_of
from ppbench.attacks.reconstruction.rows import first_layer
from ppbench.attacks.reconstruction.search.starts import Victim
from ppbench.attacks.reconstruction.spear import tapped
from ppbench.base.tree import finite
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan

DRAWS, STALE = 40_000, 12_000
"""Subsets of rows that are tried, at most; and how many without a better basis end the search."""
LEANING = 3.0
"""Largest preference for rows that seem to be of few examples."""
OUT_OF_RANGE = 1e-2
"""How far rounding may put an input outside the data range, in units of its width; a wrong basis is far outside."""


class Sparse(DirectionCandidates):
    """Candidates by their zeros alone, for any firing units."""

    def possible(self, zeros: Tensor) -> Tensor:
        """Return [n] bool: all of them."""
        return torch.ones(len(zeros), dtype=torch.bool)

    def more(self) -> None:
        """Draw again, preferring rows that, taken as inputs, lie within the data range or near it."""
        units = len(self.span.rows)
        count = max(1, 2**18 // units)
        lean = LEANING * torch.rand(count, 1, generator=self.generator, dtype=torch.float64)
        self.take(lean * self.few)

    @cached_property
    def few(self) -> Tensor:
        """[l] estimate of how few examples fire a unit, standardized: the nearer to the data range its row, the fewer.

        A row is a mean of inputs with weights that sum to 1 and have either sign.
        """
        whole = self.span.left[self.span.live] @ self.span.right
        inputs = whole[:, :-1] / whole[:, -1:]
        width = self.layer.high - self.layer.low
        out = torch.maximum(inputs - self.layer.high, self.layer.low - inputs).amax(1).clamp(min=OUT_OF_RANGE * width)
        closeness = -(out / width).nan_to_num(nan=1e6, posinf=1e6).log()
        return (closeness - closeness.mean()) / closeness.std().clamp(min=1e-9)

    def sparsest(self) -> Tensor:
        """Return the independent candidates [<= k, k] with most zeros, by greedy choice."""
        return independent(self.directions[self.zeros.sum(1).argsort(descending=True, stable=True)])


def inputs_by_rank(change: Tensor, layer: PublicLayer, count: int, generator: torch.Generator) -> Tensor | None:
    """Return the inputs [k, D] float64 of at most `count` examples in a change [m, D + 1] of [W, b].

    None without a clear rank (noise), with too few columns, or if the inputs lie outside the data range.
    """
    span = span_of(change.double(), layer, count)
    if span is None:
        return None
    search, best, since = Sparse(span, layer, generator), -1, 0
    slack, inputs = OUT_OF_RANGE * (layer.high - layer.low), None
    while search.draws < DRAWS and (inputs is None or search.draws - since < STALE):
        search.more()
        basis = search.sparsest()
        sparsity = int(span.zeros(basis).sum()) if len(basis) == span.rank else -1
        if sparsity > best:
            best, since = sparsity, search.draws
            whole = torch.linalg.inv(basis).T @ span.right
            inputs = whole[:, :-1] / whole[:, -1:]
            if not bool((inputs >= layer.low - slack).all() and (inputs <= layer.high + slack).all()):
                inputs = None
    return None if inputs is None else inputs.clamp(layer.low, layer.high)


def by_rank(victim: Victim, evidence: Evidence | None) -> Guess | None:
    """Return the images of a batch from a weight change, taken for a gradient of any size; None if not possible.

    It is possible for batches of networks that begin with a linear layer with biases and a ReLU, if the whole change is
    observed and clients train by SGD.
    """
    plan, count = victim.plan, victim.size[0]
    if evidence is None or evidence.params is None or count < 2 or not sums_gradients(plan):
        return None
    layer = first_layer(plan)
    rows = None if layer is None else layer.rows(evidence)
    if layer is None or rows is None or layer.bias is None:
        return None
    if not bool((rows.seen > 0).all() and (rows.seen_bias > 0).all()):
        return None
    weight, bias = (evidence.params[name].detach().double().cpu() for name in (layer.weight, layer.bias))
    change = torch.cat([rows.weight, rows.bias[:, None]], 1)
    if not finite((weight, bias, change)):
        return None
    inputs = inputs_by_rank(change, PublicLayer(weight, bias, *plan.data_range), count, victim.generator)
    if inputs is None:
        return None
    x = inputs[torch.arange(count) % len(inputs)].view(victim.size)
    return Guess(x=x.float(), y=guessed_labels(replace(victim, evidence=evidence)), evaluations=1)


def sums_gradients(plan: Plan) -> bool:
    """Return whether the change of the first layer is a sum of gradients in front of a ReLU, so that zeros remain."""
    return tapped(plan) is not None and first_layer(plan) is not None and plan.local.opt.name == "sgd"
