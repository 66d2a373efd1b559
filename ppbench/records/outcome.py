"""Results of a training and of an attack's tuning, as records keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from ppbench.records.scores import Amount, Count, Grown, Scalar, Share, Strict

TRAININGS = 3
"""Most trainings of one cell: its own, and with other seeds if that one collapsed."""


class Utility(Grown):
    """Accuracy of the delivered model on the test part, 95 % Clopper-Pearson interval, chance level.

    curve: (round, accuracy) pairs measured during training, or (round, mse) where targets are numbers.
    mse: mean squared error per output on the test part, with its 95 % interval, if the loss is the squared one.
    dice: mean Dice coefficient per image, with its 95 % interval, if targets are masks; then accuracy is the share
    of pixels, n the number of images, chance the best constant mask's accuracy, and both intervals resample images.
    accuracy_top5: share of the test part whose class is among the five likeliest, where there are more than ten.
    collapsed: how many trainings stayed at chance in every evaluated round (or, tried again, diverged); retrained: the
    seed of the training described here, None if it is the cell's own. All figures are of one training: the first that
    did not collapse, or the cell's own if all did.
    constant, constant_mse: accuracy, or mean squared error, of the best constant answer on the test part; None in older
    records, and where targets are masks: `chance` is that accuracy there.
    """

    accuracy: Share | None
    low: Share | None
    high: Share | None
    n: Count
    chance: Share
    curve: list[tuple[Count, Amount]]
    reason: str | None = None
    mse: Amount | None = None
    mse_low: Amount | None = None
    mse_high: Amount | None = None
    dice: Share | None = None
    dice_low: Share | None = None
    dice_high: Share | None = None
    accuracy_top5: Share | None = None
    accuracy_top5_low: Share | None = None
    accuracy_top5_high: Share | None = None
    collapsed: Annotated[int, Field(ge=0, le=TRAININGS)] = 0
    retrained: Count | None = None
    constant: Share | None = None
    constant_mse: Amount | None = None
    LATER: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("accuracy_top5", "accuracy_top5_low", "accuracy_top5_high", "retrained")),
        **dict.fromkeys(("constant", "constant_mse")),
        "collapsed": 0,
    }

    @property
    def floor(self) -> float:
        """The accuracy of the best constant answer if it is known, else the chance level."""
        return self.chance if self.constant is None else self.constant

    @property
    def is_collapsed(self) -> bool:
        """Whether every training collapsed, so that accuracy describes no model that learnt."""
        return self.collapsed >= TRAININGS

    @property
    def collapse(self) -> str:
        """The number of collapsed trainings, in words; "" for none."""
        if not self.collapsed:
            return ""
        tried = self.collapsed if self.is_collapsed else self.collapsed + 1
        return f"collapsed in {self.collapsed} of {tried} trainings"

    def figure(self, name: str) -> tuple[float | None, float | None, float | None]:
        """Return "accuracy", "accuracy_top5", "dice" or "mse" with the ends of its interval."""
        prefix = "" if name == "accuracy" else f"{name}_"
        return getattr(self, name), getattr(self, f"{prefix}low"), getattr(self, f"{prefix}high")


class Cost(Strict):
    """Bytes per client and round from the Wire, and of set-up in all.

    memory_peak: most bytes at a time that the first client's computation in round 1 allocates beyond its inputs
    (`ppbench.run.cost`); null in older records, or if that round overflows.
    """

    bytes_up: Amount
    bytes_down: Amount
    bytes_setup: Count
    memory_peak: Count | None = None


class Privacy(Grown):
    """The formal guarantee over the whole training, or null with the reason.

    probe_epsilon, probe_delta: of a probed client's upload alone, for an example that certainly takes part; null
    without a guarantee, without a probe, and in older records.
    """

    epsilon: Amount | None
    delta: Share | None
    reason: str | None = None
    probe_epsilon: Amount | None = None
    probe_delta: Share | None = None
    LATER: ClassVar[Mapping[str, Any]] = {"probe_epsilon": None, "probe_delta": None}

    @property
    def of_training(self) -> Privacy:
        """The guarantee of the training alone, without the probe: the same in all its cells."""
        return self.model_copy(update=dict(self.LATER))


class Played(Strict):
    """How many rounds of training each client played each role: rounds[role][client], beside its number of examples."""

    roles: list[str]
    rounds: list[list[Count]]
    examples: list[Count]

    @model_validator(mode="after")
    def _fits(self) -> Played:
        if len(self.rounds) != len(self.roles) or any(len(row) != len(self.examples) for row in self.rounds):
            raise ValueError("rounds must have one row per role, with one number per client")
        return self


class Tuned(Strict):
    """Scores of an attack's `variants` (their differing settings) on tuning victims, median dB; chosen: index."""

    variants: list[dict[str, Scalar]]
    scores: list[float]
    chosen: Count

    @model_validator(mode="after")
    def _fits(self) -> Tuned:
        if len(self.scores) != len(self.variants) or self.chosen >= len(self.variants):
            raise ValueError("there must be one score per variant, and chosen must be the index of one")
        return self
