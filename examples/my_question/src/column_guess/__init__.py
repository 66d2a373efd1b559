"""A question of your own, attribute inference: the rest of a client's row is known; which value has one column?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ppbench.api import (
    Attack,
    Challenge,
    DistanceLaw,
    Evidence,
    Guess,
    Inquiry,
    Judgment,
    Metric,
    MetricSpec,
    Plan,
    Probe,
    ProbedScore,
    Question,
    Scored,
    Terms,
    UsageError,
    View,
    one_minus,
    proportion,
    record_metric,
)

MOST = 12
"""Values that a column may have to be asked about."""
CLOSE = 1e-5
"""How near to the true value a guess must be; values are those of the encoded column."""


ACCURACY = MetricSpec(
    "attribute_accuracy",
    "Values guessed",
    unit="share",
    meaning="Share of rows whose value is guessed.",
    judgment=Judgment("decision", tolerance=0.02, luck=0.05),
)


class ColumnScore(ProbedScore):
    """One row: the true value of the column, and the guessed one; null for no answer."""

    kind: Literal["attribute"] = "attribute"
    value: float
    guess: float | None

    @property
    def right(self) -> bool:
        """Whether the value was guessed."""
        return self.guess is not None and abs(self.guess - self.value) < CLOSE


class Attribute(Question):
    """Which value has one column of a client's row, where the rest of the row and its label are known?"""

    name = "attribute"
    contract = 1
    title = "Attribute inference"
    score = ColumnScore
    specs = (ACCURACY,)
    distances = (DistanceLaw("attribute/1", ACCURACY.name, one_minus, "1 - share of values guessed"),)

    def of_probe(self, probe: Probe) -> Inquiry:
        """Return one question a unit: its rows with the column unknown (NaN), their labels, and the column's values."""
        column, values = asked_column(probe.test.x)
        victims, challenges, truth = probe.victims, [], []
        for unit in victims.units:
            data = victims.truth(unit)
            x = data.x.clone()
            truth.append(x.flatten(1)[:, column].clone())
            x.view(len(x), -1)[:, column] = torch.nan
            y = data.y.unflatten(0, (len(unit), -1)).clone()
            challenges.append(Challenge(unit, victims.batch, y=y, x=x, extra={"values": values.clone()}))

        def score(guesses: Sequence[Guess]) -> Scored:
            scores = []
            for unit, true, guess in zip(victims.units, truth, guesses, strict=True):
                result = answers(guess, len(true))
                for index, (value, answer) in enumerate(zip(true.tolist(), result, strict=True)):
                    slot, place = unit[index // victims.batch], index % victims.batch
                    where = {"probe": slot.probe, "client": slot.client, "index": place, "cohort": len(unit) > 1}
                    scores.append(ColumnScore(**where, value=value, guess=answer))
            return Scored(scores)

        return Inquiry(challenges, score, victims.digest())

    def malformed(self, guess: Guess, challenge: Challenge, plan: Plan) -> Iterator[str]:
        """Yield what is wrong with the values: floating point, one a row."""
        guesses, count = guess.extra.get("value"), len(challenge.unit) * challenge.batch
        if guesses is None or tuple(guesses.shape) != (count,) or not guesses.is_floating_point():
            yield f"extra['value'] must be a float tensor of shape ({count},)"

    def metrics(self, scores: Sequence[ColumnScore], terms: Terms) -> list[Metric]:
        """Return the share of values guessed; chance is always guessing the most frequent one."""
        units: dict[tuple[int, ...], list[bool]] = {}
        for score in scores:
            units.setdefault(score.unit, []).append(score.right)
        chance = max(Counter(score.value for score in scores).values()) / len(scores)
        return [record_metric(ACCURACY, proportion([np.array(u) for u in units.values()], chance))]

    def judged(self, score: ColumnScore, metric: str) -> float:
        """Return 1 for a guessed value."""
        return float(score.right)


def asked_column(x: Tensor) -> tuple[int, Tensor]:
    """Return the first column with a few values, and these, from examples [N, *shape] that nobody trains on.

    Columns of 0 and 1 are passed over: numbers come standardized, so these are one of several that encode one text, and
    the others would tell it.

    Raises:
        UsageError: there is no such column.
    """
    for column, entries in enumerate(x.flatten(1).T):
        values = entries.unique()
        if 2 <= len(values) <= MOST and not set(values.tolist()) <= {0.0, 1.0}:
            return column, values
    raise UsageError(f"No column of numbers has 2 to {MOST} values; nothing can be asked of attributes.")


def answers(guess: Guess, count: int) -> list[float | None]:
    """Return the guessed values, None each where there are none, or they are not finite.

    Raises:
        ValueError: there are more or fewer than `count`.
    """
    guesses = guess.extra.get("value")
    if guesses is None:
        return [None] * count
    if tuple(guesses.shape) != (count,):
        raise ValueError(f"extra['value'] has shape {tuple(guesses.shape)}; it must be ({count},)")
    return [value if np.isfinite(value) else None for value in guesses.tolist()]


@dataclass(frozen=True)
class ValueSearch(Attack):
    """The value whose gradient explains the update best, row by row.

    Attributes:
        sweeps: how often each row of a batch is tried anew, the others being held.
    """

    sweeps: int = 2

    name: ClassVar[str] = "value_search"
    contract: ClassVar[int] = 1
    kind: ClassVar[str] = "attribute"
    reference: ClassVar[str] = "Lyu and Chen, A Novel Attribute Reconstruction Attack in Federated Learning, 2021"

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one value a row; where an update says nothing they are drawn from `generator`."""
        known = {frozenset(evidence.unit): evidence for evidence in self.evidence(view)}
        return [self._guess(known.get(frozenset(challenge.unit)), challenge, generator) for challenge in challenges]

    def _guess(self, evidence: Evidence | None, challenge: Challenge, generator: torch.Generator) -> Guess:
        assert challenge.x is not None and challenge.y is not None
        values, rows = challenge.extra["values"], challenge.x.double().flatten(1)
        column = int(rows.isnan().any(0).nonzero()[0])
        drawn = torch.randint(len(values), (len(rows),), generator=generator)  # always: nobody else's draw may move
        rows[:, column] = values[drawn].double()
        if evidence is None or evidence.nuisance:
            return Guess(extra={"value": rows[:, column].float()})

        def miss() -> float:
            x = rows.view_as(challenge.x).unflatten(0, (len(challenge.unit), -1))
            return float(evidence.discrepancy(evidence.simulate(x, challenge.y.double())).detach())

        spent = 0
        for row in list(range(len(rows))) * (self.sweeps if len(rows) > 1 else 1):
            before, missed = rows[row, column].clone(), []
            for value in values:
                rows[row, column] = value
                missed.append(miss())
            spent += len(values)
            result = bool(np.isfinite(missed).all()) and max(missed) > min(missed)
            rows[row, column] = values[int(np.argmin(missed))] if result else before
        return Guess(extra={"value": rows[:, column].float()}, evaluations=spent)
