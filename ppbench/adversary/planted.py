"""Planted secrets: each canary that holds one, among other canaries that differ in the secret alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.adversary.victims import Candidates, tensors_digest
from ppbench.base.seeds import Seeds
from ppbench.federation.plan import Plan
from ppbench.metrics.modality import modality_in

SECRET_FORMS = 256
"""Forms of a canary that an attack ranks, its own among them: an exposure is at most log2 of it, 8 bits."""


@dataclass(frozen=True, eq=False)
class PlantedSecret:
    """A canary among forms of it.

    index: its number among the candidates. forms: [V, *shape], which differ in the secret alone; all secrets are drawn
    alike, so that only training on the canary tells its own. labels: [V, C] targets. place: of the canary's own form.
    member: whether it was trained on.
    """

    index: int
    forms: Tensor
    labels: Tensor
    place: int
    member: bool

    def challenge(self) -> Challenge:
        """Return the challenge which form was planted."""
        return Challenge((), 1, x=self.forms.clone(), labels=self.labels.clone())


def planted_secrets(candidates: Candidates, plan: Plan, seeds: Seeds) -> list[PlantedSecret]:
    """Return the canaries among `candidates` that hold a secret, [] where the plan's kind of data has none."""
    modality, generator = modality_in(plan), seeds.generator("secrets")
    chosen = [i for i, family in enumerate(candidates.family) if family and family == modality.secret_family]
    planted = []
    for index in chosen:
        x = candidates.x[index]
        forms = modality.redrawn(x.expand(SECRET_FORMS, *x.shape), plan, generator).clone()
        place = int(torch.randint(SECRET_FORMS, (), generator=generator))
        forms[place] = x
        if bool((forms == x).all()):
            continue  # it holds no secret
        labels = forms if plan.next_token else candidates.labels[index].expand(SECRET_FORMS, -1)
        planted.append(PlantedSecret(index, forms, labels, place, bool(candidates.member[index])))
    return planted


def secrets_digest(planted: Sequence[PlantedSecret]) -> str:
    """Return the hash of all planted secrets with the truth, in order."""
    truth = [(secret.index, secret.place, secret.member) for secret in planted]
    return tensors_digest(*(secret.forms for secret in planted), about=str(truth))
