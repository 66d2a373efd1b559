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
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import torch

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.adaptive.inversion import Algebra
from ppbench.attacks.reconstruction.dlg import NEAR
from ppbench.attacks.reconstruction.fedavg import FedAvgInversion
from ppbench.attacks.reconstruction.local_steps import LocalTraining, signed
from ppbench.base.tree import Params
from ppbench.defenses.fedpc.evidence import model_of, uploads
from ppbench.defenses.fedpc.messages import Weights
from ppbench.defenses.fedpc.protocol import FedPC
from ppbench.federation.evidence import Evidence, simulation
from ppbench.federation.plan import Plan
from ppbench.federation.view import Exchange, View
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


@dataclass(frozen=True)
class Given(FedAvgInversion):
    """FedAvg inversion of given evidence."""

    found: tuple[Evidence, ...] = ()
    name: ClassVar[str] = "adaptive_fedpc"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the given evidence."""
        return list(self.found)


def observed_pilots(view: View) -> dict[Slot, Observed]:
    """Return each slot's first upload of a model, with one object for equal broadcasts."""
    found: dict[Slot, Observed] = {}
    models: list[Params] = []
    for exchange in uploads(view):
        last = model_of(view, exchange.slot.probe, exchange.round)
        if isinstance(exchange.answer, Weights) and exchange.slot not in found and last is not None:
            found[exchange.slot] = _observed(view, exchange, shared(models, last))
    return found


def _observed(view: View, exchange: Exchange, params: Params) -> Observed:
    return Observed(exchange.slot, exchange.round, view.defense.decode(exchange.answer, params), params)


def shared(known: list[Params], params: Params) -> Params:
    """Return the member of `known` that equals `params`, which joins them if there is none."""
    same = next((k for k in known if all(torch.equal(k[name], value) for name, value in params.items())), None)
    if same is None:
        known.append(params)
    return params if same is None else same


def secrets(plan: Plan, defense: FedPC, round_: int, count: int) -> list[Secret]:
    """Return the hyper-parameters of the public menus that differ in effect on `count` images.

    A client that uploads after one gradient (a gradient plan) takes one step, whatever its epochs.
    """
    base, local = plan.local.opt.rate(round_), plan.local.upload == "delta"
    epochs = [int(e) for e in defense.menu("epochs")] if local else [1]
    sizes = [min(int(b), count) for b in defense.menu("batch_sizes")]
    if plan.local.opt.name == "adam":  # only the signs of the change are matched
        return [Secret(base, 1, count)]
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
    """Return evidence that holds whatever the learning rate: the direction of the update, taken for one gradient's.

    Under Adam, its signs.
    """
    if plan.local.opt.name == "adam":
        return pilot_evidence(found, plan, Secret(plan.local.opt.lr, 1, 2**31))
    return [Evidence((o.slot,), o.change, simulation(plan, o.params), measure="cosine", channel="pilot") for o in found]


@dataclass
class Trials:
    """The search of a view's clients over hyper-parameters.

    Attributes:
        attack: options of the search.
        view: gives the plan.
        suppose: evidence about the clients of given places, supposed that given hyper-parameters are theirs.
        challenges: what is asked, by place.
        generator: source of starts.
        best: each client's surest guess so far, with its mismatch and hyper-parameters.
        spent: evaluations.
    """

    attack: FedAvgInversion
    view: View
    suppose: Callable[[Sequence[int], Secret], Sequence[Evidence]]
    challenges: Sequence[Challenge]
    generator: torch.Generator
    best: dict[int, tuple[float, Secret, Guess]] = field(default_factory=dict)
    spent: Counter[int] = field(default_factory=Counter)

    def attempt(self, rows: Sequence[int], secret: Secret, budget: int) -> None:
        """Attack the clients `rows` as if `secret` were theirs, with `budget` evaluations each."""
        evidence = self.suppose(rows, secret)
        options = {f.name: getattr(self.attack, f.name) for f in fields(FedAvgInversion)}
        inner = Given(**{**options, "budget": max(1, budget), "found": tuple(evidence)})
        guesses = inner.run(self.view, [self.challenges[i] for i in rows], self.generator)
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

    def guesses(self) -> list[Guess]:
        """Return the surest guesses, with all evaluations spent."""
        return [replace(self.best[i][2], evaluations=self.spent[i]) for i in range(len(self.challenges))]


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
    return trials.guesses()


def linear_pilots(
    found: Sequence[Observed], view: View, challenges: Sequence[Challenge], generator: torch.Generator, budget: int
) -> list[Guess]:
    """Return guesses where the first layer is linear with biases: the ratio of changes, free of learning rates.

    For one example it is the image after any number of steps of SGD, since the input of that layer never moves.
    """
    nominal = pilot_evidence(found, view.plan, Secret(view.plan.local.opt.rate(found[0].round), 1, 2**31))
    gradients = tuple(e.simulate.as_gradient(e, 1) for e in nominal if isinstance(e.simulate, LocalTraining))
    return Algebra(budget=budget, found=gradients).run(view, challenges, generator)
