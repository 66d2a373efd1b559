"""Labels from FedPC's ternaries: the signs of the head's update, by class.

The gradient of the head's bias is the mean of p - onehot(y): negative exactly for classes that are more frequent in the
batch than the model predicts. For one example that is its label alone. A nonzero ternary gives the sign exactly, for
all hyper-parameters of the client (`signs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.label.multisets import greedy_multiset
from ppbench.attacks.label.recovery import LabelRecovery, read_labels, single_label, typical_means
from ppbench.base.tree import Params, finite
from ppbench.defenses.fedpc.evidence import command_answers, previous_model, round_model, step_signs
from ppbench.defenses.fedpc.messages import Ternary
from ppbench.defenses.fedpc.protocol import FedPC
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot


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
