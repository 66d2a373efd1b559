"""What a person sees while an evaluation runs: how far it is, and the first answer as soon as it is known."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.base.bars import Bars
from ppbench.records.schema import Record
from ppbench.report.verdict import verdicts

FIRST = ("pixels", "rows")
"""Questions whose sentences are the first answer."""


class Live(Bars):
    """Progress bars, and above them what the first cells say of one defense."""

    def __init__(self, defense: str, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._defense = defense

    def ready(self, records: Sequence[Record]) -> None:  # type: ignore[override]  # Bars cannot know records
        """Say what the cells of the first answer show, while the others run."""
        for found in verdicts(self._defense, records):
            if found.question in FIRST:
                self.say(found.sentence)
