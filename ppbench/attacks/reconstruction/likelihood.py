"""The likelihood of the observation under the public noise law (Balunovic, Dimitrov, Staab and Vechev, ICLR 2022).

Minimize -log p(observed | simulated) - log p(x) by Adam: sum (o - g)^2 / 2 s^2 under Gaussian noise of deviation s,
sum sqrt(2) |o - g| / s under Laplace noise, and a Laplace prior on the image's gradient. Entries that a message visibly
lacks have weight 0. Without a noise law it is plain gradient matching. Clipped gradients, whose scale is unknown, are
compared by the cosine: the likelihood at the best scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.attacks.reconstruction.gauss_newton import MOST_REFINED, GradientProblem, image_prior
from ppbench.attacks.reconstruction.ig import tried_labels
from ppbench.attacks.reconstruction.search.descent import Inversion, SearchHistory, descent_of, evidence_of
from ppbench.attacks.reconstruction.search.starts import PosedVictim
from ppbench.base.tree import Params, Tree
from ppbench.federation.bounds import NonNegative, Positive, PositiveInt
from ppbench.federation.evidence import Evidence, as_gradient
from ppbench.federation.plan import Layout, Noise, Plan
from ppbench.federation.view import View

NOISELESS_SHARE = 1e-3
"""Deviation assumed for tensors without noise, relative to the root mean square of their observed entries."""


@runtime_checkable
class Supports(Protocol):
    """A defense whose messages show which entries they hold."""

    def support(self, upload: Tree, like: Params) -> Params:
        """Return 1.0 for entries that were sent and 0.0 for others."""
        ...


@dataclass(frozen=True)
class Likelihood(Inversion):
    """Maximum a-posteriori images under the public noise law and a prior on their gradients.

    The negative log-likelihood is relative to what it is at the truth, and multiplies the prior (`fading`). With P
    parameters and n pixels, tv expects a mean |dx| + |dy| of 2 n / (P tv), the scale of the prior's Laplace law.
    """

    name: ClassVar[str] = "likelihood"
    version: ClassVar[str] = "3"
    standard: ClassVar[bool] = False
    reference: ClassVar[str] = "Balunovic et al., Bayesian Framework for Gradient Leakage, ICLR 2022"

    budget: PositiveInt = 600
    lr: Positive = 0.05
    tv: NonNegative = 0.1
    fading: bool = True

    def variants(self) -> Sequence[Attack]:
        """Return this attack with several weights of the prior, its own first."""
        return [self, *(replace(self, tv=factor * self.tv) for factor in (0.3, 3.0, 10.0))]

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence with its noise law (1 / sqrt(U) of it for a mean of U), weighted by support."""
        law, weighted = view.defense.noise(view.plan), []
        divisor = as_gradient(view.plan, min((e.round for e in view.exchanges()), default=1))
        sent = {e.slot: e.answer for e in view.exchanges()} if isinstance(view.defense, Supports) else {}
        for e in view.defense.evidence(view):
            noise = e.noise or (None if law is None else scaled_law(law, 1 / (divisor * math.sqrt(len(e.unit)))))
            if isinstance(view.defense, Supports) and len(e.unit) == 1 and e.unit[0] in sent and e.weight is None:
                e = replace(e, weight=view.defense.support(sent[e.unit[0]], e.observed))
            clipped = view.defense.clipping(view.plan) is not None and e.measure == "squares"
            weighted.append(replace(e, noise=noise, measure="cosine" if clipped else e.measure))
        return weighted

    def matched(self, evidence: Evidence) -> Evidence:
        """Return `evidence` compared by its negative log-likelihood, at the best scale if it has none."""
        noise, scaled = evidence.noise, evidence.measure == "squares"
        if noise is None or not (scaled or evidence.measure == "cosine"):
            return evidence
        absolute = noise.law == "laplace" and scaled
        weight = {}
        for name, std in deviations(evidence, noise).items():
            own = torch.ones((), device=evidence.device) if evidence.weight is None else evidence.weight[name]
            weight[name] = own * (math.sqrt(2) / std if absolute else 0.5 / std**2)
        return replace(evidence, weight=weight, measure="absolute" if absolute else evidence.measure)

    def unit(self, evidences: Sequence[Evidence]) -> Tensor:
        """Return the expected negative log-likelihood at the truth [V], up to constants; see `Inversion.unit`."""
        if evidences[0].noise is None or evidences[0].measure != "squares":
            return super().unit(evidences)
        share = 1.0 if evidences[0].noise.law == "laplace" else 0.5
        return share * torch.tensor([visible_entries(e) for e in evidences], device=evidences[0].device)

    def attack(self, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses for victims from one of `blocks`; under noise all labels are tried."""
        evidences, labels, spent = [evidence_of(v) for v in victims], None, 0
        if evidences[0].noise is not None and self.budget > victims[0].plan.spec.classes:
            labels, spent = tried_labels(victims, [self.matched(e) for e in evidences], self.start)
        left = self.budget - spent
        tries = min(self.tries, left)
        problem = self.problem(victims, evidences, tries, labels)
        schedule = self.schedule(left // tries, victims[0].plan)
        return SearchHistory(tries, spent).add(problem, descent_of(problem, problem.start, schedule)).guesses()


def scaled_law(law: Noise, factor: float) -> Noise:
    """Return the law of `factor` times the noise."""
    return replace(law, std=factor * law.std, tensors=tuple((name, factor * std) for name, std in law.tensors))


def visible_entries(evidence: Evidence) -> float:
    """Return the number of visible entries, at least 1."""
    if evidence.weight is None:
        return float(sum(value.numel() for value in evidence.observed.values()))
    visible = (float((evidence.weight[n] * torch.ones_like(v) > 0).sum()) for n, v in evidence.observed.items())
    return max(1.0, sum(visible))


def deviations(evidence: Evidence, noise: Noise) -> dict[str, float]:
    """Return the noise's standard deviation in each tensor; without noise, a small share of its size."""
    stds = {name: noise.of(name) for name in evidence.observed}
    exact = [value.double().flatten() for name, value in evidence.observed.items() if stds[name] <= 0]
    least = NOISELESS_SHARE * float(torch.cat(exact).square().mean().sqrt()) if exact else 0.0
    return {name: max(std, least, 1e-20) for name, std in stds.items()}


# -- Noise of an unknown law: what uploads are beyond what the public model says of gradients --
# A defense may leave a tenth of the entries bare, a layer, or whatever its noise rounds to zero. Who weighs all entries
# alike sees noise. What an upload has beyond the gradient of a grey image at the public weights is noise, and what the
# image adds. Several uploads tell entry by entry which is small, one upload tensor by tensor; and so do the residuals
# of each later fit, in which entries without noise vanish.

UNIT = Noise("gaussian", 1.0)
"""The law of entries that are weighed by their precision."""
FEWEST_UPLOADS = 8
"""Uploads from which on each entry has a deviation of its own."""
LEAST_NOISE = 1e-7
"""Deviation of a bare entry, relative to its tensor's root mean square: float32."""
UNEVEN = 3.0
"""Mean precision of entries over that of their mean square from which on the law is no single one."""
PASSES, STEPS_EACH = 10, 1
"""Laws from the residuals of all uploads, at most, and steps of Gauss and Newton's method under each."""
LEAST_GAIN, FEWEST_PASSES = 0.01, 5
"""Decrease of the mean logarithm of squared residuals below which no further law is estimated, and laws at least."""
CLIFF = 10.0
"""Ratio of two successive eigenvalues of all residuals from which on the larger ones are noise in few directions."""
BARE_SCALE = 0.03
"""Scale, relative to a tensor's residuals, at which single entries may be bare."""
NARROWER = (0.3, 0.1, 0.03, 0.01, 0.003, 1e-3, 1e-4, 1e-5)
"""Successive scales at which entries are taken for bare."""
BEYOND_CHANCE = 2.0
"""Entries within a scale, over what a normal law has there, from which on they are taken for bare."""
SEARCHED = 300
"""Evaluations, at most, of the search by first order that large inputs and batches get."""


@dataclass(frozen=True)
class Uploads:
    """Several observed gradients at one model: values [n, P] float64; sizes: the entries of each tensor."""

    values: Tensor
    sizes: tuple[int, ...]

    @staticmethod
    def of(evidences: Sequence[Evidence]) -> Uploads:
        """Return the uploads that some evidence observes."""
        values = torch.stack([flat(e.observed) for e in evidences])
        return Uploads(values, tuple(v.numel() for v in evidences[0].observed.values()))

    def per_tensor(self, squares: Tensor) -> Tensor:
        """Return the mean of squares [..., P] over each tensor, for each of its entries."""
        parts = squares.split(self.sizes, -1)
        return torch.cat([part.mean(-1, keepdim=True).expand_as(part) for part in parts], -1)

    def precision(self, residuals: Tensor) -> Tensor:
        """Return the precision [P] of each entry by residuals [n, P], of all uploads or of its tensor."""
        squares = residuals.square().mean(0)
        if len(residuals) < FEWEST_UPLOADS:
            squares = self.per_tensor(squares)
        least = LEAST_NOISE**2 * self.per_tensor(self.values.square().mean(0))
        return 1 / (squares + least).clamp(min=1e-60)

    def uneven_entries(self, residuals: Tensor) -> bool:
        """Return whether entries differ in their noise in all uploads alike."""
        return bool(self.precision(residuals).mean() * residuals.square().mean() > UNEVEN)

    def uneven(self, residuals: Tensor) -> bool:
        """Return whether entries differ in their noise, in all uploads alike or within one."""
        small = (
            self.bare(residuals, BARE_SCALE).sum() > BEYOND_CHANCE * normal_share(BARE_SCALE) * (residuals != 0).sum()
        )
        return self.uneven_entries(residuals) or bool(small)

    def shared(self, residuals: Tensor) -> Tensor:
        """Return orthonormal directions [K, P] in which almost all residuals [n, P] lie, K = 0 for none.

        Noise that is drawn once, for each client or of few directions, lies in them.
        """
        if len(residuals) < FEWEST_UPLOADS:
            return residuals[:0]
        values, vectors = torch.linalg.eigh(residuals @ residuals.T)
        values, vectors = values.flip(0).clamp(min=1e-300), vectors.flip(1)
        ratios = values[: len(values) // 2] / values[1 : len(values) // 2 + 1]
        count = int(ratios.argmax()) + 1 if bool(ratios.max() > CLIFF) else 0
        directions: Tensor = (vectors[:, :count].T @ residuals) / values[:count, None].sqrt()
        return directions

    def bare(self, residuals: Tensor, scale: float) -> Tensor:
        """Return which residuals [..., P] are within a scale, relative to those of their tensor."""
        return (residuals != 0) & (residuals.abs() < scale * self.per_tensor(residuals.square()).sqrt())


def flat(tree: Params) -> Tensor:
    """Return all entries [P] float64 of a tree."""
    return Layout.of(tree).pack(tree).detach().double()


def normal_share(scale: float) -> float:
    """Return the share of a normal law within a scale."""
    return math.erf(scale / math.sqrt(2))


@dataclass
class Fit:
    """The search for one image [1, *shape] under changing laws. spent: gradient evaluations, at most `budget`."""

    evidence: Evidence
    plan: Plan
    budget: int
    image: Tensor
    label: int = 0
    spent: int = 0
    shared: Tensor = field(default_factory=lambda: torch.zeros(0, 1))

    @staticmethod
    def of(evidence: Evidence, plan: Plan, budget: int) -> Fit:
        """Return the search from a grey image on."""
        low, high = plan.data_range
        return Fit(evidence, plan, budget, torch.full((1, *plan.spec.shape), (low + high) / 2, dtype=torch.float64))

    def choose_label(self, precision: Tensor) -> None:
        """Take the label that fits the start image best."""
        every = range(self.plan.spec.classes)
        gaps = [float((precision * self.residual(precision, label).square()).sum()) for label in every]
        self.label, self.spent = min(every, key=lambda label: gaps[label]), self.spent + len(gaps)

    def residual(self, precision: Tensor, label: int | None = None, *, whole: bool = False) -> Tensor:
        """Return what the image leaves unexplained [P], at the best factor.

        label: in place of its own; whole: with the part in the directions that hold the noise.
        """
        y = one_hot(torch.tensor([[self.label if label is None else label]]), self.plan.spec.classes).double()
        simulated = self.evidence.simulate(self.image[None].to(self.evidence.device), y.to(self.evidence.device))
        both = flat(self.evidence.observed), flat(simulated)
        observed, gradient = (self.without(values) for values in both)
        law = precision * self._sent
        factor = (law * observed) @ gradient / ((law * gradient) @ gradient)
        return self._sent * (both[0] - factor * both[1] if whole else observed - factor * gradient)

    @property
    def _sent(self) -> Tensor:
        """1 for entries that were sent, 0 for those that are exactly zero: what is not sent may be anything."""
        return (flat(self.evidence.observed) != 0).double()

    def without(self, values: Tensor) -> Tensor:
        """Return entries [P] without their part in the directions that hold the noise of all uploads."""
        return values - (self.shared @ values) @ self.shared if len(self.shared) else values

    @property
    def _seen(self) -> Evidence:
        """The evidence without its part in these directions."""
        if not len(self.shared):
            return self.evidence
        evidence, without, layout = self.evidence, self.without, Layout.of(self.evidence.observed)

        def simulate(x: Tensor, y: Tensor) -> Params:
            return layout.unpack(without(layout.pack(evidence.simulate(x, y))))

        return replace(evidence, observed=layout.unpack(without(flat(evidence.observed))), simulate=simulate)

    def go_on(self, precision: Tensor) -> bool:
        """Search on under a law; return whether the budget allowed a step."""
        steps = min(STEPS_EACH, (self.budget - self.spent) // (2 * self.image.numel()))
        if steps < 1:
            return False
        y = one_hot(torch.tensor([self.label]), self.plan.spec.classes).double().to(self.evidence.device)
        law, known = Layout.of(self.evidence.observed).unpack(precision * self._sent), image_prior(self.plan)
        problem = GradientProblem(
            self._seen, y, None, self.plan.spec.shape, known, self.plan.data_range, law, steps, scaled=True
        )
        answer = problem.refined(self.image)
        self.image, self.spent = answer.image, self.spent + answer.evaluations
        return True

    def narrow(self, uploads: Uploads, law: Tensor) -> None:
        """Search on among single entries that may be bare, from the scale on at which most are beyond chance."""
        residual = self.residual(law)
        shares = [
            float(uploads.bare(residual, s).sum()) / self._by_chance(s, int((residual != 0).sum())) for s in NARROWER
        ]
        first = max(range(len(shares)), key=lambda place: shares[place])
        for scale in NARROWER[first:] if shares[first] >= BEYOND_CHANCE else ():
            residual, before = self.residual(law), self.image
            width = scale * uploads.per_tensor(residual.square()).sqrt().clamp(min=1e-30)
            law = 1 / (width.square() + residual.square())
            if not self.go_on(law):
                return
            left, self.spent = self.residual(law), self.spent + 2
            within = int(((left != 0) & (left.abs() < width)).sum())
            if within < BEYOND_CHANCE * self._by_chance(scale, int((left != 0).sum())):
                self.image = before
                return

    def _by_chance(self, scale: float, count: int) -> float:
        """Return how many of `count` residuals are within a scale by chance, those that the image fits among them."""
        return normal_share(scale) * count + self.image.numel()


@dataclass(frozen=True)
class EstimatedNoise(Likelihood):
    """Images under noise of an unknown law: entries weigh as little as uploads differ from gradients there.

    Small single images by Gauss and Newton's method, under laws estimated tensor by tensor, from `FEWEST_UPLOADS` on
    entry by entry, then among the entries that one upload leaves bare; a grey image where all entries are alike, as
    other attacks assume. Other inputs by `likelihood` under the first law.
    """

    name: ClassVar[str] = "estimated_noise"
    version: ClassVar[str] = "1"
    standard: ClassVar[bool] = True
    quick: ClassVar[Literal["foreign"]] = "foreign"
    reference: ClassVar[str] = "this project; the likelihood of Balunovic et al. 2022 under an estimated law"

    budget: PositiveInt = 6000

    def variants(self) -> Sequence[Attack]:
        """Return this attack alone: the law is estimated, and the prior is wide."""
        return (self,)

    def evidence(self, view: View) -> list[Evidence]:
        """Return the defense's plain evidence: no declared law is believed."""
        return view.defense.evidence(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge, a start image without usable evidence."""
        return self.answer(self.evidence(view), view.plan, challenges, generator, self._fitted)

    def _fitted(self, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses for victims from one of `blocks`, whose uploads tell the law together."""
        evidences, plan = [evidence_of(v) for v in victims], victims[0].plan
        if any(e.params is None or e.measure != "squares" or e.nuisance for e in evidences):
            return self._searched(victims)
        uploads = Uploads.of(evidences)
        if victims[0].size[0] > 1 or math.prod(plan.spec.shape) > MOST_REFINED or plan.spec.classes < 2:
            law = Layout.of(evidences[0].observed).unpack(uploads.precision(uploads.values).float())
            return self._searched(
                [replace(v, evidence=replace(evidence_of(v), noise=UNIT, weight=law)) for v in victims]
            )
        fits = [Fit.of(e, plan, self.budget) for e in evidences]
        try:
            fit_all(fits, uploads)
        except RuntimeError:  # an operation without a forward derivative
            return self._searched(victims)
        return [
            Guess(f.image.clamp(*plan.data_range).float(), torch.tensor([f.label]), evaluations=f.spent) for f in fits
        ]

    def _searched(self, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses of a search by first order, without a path: its budget is not this attack's."""
        guesses = replace(self, budget=min(self.budget, SEARCHED)).attack(victims)
        return [replace(guess, path=()) for guess in guesses]


def fit_all(fits: Sequence[Fit], uploads: Uploads) -> None:
    """Search all images under laws from the residuals of all, then each under one of its own."""
    law = uploads.precision(uploads.values)
    for fit in fits:
        fit.choose_label(law)
    residuals = _unshared(fits, uploads, law)
    if not uploads.uneven(residuals) and not len(fits[0].shared):
        return
    for number in range(PASSES if uploads.uneven_entries(residuals) or len(fits[0].shared) else 0):
        law, before = uploads.precision(residuals), mean_logarithm(residuals)
        for fit in fits:
            fit.spent += 1
            fit.go_on(law)
        residuals = _unshared(fits, uploads, law)
        if number + 1 >= FEWEST_PASSES and before - mean_logarithm(residuals) < LEAST_GAIN:
            break
    for fit in fits:
        fit.narrow(uploads, law)


def _unshared(fits: Sequence[Fit], uploads: Uploads, law: Tensor) -> Tensor:
    """Return the residuals [n, P] of all uploads without the directions that hold most of them, which all fits leave
    out from now on."""
    shared = uploads.shared(torch.stack([fit.residual(law, whole=True) for fit in fits]))
    for fit in fits:
        fit.shared = shared
    return torch.stack([fit.residual(law) for fit in fits])


def mean_logarithm(residuals: Tensor) -> float:
    """Return the mean logarithm of squared residuals, which few large ones do not hide."""
    squares = residuals.square()
    return float((squares + LEAST_NOISE**2 * squares.mean()).clamp(min=1e-60).log().mean())
