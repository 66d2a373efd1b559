"""The attack that knows FedPC (Cao et al. 2022): pilots by simulated training, the others by the signs they tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge, Guess
from ppbench.adversary.evidence import Evidence
from ppbench.adversary.view import View
from ppbench.attacks.adaptive.fedpc_labels import slot_labels
from ppbench.attacks.adaptive.fedpc_pilot import (
    Given,
    Trials,
    direction_evidence,
    invert_pilots,
    linear_pilots,
    observed_pilots,
    secrets,
)
from ppbench.attacks.adaptive.fedpc_ternary import ternary_evidence
from ppbench.attacks.reconstruction.fedavg import FedAvgInversion
from ppbench.attacks.reconstruction.rows import first_layer
from ppbench.defenses.fedpc import FedPC
from ppbench.federation.plan import Plan


@dataclass(frozen=True)
class AdaptiveFedPC(FedAvgInversion):
    """Inverts whatever a client sent: its model as pilot, else its ternaries.

    Attributes:
        sign_budget: gradient evaluations a victim where only signs are known, as under Adam; more gain little.
    """

    budget: int = 1200
    sign_budget: int = 150

    name: ClassVar[str] = "adaptive_fedpc"
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
        signs = [e for slot, e in ternary_evidence(view).items() if slot not in pilots]
        return direction_evidence(list(pilots.values()), view.plan) + signs

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge; a start image where nothing can be read, as of masked ternaries."""
        if not isinstance(view.defense, FedPC):
            return super().run(view, challenges, generator)
        self.check()
        pilots, guesses = observed_pilots(view), dict[int, Guess]()
        first = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))
        sent = [i for i, asked in enumerate(challenges) if asked.unit[0] in pilots and len(asked.unit) == 1]
        if sent:
            asked = [challenges[i] for i in sent]
            attack = replace(self, budget=self.sign_budget) if view.plan.local.opt.name == "adam" else self
            trials = Trials(attack, view, [pilots[c.unit[0]] for c in asked], asked, first)
            guesses |= dict(zip(sent, self._pilots(trials, view.defense), strict=True))
        others = [i for i in range(len(challenges)) if i not in guesses]
        guesses |= dict(zip(others, self._others(view, [challenges[i] for i in others], generator), strict=True))
        return [guesses[i] for i in range(len(challenges))]

    def _pilots(self, trials: Trials, defense: FedPC) -> list[Guess]:
        if linear(trials.view.plan):
            return linear_pilots(trials)
        round_, batch = trials.found[0].round, trials.challenges[0].batch
        return invert_pilots(trials, secrets(trials.view.plan, defense, round_, batch))

    def _others(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        labels = slot_labels(view, challenges, generator)
        known = [
            c if c.y is not None else replace(c, y=one_hot(y, view.plan.spec.classes)[None].float())
            for c, y in zip(challenges, labels, strict=True)
        ]
        found = tuple(ternary_evidence(view).values())
        inner = Given(budget=self.sign_budget, restarts=0, tv=self.tv, found=found)
        guesses = inner.run(view, known, generator)
        spent = [max(1, g.evaluations) for g in guesses]  # reading the labels counts as one
        named = [c.y.flatten(0, 1).argmax(-1) for c in known if c.y is not None]
        return [replace(g, y=y, evaluations=n) for g, y, n in zip(guesses, named, spent, strict=True)]


def linear(plan: Plan) -> bool:
    """Return whether the network begins with a linear layer with biases, trained by SGD: then ratios tell the input."""
    first = first_layer(plan)
    return first is not None and first.bias is not None and plan.local.opt.name == "sgd"
