"""What no word of a command line may be, whatever it is for: asked once, before any of them is looked at."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.base.errors import UsageError, shown

LONGEST = 20_000
"""Characters of a word: lists of names and numbers are shorter, and so are the names of files."""


def check_words(words: Sequence[str]) -> None:
    """Refuse words that are empty, no UTF-8, or longer than `LONGEST` (UsageError, with the word before it).

    An empty one is mostly a variable that is not set: as a folder it would be the present one, as a list everything.
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
