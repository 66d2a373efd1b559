"""Feature inversion: labels and features from the head's gradient, then images from the features and all gradients.

The features are exact for one image, and for batches of fewer images than classes. The cotangent of the loss at the
features is searched as an unknown: a trained network's is tiny and falls by orders of magnitude on the way to the
truth, which blinds attacks that simulate it. A secret part of it, as SPN's, does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.reconstruction.analytic import guessed_labels
from ppbench.attacks.reconstruction.features import (
    BACKBONE,
    Features,
    RecoveredImages,
    backbone_objective,
    head_cotangents,
    invert_features,
    match_backbone,
    recover_features,
)
from ppbench.attacks.reconstruction.search import starts
from ppbench.base.tree import Params, finite, tree_map
from ppbench.federation.bounds import InMemoryCount, NonNegative, Positive, PositiveInt
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.nets.classifier import HEAD_NAMES


@dataclass(frozen=True)
class FeatureVictim:
    """One challenge that can be attacked: its place, public weights, gradient (float32), its precision, features."""

    place: int
    params: Params
    observed: Params
    weight: Params | None
    features: Features


@dataclass(frozen=True)
class FeatureInversion(Attack):
    """Labels, exact features, feature inversion, then the backbone's gradient with a free cotangent.

    Attributes:
        restarts: starts of the batch feature solver besides the plain one.
        inversion_budget: gradient evaluations per image for its search from the features alone.
        inversion_tv: weight of the total variation there.
        joint_budget: gradient evaluations per victim with the backbone's gradient; 0 skips that joint stage.
        joint_tv: weight of the total variation there for batches, relative to the pull of the observation at its start;
            one example needs none.
        joint_stop: objective at which a victim is done (about 50 dB on CIFAR-10 and DLNet).
        consistency: weight of the known features there.
        accept: largest final objective at which the joint stage counts as an explanation of the observation; above
            it (noise, a pruned gradient) the image from the features alone is the guess.
    """

    restarts: InMemoryCount = 30
    inversion_budget: PositiveInt = 400
    inversion_tv: NonNegative = 0.003
    joint_budget: PositiveInt = 2500
    joint_tv: NonNegative = 0.03
    joint_stop: Positive = 1e-8
    consistency: NonNegative = 10.0
    accept: NonNegative = 0.1

    name: ClassVar[str] = "feature_inversion"
    separates_by: ClassVar[Literal["any", "classes", "softmax"]] = "softmax"
    kind: ClassVar[Kind] = "reconstruction"
    reference: ClassVar[str] = "this project; features as in Phong et al. 2018 and Geiping et al. 2020"

    def suits(self, plan: Plan) -> bool:
        """Return whether the head has a weight and a bias, both trained: features are read off both."""
        return super().suits(plan) and set(HEAD_NAMES) <= set(plan.net.names)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return reconstructions [U * B, *shape] and labels [U * B], aligned, per challenge.

        The confidence is the attacker's own final objective (relative squared mismatch of backbone gradient and
        features), or the head's mismatch alone if the joint stage did not run. A challenge without a usable
        observation (none, not finite, zero) gets grey images and drawn labels.
        """
        by_unit = {evidence.unit: evidence for evidence in view.defense.evidence(view)}
        guesses: list[Guess] = []
        groups: list[list[FeatureVictim]] = []
        for place, challenge in enumerate(challenges):
            evidence = by_unit.get(challenge.unit)
            labels = guessed_labels(starts.PosedVictim(evidence, challenge, view.plan, generator)).cpu()
            grey = sum(view.plan.data_range) / 2
            guesses.append(Guess(x=torch.full((len(labels), *view.plan.spec.shape), grey), y=labels))
            victim = self._victim(place, evidence, labels, generator)
            if victim is not None:
                members = next((group for group in groups if _alike(group[0], victim)), [])
                if not members:
                    groups.append(members)
                members.append(victim)
        for victims in groups:
            for victim, guess in zip(victims, self._guess(view.plan, victims, generator), strict=True):
                guesses[victim.place] = guess
        return guesses

    def _victim(
        self, place: int, evidence: Evidence | None, labels: Tensor, generator: torch.Generator
    ) -> FeatureVictim | None:
        """Return the victim with the features read off the head; None if these are zero, not finite or unobserved."""
        if evidence is None or evidence.params is None or not evidence.observed.keys() >= set(HEAD_NAMES):
            return None
        seen = tree_map(lambda t: t.detach().float(), evidence.observed)
        if not finite(seen):
            return None
        params, (dw, db) = tree_map(lambda t: t.detach().cpu(), evidence.params), (seen[n].cpu() for n in HEAD_NAMES)
        features = recover_features(params, dw, db, labels, generator, restarts=self.restarts)
        norms = features.value.norm(dim=1)
        if not bool(norms.isfinite().all() & (norms > 0).all()):
            return None
        return FeatureVictim(place, evidence.params, seen, evidence.weight, features)

    def _guess(self, plan: Plan, victims: Sequence[FeatureVictim], generator: torch.Generator) -> list[Guess]:
        """Return the guesses for victims that are `_alike`."""
        params = tree_map(lambda t: t.detach().float(), victims[0].params)
        phi = torch.stack([victim.features.value for victim in victims]).to(params["head.weight"])
        first = invert_features(
            plan, params, phi, generator, budget=self.inversion_budget, smoothness=self.inversion_tv
        )
        second = None
        trained = any(name.startswith(BACKBONE) for name in victims[0].observed)  # else it is frozen
        if self.joint_budget > 0 and victims[0].features.exact and trained:
            weights = [tree_map(lambda t: t.detach(), victim.weight) for victim in victims if victim.weight] or None
            observed = [victim.observed for victim in victims]
            objective = backbone_objective(plan, params, observed, phi, weights=weights, consistency=self.consistency)
            cotangents = head_cotangents(
                params, phi, torch.stack([victim.features.labels for victim in victims]).to(phi.device)
            )
            smoothness = self.joint_tv if phi.shape[1] > 1 else 0.0
            second = match_backbone(
                objective, first.x, cotangents, budget=self.joint_budget, stop=self.joint_stop, smoothness=smoothness
            )
        return [_choose(victim, v, first, second, self.accept) for v, victim in enumerate(victims)]


def _alike(a: FeatureVictim, b: FeatureVictim) -> bool:
    """Return whether victims can share evaluations: equal weights (each probe has a copy), batch size, known values."""
    known = [(len(v.features.labels), v.features.exact, v.weight is None) for v in (a, b)]
    same = a.params is b.params or all(torch.equal(value, b.params[name]) for name, value in a.params.items())
    return same and known[0] == known[1]


def _choose(
    victim: FeatureVictim, v: int, first: RecoveredImages, second: RecoveredImages | None, accept: float
) -> Guess:
    """Return the joint stage's image if its own objective is at most `accept`, else the first stage's."""
    spent, labels = int(first.evaluations[v]), victim.features.labels
    if second is None:
        return Guess(x=first.x[v], y=labels, confidence=victim.features.residual, evaluations=spent)
    spent += int(second.evaluations[v])
    loss = float(second.loss[v])
    x = second.x[v] if loss <= accept else first.x[v]
    return Guess(x=x, y=labels, confidence=loss if math.isfinite(loss) else None, evaluations=spent)
