"""What a person sees while an evaluation runs: how far it is, and the first answer as soon as it is known."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.base.bars import Bars
from ppbench.records.schema import Record
from ppbench.report.page.answer import answer_of


class Live(Bars):
    """Progress bars, and above them the line that the first cells give: the smallest batch, the delivered model."""

    def ready(self, records: Sequence[Record]) -> None:  # type: ignore[override]  # Bars cannot know records
        """Say what the cells of the first answer show, while the others run."""
        self.say(f"{answer_of(records, None).headline.words} (preliminary; still running)")
