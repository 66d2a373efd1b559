"""Figures of a reconstructed text beside the original, both rows of token numbers.

ROUGE is computed here, in a few lines, since the package `rouge-score` costs every worker 3 s of imports (all of nltk,
scikit-learn, pandas) and is published without a wheel; `tests/test_texts.py` holds both to equal figures.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ppbench.base.vocabulary import PADDING, Vocabulary

if TYPE_CHECKING:
    from torch import Generator, Tensor

FACT = re.compile(r"\d+(?:[.,:]\d+)*|(?<=[\w,;] )[A-Z]\w+")
"""What a reader fears to find of a text: numbers, and capitalized words that do not start a sentence."""

NAME, NUMBER = re.compile(r"[Ġ▁]?[A-Z]\w+"), re.compile(r"(?:[Ġ▁]|##)?\d+")
"""Tokens of which facts are made: capitalized words, digits."""
ROUGE_WORD = re.compile(r"[^\W_]+")
"""A word of ROUGE: letters and digits, of any script where `rouge-score` knows those of ASCII alone."""


@dataclass(frozen=True)
class TextFigures:
    """How much of a text came out.

    in_place: the share of its tokens at their place. in_set: of its tokens wherever they stand, each counted as often
    as it stands in both. exact: whether all are in place. run: the longest run of tokens that both texts share, in
    tokens. facts: the share of its numbers and names (`FACT`) that the reconstruction contains; None if it has none.
    rouge_1, rouge_2, rouge_l: as `rouge` gives them.
    """

    in_place: float
    in_set: float
    exact: bool
    run: int
    facts: float | None
    rouge_1: float
    rouge_2: float
    rouge_l: float


def tokens_of(text: Tensor) -> list[int]:
    """Return a text [length] of numbers as token numbers, each rounded; padding where it is not finite."""
    return [int(token) for token in text.detach().nan_to_num(PADDING, PADDING, PADDING).round().tolist()]


def share_in_place(guess: Sequence[int], truth: Sequence[int]) -> float:
    """Return the share of the tokens of a text, padding aside, that a guess of the same length has at their place."""
    places = [i for i, token in enumerate(truth) if token != PADDING]
    return sum(guess[i] == truth[i] for i in places) / max(len(places), 1)


def share_in_text(guess: Sequence[int], truth: Sequence[int]) -> float:
    """Return the share of the tokens of a text, padding aside, that a guess has too, each as often as both have it."""
    words = Counter(token for token in truth if token != PADDING)
    return (Counter(guess) & words).total() / max(words.total(), 1)


def commonest_tokens(texts: Tensor) -> tuple[int, ...]:
    """Return the L tokens, some repeated, that share most with texts [N, L] on average: a blind guess in any order."""
    gains, length = Counter[tuple[int, int]](), texts.shape[1]
    for tokens in map(tokens_of, texts):
        counts = Counter(token for token in tokens if token != PADDING)
        for token, count in counts.items():
            gains.update({(token, nth): 1 / counts.total() for nth in range(count)})
    return tuple(token for (token, _), _ in sorted(gains.items(), key=lambda one: (-one[1], one[0]))[:length])


def text_figures(guess: Sequence[int], truth: Sequence[int], vocabulary: Vocabulary) -> TextFigures:
    """Return the figures of a reconstruction, both token numbers of the same length."""
    tokens, words = [t for t in guess if t != PADDING], [t for t in truth if t != PADDING]
    matched = SequenceMatcher(None, tokens, words, autojunk=False).find_longest_match()
    written, original = vocabulary.text(guess), vocabulary.text(truth)
    known = set(FACT.findall(written))
    facts = FACT.findall(original)
    return TextFigures(
        share_in_place(guess, truth),
        share_in_text(tokens, words),
        list(guess) == list(truth),
        matched.size,
        sum(fact in known for fact in facts) / len(facts) if facts else None,
        *rouge(written, original),
    )


def redraw_facts(texts: Tensor, vocabulary: Vocabulary, generator: Generator) -> Tensor:
    """Return texts [n, length] whose names and numbers (`FACT`) are other ones of the vocabulary, token by token."""
    import torch

    numbers, names = ([i for i, word in enumerate(vocabulary.words) if k.fullmatch(word)] for k in (NUMBER, NAME))
    alike = {token: some for some in (numbers, names) for token in some}
    draws = torch.rand(texts.shape, generator=generator).tolist()
    out = texts.clone()
    for row, tokens, shares in zip(out, map(tokens_of, texts), draws, strict=True):
        for place, (token, share) in enumerate(zip(tokens, shares, strict=True)):
            before = vocabulary.words[tokens[place - 1]] if place else "."
            inside = before[-1:] in ",;" or before[-1:].isalnum()  # a sentence has begun
            if token in alike and (inside or alike[token] is numbers):
                row[place] = alike[token][int(share * len(alike[token]))]
    return out


def rouge(guess: str, truth: str) -> tuple[float, float, float]:
    """Return ROUGE-1, ROUGE-2 and ROUGE-L of two texts, balanced F-measures without stemming (Lin, 2004).

    Their units are words, pairs of neighboring words, and the longest subsequence of words, gaps allowed, that both
    have. 0 where a text has no unit: a single word has no pair.
    """
    words, others = (ROUGE_WORD.findall(text.lower()) for text in (guess, truth))
    pairs, other_pairs = (list(pairwise(some)) for some in (words, others))
    return (
        _f_measure((Counter(words) & Counter(others)).total(), len(words) + len(others)),
        _f_measure((Counter(pairs) & Counter(other_pairs)).total(), len(pairs) + len(other_pairs)),
        _f_measure(_common_subsequence(words, others), len(words) + len(others)),
    )


def _f_measure(shared: int, total: int) -> float:
    """Return 2 P R / (P + R) of the units that two texts share, by the number of both texts' units."""
    return 2 * shared / total if shared else 0.0


def _common_subsequence(words: Sequence[str], others: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, by the usual table, a row at a time."""
    row, columns = np.zeros(len(others) + 1, dtype=np.int64), np.array(others, dtype=object)
    for word in words:
        row[1:] = np.maximum.accumulate(np.maximum(row[1:], row[:-1] + (columns == word)))
    return int(row[-1])
