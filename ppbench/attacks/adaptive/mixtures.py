"""The attack aware of mixup: a gradient gives a mixture, its label the shares, and more rounds more mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.adaptive.inversion import exact_first, fittest_guesses
from ppbench.attacks.reconstruction.dlg import DLG
from ppbench.base.tree import finite
from ppbench.defenses.representation import Mixup
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import View

ONE_CLASS = 1e-3
"""Share of a second class up to which a label shows one class: either both examples have it, which hides the shares, or
the other's share is smaller."""


@dataclass(frozen=True)
class AdaptiveMixup(Attack):
    """Mixtures from each observed round, shares from their labels, and the example that all of them hold.

    The gradient of one mixture is exact: it gives the mixture and, by the head's bias, its label, which holds classes
    and shares of both examples. The example common to all rounds (`--probe-rounds`) is the most probable one for
    independent others. Means of classes come of public data; without these the mean of the mixtures stands for all.
    Shares of a batch are not known: then the mixtures of the first round are the answer, searched with soft labels.

    budget: gradient evaluations per victim, over all rounds.
    """

    budget: PositiveInt = 1800

    name: ClassVar[str] = "adaptive_mixup"
    version: ClassVar[str] = "2"
    kind: ClassVar[Kind] = "reconstruction"
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"mixup"})
    reference: ClassVar[str] = (
        "this project; least squares over several mixtures as in Carlini et al., Is Private Learning Possible with "
        "Instance Encoding?, IEEE S&P 2021"
    )

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge, separated where the defense mixes and single examples are observed."""
        plan, defense = view.plan, view.defense
        if not isinstance(defense, Mixup) or defense.alpha == 0:
            return self._mixtures(self.evidence(view), plan, challenges, generator, self.budget)
        unlabeled = [replace(challenge, y=None) for challenge in challenges]  # granted labels are the originals'
        rounds = [self.evidence(part) for part in view.by_round() or [view]]
        share = max(1, self.budget // len(rounds))
        answers = [self._mixtures(evidence, plan, unlabeled, generator, share) for evidence in rounds]
        by_unit, guesses = [{e.unit: e for e in evidence} for evidence in rounds], list[Guess]()
        for challenge, own in zip(challenges, zip(*answers, strict=True), strict=True):
            pairs = zip(by_unit, own, strict=True)
            mixtures = [mixture_of(known.get(challenge.unit), guess, plan) for known, guess in pairs]
            readable = [mixture for mixture in mixtures if mixture is not None]
            x, y = common_example(readable, defense, view.public, plan) if readable else (own[0].x, own[0].y)
            guesses.append(replace(own[0], x=x, y=y, evaluations=sum(one.evaluations for one in own), layers=()))
        return guesses

    def _mixtures(
        self,
        evidence: Sequence[Evidence],
        plan: Plan,
        challenges: Sequence[Challenge],
        generator: torch.Generator,
        budget: int,
    ) -> list[Guess]:
        """Return the inputs behind gradients; no algebra of batches, which needs labels of one class."""

        def search(left: Sequence[Evidence]) -> list[Guess]:
            return fittest_guesses(DLG(budget=budget), left, plan, challenges, generator)

        if any(len(challenge.unit) * challenge.batch > 1 for challenge in challenges):
            return search(evidence)
        return exact_first(evidence, plan, challenges, search, budget)


@dataclass(frozen=True)
class Mixture:
    """A mixture of two examples: input [*shape], and label [C], which holds the shares of their classes."""

    x: Tensor
    label: Tensor


def mixture_of(evidence: Evidence | None, guess: Guess, plan: Plan) -> Mixture | None:
    """Return a guessed mixture with the label that the head's bias shows; None for batches, or if it shows none.

    The gradient by that bias is prediction minus label.
    """
    if evidence is None or evidence.params is None or guess.x is None or len(guess.x) != 1 or not finite(guess.x):
        return None
    shown = evidence.observed.get("head.bias")
    if shown is None or plan.loss not in ("cross_entropy", "squared"):
        return None
    with torch.no_grad():
        outputs = plan.net(evidence.params, guess.x.to(shown))[0]
    label = ((outputs.softmax(-1) if plan.by_softmax else outputs) - shown).double().cpu()
    return Mixture(guess.x[0].double(), label) if finite(label) else None


def common_example(
    mixtures: Sequence[Mixture], defense: Mixup, public: Data | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Return the most probable common example of mixtures, [1, *shape] float32 in the data range, and its class [1].

    All examples count as independent, with the mean of their class and one variance. Where a label shows one class, the
    likelier of its two reasons is taken for true, with the mean share where that is hidden.
    """
    x, labels = torch.stack([m.x for m in mixtures]), torch.stack([m.label for m in mixtures])
    own = int(labels.sum(0).argmax())
    rest = labels.index_fill(1, torch.tensor([own]), -torch.inf)
    hidden = (rest.amax(1) <= ONE_CLASS) & (defense.share_beyond(1 - ONE_CLASS) < 1 / labels.shape[1])
    share = torch.where(hidden, defense.mean_share, labels[:, own].clamp(ONE_CLASS, 1 - ONE_CLASS))
    centers = class_means(public, labels.shape[1]) if public is not None and len(public.x) else x.mean(0)
    centers = centers.expand(labels.shape[1], *x.shape[1:])
    first, second = centers[own], centers[torch.where(hidden, own, rest.argmax(1))]
    share = share.view(-1, *[1] * (x.dim() - 1))
    off = x - share * first - (1 - share) * second
    change = (share / (1 - share) ** 2 * off).sum(0) / (1 + (share / (1 - share)).square().sum(0))
    return (first + change)[None].clamp(*plan.data_range).float(), torch.tensor([own])


def class_means(data: Data, classes: int) -> Tensor:
    """Return the mean input [C, *shape] float64 of each class; that of all examples where a class has none."""
    x, y = data.x.double().cpu(), data.y.double().cpu()
    counts = y.sum(0).view(classes, *[1] * (x.dim() - 1))
    return torch.where(counts > 0, torch.tensordot(y.T, x, 1) / counts.clamp(min=1), x.mean(0))
