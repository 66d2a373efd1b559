"""What a training gave, and what tuning an attack gave, as records keep them."""

from __future__ import annotations

from ppbench.records.scores import Scalar, Strict


class Utility(Strict):
    """Accuracy of the delivered model on the test part, 95 % Clopper-Pearson interval, chance level.

    curve: (round, accuracy) pairs measured during training, or (round, mse) where targets are numbers.
    mse: mean squared error an output on the test part, with its 95 % interval, where the loss is the squared one.
    dice: mean Dice coefficient an image, with its 95 % interval, where targets are masks; then accuracy is the share
    of pixels, n the number of images, chance the best constant mask's accuracy, and both intervals resample images.
    """

    accuracy: float | None
    low: float | None
    high: float | None
    n: int
    chance: float
    curve: list[tuple[int, float]]
    reason: str | None = None
    mse: float | None = None
    mse_low: float | None = None
    mse_high: float | None = None
    dice: float | None = None
    dice_low: float | None = None
    dice_high: float | None = None

    def figure(self, name: str) -> tuple[float | None, float | None, float | None]:
        """Return "accuracy", "dice" or "mse" with the ends of its interval."""
        prefix = "" if name == "accuracy" else f"{name}_"
        return getattr(self, name), getattr(self, f"{prefix}low"), getattr(self, f"{prefix}high")


class Cost(Strict):
    """Bytes per client and round from the Wire, and of set-up in all.

    memory_peak: most bytes at a time that the first client's computation in round 1 allocates beyond its inputs
    (`ppbench.run.cost`); null in records of before it was measured, or where that round is out of range.
    """

    bytes_up: float
    bytes_down: float
    bytes_setup: int
    memory_peak: int | None = None


class Privacy(Strict):
    """The formal guarantee over the whole training, or null with the reason."""

    epsilon: float | None
    delta: float | None
    reason: str | None = None


class Played(Strict):
    """How many rounds of training each client played each role: rounds[role][client], beside its number of examples."""

    roles: list[str]
    rounds: list[list[int]]
    examples: list[int]


class Tuned(Strict):
    """What an attack's settings, which differ in `variants`, gave on tuning victims: median dB each; chosen: index."""

    variants: list[dict[str, Scalar]]
    scores: list[float]
    chosen: int
