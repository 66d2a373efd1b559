"""What was found, in words: sentences computed from records, for the terminal and the head of the board."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.questions.base import questions
from ppbench.records.schema import Record
from ppbench.report.frame import frame_of
from ppbench.report.verdict.audits import what_audits_tell
from ppbench.report.verdict.guarantee import guarantee
from ppbench.report.verdict.lines import held, lines
from ppbench.report.verdict.models import what_models_tell
from ppbench.report.verdict.uploads import what_uploads_tell
from ppbench.report.verdict.verdict import Verdict

__all__ = ["held", "lines", "sentences", "verdicts"]


def verdicts(defense: str, records: Sequence[Record]) -> list[Verdict]:
    """Return what was found about `defense`, question by question, each with its sentence.

    What uploads give away (pixels, labels), what a model gives away to who holds it (members, the true outputs), what
    audits show (canaries, owners, a bound on epsilon), what questions of other packages find, and the formal guarantee.
    Every figure is a record's.
    """
    frame = frame_of(records)
    said = [*what_uploads_tell(defense, frame), *what_models_tell(defense, frame), *what_audits_tell(defense, frame)]
    for name, question in questions().items():
        own = [] if question.chapter else [r for r in frame if r.config.attack.kind == name]
        said += [Verdict(defense, name, None, sentence) for sentence in question.sentences(defense, own)]
    stated = guarantee([r for r in frame if r.config.defense.id == defense])
    return [*said, *(Verdict(defense, "guarantee", None, sentence) for sentence in stated)]


def sentences(defense: str, records: Sequence[Record]) -> list[str]:
    """Return the sentences of `verdicts`."""
    return [verdict.sentence for verdict in verdicts(defense, records)]
