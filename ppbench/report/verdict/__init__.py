"""What was found, in words: sentences computed from records, for the terminal and the head of the board."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.questions.base import questions
from ppbench.records.schema import Record
from ppbench.report.verdict.audits import Audited, audits, what_audits_tell
from ppbench.report.verdict.guarantee import guarantee
from ppbench.report.verdict.lines import Held, Line, Sides, figure, held, lines
from ppbench.report.verdict.models import what_models_tell
from ppbench.report.verdict.uploads import what_uploads_tell

__all__ = ["Audited", "Held", "Line", "Sides", "audits", "figure", "held", "lines", "sentences"]


def sentences(defense: str, records: Sequence[Record]) -> list[str]:
    """Return what was found about `defense`, a sentence each.

    What uploads give away (pixels, labels), what a model gives away to who holds it (members, the true outputs), what
    audits show (canaries, owners, a bound on epsilon), what questions of other packages find, and the formal guarantee.
    Every figure is a record's.
    """
    mine = [r for r in records if r.config.defense.id == defense]
    said = [*what_uploads_tell(defense, records), *what_models_tell(defense, records)]
    said += what_audits_tell(defense, records)
    for name, question in questions().items():
        own = [] if question.chapter else [r for r in records if r.config.attack.kind == name]
        said += question.sentences(defense, own)
    return [*said, *guarantee(mine)]
