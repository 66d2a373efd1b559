"""What FedPC's pilot gives away: its whole update P - Q, up to hyper-parameters that come from public menus.

The paper (Cao et al. 2022, Theorem 2) argues that nobody can solve for data while learning rate, batch size and epochs
are secret. They are tried one by one here: each makes another simulation of the pilot's training, and the one that
explains the update is, as a rule, the true one.
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
from ppbench.attacks.reconstruction.dlg import NEAR
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

SHARE = 0.5
"""Of the budget, for trying all hyper-parameters; the rest is for the best ones."""


@dataclass(frozen=True)
class Secret:
    """Hyper-parameters that a pilot may have. rate: learning rate; epochs, batch: whole numbers."""

    rate: float
    epochs: int
    batch: int


@dataclass(frozen=True)
class Observed:
    """One pilot's upload. change: P - Q; params: P."""

    slot: Slot
    round: int
    change: Params
    params: Params


def observed_pilots(view: View) -> dict[Slot, Observed]:
    """Return each slot's first upload of a model, with one object for equal broadcasts."""
    found: dict[Slot, Observed] = {}
    models: list[Params] = []
    for exchange in command_answers(view):
        slot, last = exchange.slot, round_model(view, exchange.slot.probe, exchange.round)
        if isinstance(exchange.answer, Weights) and slot not in found and last is not None:
            same = (m for m in models if all(torch.equal(m[name], value) for name, value in last.items()))
            params = next(same, last)
            models.append(params)
            found[slot] = Observed(slot, exchange.round, view.defense.decode(exchange.answer, params), params)
    return found


def secrets(plan: Plan, defense: FedPC, round_: int, count: int) -> list[Secret]:
    """Return the public menus' hyper-parameters that differ in effect on `count` images; one under Adam."""
    base, local = plan.local.opt.rate(round_), plan.local.upload == "delta"
    if plan.local.opt.name == "adam":
        return [Secret(base, 1, count)]
    epochs = [int(e) for e in defense.menu("epochs")] if local else [1]
    sizes = [min(int(b), count) for b in defense.menu("batch_sizes")]
    every = (Secret(base * r, e, b) for e, r, b in itertools.product(epochs, defense.menu("rates"), sizes))
    return list(dict.fromkeys(every))


def pilot_evidence(found: Sequence[Observed], plan: Plan, secret: Secret) -> list[Evidence]:
    """Return evidence of an attacker who supposes these hyper-parameters: local training, or its first step's signs."""
    local = replace(plan.local, upload="delta", epochs=secret.epochs, batch=secret.batch)
    divisor, trained, evidence = secret.rate * secret.epochs, replace(plan, local=local), []
    known: dict[int, LocalTraining] = {}
    for one in found:
        observed = {name: value / divisor for name, value in one.change.items()}
        once = simulation(plan, one.params)
        simulate = known.setdefault(id(one.params), LocalTraining(one.params, trained, once, secret.rate, divisor))
        evidence.append(Evidence((one.slot,), observed, simulate, channel="pilot"))
    if plan.local.opt.name == "adam":
        return signed([replace(e, params=o.params) for e, o in zip(evidence, found, strict=True)], plan)
    return evidence


def direction_evidence(found: Sequence[Observed], plan: Plan) -> list[Evidence]:
    """Return evidence that holds whatever the learning rate: the update's direction, as one gradient's; Adam: signs."""
    if plan.local.opt.name == "adam":
        return pilot_evidence(found, plan, Secret(plan.local.opt.lr, 1, 2**31))
    return [Evidence((o.slot,), o.change, simulation(plan, o.params), measure="cosine", channel="pilot") for o in found]


@dataclass
class Trials:
    """The search of a view's clients over hyper-parameters, with the options of `attack`.

    suppose: evidence about the clients of given places, supposed that given hyper-parameters are theirs; best: each
    client's surest guess so far, with its mismatch and hyper-parameters; spent: evaluations.
    """

    attack: FedAvgInversion
    plan: Plan
    suppose: Callable[[Sequence[int], Secret], Sequence[Evidence]]
    challenges: Sequence[Challenge]
    generator: torch.Generator
    best: dict[int, tuple[float, Secret, Guess]] = field(default_factory=dict)
    spent: Counter[int] = field(default_factory=Counter)

    def attempt(self, rows: Sequence[int], secret: Secret, budget: int) -> None:
        """Attack the clients `rows` as if `secret` were theirs, with `budget` evaluations each."""
        inner, asked = replace(self.attack, budget=max(1, budget)), [self.challenges[i] for i in rows]
        guesses = inner.answer(self.suppose(rows, secret), self.plan, asked, self.generator)
        for i, guess in zip(rows, guesses, strict=True):
            self.spent[i] += guess.evaluations
            mismatch = math.inf if guess.confidence is None else guess.confidence
            if i not in self.best or mismatch < self.best[i][0]:
                self.best[i] = (mismatch, secret, guess)

    def unexplained(self) -> list[int]:
        """Return the clients whose update no guess explains yet, and who have evaluations left."""
        done = NEAR * self.attack.stop
        every = range(len(self.challenges))
        return [
            i for i in every if self.spent[i] < self.attack.budget and (i not in self.best or self.best[i][0] > done)
        ]


def invert(trials: Trials, tries: Sequence[Secret]) -> list[Guess]:
    """Return one guess a client: all `tries` with `SHARE` of the budget, then each one's best with the rest."""
    budget = trials.attack.budget
    for secret in tries:
        if rows := trials.unexplained():
            trials.attempt(rows, secret, int(SHARE * budget) // len(tries) if len(tries) > 1 else budget)
    left = trials.unexplained()
    for secret in dict.fromkeys(trials.best[i][1] for i in left):
        rows = [i for i in left if trials.best[i][1] == secret]
        trials.attempt(rows, secret, min(budget - trials.spent[i] for i in rows))
    return [replace(trials.best[i][2], evaluations=trials.spent[i]) for i in range(len(trials.challenges))]


def linear_pilots(
    found: Sequence[Observed], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator, budget: int
) -> list[Guess]:
    """Return guesses where the first layer is linear with biases: ratios of changes, free of learning rates.

    A batch's images are in the span of the rows, however many steps were taken (`steps`): Theorem 2's system of
    equations is non-linear in what is secret of the training, and linear in the images.
    """
    nominal = pilot_evidence(found, plan, Secret(plan.local.opt.rate(found[0].round), 1, 2**31))
    gradients = [e.simulate.as_gradient(e, 1) for e in nominal if isinstance(e.simulate, LocalTraining)]
    told = [by_rank(victim, victim.evidence) for victim in posed(gradients, plan, challenges, generator)]
    plain = AnalyticInversion(budget=budget).answer(gradients, plan, challenges, generator)
    return [other if guess is None else guess for guess, other in zip(told, plain, strict=True)]
