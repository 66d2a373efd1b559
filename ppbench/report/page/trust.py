"""Whether conclusions can be relied on: one signal for page, JSON and terminal.

A failed control invalidates everything. Where the undefended model learned too little, leaks still count, but nothing
is usable and nothing withstands the attacks. A board on which even the undefended model resists the attacks shows
nothing about defenses, and nothing against other boards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ppbench.records.schema import Record
from ppbench.report.controls import Check
from ppbench.report.entries import Board
from ppbench.report.page.boards import JudgedEvaluation, checks_of
from ppbench.report.page.overview import Overview
from ppbench.report.page.sections import board_title
from ppbench.report.words import capitalized

TrustState = Literal["failed", "unknown", "unlearned", "partly", "holds"]


@dataclass(frozen=True)
class SilentBoard:
    """A board without conclusions. place: its number, from 1; title, reason: in words."""

    place: int
    title: str
    reason: str


@dataclass(frozen=True)
class Trust:
    """The controls of all evaluations.

    checks: theirs and the harness's; boards: number of boards; evaluations, sound: number of evaluations, and of
    reliable ones; leaking: whether some defense is shown to leak; company: a sentence on where other packages' attacks
    ran, or "".
    """

    checks: tuple[Check, ...]
    boards: int
    silent: tuple[SilentBoard, ...]
    evaluations: int
    sound: int
    leaking: bool
    company: str = ""

    @cached_property
    def state(self) -> TrustState:
        """ "failed": a control failed; "unknown": one did not run; "partly": some boards show nothing.

        "unlearned": an undefended model learned too little.
        """
        controls = [check for check in self.checks if check.control != "learning"]
        if any(check.ok is False for check in controls):
            return "failed"
        if not controls or any(check.ok is None for check in controls):
            return "unknown"
        if len(controls) < len(self.checks):
            return "unlearned"
        return "partly" if self.silent else "holds"

    @property
    def reliable(self) -> bool:
        """Whether conclusions can be drawn: all controls ran and hold.

        Where the undefended model learned too little, the only conclusion can be that something leaks.
        """
        return self.state in ("partly", "holds") or (self.state == "unlearned" and self.leaking)

    @property
    def sentence(self) -> str:
        """The state in a sentence, and `company`."""
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
        if self.state == "unlearned":
            return f"The attacks' controls hold, but usability cannot be judged. {' '.join(bad)}"
        if self.state == "partly":
            left, why = self.boards - len(self.silent), "; ".join(dict.fromkeys(one.reason for one in self.silent))
            return f"Controls hold. {left} of {self.boards} boards can be judged; {len(self.silent)} cannot: {why}."
        return (
            "Controls hold: the undefended model falls, noise gives nothing away, and the harness passes its self-test."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the state in types that JSON has."""
        return {
            "state": self.state,
            "sentence": self.sentence,
            "controls": [{"control": c.control, "ok": c.ok, "sentence": c.sentence} for c in self.checks],
            "boards": self.boards,
            "silent": [{"board": one.title, "reason": one.reason} for one in self.silent],
        }


def trust_of(
    boards: Sequence[Board], evaluations: Sequence[JudgedEvaluation], harness: Check | None, tables: Sequence[Overview]
) -> Trust:
    """Return the trust in all boards, in order, and all evaluations; harness: check of the self-test, or None."""
    silent = [
        SilentBoard(place, board_title(board.setting), reason)
        for place, board in enumerate(boards, start=1)
        if (reason := _reason(board)) and not board.setting.intended
    ]
    checks = (*checks_of(evaluations), *(() if harness is None else (harness,)), *_learning(tables))
    records = [record for one in evaluations for record in one.records]
    sound = sum(one.reliable for one in evaluations)
    rows = [row for table in tables if table.reliable for row in table.compared]
    leaking = any(row.leaking or any(setting.recovered for setting in row.grid) for row in rows)
    return Trust(checks, len(boards), tuple(silent), len(evaluations), sound, leaking, company_of(records))


def _learning(tables: Sequence[Overview]) -> Iterator[Check]:
    """Yield a check that fails for each evaluation whose undefended model learned too little."""
    for table in tables:
        if table.unlearned:
            head = f"[{table.about}] " if len(tables) > 1 else ""
            yield Check("learning", False, f"{head}{capitalized(table.unlearned)}.")


def company_of(records: Iterable[Record]) -> str:
    """Return sentences on where attacks of other packages ran, and what they could not access."""
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
    """Return why a board shows nothing, a clause; "" where it shows something."""
    if board.reliable:
        return ""
    own = next((check for check in board.checks if check.control == "board"), None)
    if own is None or own.ok is True:
        return "a control fails there" if any(check.ok is False for check in board.checks) else "a control did not run"
    return (
        "the undefended model was not attacked there"
        if own.ok is None
        else "even the undefended model resists the attacks there"
    )
