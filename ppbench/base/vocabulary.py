"""Texts as rows of token numbers, and the vocabulary that says what they mean.

A row has a fixed length; `PADDING` fills what a shorter text leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PADDING, UNKNOWN = 0, 1
"""Token numbers of what fills a short text, and of a word that the vocabulary lacks."""
JOINED = frozenset(".,;:!?)%'")
"""Tokens that a written text does not set apart from the one before."""
Style = Literal["words", "wordpiece", "bytes", "pieces"]
"""How tokens make a text: whole words and digits; "##" continues a word (BERT); bytes as letters, "Ġ" a space (GPT);
"▁" a space (SentencePiece)."""


@dataclass(frozen=True)
class Vocabulary:
    """The public vocabulary of texts. words: the tokens by number; `PADDING` is the first. style: see `Style`."""

    words: tuple[str, ...]
    style: Style = "words"

    def __len__(self) -> int:
        return len(self.words)

    def text(self, tokens: Sequence[float]) -> str:
        """Return what token numbers say, rounded to the nearest that exist, without padding."""
        numbers = (min(max(round(token), 0), len(self) - 1) if token == token else PADDING for token in tokens)
        words = [self.words[number] for number in numbers if number != PADDING]
        if self.style == "bytes":
            return _from_bytes("".join(words)).strip()
        if self.style == "pieces":
            return "".join(words).replace("▁", " ").strip()
        if self.style == "wordpiece":
            return " ".join(words).replace(" ##", "")
        return _written(words)


def _written(words: Sequence[str]) -> str:
    """Return words with spaces between, but within numbers and before punctuation."""
    text, before = "", ""
    for word in words:
        close = word in JOINED or (word.isdigit() and before.isdigit()) or not text
        text, before = text + ("" if close else " ") + word, word
    return text


def _from_bytes(letters: str) -> str:
    """Return the UTF-8 text that a byte-level tokenizer's letters stand for (Radford et al., GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    of_letter = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}
    return bytes(of_letter.get(letter, ord("?")) for letter in letters).decode("utf-8", errors="replace")
