"""What FedPC's pilot reveals: its whole update P - Q, up to hyper-parameters that come from public menus.

The paper (Cao et al. 2022, Theorem 2) argues that nobody can solve for data while learning rate, batch size and epochs
are secret. Here all choices are tried: the pilot's training is simulated with each, and the one that explains the
update is usually the true one.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.reconstruction.analytic import AnalyticInversion
from ppbench.attacks.reconstruction.dlg import NEAR_STOP
from ppbench.attacks.reconstruction.fedavg import FedAvgInversion, LocalTraining, signed
from ppbench.attacks.reconstruction.search.starts import posed
from ppbench.attacks.reconstruction.steps import by_rank
from ppbench.base.tree import Params
from ppbench.defenses.fedpc.evidence import command_answers, round_model
from ppbench.defenses.fedpc.messages import Weights
from ppbench.defenses.fedpc.protocol import FedPC
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot

TRIAL_SHARE = 0.5
"""Share of the budget for trying all hyper-parameters; the rest is for the best ones."""


@dataclass(frozen=True)
class Hyperparameters:
    """Hyper-parameters that a pilot may have. rate: learning rate; epochs, batch: whole numbers."""

    rate: float
    epochs: int
    batch: int


@dataclass(frozen=True)
class ObservedPilot:
    """One pilot's upload. change: P - Q; params: P."""

    slot: Slot
    round: int
    change: Params
    params: Params


def observed_pilots(view: View) -> dict[Slot, ObservedPilot]:
    """Return each slot's first upload of a model, with one object for equal broadcasts."""
    pilots: dict[Slot, ObservedPilot] = {}
    models: list[Params] = []
    for exchange in command_answers(view):
        slot, last = exchange.slot, round_model(view, exchange.slot.probe, exchange.round)
        if isinstance(exchange.answer, Weights) and slot not in pilots and last is not None:
            same = (m for m in models if all(torch.equal(m[name], value) for name, value in last.items()))
            params = next(same, last)
            models.append(params)
            pilots[slot] = ObservedPilot(slot, exchange.round, view.defense.decode(exchange.answer, params), params)
    return pilots


def public_hyperparameters(plan: Plan, defense: FedPC, round_: int, count: int) -> list[Hyperparameters]:
    """Return all choices from the public menus that differ in effect on `count` images; one under Adam."""
    base, local = plan.local.opt.rate(round_), plan.local.upload == "delta"
    if plan.local.opt.name == "adam":
        return [Hyperparameters(base, 1, count)]
    epochs = [int(e) for e in defense.menu("epochs")] if local else [1]
    sizes = [min(int(b), count) for b in defense.menu("batch_sizes")]
    every = (Hyperparameters(base * r, e, b) for e, r, b in itertools.product(epochs, defense.menu("rates"), sizes))
    return list(dict.fromkeys(every))


def pilot_evidence(pilots: Sequence[ObservedPilot], plan: Plan, secret: Hyperparameters) -> list[Evidence]:
    """Return evidence under the assumption that pilots used `secret`: local training, or its first step's signs."""
    local = replace(plan.local, upload="delta", epochs=secret.epochs, batch=secret.batch)
    divisor, trained, evidence = secret.rate * secret.epochs, replace(plan, local=local), []
    known: dict[int, LocalTraining] = {}
    for pilot in pilots:
        observed = {name: value / divisor for name, value in pilot.change.items()}
        once = simulation(plan, pilot.params)
        simulate = known.setdefault(id(pilot.params), LocalTraining(pilot.params, trained, once, secret.rate, divisor))
        evidence.append(Evidence((pilot.slot,), observed, simulate, channel="pilot"))
    if plan.local.opt.name == "adam":
        return signed([replace(e, params=o.params) for e, o in zip(evidence, pilots, strict=True)], plan)
    return evidence


def direction_evidence(pilots: Sequence[ObservedPilot], plan: Plan) -> list[Evidence]:
    """Return evidence for any learning rate: the update's direction, as one gradient's; under Adam its signs."""
    if plan.local.opt.name == "adam":
        return pilot_evidence(pilots, plan, Hyperparameters(plan.local.opt.lr, 1, 2**31))
    return [
        Evidence((o.slot,), o.change, simulation(plan, o.params), measure="cosine", channel="pilot") for o in pilots
    ]


@dataclass
class Trials:
    """The search over hyper-parameters for all clients of a view, with the options of `attack`.

    suppose: returns evidence about the clients in given places under the assumption of given hyper-parameters; best:
    by client, the best guess so far with its mismatch and hyper-parameters; spent: evaluations by client.
    """

    attack: FedAvgInversion
    plan: Plan
    suppose: Callable[[Sequence[int], Hyperparameters], Sequence[Evidence]]
    challenges: Sequence[Challenge]
    generator: torch.Generator
    best: dict[int, tuple[float, Hyperparameters, Guess]] = field(default_factory=dict)
    spent: Counter[int] = field(default_factory=Counter)

    def attempt(self, rows: Sequence[int], secret: Hyperparameters, budget: int) -> None:
        """Attack the clients `rows` as if `secret` were theirs, with `budget` evaluations each."""
        inner, challenges = replace(self.attack, budget=max(1, budget)), [self.challenges[i] for i in rows]
        guesses = inner.answer(self.suppose(rows, secret), self.plan, challenges, self.generator)
        for i, guess in zip(rows, guesses, strict=True):
            self.spent[i] += guess.evaluations
            mismatch = math.inf if guess.confidence is None else guess.confidence
            if i not in self.best or mismatch < self.best[i][0]:
                self.best[i] = (mismatch, secret, guess)

    def unexplained(self) -> list[int]:
        """Return the clients whose update no guess explains yet and that have evaluations left."""
        done = NEAR_STOP * self.attack.stop
        every = range(len(self.challenges))
        return [
            i for i in every if self.spent[i] < self.attack.budget and (i not in self.best or self.best[i][0] > done)
        ]


def search_hyperparameters(trials: Trials, tries: Sequence[Hyperparameters]) -> list[Guess]:
    """Return one guess per client: all `tries` with `TRIAL_SHARE` of the budget, then the best one with the rest."""
    budget = trials.attack.budget
    for secret in tries:
        if rows := trials.unexplained():
            trials.attempt(rows, secret, int(TRIAL_SHARE * budget) // len(tries) if len(tries) > 1 else budget)
    left = trials.unexplained()
    for secret in dict.fromkeys(trials.best[i][1] for i in left):
        rows = [i for i in left if trials.best[i][1] == secret]
        trials.attempt(rows, secret, min(budget - trials.spent[i] for i in rows))
    return [replace(trials.best[i][2], evaluations=trials.spent[i]) for i in range(len(trials.challenges))]


def linear_pilots(
    pilots: Sequence[ObservedPilot],
    plan: Plan,
    challenges: Sequence[Challenge],
    generator: torch.Generator,
    budget: int,
) -> list[Guess]:
    """Return guesses where the first layer is linear with biases: ratios of changes, in which learning rates cancel.

    A batch's images are in the span of the rows after any number of steps (`steps`): Theorem 2's system of equations
    is nonlinear in the secret hyper-parameters, but linear in the images.
    """
    nominal = pilot_evidence(pilots, plan, Hyperparameters(plan.local.opt.rate(pilots[0].round), 1, 2**31))
    gradients = [e.simulate.as_gradient(e, 1) for e in nominal if isinstance(e.simulate, LocalTraining)]
    ranked = [by_rank(victim, victim.evidence) for victim in posed(gradients, plan, challenges, generator)]
    plain = AnalyticInversion(budget=budget).answer(gradients, plan, challenges, generator)
    return [other if guess is None else guess for guess, other in zip(ranked, plain, strict=True)]
