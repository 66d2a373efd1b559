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
    """state: "little" if the interval begins at most `USABLE` points above a constant answer; figure: in words."""

    state: State
    figure: str

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
            return f"the undefended model learned nothing that can be told from chance ({self.figure})"
        return f"the undefended model is not shown to be {USABLE:g} points above chance ({self.figure})"


def learning_of(utility: Utility) -> Learning:
    """Return what the training behind `utility` learned."""
    if utility.accuracy is not None and utility.low is not None and utility.high is not None:
        gain = round(100 * (utility.low - utility.floor), 9)
        ends = f"[{100 * utility.low:.1f}, {100 * utility.high:.1f}]"
        figure = f"accuracy {utility.accuracy:.1%} {ends}, chance {utility.floor:.1%}".replace(".0%", "%")
        return Learning("nothing" if gain <= 0 else "little" if gain <= USABLE else "learned", figure)
    if utility.mse is not None:
        if utility.constant_mse is None or utility.mse_high is None:
            return Learning("unknown", "")
        beats = utility.mse_high < utility.constant_mse
        figure = f"MSE {utility.mse:.3g}, a constant answer {utility.constant_mse:.3g}"
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


def keeps_enough(accuracy: float | None, undefended: float | None, floor: float) -> bool:
    """Return whether a model is usable beside the undefended one; floor: accuracy of a constant answer.

    True where an accuracy is not known. A loss of at most `USABLE` points counts, and `KEPT` of what was learned.
    """
    loss = points_lost(accuracy, undefended)
    if loss is None or accuracy is None or undefended is None:
        return True
    return loss <= USABLE and accuracy - floor >= KEPT * (undefended - floor)
