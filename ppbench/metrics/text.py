"""Figures of a reconstructed text beside the original, both rows of token numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from ppbench.base.vocabulary import PADDING, Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

FACT = re.compile(r"\d+(?:[.,:]\d+)*|(?<=[\w,;] )[A-Z]\w+")
"""What a reader fears to find of a text: numbers, and capitalized words that do not start a sentence."""


@dataclass(frozen=True)
class TextFigures:
    """How much of a text came out.

    in_place: the share of its tokens at their place. in_set: of its tokens wherever they stand, each counted as often
    as it stands in both. exact: whether all are in place. run: the longest run of tokens that both texts share, in
    tokens. facts: the share of its numbers and names (`FACT`) that the reconstruction contains; None if it has none.
    """

    in_place: float
    in_set: float
    exact: bool
    run: int
    facts: float | None


def tokens_of(text: Tensor) -> list[int]:
    """Return a text [length] of numbers as token numbers, each rounded; padding where it is not finite."""
    return [int(token) for token in text.detach().nan_to_num(PADDING, PADDING, PADDING).round().tolist()]


def share_in_place(guess: Sequence[int], truth: Sequence[int]) -> float:
    """Return the share of the tokens of a text, padding aside, that a guess of the same length has at their place."""
    places = [i for i, token in enumerate(truth) if token != PADDING]
    return sum(guess[i] == truth[i] for i in places) / max(len(places), 1)


def text_figures(guess: Sequence[int], truth: Sequence[int], vocabulary: Vocabulary) -> TextFigures:
    """Return the figures of a reconstruction, both token numbers of the same length."""
    tokens, words = [t for t in guess if t != PADDING], [t for t in truth if t != PADDING]
    shared = (Counter(tokens) & Counter(words)).total()
    matched = SequenceMatcher(None, tokens, words, autojunk=False).find_longest_match()
    known = set(FACT.findall(vocabulary.text(guess)))
    facts = FACT.findall(vocabulary.text(truth))
    return TextFigures(
        share_in_place(guess, truth),
        shared / max(len(words), 1),
        list(guess) == list(truth),
        matched.size,
        sum(fact in known for fact in facts) / len(facts) if facts else None,
    )
