"""The attack that knows FedPC (Cao et al. 2022): pilots by simulated training, the others by the signs they tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.adaptive.fedpc_labels import known_signs, slot_labels
from ppbench.attacks.adaptive.fedpc_pilot import (
    Secret,
    Trials,
    direction_evidence,
    invert,
    linear_pilots,
    observed_pilots,
    pilot_evidence,
    secrets,
)
from ppbench.attacks.adaptive.fedpc_ternary import gain_of, ternary_evidence
from ppbench.attacks.reconstruction.fedavg import FedAvgInversion
from ppbench.attacks.reconstruction.rows import first_layer
from ppbench.attacks.reconstruction.search.starts import Victim
from ppbench.defenses.fedpc.protocol import FedPC
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View


@dataclass(frozen=True)
class AdaptiveFedPC(FedAvgInversion):
    """Inverts whatever a client sent: its model as pilot, else its ternaries.

    Attributes:
        sign_budget: gradient evaluations a victim where only signs are known, as under Adam; more gain little.
    """

    budget: int = 1200
    restarts: int = 0
    sign_budget: int = 150

    name: ClassVar[str] = "adaptive_fedpc"
    version: ClassVar[str] = "2"
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"fedpc"})
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "collusion/1")
    reference: ClassVar[str] = "this project; local training simulated as in Geiping et al. 2020"

    def suits(self, plan: Plan) -> bool:
        """Return whether targets are classes of whole images."""
        return plan.spec.classes > 1 and super().suits(plan)

    def evidence(self, view: View) -> list[Evidence]:
        """Return, of FedPC, what holds whatever the hyper-parameters: a pilot's direction, or signs of the others."""
        if not isinstance(view.defense, FedPC):
            return super().evidence(view)
        pilots = observed_pilots(view)
        told = known_signs(view, view.defense)
        signs = [ternary_evidence(slot, rounds, view.plan) for slot, rounds in told.items() if slot not in pilots]
        return direction_evidence(list(pilots.values()), view.plan) + signs

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge; a start image where nothing can be read, as of masked ternaries."""
        if not isinstance(view.defense, FedPC):
            return super().run(view, challenges, generator)
        pilots, told = observed_pilots(view), known_signs(view, view.defense)
        labels = slot_labels(view, view.defense, challenges, generator)
        named = [_with_labels(asked, y, view.plan) for asked, y in zip(challenges, labels, strict=True)]
        guesses = [_grey(asked, view.plan, generator) for asked in named]
        alone = [i for i, asked in enumerate(challenges) if len(asked.unit) == 1]
        sent = [i for i in alone if challenges[i].unit[0] in pilots]
        signed = [i for i in alone if challenges[i].unit[0] in told and i not in sent]
        for rows, run, asked in ((sent, self._pilots, challenges), (signed, self._others, named)):
            found = run(view, view.defense, [asked[i] for i in rows], generator) if rows else []
            for i, guess in zip(rows, found, strict=True):
                guesses[i] = guess if guess.y is not None else replace(guesses[i], evaluations=guess.evaluations)
        return guesses

    def _pilots(
        self, view: View, defense: FedPC, challenges: Sequence[Challenge], generator: torch.Generator
    ) -> list[Guess]:
        plan, pilots, first = view.plan, observed_pilots(view), first_layer(view.plan)
        found = [pilots[asked.unit[0]] for asked in challenges]
        if first is not None and first.bias is not None and plan.local.opt.name == "sgd":  # ratios tell the input
            return linear_pilots(found, plan, challenges, generator, self.budget)

        def suppose(rows: Sequence[int], secret: Secret) -> list[Evidence]:
            return pilot_evidence([found[i] for i in rows], plan, secret)

        attack = replace(self, budget=self.sign_budget) if plan.local.opt.name == "adam" else self
        tries = secrets(plan, defense, found[0].round, challenges[0].batch)
        return invert(Trials(attack, plan, suppose, challenges, generator), tries)

    def _others(
        self, view: View, defense: FedPC, challenges: Sequence[Challenge], generator: torch.Generator
    ) -> list[Guess]:
        plan, told, count = view.plan, known_signs(view, defense), challenges[0].batch
        slots = [asked.unit[0] for asked in challenges]

        def suppose(rows: Sequence[int], secret: Secret) -> list[Evidence]:
            gain = gain_of(plan, secret, count)
            return [ternary_evidence(slots[i], told[slots[i]], plan, gain) for i in rows]

        attack = replace(self, budget=self.sign_budget, restarts=0)
        tries = secrets(plan, defense, told[slots[0]][-1].round, count)
        return invert(Trials(attack, plan, suppose, challenges, generator), tries)


def _with_labels(asked: Challenge, labels: Tensor, plan: Plan) -> Challenge:
    """Return the challenge with the labels [U * B] that it grants, or else these."""
    if asked.y is not None:
        return asked
    y = one_hot(labels, plan.spec.classes).float().unflatten(0, (len(asked.unit), asked.batch))
    return replace(asked, y=y)


def _grey(asked: Challenge, plan: Plan, generator: torch.Generator) -> Guess:
    """Return the guess of an attacker who knows labels only; reading them counts as one evaluation."""
    victim = Victim(None, asked, plan, generator)
    labels = victim.labels("inferred")
    return Guess(x=victim.image("grey"), y=None if labels is None else labels.argmax(-1), evaluations=1)
