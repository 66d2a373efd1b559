"""The attack aware of the noise: maximum a-posteriori images under the public noise law (Balunovic et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.adaptive.inversion import exact_first, fittest_guesses, is_affordable, mismatch_of
from ppbench.attacks.reconstruction.closed_form import ClosedForm
from ppbench.attacks.reconstruction.dlg import DLG, Matches, match_gradients
from ppbench.attacks.reconstruction.fedavg import FedAvgInversion, signed, trained_evidence
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.search.lbfgs import LBFGSSettings
from ppbench.attacks.reconstruction.search.priors import ImagePrior
from ppbench.attacks.reconstruction.search.problem import simulated
from ppbench.attacks.reconstruction.search.starts import Starts, usable
from ppbench.base.tree import finite, tree_map
from ppbench.defenses.compression import QSGD, SignSGD
from ppbench.defenses.ppdl import PPDL
from ppbench.defenses.representation import Soteria
from ppbench.federation.bounds import NonNegative, NonNegativeInt, PositiveInt
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Layout, Noise, Plan
from ppbench.federation.view import View
from ppbench.metrics.modality import modality_in
from ppbench.nets.channels import has_kinks
from ppbench.nets.classifier import HEAD_NAMES

PLAIN_SHARE = 0.75  # of the budget, for `ig` where it gives the first start
REWEIGHTINGS = 2  # of a Laplace likelihood, after a Gaussian one
RESCALINGS = 2  # of a clipped gradient, after a guess from a grey image
FINEST = 1e-3  # least error of a tensor, in units of the mean one, that counts: a tensor of zeros has none
CERTAIN_LOGIT = 100.0  # logit of a label whose softmax is 1 in float64


@dataclass(frozen=True)
class AdaptiveDP(Attack):
    """Maximum a-posteriori images and labels: the public noise law as likelihood, total variation and box as prior.

    Gaussian noise gives a squared distance over 2 std^2; Laplace noise an absolute one, by reweighting squares with
    1 / |residual|. Where gradients are clipped the attacker also searches the factor by which this shrank the
    gradient: the one at which the simulated gradient has the bound's norm. On convolutions with kinked activations
    L-BFGS does not get from a grey image to the maximum: there the first start is the answer of `ig`.

    Attributes:
        budget: gradient evaluations per victim, over all restarts and reweightings; `ig` gets three quarters.
        restarts: further starts, if there is noise; the best posterior counts.
        roughness: typical magnitude of an image's gradient, in units of the data range.
        box: weight of leaving the data range, relative to the likelihood of one unit of noise.
    """

    budget: PositiveInt = 1800
    restarts: NonNegativeInt = 2
    roughness: NonNegative = 0.3
    box: NonNegative = 100.0

    name: ClassVar[str] = "adaptive_dp"
    next_token: ClassVar[bool] = True
    version: ClassVar[str] = "7"
    kind: ClassVar[Kind] = "reconstruction"
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"dp", "dp_sgd"})
    reference: ClassVar[str] = "Balunovic et al., Bayesian Framework for Gradient Leakage, ICLR 2022"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence with the noise law of the defense; a mean of U uploads has 1/sqrt(U) of its std."""
        return with_law(view.defense.noise(view.plan), view.defense.evidence(view))

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge; zero or non-finite observations get their start image."""
        evidence = self.evidence(view)
        if any(e.noise is not None for e in evidence):
            return self._searched(view, evidence, challenges, generator)
        clipped = view.defense.clipping(view.plan) is not None

        def search(left: Sequence[Evidence]) -> list[Guess]:
            if clipped:
                return self._searched(view, left, challenges, generator)
            return fittest_guesses(DLG(budget=self.budget), left, view.plan, challenges, generator)

        return exact_first(evidence, view.plan, challenges, search, self.budget)

    def _searched(
        self, view: View, known: Sequence[Evidence], challenges: Sequence[Challenge], generator: torch.Generator
    ) -> list[Guess]:
        """Return one guess per challenge by search: of the most probable image, or of the clipped gradient's."""
        noisy, plan = any(e.noise is not None for e in known), view.plan
        by_unit, tries = {e.unit: e for e in known}, 1 + (self.restarts if noisy else 0)
        (low, high), guesses = plan.data_range, []
        by_count: dict[int, list[tuple[int, Evidence, Starts]]] = {}  # by number of images
        for place, challenge in enumerate(challenges):
            count, evidence = len(challenge.unit) * challenge.batch, by_unit.get(challenge.unit)
            draws = torch.randn(tries, count, *plan.spec.shape, generator=generator)
            images = (low + high) / 2 + 0.02 * (high - low) * draws
            logits = 0.1 * torch.randn(tries, count, plan.spec.classes, generator=generator)
            guesses.append(Guess(x=images[0], y=logits[0].argmax(-1)))
            if evidence is not None and usable(evidence):
                start = Starts(images.to(evidence.device), logits.to(evidence.device), joint=True)
                by_count.setdefault(count, []).append((place, evidence, start))
        plain, left = self._plain_guesses(known, plan, challenges, generator)
        for victims in by_count.values():
            places, evidences, starts = zip(*victims, strict=True)
            starts = tuple(_begun_at(start, plain.get(i)) for i, start in zip(places, starts, strict=True))
            for place, guess in zip(places, self._best(view, evidences, starts, left), strict=True):
                spent = plain[place].evaluations if place in plain else 0
                guesses[place] = replace(guess, evaluations=guess.evaluations + spent)
        return guesses

    def _plain_guesses(
        self, known: Sequence[Evidence], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator
    ) -> tuple[dict[int, Guess], int]:
        """Return the answers of `ig` by place where L-BFGS is worse, and the evaluations that are left."""
        share = int(PLAIN_SHARE * self.budget)
        if not share or not has_kinks(plan.net):
            return {}, self.budget
        return dict(enumerate(IG(budget=share).answer(known, plan, challenges, generator))), self.budget - share

    def _best(self, view: View, evidence: Sequence[Evidence], starts: Sequence[Starts], budget: int) -> list[Guess]:
        """Return for each victim the best of its restarts, which share the budget, by the posterior."""
        tries = len(starts[0].x)
        repeated = [e for e in evidence for _ in range(tries)]
        start = Starts(torch.cat([s.x for s in starts]), torch.cat([s.y for s in starts]), joint=True)
        matches = self._search(view, repeated, start, budget // tries)
        score = torch.nan_to_num(matches.mismatch, nan=torch.inf).view(-1, tries)
        spent, guesses = matches.evaluations.view(-1, tries).sum(1), []
        for victim, choice in enumerate(score.argmin(1).tolist()):
            row = victim * tries + choice
            x, labels = matches.ends.x[row].float(), matches.ends.labels[row].argmax(-1)
            mismatch = float(score[victim, choice])
            guesses.append(Guess(x, labels, confidence=mismatch, evaluations=int(spent[victim])))
        return guesses

    def _search(self, view: View, evidence: list[Evidence], start: Starts, budget: int) -> Matches:
        """Run the passes: one for Gaussian noise, more where the likelihood or the scale must be estimated."""
        noise = evidence[0].noise
        clip = view.defense.clipping(view.plan)
        laplace = noise is not None and noise.law == "laplace"
        passes = 1 + (REWEIGHTINGS if laplace else 0) + (RESCALINGS if clip else 0)
        share = max(1, budget // passes)
        spent, factor, best = torch.zeros(len(evidence), dtype=torch.int64), torch.ones(len(evidence)), None
        for _ in range(passes):
            if clip:
                factor = shrinkage(evidence, start if best is None else with_hard_labels(start), clip)
            current = [scaled_evidence(e, float(f)) for e, f in zip(evidence, factor, strict=True)]
            if laplace and best is not None:
                current = [reweighted(e, start, row) for row, e in enumerate(current)]
            best = self._match(view, current, start, factor, share)
            spent += best.evaluations
            start = Starts(best.ends.x, best.ends.labels.clamp(min=1e-6).log(), joint=True)
        assert best is not None  # there is at least one pass
        return replace(best, evaluations=spent)

    def _match(self, view: View, evidence: list[Evidence], start: Starts, factor: Tensor, budget: int) -> Matches:
        unit, prior, stop, noise = None, None, 1e-10, evidence[0].noise
        if noise is not None:  # else clipped only
            unit, stop = 2 * (noise.std * factor.double()) ** 2, 0.0
            shape, (low, high) = view.plan.spec.shape, view.plan.data_range
            smooth = math.prod(shape) / (self.roughness * (high - low)) if modality_in(view.plan).smooth else 0.0
            prior = ImagePrior(smooth, self.box * math.prod(shape), low=low, high=high)
        budgets, stops = torch.full((len(evidence),), budget), torch.full((len(evidence),), stop, dtype=torch.float64)
        return match_gradients(
            evidence, start, view.plan, budget=budgets, stop=stops, unit=unit, prior=prior, settings=LBFGSSettings()
        )


def with_law(law: Noise | None, evidence: Sequence[Evidence]) -> list[Evidence]:
    """Return evidence with the noise law of single uploads; a mean of U uploads has 1/sqrt(U) of its std."""
    stds = [0.0 if law is None else law.std / math.sqrt(len(e.unit)) for e in evidence]
    return [replace(e, noise=law and replace(law, std=std)) for e, std in zip(evidence, stds, strict=True)]


def _begun_at(start: Starts, guess: Guess | None) -> Starts:
    """Return the starts [tries, ...] of a victim, the first of them at a guess, with its labels as certain ones."""
    if guess is None or guess.x is None or guess.y is None or not finite(guess.x):
        return start
    labels = CERTAIN_LOGIT * one_hot(guess.y, start.y.shape[-1])
    return replace(
        start,
        x=torch.cat([guess.x[None].to(start.x), start.x[1:]]),
        y=torch.cat([labels[None].to(start.y), start.y[1:]]),
    )


def scaled_evidence(evidence: Evidence, factor: float) -> Evidence:
    """Return evidence whose observation is multiplied by `factor`."""
    if factor == 1.0:
        return evidence
    return replace(evidence, observed={n: v * factor for n, v in evidence.observed.items()})


def _simulated(evidence: Evidence, start: Starts, row: int) -> dict[str, Tensor]:
    """Return the simulated update at guess `row`, detached."""
    x, y = start.x[row], torch.softmax(start.y[row], -1).to(start.x.dtype)
    with torch.enable_grad():
        return tree_map(lambda t: t.detach(), simulated(evidence, x, y, x.new_zeros(0)))


def with_hard_labels(start: Starts) -> Starts:
    """Return `start` with each example's likeliest label alone, for `shrinkage` after a search.

    With p the prediction and y the label, the soft label p - f (p - y), 0 < f < 1, gives exactly f times the gradient
    of y: a search explains any factor below the true one by softer labels, so soft labels would confirm it.
    """
    likeliest = one_hot(start.y.argmax(-1), start.y.shape[-1])
    return replace(start, y=CERTAIN_LOGIT * likeliest.to(start.y.dtype), joint=True)


def shrinkage(evidence: Sequence[Evidence], start: Starts, clip: float) -> Tensor:
    """Return the factors by which clipping shrank the gradients, at least 1: norm of the simulated one over `clip`."""
    updates = [_simulated(e, start, row) for row, e in enumerate(evidence)]
    norms = [float(Layout.of(update).pack(update).norm()) for update in updates]
    return (torch.tensor(norms) / clip).clamp(min=1.0).nan_to_num(nan=1.0, posinf=1.0)


def reweighted(evidence: Evidence, start: Starts, row: int) -> Evidence:
    """Return evidence whose weighted squares touch a Laplace likelihood at r0: |r| <= (r^2 / |r0| + |r0|) / 2."""
    noise: Noise | None = evidence.noise
    assert noise is not None  # only called under a Laplace law
    scale = noise.std / math.sqrt(2)
    weight = {
        n: 2 * scale / (v.float() - evidence.observed[n]).abs().clamp(min=0.1 * scale)
        for n, v in _simulated(evidence, start, row).items()
    }
    if evidence.weight is not None:
        weight = {n: v * evidence.weight[n] for n, v in weight.items()}
    return replace(evidence, weight=weight)


# -- The attack aware that unsent entries are unknown, not zero --


@dataclass(frozen=True)
class AdaptivePPDL(AdaptiveDP):
    """Gradient matching on the visible support: unsent entries carry no weight; which were sent is in the message.

    Where the sent entries are noisy, it searches the maximum of the posterior under the public noise law. Where the
    largest were chosen under noise, an unsent entry is probably small and is weighted accordingly (`PPDL.precision`).
    """

    name: ClassVar[str] = "adaptive_ppdl"
    version: ClassVar[str] = "7"
    targets: ClassVar[frozenset[str] | None] = frozenset({"ppdl"})
    reference: ClassVar[str] = "this project; gradient matching of Zhu, Liu and Han 2019 with a mask"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence with the noise law, each entry weighted by `PPDL.precision`."""
        evidence = super().evidence(view)
        if not isinstance(view.defense, PPDL) or not view.threat.sees_uploads:
            return evidence
        sent = {exchange.slot: exchange.answer for exchange in view.exchanges()}
        defense = view.defense
        return [replace(e, weight=defense.precision(view.plan, sent[e.unit[0]], e.observed)) for e in evidence]


# -- The attack aware that columns of the head's gradient were left out --


EXPLAINED_COLUMNS = 1e-10
"""Mismatch up to which an image explains all that was not left out, so that a search adds nothing: 60 dB and more."""


@dataclass(frozen=True)
class AdaptiveSoteria(AdaptiveDP):
    """One gradient without the columns of the head's that are all zero: Soteria left them out, they are not compared.

    Single images by linear systems first. These take a feature of 0 for one that says nothing, and where the cotangents
    do not fit then, for unknown: both is right here. Else by Gauss and Newton's method, else, as batches, by a search.
    """

    name: ClassVar[str] = "adaptive_soteria"
    next_token: ClassVar[bool] = False
    version: ClassVar[str] = "2"
    targets: ClassVar[frozenset[str] | None] = frozenset({"soteria"})
    reference: ClassVar[str] = "Balunovic et al., ICLR 2022, leave out the whole layer; here, the columns that are zero"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence; columns that were left out carry no weight."""
        plain = view.defense.evidence(view)
        return [_seen_columns(e) for e in plain] if isinstance(view.defense, Soteria) else plain

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge."""
        algebra, guesses = ClosedForm(largest_batch=1), dict[int, Guess]()
        if isinstance(view.defense, Soteria) and algebra.suits(view.plan):
            plain = algebra.answer(view.defense.evidence(view), view.plan, challenges, generator)
            refined = algebra.answer(self.evidence(view), view.plan, challenges, generator, refines=True)
            guesses = {i: guess for i, guess in enumerate(refined) if self._is_explained(guess)}
            guesses |= {i: guess for i, guess in enumerate(plain) if is_affordable(guess, self.budget)}
        left = [i for i in range(len(challenges)) if i not in guesses]
        searched = super().run(view, [challenges[i] for i in left], generator) if left else []
        guesses |= dict(zip(left, searched, strict=True))
        return [guesses[i] for i in range(len(challenges))]

    def _is_explained(self, guess: Guess) -> bool:
        """Return whether the algebra's answer, within the budget, is that of one image and explains the gradient."""
        one = guess.x is not None and len(guess.x) == 1
        return one and mismatch_of(guess) <= EXPLAINED_COLUMNS and guess.evaluations <= self.budget


def _seen_columns(evidence: Evidence) -> Evidence:
    """Return evidence whose weight is 0 in the columns of the head's gradient that are all zero."""
    if HEAD_NAMES[0] not in evidence.observed:
        return evidence
    weight = {name: torch.ones_like(value) for name, value in evidence.observed.items()}
    weight[HEAD_NAMES[0]] *= (evidence.observed[HEAD_NAMES[0]] != 0).any(0)
    return replace(evidence, weight=weight)


# -- Attacks aware of quantization: rounding errors have a known law, and signs are signs --


@dataclass(frozen=True)
class AdaptiveQSGD(AdaptiveDP):
    """The most probable image under the law of the rounding error, which the message's steps give tensor by tensor."""

    name: ClassVar[str] = "adaptive_qsgd"
    version: ClassVar[str] = "2"
    targets: ClassVar[frozenset[str] | None] = frozenset({"qsgd"})
    reference: ClassVar[str] = "this project; Balunovic et al., ICLR 2022, under the law of stochastic rounding"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence with that law; each tensor is weighted by its precision."""
        plain = view.defense.evidence(view)
        if not isinstance(view.defense, QSGD) or not view.threat.sees_uploads:
            return plain
        sent = view.first_uploads()
        return [_of_law(e, view.defense.law(sent[e.unit[0]].answer, e.observed)) for e in plain]


def _of_law(evidence: Evidence, law: Noise) -> Evidence:
    """Return evidence with a law of noise by tensor, weights relative to its mean variance."""
    stds = {n: max(law.of(n), FINEST * law.std) for n in evidence.observed}
    if law.std == 0:
        return evidence
    weight = {n: torch.full_like(v, (law.std / stds[n]) ** 2) for n, v in evidence.observed.items()}
    return replace(evidence, noise=law, weight=weight)


@dataclass(frozen=True)
class AdaptiveSign(FedAvgInversion):
    """Images whose gradient has the observed signs."""

    name: ClassVar[str] = "adaptive_sign"
    version: ClassVar[str] = "1"
    kind: ClassVar[Kind] = "reconstruction"
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"sign"})
    probes: ClassVar[tuple[str, ...]] = ("gradient", "local")
    reference: ClassVar[str] = "this project; signs compared as in `fedavg_inversion` under Adam"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the evidence of the signs, where these are sent."""
        if not isinstance(view.defense, SignSGD):
            return trained_evidence(view)
        return signed(view.defense.evidence(view), view.plan)
