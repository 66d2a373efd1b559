"""The attack aware of FedPC (Cao et al. 2022): pilots by simulated training, the others by the signs they send."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.adaptive.fedpc_labels import StepSigns, known_signs, slot_labels
from ppbench.attacks.adaptive.fedpc_pilot import (
    Hyperparameters,
    Trials,
    direction_evidence,
    linear_pilots,
    observed_pilots,
    pilot_evidence,
    public_hyperparameters,
    search_hyperparameters,
)
from ppbench.attacks.adaptive.fedpc_signs import images_from_signs
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
        """Return what determines the gradients, apart from the models."""
        return Gradients, self.plan, self.rounds, self.gain, len(self.params)

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return gradients g at all models, and |g| - bound / gain, by the names of `params`; x [U, B, *shape]."""
        simulated: Params = {}
        for number in range(self.rounds):
            prefix = f"{number}/"
            model = {n[len(prefix) :]: v for n, v in self.params.items() if n.startswith(prefix)}
            simulated |= _named(prefix, simulation(self.plan, model)(x, y))
        for name, bound in self.params.items():
            if name.startswith(BOUND):
                simulated[name] = simulated[name[len(BOUND) :]].abs() - bound / self.gain
        return simulated


def _named(prefix: str, tree: Params) -> Params:
    return {f"{prefix}{name}": value for name, value in tree.items()}


def ternary_evidence(slot: Slot, rounds: Sequence[StepSigns], plan: Plan, gain: float | None = None) -> Evidence:
    """Return evidence from the signs of all rounds and, if a change is `gain` times a gradient, from the bounds."""
    observed: Params = {}
    params: Params = {}
    for number, step in enumerate(rounds):
        prefix = f"{number}/"
        observed |= _named(prefix, step.signs)
        params |= _named(prefix, step.params)
        if gain is not None:
            sides = {n: torch.where(step.signs[n] != 0, 1.0, -1.0) * (b > 0) for n, b in step.bounds.items()}
            observed |= _named(BOUND + prefix, sides)
            params |= _named(BOUND + prefix, step.bounds)
    simulate = Gradients(params, plan, len(rounds), 1.0 if gain is None else gain)
    return Evidence((slot,), observed, simulate, channel="ternary", measure="hinge")


def gradient_gain(plan: Plan, secret: Hyperparameters, count: int) -> float | None:
    """Return the factor by which such a client multiplies a gradient of `count` images; None under Adam."""
    if plan.local.opt.name == "adam":
        return None
    steps = secret.epochs * -(-count // secret.batch)
    return secret.rate * reach(plan.local.opt.momentum, steps)


@dataclass(frozen=True)
class AdaptiveFedPC(FedAvgInversion):
    """Inverts what a client sent: a pilot's model, or else its ternaries.

    Where the network begins with a linear layer, batches are solved in closed form for any number of steps: pilots by
    rank (`steps`), the others, whose signs have no low rank, as one coarse image per class (`fedpc_signs`).

    Attributes:
        sign_budget: gradient evaluations per victim where only signs are known, as under Adam; more gain little.
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
        """Return evidence for any hyper-parameters: the direction of a pilot's update, the signs of the others."""
        if not isinstance(view.defense, FedPC):
            return super().evidence(view)
        pilots = observed_pilots(view)
        by_slot = known_signs(view, view.defense)
        signs = [ternary_evidence(slot, rounds, view.plan) for slot, rounds in by_slot.items() if slot not in pilots]
        return direction_evidence(list(pilots.values()), view.plan) + signs

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge; a start image where nothing can be read, as from masked ternaries."""
        if not isinstance(view.defense, FedPC):
            return super().run(view, challenges, generator)
        pilots, by_slot = observed_pilots(view), known_signs(view, view.defense)
        labels = slot_labels(view, view.defense, challenges, generator)
        labelled = [_with_labels(challenge, y, view.plan) for challenge, y in zip(challenges, labels, strict=True)]
        guesses = [_grey(challenge, view.plan, generator) for challenge in labelled]
        alone = [i for i, challenge in enumerate(challenges) if len(challenge.unit) == 1]
        sent = [i for i in alone if challenges[i].unit[0] in pilots]
        signed = [i for i in alone if challenges[i].unit[0] in by_slot and i not in sent]
        for rows, run, victims in ((sent, self._pilots, challenges), (signed, self._others, labelled)):
            answers = run(view, view.defense, [victims[i] for i in rows], generator) if rows else []
            for i, guess in zip(rows, answers, strict=True):
                guesses[i] = guess if guess.y is not None else replace(guesses[i], evaluations=guess.evaluations)
        return guesses

    def _pilots(
        self, view: View, defense: FedPC, challenges: Sequence[Challenge], generator: torch.Generator
    ) -> list[Guess]:
        plan, pilots, first = view.plan, observed_pilots(view), first_layer(view.plan)
        observed = [pilots[challenge.unit[0]] for challenge in challenges]
        if first is not None and first.bias is not None and plan.local.opt.name == "sgd":  # ratios give the input
            return linear_pilots(observed, plan, challenges, generator, self.budget)

        def suppose(rows: Sequence[int], secret: Hyperparameters) -> list[Evidence]:
            return pilot_evidence([observed[i] for i in rows], plan, secret)

        attack = replace(self, budget=self.sign_budget) if plan.local.opt.name == "adam" else self
        tries = public_hyperparameters(plan, defense, observed[0].round, challenges[0].batch)
        return search_hyperparameters(Trials(attack, plan, suppose, challenges, generator), tries)

    def _others(
        self, view: View, defense: FedPC, challenges: Sequence[Challenge], generator: torch.Generator
    ) -> list[Guess]:
        plan, by_slot, count = view.plan, known_signs(view, defense), challenges[0].batch
        slots, first = [challenge.unit[0] for challenge in challenges], first_layer(plan)
        if first is not None and first.bias is not None and count > 1 and plan.local.opt.name == "sgd":
            named = [challenge.y.argmax(-1).flatten().cpu() for challenge in challenges if challenge.y is not None]
            return [
                images_from_signs(by_slot[slot], first, y, plan, generator)
                for slot, y in zip(slots, named, strict=True)
            ]

        def suppose(rows: Sequence[int], secret: Hyperparameters) -> list[Evidence]:
            gain = gradient_gain(plan, secret, count)
            return [ternary_evidence(slots[i], by_slot[slots[i]], plan, gain) for i in rows]

        attack = replace(self, budget=self.sign_budget, restarts=0)
        tries = public_hyperparameters(plan, defense, by_slot[slots[0]][-1].round, count)
        return search_hyperparameters(Trials(attack, plan, suppose, challenges, generator), tries)


def _with_labels(challenge: Challenge, labels: Tensor, plan: Plan) -> Challenge:
    """Return the challenge with the labels that it grants, or else with `labels` [U * B]."""
    if challenge.y is not None:
        return challenge
    y = one_hot(labels, plan.spec.classes).float().unflatten(0, (len(challenge.unit), challenge.batch))
    return replace(challenge, y=y)


def _grey(challenge: Challenge, plan: Plan, generator: torch.Generator) -> Guess:
    """Return the guess of an attacker that knows labels only; reading them counts as one evaluation."""
    victim = Victim(None, challenge, plan, generator)
    labels = victim.labels("inferred")
    return Guess(x=victim.image("grey"), y=None if labels is None else labels.argmax(-1), evaluations=1)
