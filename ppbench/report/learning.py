"""What a model learned: the premise of every statement on usability.

Where the undefended model learned nothing, a defense that loses nothing is not usable, and nothing shows that it
withstands attacks. Learning is judged against the best constant answer, by the 95 % interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ppbench.records.schema import FederationInfo, Utility

USABLE = 5.0
"""Points of accuracy that a usable setting may lose against the undefended model."""
KEPT_SHARE = 0.5
"""Share that a usable setting must keep of what the undefended model learned beyond a constant answer."""
LearningState = Literal["learned", "little", "nothing", "unknown"]


@dataclass(frozen=True)
class Learning:
    """What a model learned. state: "little" if the interval begins at most `USABLE` points above `beside`.

    figure: in words; beside: the baseline, "a constant answer", or "chance" for older records.
    """

    state: LearningState
    figure: str
    beside: str = "a constant answer"

    @property
    def suffices(self) -> bool:
        """Whether a loss of `USABLE` points is less than all that was learned; True where nothing is known."""
        return self.state in ("learned", "unknown")

    @property
    def clause(self) -> str:
        """A clause on how little the undefended model learned; "" where it suffices."""
        if self.suffices:
            return ""
        if self.state == "nothing":
            return f"the undefended model learned nothing that can be shown ({self.figure})"
        return f"the undefended model is not shown to be {USABLE:g} points above {self.beside} ({self.figure})"


def learning_of(utility: Utility) -> Learning:
    """Return what the training behind `utility` learned."""
    if utility.accuracy is not None and utility.low is not None and utility.high is not None:
        gain = round(100 * (utility.low - utility.floor), 9)
        ends = f"[{100 * utility.low:.1f}, {100 * utility.high:.1f}]"
        beside = "chance" if utility.constant is None else "a constant answer"
        figure = f"accuracy {utility.accuracy:.1%}{utility.counted} {ends}, {beside} {utility.floor:.1%}".replace(
            ".0%", "%"
        )
        return Learning("nothing" if gain <= 0 else "little" if gain <= USABLE else "learned", figure, beside)
    if utility.mse is not None:
        if utility.constant_mse is None or utility.mse_high is None:
            return Learning("unknown", "")
        beats = utility.mse_high < utility.constant_mse
        ends = f"[{utility.mse_low:.3g}, {utility.mse_high:.3g}]"
        figure = f"MSE {utility.mse:.3g} {ends}, a constant answer {utility.constant_mse:.3g}"
        return Learning("learned" if beats else "nothing", figure)
    return Learning("nothing", "its training diverged") if utility.curve else Learning("unknown", "")


def advice(federation: FederationInfo) -> str:
    """Return a sentence on what to change so that the undefended model learns."""
    return (
        f"Train longer (--rounds, now {federation.rounds}), at another rate (--lr, now {federation.lr:g}) "
        "or on more examples."
    )


def points_lost(accuracy: float | None, undefended: float | None) -> float | None:
    """Return the points of accuracy that a setting loses, negative for a gain; None where either is unknown."""
    return None if accuracy is None or undefended is None else round(100 * (undefended - accuracy), 9)


def score_of(utility: Utility) -> float | None:
    """Return a model's score, at most 1: its accuracy, or the share of variance explained.

    None where neither is known: older records of regressions lack the error of a constant answer.
    """
    if utility.accuracy is not None:
        return utility.accuracy
    return None if utility.mse is None or not utility.constant_mse else 1 - utility.mse / utility.constant_mse


def keeps_enough(score: float | None, undefended: float | None, floor: float) -> bool | None:
    """Return whether a model is usable beside the undefended one, None where a score (`score_of`) is unknown.

    It is if it loses at most `USABLE` points and keeps `KEPT_SHARE` of what was learned beyond `floor`, the score of a
    constant answer.
    """
    loss = points_lost(score, undefended)
    if loss is None or score is None or undefended is None:
        return None
    return loss <= USABLE and score - floor >= KEPT_SHARE * (undefended - floor)


def is_usable(uses: Sequence[Utility], undefended: Sequence[Utility]) -> bool | None:
    """Return whether a setting is usable, by its models and the undefended ones at the same seeds.

    None where an undefended model learned too little, or there is none; False where a model learned nothing; else
    `keeps_enough` of the means.
    """
    if not undefended or not all(learning_of(use).suffices for use in undefended):
        return None
    if any(learning_of(use).state == "nothing" for use in uses):
        return False
    floor = 0.0 if mean_of([use.accuracy for use in uses]) is None else max(use.floor for use in uses)
    return keeps_enough(mean_of([score_of(use) for use in uses]), mean_of([score_of(use) for use in undefended]), floor)


def mean_of(figures: Sequence[float | None]) -> float | None:
    """Return the mean; None where a figure is missing, or there is none."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) / len(known) if known and len(known) == len(figures) else None
