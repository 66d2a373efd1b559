"""What a training gave, and what tuning an attack gave, as records keep them."""

from __future__ import annotations

from pydantic import model_validator

from ppbench.records.scores import Amount, Count, Scalar, Share, Strict


class Utility(Strict):
    """Accuracy of the delivered model on the test part, 95 % Clopper-Pearson interval, chance level.

    curve: (round, accuracy) pairs measured during training, or (round, mse) where targets are numbers.
    mse: mean squared error an output on the test part, with its 95 % interval, where the loss is the squared one.
    dice: mean Dice coefficient an image, with its 95 % interval, where targets are masks; then accuracy is the share
    of pixels, n the number of images, chance the best constant mask's accuracy, and both intervals resample images.
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

    def figure(self, name: str) -> tuple[float | None, float | None, float | None]:
        """Return "accuracy", "dice" or "mse" with the ends of its interval."""
        prefix = "" if name == "accuracy" else f"{name}_"
        return getattr(self, name), getattr(self, f"{prefix}low"), getattr(self, f"{prefix}high")


class Cost(Strict):
    """Bytes per client and round from the Wire, and of set-up in all.

    memory_peak: most bytes at a time that the first client's computation in round 1 allocates beyond its inputs
    (`ppbench.run.cost`); null in records of before it was measured, or where that round is out of range.
    """

    bytes_up: Amount
    bytes_down: Amount
    bytes_setup: Count
    memory_peak: Count | None = None


class Privacy(Strict):
    """The formal guarantee over the whole training, or null with the reason."""

    epsilon: Amount | None
    delta: Share | None
    reason: str | None = None


class Played(Strict):
    """How many rounds of training each client played each role: rounds[role][client], beside its number of examples."""

    roles: list[str]
    rounds: list[list[Count]]
    examples: list[Count]

    @model_validator(mode="after")
    def _fits(self) -> Played:
        if len(self.rounds) != len(self.roles) or any(len(row) != len(self.examples) for row in self.rounds):
            raise ValueError("rounds must have a row a role, and in it a number a client of examples")
        return self


class Tuned(Strict):
    """What an attack's settings, which differ in `variants`, gave on tuning victims: median dB each; chosen: index."""

    variants: list[dict[str, Scalar]]
    scores: list[float]
    chosen: Count

    @model_validator(mode="after")
    def _fits(self) -> Tuned:
        if len(self.scores) != len(self.variants) or self.chosen >= len(self.variants):
            raise ValueError("there must be a score a variant, and chosen must be the index of one")
        return self
