"""What was found, in words: sentences computed from records, for the terminal and the head of the board."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.records.schema import Record
from ppbench.verdict.guarantee import guarantee
from ppbench.verdict.lines import Held, Line, Strongest, figure, held, lines
from ppbench.verdict.models import what_models_tell
from ppbench.verdict.uploads import what_uploads_tell

__all__ = ["Held", "Line", "Strongest", "figure", "held", "lines", "sentences"]


def sentences(defense: str, records: Sequence[Record]) -> list[str]:
    """Return what was found about `defense`, a sentence each.

    What uploads give away (pixels, labels), what a model gives away to who holds it (members, the true outputs), and
    the formal guarantee. Every figure is a record's.
    """
    mine = [r for r in records if r.config.defense.id == defense]
    return [*what_uploads_tell(defense, records), *what_models_tell(defense, records), *guarantee(mine)]
