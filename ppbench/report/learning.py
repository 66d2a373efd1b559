"""What a model learned: the premise of every statement on usability.

A defense that loses nothing of a model that learned nothing is not usable, and no result of such a training could show
that it withstands anything. Learned is judged against the best constant answer, by the 95 % interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppbench.records.outcome import Utility
from ppbench.records.schema import FederationInfo

USABLE = 5.0
"""Points of accuracy that a setting may lose beside the undefended model to be called usable."""
KEPT = 0.5
"""Share that it must keep of what the undefended model learned beyond a constant answer."""
State = Literal["learned", "little", "nothing", "unknown"]


@dataclass(frozen=True)
class Learning:
    """state: "little" if the interval begins at most `USABLE` points above a constant answer; figure: in words.

    beside: what it is compared with, "a constant answer", or "chance" in records that do not have that.
    """

    state: State
    figure: str
    beside: str = "a constant answer"

    @property
    def suffices(self) -> bool:
        """Whether a loss of `USABLE` points can be told from losing everything; True where nothing is known."""
        return self.state in ("learned", "unknown")

    @property
    def clause(self) -> str:
        """What the undefended model learned, as a clause; "" where it suffices."""
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
        figure = f"accuracy {utility.accuracy:.1%} {ends}, {beside} {utility.floor:.1%}".replace(".0%", "%")
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
    """Return what to change so that the undefended model learns."""
    return (
        f"Train longer (--rounds, now {federation.rounds}), at another rate (--lr, now {federation.lr:g}) "
        "or on more examples."
    )


def points_lost(accuracy: float | None, undefended: float | None) -> float | None:
    """Return how many points of accuracy a setting loses, below 0 where it gains; None where either is not known."""
    return None if accuracy is None or undefended is None else round(100 * (undefended - accuracy), 9)


def score_of(utility: Utility) -> float | None:
    """Return how good a model is on a scale of which 1 is perfect: its accuracy, or the share of variance explained.

    None where neither is known: numbers of older records have no constant answer to stand beside.
    """
    if utility.accuracy is not None:
        return utility.accuracy
    return None if utility.mse is None or not utility.constant_mse else 1 - utility.mse / utility.constant_mse


def keeps_enough(score: float | None, undefended: float | None, floor: float) -> bool | None:
    """Return whether a model is usable beside the undefended one, None where a score (`score_of`) is not known.

    A loss of at most `USABLE` points will do if `KEPT` of what was learned is left; floor: score of a constant answer.
    """
    loss = points_lost(score, undefended)
    if loss is None or score is None or undefended is None:
        return None
    return loss <= USABLE and score - floor >= KEPT * (undefended - floor)
