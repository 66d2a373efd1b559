"""The attack aware of FedPC (Cao et al. 2022): pilots by simulated training, the others by the signs they send."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.labels import (
    LabelRecovery,
    greedy_multiset,
    random_images,
    read_labels,
    single_label,
    typical_means,
)
from ppbench.attacks.reconstruction.analytic import AnalyticInversion, FirstLayer, first_layer
from ppbench.attacks.reconstruction.dlg import NEAR_STOP
from ppbench.attacks.reconstruction.fedavg import FedAvgInversion, LocalTraining, by_rank, signed
from ppbench.attacks.reconstruction.search.starts import PosedVictim, posed
from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params, finite
from ppbench.defenses.fedpc.messages import Ternary, Weights
from ppbench.defenses.fedpc.protocol import FedPC, command_answers, previous_model, round_model, step_signs
from ppbench.federation.bounds import NonNegativeInt
from ppbench.federation.evidence import Evidence, Mappable, Shared, numbered, simulation, with_number
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot

# -- Labels from FedPC's ternaries: the signs of the head's update, by class --
# The gradient of the head's bias is the mean of p - onehot(y): negative exactly for classes that are more frequent
# in the batch than the model predicts. For one example that is its label alone. A nonzero ternary gives the sign
# exactly, for all hyper-parameters of the client (`step_signs`).


def class_signs(rounds: Sequence[Params]) -> Tensor:
    """Return [C] float64, negative for classes more frequent than predicted: mean sign of bias or weights over rounds.

    A scalar 0 [] where the head is frozen.
    """
    signals = []
    for known in rounds:
        weight, bias = known.get("head.weight"), known.get("head.bias")
        rows = torch.zeros(()) if weight is None else weight.double().mean(1)
        signals.append(rows if bias is None else torch.where(bias == 0, rows.to(bias.device), bias.double()))
    return torch.stack(signals).mean(0).cpu()


def sign_labels(rounds: Sequence[Params], plan: Plan, params: Params, batch: int, generator: torch.Generator) -> Tensor:
    """Return labels [batch] int64, sorted, from `class_signs` of rounds that began with `params`; else at random."""
    signal = class_signs(rounds) if rounds else torch.zeros(plan.spec.classes, dtype=torch.float64)
    if not signal.isfinite().all() or not bool((signal != 0).any()):
        return torch.randint(0, plan.spec.classes, (batch,), generator=generator).sort().values
    if batch == 1:
        return single_label(signal)
    prediction = typical_means(plan, params, generator).prediction
    return greedy_multiset(batch * prediction - signal, signal < 0, batch)


@dataclass(frozen=True)
class StepSigns:
    """What one ternary reveals about a client's step P - Q.

    Attributes:
        round: number of the round.
        params: the model P that it began with.
        signs: of the step, 0 where unknown; oriented as a gradient.
        bounds: beta times the size of the last global step: |P - Q| is at least that where the ternary is not 0, else
            less; nothing is known where the bound is 0. Empty in round 1.
    """

    round: int
    signs: Params
    params: Params
    bounds: Params


def known_signs(view: View, defense: FedPC) -> dict[Slot, list[StepSigns]]:
    """Return by slot what its ternaries reveal, one entry per round with any known sign."""
    by_slot: dict[Slot, list[StepSigns]] = {}
    for exchange in command_answers(view):
        params = round_model(view, exchange.slot.probe, exchange.round)
        known = step_signs(view, exchange) if isinstance(exchange.answer, Ternary) else None
        if params is None or known is None or not finite(known):
            continue
        if any(bool((v != 0).any()) for v in known.values()):
            older = previous_model(view, exchange) or {}
            bounds = {n: defense.beta * (params[n] - v).abs() for n, v in older.items()}
            by_slot.setdefault(exchange.slot, []).append(StepSigns(exchange.round, known, params, bounds))
    return by_slot


@dataclass(frozen=True)
class FedPCLabels(LabelRecovery):
    """Labels of a batch: of a pilot from the head's change, of others from the signs of their ternaries."""

    name: ClassVar[str] = "fedpc_labels"
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"fedpc"})
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "collusion/1")
    reference: ClassVar[str] = "this project; signs of the bias as in Zhao et al., iDLG, 2020"

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return the labels [U * B] int64 of every challenge, as a sorted multiset."""
        if not isinstance(view.defense, FedPC):
            return super().run(view, challenges, generator)
        return [Guess(y=y, evaluations=1) for y in slot_labels(view, view.defense, challenges, generator)]


def slot_labels(
    view: View, defense: FedPC, challenges: Sequence[Challenge], generator: torch.Generator
) -> list[Tensor]:
    """Return the labels [U * B] int64 of each challenge about a FedPC client, from what it sent."""
    pilots: dict[Slot, Evidence] = {e.unit[0]: e for e in view.defense.evidence(view) if e.channel == "pilot"}
    by_slot, labels = known_signs(view, defense), []
    for challenge in challenges:
        slot, batch = challenge.unit[0], len(challenge.unit) * challenge.batch
        rounds = by_slot.get(slot)
        if slot in pilots or rounds is None:
            labels.append(read_labels(pilots.get(slot), view.plan, batch, generator))
        else:
            labels.append(sign_labels([t.signs for t in rounds], view.plan, rounds[-1].params, batch, generator))
    return labels


# -- Batches from FedPC's ternaries where the network begins with a linear layer: coarse images in closed form --
# The change of the first layer [W, b] in many steps is a sum over examples of cotangents times inputs, d x^T. The
# attacker computes the mean cotangent of class c himself, on random images at the public model: it depends on the
# class far more than on the image. The signs of the change are filtered by these: the coefficients of the mean
# cotangents that explain the signs best are the image of each class, up to brightness and contrast.

GUESS_CONTRAST = 0.12
"""Standard deviation of a guessed image around mid-grey, relative to the width of the data range: less than in real
images, as the filter is far from exact (on 32 images of CIFAR-10, 0.06 to 0.12 gave equal mean errors, 0.17 a larger
one)."""
CLASS_RIDGE = 1e-2
"""Strength of the ridge, in units of a class's mean squared norm."""


def images_from_signs(
    steps: Sequence[StepSigns], layer: FirstLayer, labels: Tensor, plan: Plan, generator: torch.Generator
) -> Guess:
    """Return images [N, *shape] for labels [N] int64 from one client's known signs of the layer's weights.

    Equal labels get the same image. Signs of 0 alone give mid-grey. One evaluation per class.
    """
    classes = labels.unique()
    signs = torch.stack([step.signs[layer.weight].double().cpu() for step in steps]).mean(0)
    means = class_cotangents(plan, steps[-1].params, layer, classes, generator)
    gram = means @ means.T
    ridge = CLASS_RIDGE * gram.trace() / len(gram) * torch.eye(len(gram), dtype=gram.dtype)
    coefficients = torch.linalg.solve_ex(gram + ridge, means @ signs)[0].nan_to_num()
    coefficients = coefficients - coefficients.mean(1, keepdim=True)
    coefficients = coefficients / coefficients.std(1, keepdim=True).clamp(min=1e-12)
    low, high = plan.data_range
    images = ((low + high) / 2 + GUESS_CONTRAST * (high - low) * coefficients).clamp(low, high)
    x = images[torch.searchsorted(classes, labels)].view(len(labels), *plan.spec.shape)
    return Guess(x=x.float(), y=labels, evaluations=len(classes))


def class_cotangents(
    plan: Plan, params: Params, layer: FirstLayer, classes: Tensor, generator: torch.Generator
) -> Tensor:
    """Return by class the mean slopes [K, m] float64 of the loss in the layer's outputs, on random images.

    They are the gradient of the layer's biases.
    """
    assert layer.bias is not None  # the caller has checked
    low, high = plan.data_range
    wide = {name: value.detach().double().cpu() for name, value in params.items()}
    x = random_images(plan.spec.shape, generator).double() * (high - low) + low
    ones, means = torch.ones(len(x), dtype=torch.float64), []
    for c in classes.tolist():
        y = one_hot(torch.full((len(x),), c), plan.spec.classes).double()
        with torch.no_grad():
            slopes = gradient(lambda p, y=y: plan.objective(p, x, y, ones), wide)  # type: ignore[misc]
        means.append(slopes[layer.bias])
    return torch.stack(means)


# -- What FedPC's pilot reveals: its whole update P - Q, up to hyper-parameters that come from public menus --
# The paper (Cao et al. 2022, Theorem 2) argues that nobody can solve for data while learning rate, batch size and
# epochs are secret. Here all choices are tried: the pilot's training is simulated with each, and the one that
# explains the update is usually the true one.

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
    shared = Shared(view.plan)
    for exchange in command_answers(view):
        slot, last = exchange.slot, round_model(view, exchange.slot.probe, exchange.round)
        if isinstance(exchange.answer, Weights) and slot not in pilots and last is not None:
            params = shared.same(last)
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

    A batch's images are in the span of the rows after any number of steps (`by_rank`): Theorem 2's system of equations
    is nonlinear in the secret hyper-parameters, but linear in the images.
    """
    nominal = pilot_evidence(pilots, plan, Hyperparameters(plan.local.opt.rate(pilots[0].round), 1, 2**31))
    gradients = [e.simulate.as_gradient(e, 1) for e in nominal if isinstance(e.simulate, LocalTraining)]
    ranked = [by_rank(victim, victim.evidence) for victim in posed(gradients, plan, challenges, generator)]
    plain = AnalyticInversion(budget=budget).answer(gradients, plan, challenges, generator)
    return [other if guess is None else guess for guess, other in zip(ranked, plain, strict=True)]


BOUND = "bound/"


@dataclass(frozen=True, eq=False)
class Gradients(Mappable):
    """Gradients of one batch at models "ROUND/NAME" in `params`, and by how much these times `gain` exceed "bound/"."""

    plan: Plan
    rounds: int
    gain: float

    def __call__(self, x: Tensor, y: Tensor) -> Params:
        """Return gradients g at all models, and |g| - bound / gain, by the names of `params`; x [U, B, *shape]."""
        models = [with_number(self.params, number) for number in range(self.rounds)]
        simulated: Params = numbered([simulation(self.plan, model)(x, y) for model in models])
        for name, bound in self.params.items():
            if name.startswith(BOUND):
                simulated[name] = simulated[name[len(BOUND) :]].abs() - bound / self.gain
        return simulated


def ternary_evidence(slot: Slot, rounds: Sequence[StepSigns], plan: Plan, gain: float | None = None) -> Evidence:
    """Return evidence from the signs of all rounds and, if a change is `gain` times a gradient, from the bounds."""
    observed, params = numbered([step.signs for step in rounds]), numbered([step.params for step in rounds])
    for name, bound in numbered([step.bounds for step in rounds] if gain is not None else []).items():
        observed[BOUND + name] = torch.where(observed[name] != 0, 1.0, -1.0) * (bound > 0)
        params[BOUND + name] = bound
    simulate = Gradients(params, plan, len(rounds), 1.0 if gain is None else gain)
    return Evidence((slot,), observed, simulate, channel="ternary", measure="hinge")


def gradient_gain(plan: Plan, secret: Hyperparameters, count: int) -> float | None:
    """Return the factor by which such a client multiplies a gradient of `count` images; None under Adam."""
    if plan.local.opt.name == "adam":
        return None
    steps = secret.epochs * -(-count // secret.batch)
    return secret.rate * plan.local.opt.reach(steps)


@dataclass(frozen=True)
class AdaptiveFedPC(FedAvgInversion):
    """Inverts what a client sent: a pilot's model, or else its ternaries.

    Where the network begins with a linear layer, batches are solved in closed form for any number of steps: pilots by
    rank, the others, whose signs have no low rank, as one coarse image per class (`images_from_signs`).

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
    victim = PosedVictim(None, challenge, plan, generator)
    labels = victim.labels("inferred")
    return Guess(x=victim.image("grey"), y=None if labels is None else labels.argmax(-1), evaluations=1)
