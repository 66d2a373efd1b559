"""Whether what is concluded can be relied on: one signal, the same on the page, in JSON and in the terminal.

A control that fails speaks against everything. A board on which the undefended model stands too says nothing about
defenses, and nothing against the others: the attacks are too weak there, or the model gives nothing away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ppbench.records.schema import Record
from ppbench.report.controls import Check
from ppbench.report.page.entries import Board
from ppbench.report.page.evaluations import Judged, checks_of
from ppbench.report.page.sections import words_of

State = Literal["failed", "unknown", "partly", "holds"]


@dataclass(frozen=True)
class Silent:
    """A board that nothing can be concluded from. place: its number, from 1; title, reason: in words."""

    place: int
    title: str
    reason: str


@dataclass(frozen=True)
class Trust:
    """What the controls say of all evaluations.

    checks: theirs and the harness's; boards: how many there are; evaluations, sound: how many there are, and of how
    many something may be concluded. company: a sentence on where other packages' attacks ran, "" without any.
    """

    checks: tuple[Check, ...]
    boards: int
    silent: tuple[Silent, ...]
    evaluations: int
    sound: int
    company: str = ""

    @cached_property
    def state(self) -> State:
        """Failed: a control speaks against the results; unknown: one did not run; partly: some boards say nothing."""
        if any(check.ok is False for check in self.checks):
            return "failed"
        if not self.checks or any(check.ok is None for check in self.checks):
            return "unknown"
        return "partly" if self.silent else "holds"

    @property
    def reliable(self) -> bool:
        """Whether all controls ran and hold."""
        return self.state in ("partly", "holds")

    @property
    def sentence(self) -> str:
        """Say it in one line, and where strangers' attacks ran in another."""
        return " ".join(filter(None, (self._controls, self.company)))

    @property
    def _controls(self) -> str:
        bad = [check.sentence for check in self.checks if check.ok is not True]
        if self.state == "failed" and self.sound:
            failed = self.evaluations - self.sound
            which = f"{failed} of {self.evaluations} evaluations, of which nothing is concluded"
            return f"A control failed in {which}: {' '.join(bad)}"
        if self.state == "failed":
            return f"A control failed, so nothing is concluded: {' '.join(bad)}"
        if self.state == "unknown":
            return f"Controls did not all run, so nothing is concluded: {' '.join(bad) or 'nothing was evaluated.'}"
        if self.state == "partly":
            left = self.boards - len(self.silent)
            return (
                f"Controls hold. {left} of {self.boards} boards can be judged; {len(self.silent)} cannot: {self._why}."
            )
        return (
            "Controls hold: the undefended model falls, noise gives nothing away, and the harness passes its self-test."
        )

    @property
    def _why(self) -> str:
        return "; ".join(dict.fromkeys(one.reason for one in self.silent))

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs, in types that JSON has."""
        return {
            "state": self.state,
            "sentence": self.sentence,
            "controls": [{"control": c.control, "ok": c.ok, "sentence": c.sentence} for c in self.checks],
            "boards": self.boards,
            "silent": [{"board": one.title, "reason": one.reason} for one in self.silent],
        }


def trust_of(found: Sequence[Board], told: Sequence[Judged], harness: Check | None) -> Trust:
    """Return what can be relied on, from all boards, in order, and all evaluations; harness: its self-test or None."""
    silent = [
        Silent(place, words_of(board.setting), reason)
        for place, board in enumerate(found, start=1)
        if (reason := _reason(board)) and not board.setting.intended
    ]
    checks = checks_of(told) if harness is None else (*checks_of(told), harness)
    records = [record for one in told for record in one.records]
    return Trust(checks, len(found), tuple(silent), len(told), sum(one.reliable for one in told), company_of(records))


def company_of(records: Iterable[Record]) -> str:
    """Return where attacks of other packages ran, in sentences: beside the truth, or apart and kept from what."""
    where: dict[str, set[str]] = {}
    for record in records:
        if record.config.attack.code and record.status == "complete":
            where.setdefault(record.environment.apart, set()).add(record.config.attack.id)
    return " ".join(
        f"{', '.join(sorted(names))}, of other packages, ran "
        + (f"{apart}." if apart else "in the process that knows the truth; --isolate keeps them from it.")
        for apart, names in sorted(where.items())
    )


def _reason(board: Board) -> str:
    """Return why nothing can be concluded from a board, "" where something can."""
    if board.reliable:
        return ""
    own = next((check for check in board.checks if check.control == "board"), None)
    if own is None or own.ok is True:
        return "a control fails there" if any(check.ok is False for check in board.checks) else "a control did not run"
    return "the undefended model was not attacked there" if own.ok is None else "the undefended model stands there too"
