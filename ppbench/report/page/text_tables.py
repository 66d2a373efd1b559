"""Texts of a page: originals and what the best attack read, the tokens that agree marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from ppbench.records.figure import best
from ppbench.report.compare.report import markdown_text
from ppbench.report.entries import Entry
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import Leak
from ppbench.report.page.overview import Overview, setting_words
from ppbench.report.words import capitalized

SHOWN_TEXTS = 5
"""Texts of a setting: the first victims, not the best ones."""
LEAST_MARKED = 4
"""Characters from which on a piece that both texts share is marked."""


@dataclass(frozen=True)
class MarkedText:
    """A reconstructed text in pieces, each with whether the original has it. share: of tokens in place."""

    original: str
    pieces: tuple[tuple[str, bool], ...]
    share: float | None


@dataclass(frozen=True)
class TextTable:
    """The texts of one setting, by an attacker unaware of the defense or aware of it."""

    name: str
    attack: str
    is_aware: bool
    texts: tuple[MarkedText, ...]


@dataclass(frozen=True)
class TextSample:
    """What the worst case read of the first victim under each setting. scene: batch size and model.

    readings: by the name of a setting, with what tells its evaluation from others.
    """

    scene: str
    original: str
    readings: tuple[tuple[str, MarkedText], ...]


def text_samples(tables: Sequence[tuple[Overview, str]]) -> list[TextSample]:
    """Return the samples of evaluations, of the settings that their tables show; none where inputs are no texts.

    tables: with what tells each from the others. Evaluations that attack the same text share a sample.
    """
    samples = dict[tuple[str, str], list[tuple[str, MarkedText]]]()
    for table, about in tables:
        original = ""
        for row in table.rows:
            text = _first_text(row.value.shown.leak)
            if text is None or text.original != (original := original or text.original):  # other seeds' victims differ
                continue
            name = setting_words(row.value) if row.value.entry.role == "compared" else "undefended"
            readings = samples.setdefault((table.scene, original), [])
            readings.append((f"{about}: {name}" if about else name, text))
    return [
        TextSample(capitalized(scene), original, tuple(readings)) for (scene, original), readings in samples.items()
    ]


def _first_text(leak: Leak | None) -> MarkedText | None:
    victims = () if leak is None or leak.worst is None else leak.worst.victims
    return next((marked(victim) for victim in victims if getattr(victim, "text", None)), None)


def text_lines(samples: Sequence[TextSample]) -> list[str]:
    """Return the samples as lines of Markdown, what a reading shares with its original in bold."""
    lines = list[str]()
    for sample in samples:
        lines += [markdown_text(f"{sample.scene}; the first victim: {sample.original}"), ""]
        lines += ["| Setting | What was read | Tokens in place |", "| --- | --- | --- |"]
        for name, text in sample.readings:
            words = "".join(_bold(piece) if hit else markdown_text(piece) for piece, hit in text.pieces)
            share = "-" if text.share is None else f"{text.share:.0%}"
            lines.append(f"| {markdown_text(name)} | {words} | {share} |")
        lines.append("")
    return lines


def _bold(piece: str) -> str:
    """Return a piece in bold; Markdown takes no mark of bold beside a space."""
    inside = piece.strip()
    before, after = piece[: len(piece) - len(piece.lstrip())], piece[len(piece.rstrip()) :]
    return f"{before}**{markdown_text(inside)}**{after}" if inside else piece


def text_tables(section: str, entry: Entry, known: Knowledge) -> list[TextTable]:
    """Return the texts of a setting by its best unaware and its best aware attack; none where inputs are no texts."""
    records = [r for r in entry.records if r.status == "complete" and any(getattr(v, "text", None) for v in r.victims)]
    tables = []
    for aware in (False, True):
        record = best([r for r in records if known.adaptive(r) == aware], "reconstruction_accuracy")
        if record is not None:
            texts = tuple(marked(victim) for victim in record.victims[:SHOWN_TEXTS])
            tables.append(TextTable(f"{section}, {entry.name}", record.config.attack.id, aware, texts))
    return tables


def marked(score: object) -> MarkedText:
    """Return the text of a score with what it shares with the original."""
    text = getattr(score, "text")  # noqa: B009 - a record's score may be of any question
    matcher = SequenceMatcher(None, text.guess, text.truth, autojunk=False)
    return MarkedText(text.truth, tuple(_pieces(text.guess, matcher)), getattr(score, "accuracy", None))


def _pieces(guess: str, matcher: SequenceMatcher[str]) -> Sequence[tuple[str, bool]]:
    pieces, end = list[tuple[str, bool]](), 0
    for block in matcher.get_matching_blocks():
        if block.size >= LEAST_MARKED:
            pieces += [(guess[end : block.a], False), (guess[block.a : block.a + block.size], True)]
            end = block.a + block.size
    return [piece for piece in (*pieces, (guess[end:], False)) if piece[0]]
