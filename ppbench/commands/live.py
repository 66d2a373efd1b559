"""Output while an evaluation runs: its progress, and the first answer as soon as it is known."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.base.bars import Bars
from ppbench.records.schema import Record
from ppbench.report.page.answer import answer_of


class Live(Bars):
    """Progress bars, and above them the headline of the first cells: the smallest batch, the delivered model."""

    def ready(self, records: Sequence[Record]) -> None:  # type: ignore[override]  # Bars cannot know records
        """Print the headline of the first cells, while the others run."""
        self.say(f"{answer_of(records, None).headline.words} (preliminary; still running)")
