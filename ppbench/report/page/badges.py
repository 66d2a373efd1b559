"""Short remarks on a row of a board, and which attacks know the defense."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ppbench.questions.base import question_for
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.controls import CONTROLS, is_image, value
from ppbench.report.worst import Measured, knows


@dataclass(frozen=True)
class Badge:
    """A short remark on a row. tone: how it is colored; title: the sentence behind it."""

    text: str
    tone: Literal["info", "good", "warning", "error"]
    title: str


def knowing(records: Iterable[Record]) -> frozenset[str]:
    """Return the attacks that know the defense by themselves: what `adaptive` needs to know of all records."""
    return frozenset(record.config.attack.id for record in records if record.config.attack.adaptive)


def adaptive(found: Measured, known: frozenset[str]) -> bool:
    """Return whether an attack knows the defense, itself or through the attack whose images it uses."""
    return knows(found) or found.config.attack.follows in known


def badges_of(members: Sequence[Record], known: frozenset[str]) -> Iterable[Badge]:
    """Yield the remarks on a row of `members` that a reader must not miss; `known` as `knowing` gives it."""
    defense, utility = members[0].config.defense.id, members[0].utility
    if defense in CONTROLS:
        yield Badge("control", "info", "Shows whether the attacks work at all; never ranked.")
    elif not any(adaptive(r, known) and r.status == "complete" for r in members):
        yield Badge("plain attacks only", "warning", "No attack here knows this defense, so it is not ranked.")
    if _weaker_when_knowing(members, known):
        yield Badge(
            "knows more, finds less",
            "warning",
            "Attacks that know the defense rebuild less than those that do not: they are not at full strength here.",
        )
    for status, tone in (("diverged", "error"), ("failed", "error")):
        number = sum(record.status == status for record in members)
        if number:
            title = f"{number} of {len(members)} cells {status}; the worst case may be worse than shown."
            yield Badge(status, tone, title)  # type: ignore[arg-type]  # a literal in the loop above
    if utility.low is not None and utility.low <= utility.chance:
        yield Badge("accuracy at chance", "warning", "The model is no better than guessing; its privacy is cheap.")


def _weaker_when_knowing(members: Sequence[Record], known: frozenset[str]) -> bool:
    """Return whether every attack that knows the defense is over a dB worse than a plain one (AutoAttack's flag)."""
    images = [r for r in members if question_for(r).inputs]
    knowing, plain = (
        value(best([r for r in images if adaptive(r, known) == knows], "psnr_median"), "psnr_median")
        for knows in (True, False)
    )
    return knowing is not None and plain is not None and is_image(members[0]) and knowing < plain - 1
