"""Checks of all words of a command line, before any of them is parsed."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.base.errors import UsageError, shown

LONGEST = 20_000
"""Largest number of characters of a word: lists of names and numbers, and names of files, are shorter."""


def check_words(words: Sequence[str]) -> None:
    """Raise UsageError for words that are empty, no UTF-8, or longer than `LONGEST`, with the word before.

    An empty word is mostly an unset variable: as a folder it would be the current one, as a list everything.
    """
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        stated = option if equals and option.startswith("--") else words[place - 1] if place else ""
        where = f"after {shown(stated)}" if stated else f"number {place + 1}"
        if not (value if equals and option.startswith("--") else word).strip():
            raise UsageError(f"The word {where} is empty; give a value, or leave the option out.")
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise UsageError(f"The word {where}, {shown(word)}, is no text in UTF-8; rename what it names.")
        if len(word) > LONGEST:
            raise UsageError(f"The word {where} has {len(word):,} characters; words end at {LONGEST:,}.")
