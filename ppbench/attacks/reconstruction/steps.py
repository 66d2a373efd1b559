"""The inputs of many local steps, by rank alone: whatever their number, order, batch sizes and learning rates.

A step's gradient of a first linear layer z = W x + b is a sum of d x^T over its examples, and SGD, with momentum or
without, adds multiples of such gradients. So after any number of steps the change of [W, b] is Delta [X, 1], with the
k different inputs X of all steps: its rank is k, and its rows lie in the span of the inputs. All that a client keeps
secret of its steps is in Delta. With a ReLU behind the layer Delta [m, k] has zeros wherever a unit does not fire for
an example, and these tell its columns apart, as in SPEAR (Dimitrov et al. 2024). There it is known besides which units
an input fires; here weights move between the steps, and zeros alone must do. They do: the columns are the basis of the
column space with most zeros, as a combination of columns is zero, but by chance, only where all of them are, and a
greedy choice finds such a basis.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.analytic import guessed_labels
from ppbench.attacks.reconstruction.directions import Candidates, Layer, independent, span_of
from ppbench.attacks.reconstruction.rows import first_layer
from ppbench.attacks.reconstruction.search.starts import Victim
from ppbench.attacks.reconstruction.spear import tapped
from ppbench.base.tree import finite
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan

DRAWS, STALE = 40_000, 12_000
"""Subsets of rows that are looked at, at most; and how many that find no better basis end the search."""
LEANING = 3.0
"""How much rather rows are drawn that seem to be of few examples, at most."""
BEYOND = 1e-2
"""How far an input may lie outside the data range, in units of its width: rounding. A wrong basis leaves it by far."""


class Sparse(Candidates):
    """Candidates by their zeros alone: nothing is asked of what fires."""

    def possible(self, zeros: Tensor) -> Tensor:
        """Return [n] bool: all of them."""
        return torch.ones(len(zeros), dtype=torch.bool)

    def more(self) -> None:
        """Draw once more: any rows, and rather those whose own input would lie within the data range, or near."""
        units = len(self.span.rows)
        count = max(1, 2**18 // units)
        lean = LEANING * torch.rand(count, 1, generator=self.generator, dtype=torch.float64)
        self.take(lean * self.few)

    @cached_property
    def few(self) -> Tensor:
        """[l] how few examples fire a unit, standardized, by how far its row, taken for one input's, is out of range.

        A row is a mean of inputs with weights that sum to 1 and have either sign: the fewer, the nearer to the range.
        """
        whole = self.span.left[self.span.live] @ self.span.right
        inputs = whole[:, :-1] / whole[:, -1:]
        width = self.layer.high - self.layer.low
        out = torch.maximum(inputs - self.layer.high, self.layer.low - inputs).amax(1).clamp(min=BEYOND * width)
        far = -(out / width).nan_to_num(nan=1e6, posinf=1e6).log()
        return (far - far.mean()) / far.std().clamp(min=1e-9)

    def sparsest(self) -> Tensor:
        """Return the independent candidates [<= k, k] with most zeros, greedily."""
        return independent(self.found[self.zeros.sum(1).argsort(descending=True, stable=True)])


def told_inputs(change: Tensor, layer: Layer, count: int, generator: torch.Generator) -> Tensor | None:
    """Return the inputs [k, D] float64 of at most `count` examples that a change [m, D + 1] of [W, b] is made of.

    None where no rank shows (noise), too few columns are found, or what is found lies outside the data range.
    """
    span = span_of(change.double(), layer, count)
    if span is None:
        return None
    search, best, since = Sparse(span, layer, generator), -1, 0
    slack, inputs = BEYOND * (layer.high - layer.low), None
    while search.draws < DRAWS and (inputs is None or search.draws - since < STALE):
        search.more()
        basis = search.sparsest()
        found = int(span.zeros(basis).sum()) if len(basis) == span.rank else -1
        if found > best:
            best, since = found, search.draws
            whole = torch.linalg.inv(basis).T @ span.right
            inputs = whole[:, :-1] / whole[:, -1:]
            if not bool((inputs >= layer.low - slack).all() and (inputs <= layer.high + slack).all()):
                inputs = None
    return None if inputs is None else inputs.clamp(layer.low, layer.high)


def by_rank(victim: Victim, evidence: Evidence | None) -> Guess | None:
    """Return the images of a batch from a weight change that is taken for a gradient of any size; None: not told.

    Told are batches of networks that begin with a linear layer with biases and a ReLU, from a change all of which was
    seen, of clients who train by SGD.
    """
    plan, count = victim.plan, victim.size[0]
    if evidence is None or evidence.params is None or count < 2 or not linear(plan):
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
    inputs = told_inputs(change, Layer(weight, bias, *plan.data_range), count, victim.generator)
    if inputs is None:
        return None
    x = inputs[torch.arange(count) % len(inputs)].view(victim.size)
    return Guess(x=x.float(), y=guessed_labels(replace(victim, evidence=evidence)), evaluations=1)


def linear(plan: Plan) -> bool:
    """Return whether the change of the first layer is a sum of gradients in front of a ReLU, whose zeros are zeros."""
    return tapped(plan) is not None and first_layer(plan) is not None and plan.local.opt.name == "sgd"
