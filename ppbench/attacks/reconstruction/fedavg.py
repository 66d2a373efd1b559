"""FedAvg inversion: images from the result of local training, by simulating that training (Geiping et al. 2020).

If a client's images fill several local batches, their order is unknown (Dimitrov et al. 2022): it is relaxed to weights
of the images in each step, searched with them, rounded to the nearest order, and fixed for a last search.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import scipy
import torch
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.analytic import first_layer, guessed_labels
from ppbench.attacks.reconstruction.directions import DirectionCandidates, PublicLayer, independent, span_of
from ppbench.attacks.reconstruction.dlg import DLG, Matches, match_gradients
from ppbench.attacks.reconstruction.search.priors import ImagePrior, Penalty
from ppbench.attacks.reconstruction.search.starts import Label, PosedVictim
from ppbench.attacks.reconstruction.spear import read_layer, tapped
from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params
from ppbench.federation.bounds import NonNegative, PositiveInt
from ppbench.federation.evidence import Evidence, Mappable, Simulate, as_gradient, moved_shares, simulation
from ppbench.federation.plan import Layout, Local, Opt, Plan
from ppbench.federation.view import View
from ppbench.metrics.modality import modality_in

# -- The inputs of many local steps, by rank alone, for any number, order, batch sizes and learning rates of the
# steps --
# A step's gradient of a first linear layer z = W x + b is a sum of d x^T over its examples, and SGD, with or without
# momentum, adds multiples of such gradients. So after any number of steps the change of [W, b] is Delta [X, 1], with
# the k different inputs X of all steps: its rank is k, and its rows lie in the span of the inputs. The client's
# secret hyper-parameters affect Delta only. With a ReLU behind the layer, Delta [m, k] has zeros wherever a unit
# does not fire for an example, and these separate its columns, as in SPEAR (Dimitrov et al. 2024). SPEAR also knows
# which units an input fires; here weights move between the steps, and zeros alone must suffice. They do: a
# combination of columns is zero, except by chance, only where all of them are, so the columns are the basis of the
# column space with most zeros. A greedy choice gives such a basis.

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
        basis = independent(search.sparsest())
        sparsity = int(span.zeros(basis).sum()) if len(basis) == span.rank else -1
        if sparsity > best:
            best, since = sparsity, search.draws
            whole = torch.linalg.inv(basis).T @ span.right
            inputs = whole[:, :-1] / whole[:, -1:]
            if not bool((inputs >= layer.low - slack).all() and (inputs <= layer.high + slack).all()):
                inputs = None
    return None if inputs is None else inputs.clamp(layer.low, layer.high)


def by_rank(victim: PosedVictim, evidence: Evidence | None) -> Guess | None:
    """Return the images of a batch from a weight change, taken for a gradient of any size; None if not possible.

    It is possible for batches of networks that begin with a linear layer with biases and a ReLU, if the whole change is
    observed and clients train by SGD.
    """
    plan, count = victim.plan, victim.size[0]
    if count < 2 or not sums_gradients(plan):
        return None
    read = read_layer(first_layer(plan), evidence, plan.data_range)
    if read is None:
        return None
    rows, layer = read
    inputs = inputs_by_rank(torch.cat([rows.weight, rows.bias[:, None]], 1), layer, count, victim.generator)
    if inputs is None:
        return None
    x = inputs[torch.arange(count) % len(inputs)].view(victim.size)
    return Guess(x=x.float(), y=guessed_labels(replace(victim, evidence=evidence)), evaluations=1)


def sums_gradients(plan: Plan) -> bool:
    """Return whether the change of the first layer is a sum of gradients in front of a ReLU, so that zeros remain."""
    return tapped(plan) is not None and first_layer(plan) is not None and plan.local.opt.name == "sgd"


STEP_LOGIT = 30.0
"""Logit of an image in its step: the others' weights, and all slopes, vanish in float32."""


@dataclass(frozen=True, eq=False)
class LocalTraining(Mappable):
    """The simulated upload after local training on guessed images, differentiable in these.

    Clients train from `params` by plan.local, SGD with or without momentum, at `rate`; once: the simulation of one
    gradient at `params`; divisor: of the weight change, which brings it to the size of a gradient.
    """

    plan: Plan
    once: Simulate
    rate: float
    divisor: float

    def family(self) -> Hashable:
        """Return what determines the training, apart from its start."""
        return LocalTraining, self.plan, self.rate, self.divisor

    def __call__(self, x: Tensor, y: Tensor, order: Tensor | None = None, rate: Tensor | None = None) -> Params:
        """Return the mean over clients of start minus end, over `divisor`, for x [U, B, *shape] and labels y [U, B, C].

        order [U, T, B]: logits of the images' weights in each step; None: they fill the local batches in order. rate
        [U]: logarithms of the clients' rates in units of `rate`; None: 0.
        """
        layout = Layout.of(self.params)
        start = layout.pack(self.params).to(x.dtype)
        ends = []
        for u in range(len(x)):
            weights = None if order is None else order[u].softmax(-1)
            ends.append(self._trained(layout, start, x[u], y[u], weights, None if rate is None else rate[u].exp()))
        moved = layout.unpack(start - torch.stack(ends).mean(0))
        shares = moved_shares(self.plan, self.plan.local.epochs)
        return {name: value / shares.get(name, self.divisor) for name, value in moved.items()}

    def _trained(
        self, layout: Layout, flat: Tensor, x: Tensor, y: Tensor, weights: Tensor | None, faster: Tensor | None
    ) -> Tensor:
        """Return the flat weights after training on x [B, *shape], with weights [T, B] of the images in each step."""
        rate = self.rate if faster is None else self.rate * faster
        state = self.plan.local.opt.init(flat)
        for t, rows in enumerate(self.plan.local.steps(len(x))):
            images, labels, w = x[rows], y[rows], torch.ones(rows.stop - rows.start, dtype=x.dtype, device=x.device)
            if weights is not None:
                images, labels, w = x, y, weights[t]

            def loss(p: Params, a: Tensor = images, b: Tensor = labels, w: Tensor = w) -> Tensor:
                return self.plan.objective(p, a, b, w)

            step = layout.pack(gradient(loss, layout.unpack(flat)))
            flat, state = self.plan.stepped(self.plan.local.opt, layout, flat, step, state, rate)
        return flat

    def as_gradient(self, evidence: Evidence, count: int) -> Evidence:
        """Return `evidence` about `count` images with its change taken for a multiple of one gradient (`Opt.reach`)."""
        steps, epochs = len(self.plan.local.steps(count)), self.plan.local.epochs
        gain = self.rate * self.plan.local.opt.reach(steps) / self.divisor
        pairs = zip(moved_shares(self.plan, steps).items(), moved_shares(self.plan, epochs).values(), strict=True)
        gains = {name: whole / part for (name, whole), part in pairs}
        observed = {name: value / gains.get(name, gain) for name, value in evidence.observed.items()}
        return replace(evidence, observed=observed, simulate=self.once, params=self.params)


def trained_evidence(view: View) -> list[Evidence]:
    """Return the plain evidence of weight changes with local training as its simulation; under Adam by `signed`."""
    local, evidence = view.plan.local, view.defense.evidence(view)
    if local.upload == "gradient":
        return evidence
    round_ = min((e.round for e in view.exchanges()), default=1)
    rate, divisor = local.opt.rate(round_), as_gradient(view.plan, round_)
    if local.opt.name == "adam":
        return signed(evidence, view.plan)
    known: dict[int, LocalTraining] = {}  # one per model, not per probe: attacks batch by identity
    changed = []
    for e in evidence:
        if e.params is not None and e.channel != "examples":
            simulate = known.setdefault(id(e.params), LocalTraining(e.params, view.plan, e.simulate, rate, divisor))
            e = replace(e, simulate=simulate, params=None)
        changed.append(e)
    return changed


def signed(evidence: Sequence[Evidence], plan: Plan) -> list[Evidence]:
    """Return evidence of the observation's signs, compared with one gradient's: nearly all that Adam leaves."""
    known: dict[int, Simulate] = {}
    changed = []
    for e in evidence:
        if e.params is not None:
            simulate = known.setdefault(id(e.params), one_gradient(plan, e.params))
            signs = {name: o if name in e.statistics else o.sign() for name, o in e.observed.items()}
            e = replace(e, observed=signs, simulate=simulate, params=None, measure="hinge")
        changed.append(e)
    return changed


def one_gradient(plan: Plan, params: Params) -> LocalTraining:
    """Return the simulation of one gradient of all images of a client at `params`, in a form that runs under vmap."""
    local = Local("delta", epochs=1, batch=2**31, opt=Opt("sgd", lr=1.0))
    return LocalTraining(params, replace(plan, local=local), simulation(plan, params), 1.0, 1.0)


def rounded_order(training: LocalTraining, order: Tensor) -> Tensor:
    """Return logits like `order` [..., T, B] that put each image into its likeliest step of each epoch."""
    steps = training.plan.local.steps(order.shape[-1])
    epochs = training.plan.local.epochs
    sizes = [rows.stop - rows.start for rows in steps[: len(steps) // epochs]]
    seats = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    fixed = torch.zeros_like(order)
    for row, logits in zip(fixed.view(-1, *order.shape[-2:]), order.reshape(-1, *order.shape[-2:]), strict=True):
        for t in range(0, len(steps), len(sizes)):
            score = logits.log_softmax(-1)[t : t + len(sizes)][seats].double().nan_to_num().cpu()
            places, images = scipy.optimize.linear_sum_assignment(score.numpy(), maximize=True)
            row[t + seats[places], images] = STEP_LOGIT
    return fixed


RELAXED = 0.7
"""Share of the budget for images together with their order."""


@dataclass(frozen=True)
class FedAvgInversion(DLG):
    """Images from an update of several local steps, by differentiating through a simulation of these steps.

    On gradients, and on a single local step, it is iDLG. Under Adam it searches images whose gradient has the observed
    signs, with a total variation of weight `tv`. An evaluation costs as many gradients as there are local steps. With
    `fits_rate` the rate of SGD is searched too, from the plan's on.
    Batches that enter a linear layer followed by a ReLU are first solved by algebra (`by_rank`).
    """

    name: ClassVar[str] = "fedavg_inversion"
    version: ClassVar[str] = "3"
    probes: ClassVar[tuple[str, ...]] = ("local",)
    reference: ClassVar[str] = "Geiping et al., Inverting Gradients, NeurIPS 2020; Dimitrov et al., TMLR 2022"

    label: Label = "inferred"
    budget: PositiveInt = 600
    restarts: int = 1
    tv: NonNegative = 0.001
    fits_rate: bool = False

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence with the whole local training as its simulation, see `trained_evidence`."""
        return trained_evidence(view)

    def attack(self, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses for victims from one of `search_batches`: by algebra where possible, else by search."""
        ready = [prepared(victim, self.fits_rate) for victim in victims]
        by_algebra = [by_rank(victim, victim.gradient) for victim in ready]
        rest = [victim for victim, guess in zip(ready, by_algebra, strict=True) if guess is None]
        by_search = iter(super().attack(rest) if rest else [])
        return [next(by_search) if guess is None else guess for guess in by_algebra]

    def prior(self, evidence: Evidence, plan: Plan) -> Penalty | None:
        """Return a prior on smooth images in the data range if only signs are observed, else None."""
        if evidence.measure != "hinge" or not modality_in(plan).smooth:
            return None
        low, high = plan.data_range
        return ImagePrior(self.tv / (high - low), 1.0, 1e-2 * (high - low), low, high)

    def matched(self, victims: Sequence[PosedVictim], stop: Tensor) -> Matches:
        """Return the best match of each victim; for an unknown order the better of relaxed and rounded."""
        evidences = [victim.evidence for victim in victims if victim.evidence is not None]
        training = evidences[0].simulate
        if "order" not in evidences[0].nuisance or not isinstance(training, LocalTraining):
            return super().matched(victims, stop)
        best = DLG.matched(replace(self, budget=max(1, int(RELAXED * self.budget))), victims, stop)
        rows = [i for i, spent in enumerate(best.evaluations.tolist()) if spent < self.budget]
        if not rows:
            return best
        start = best.ends.at(rows)
        shape = evidences[0].nuisance["order"]
        relaxed, rest = start.extra[:, : math.prod(shape)], start.extra[:, math.prod(shape) :]
        order = rounded_order(training, relaxed.reshape(-1, *shape)).flatten(1)
        again = match_gradients(
            [evidences[i] for i in rows],
            replace(start, nuisance=torch.cat([order, rest], 1)),
            victims[0].plan,
            budget=self.budget - best.evaluations[rows],
            stop=stop[rows],
            settings=self.settings,
        )
        return best.merged(rows, again, again.mismatch < best.mismatch[rows])


def prepared(victim: PosedVictim, fits_rate: bool = False) -> PosedVictim:
    """Return the victim with one gradient as evidence for one step, else with `gradient` and an unknown order.

    fits_rate: whether the rate of several steps is unknown too.
    """
    evidence = victim.evidence
    if evidence is None or not isinstance(evidence.simulate, LocalTraining):
        return victim
    count, training = victim.challenge.batch, evidence.simulate
    gradient = training.as_gradient(evidence, count)
    if len(training.plan.local.steps(count)) == 1 and evidence.measure == "squares":
        return replace(victim, evidence=gradient)
    units, unknowns = len(evidence.unit), dict[str, tuple[int, ...]]()
    if count > training.plan.local.batch:
        unknowns["order"] = (units, len(training.plan.local.steps(count)), count)
    if fits_rate and evidence.measure == "squares":
        unknowns["rate"] = (units,)
    evidence = replace(evidence, nuisance=unknowns)
    return replace(victim, evidence=evidence, gradient=gradient)
