"""The attack that knows FedPC (Cao et al. 2022): pilots by simulated training, the others by the signs they tell."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.adaptive.fedpc_labels import Told, known_signs, slot_labels
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
from ppbench.attacks.adaptive.fedpc_signs import filtered
from ppbench.attacks.reconstruction.fedavg import FedAvgInversion, reach
from ppbench.attacks.reconstruction.rows import first_layer
from ppbench.attacks.reconstruction.search.starts import Victim
from ppbench.base.tree import Params
from ppbench.defenses.fedpc.protocol import FedPC
from ppbench.federation.bounds import NonNegativeInt
from ppbench.federation.evidence import Evidence, Mappable, simulation
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot

BOUND = "bound/"


@dataclass(frozen=True, eq=False)
class Gradients(Mappable):
    """Gradients of one batch at models "ROUND/NAME" in `params`, and by how much these times `gain` exceed "bound/"."""

    plan: Plan
    rounds: int
    gain: float

    def family(self) -> Hashable:
        """Return what determines the gradients beside the models."""
        return Gradients, self.plan, self.rounds, self.gain, len(self.params)

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return gradients g at all models, and |g| - bound / gain, by the names of `params`; x [U, B, *shape]."""
        found: Params = {}
        for number in range(self.rounds):
            prefix = f"{number}/"
            model = {n[len(prefix) :]: v for n, v in self.params.items() if n.startswith(prefix)}
            found |= _named(prefix, simulation(self.plan, model)(x, y))
        for name, bound in self.params.items():
            if name.startswith(BOUND):
                found[name] = found[name[len(BOUND) :]].abs() - bound / self.gain
        return found


def _named(prefix: str, tree: Params) -> Params:
    return {f"{prefix}{name}": value for name, value in tree.items()}


def ternary_evidence(slot: Slot, rounds: Sequence[Told], plan: Plan, gain: float | None = None) -> Evidence:
    """Return evidence from the signs of all rounds, and, if a change is `gain` times a gradient, from the bounds."""
    observed: Params = {}
    params: Params = {}
    for number, told in enumerate(rounds):
        prefix = f"{number}/"
        observed |= _named(prefix, told.signs)
        params |= _named(prefix, told.params)
        if gain is not None:
            sides = {n: torch.where(told.signs[n] != 0, 1.0, -1.0) * (b > 0) for n, b in told.bounds.items()}
            observed |= _named(BOUND + prefix, sides)
            params |= _named(BOUND + prefix, told.bounds)
    simulate = Gradients(params, plan, len(rounds), 1.0 if gain is None else gain)
    return Evidence((slot,), observed, simulate, channel="ternary", measure="hinge")


def gain_of(plan: Plan, secret: Secret, count: int) -> float | None:
    """Return what a client with these hyper-parameters multiplies a gradient of `count` images by; None under Adam."""
    if plan.local.opt.name == "adam":
        return None
    steps = secret.epochs * -(-count // secret.batch)
    return secret.rate * reach(plan.local.opt.momentum, steps)


@dataclass(frozen=True)
class AdaptiveFedPC(FedAvgInversion):
    """Inverts whatever a client sent: its model as pilot, else its ternaries.

    Where the network begins with a linear layer, batches come out in closed form, whatever the steps: of pilots by rank
    (`steps`), of the others, whose signs leave no rank, as coarse images of each class (`fedpc_signs`).

    Attributes:
        sign_budget: gradient evaluations a victim where only signs are known, as under Adam; more gain little.
    """

    budget: int = 1200
    restarts: int = 0
    sign_budget: NonNegativeInt = 150

    name: ClassVar[str] = "adaptive_fedpc"
    version: ClassVar[str] = "3"
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
        slots, first = [asked.unit[0] for asked in challenges], first_layer(plan)
        if first is not None and first.bias is not None and count > 1 and plan.local.opt.name == "sgd":
            named = [asked.y.argmax(-1).flatten().cpu() for asked in challenges if asked.y is not None]
            return [filtered(told[slot], first, y, plan, generator) for slot, y in zip(slots, named, strict=True)]

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
