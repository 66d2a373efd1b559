"""A text read off a gradient with fewer rows than the text has tokens, as that of adapters of low rank (LoRA).

Every row is a mixture of the inputs of all tokens, so no single input lies in the row space. But all rows mix the same
inputs, one for each place, of a known table: joint sparse recovery. Tokens are chosen greedily, each by how much it
explains of what the chosen ones leave (rank-aware order recursive matching pursuit: Davies and Eldar, "Rank Awareness
in Joint Sparse Recovery", IEEE Transactions on Information Theory 2012). Then each place is chosen again, given all
others, until the rows are explained whole. Wrong tokens do that too where they span nearly the whole space: a text
counts as read only if the rows hold more than it takes to choose its tokens (`_is_determined`).

Measured (docs/benchmarks.md): of letters of 22 tokens all from 6 rows on; of reviews of 32 tokens on MiniLM, which has
30,522 tokens, 97 % of 16 rows and 41 % of 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ppbench.attacks.reconstruction.row_spaces import ReadText, RowSpace, SummedInputs
from ppbench.base.vocabulary import PADDING

ATTEMPTS, SWEEPS = 3, 8
"""How often half of the best tokens are given up for others, and then all places are chosen again, at most."""
SAFETY = 2.0
"""How many times the bits that choose a text its rows must hold, for their search tries many."""
LEAST_ROOM = 0.02
"""Share of an input's square that counts, at least, as outside the others: less is rounding."""
LEAST_LEFT = 1e-4
"""Length that a direction of unit rows keeps, at least, to count as not explained."""


def text_of_mixtures(inputs: SummedInputs, words: Tensor, space: RowSpace, generator: torch.Generator) -> ReadText:
    """Return the text whose inputs, together, span the rows of a space best.

    words: the tokens [N] of `inputs`. The text's distance is that of the rows from what its inputs span; 1 where wrong
    tokens might explain them as well.
    """
    rows, best, least = space.rows[space.weights > 0.5], dict[int, int](), math.inf
    for _ in range(ATTEMPTS):
        kept = {place: best[place] for place in best if torch.rand((), generator=generator) < 0.5}
        chosen = _exchanged(inputs, rows, _filled(inputs, rows, kept), space.read_distance, generator)
        distance = _distance(rows, _span(inputs, chosen))
        if distance < least:
            best, least = chosen, distance
        if least < space.read_distance:
            break
    needed = {place: token for place, token in best.items() if _is_needed(inputs, rows, best, place, space)}
    tokens = tuple(int(words[needed[i]]) if i in needed else PADDING for i in range(len(inputs.place)))
    is_determined = _is_determined(rows, len(needed), len(words), space.read_distance)
    return ReadText(tokens, _distance(rows, _span(inputs, needed)) if is_determined else 1.0)


def _is_determined(rows: Tensor, chosen: int, words: int, limit: float) -> bool:
    """Return whether rows [R, D] that so many tokens of `words` explain to `limit` tell them from wrong ones.

    Each row lies within `limit` of their span in D - 1 - `chosen` directions (a norm leaves out one), which wrong
    tokens do by a chance of `limit` each; there are `words` to the power of `chosen` texts.
    """
    free = max(rows.shape[1] - 1 - chosen, 0)
    return len(rows) * free * -math.log2(limit) > SAFETY * chosen * math.log2(max(words, 2))


def _exchanged(
    inputs: SummedInputs, rows: Tensor, chosen: Mapping[int, int], limit: float, generator: torch.Generator
) -> dict[int, int]:
    """Return tokens of which none can be exchanged for a better one, or that leave the rows less than `limit`."""
    chosen = dict(chosen)
    for _ in range(SWEEPS):
        before = dict(chosen)
        if _distance(rows, _span(inputs, chosen)) < limit:
            break
        for place in torch.randperm(len(inputs.place), generator=generator).tolist():
            chosen.pop(place, None)
            chosen |= _best(inputs, rows, chosen, place)
        if chosen == before:
            break
    return chosen


def _filled(inputs: SummedInputs, rows: Tensor, kept: Mapping[int, int]) -> dict[int, int]:
    """Return those tokens that are kept, and one for each other place, until the rows are explained."""
    chosen, span = dict(kept), _span(inputs, kept)
    room = inputs.sizes - inputs.squares(span)
    while len(chosen) < len(inputs.place) and len(left := _unexplained(rows, span)):
        explained = inputs.squares(left.T) / room.clamp(min=LEAST_ROOM * inputs.sizes)
        explained[[*chosen]] = -1.0
        place, token = divmod(int(explained.argmax()), explained.shape[1])
        chosen[place] = token
        grown = _span(inputs, chosen)
        room, span = room - inputs.squares(grown[:, -1:]), grown
    return chosen


def _best(inputs: SummedInputs, rows: Tensor, others: Mapping[int, int], place: int) -> dict[int, int]:
    """Return the token of a place that explains most of what the others leave; none if they leave nothing."""
    span = _span(inputs, others)
    left = _unexplained(rows, span)
    if not len(left):
        return {}
    size = inputs.sizes[place]
    room = (size - inputs.squares(span, [place])[0]).clamp(min=LEAST_ROOM * size)
    return {place: int((inputs.squares(left.T, [place])[0] / room).argmax())}


def _is_needed(inputs: SummedInputs, rows: Tensor, chosen: Mapping[int, int], place: int, space: RowSpace) -> bool:
    """Return whether the rows are not explained without the token of a place: places behind a text's end are not."""
    others = {other: token for other, token in chosen.items() if other != place}
    return _distance(rows, _span(inputs, others)) >= space.read_distance


def _span(inputs: SummedInputs, chosen: Mapping[int, int]) -> Tensor:
    """Return orthonormal directions [D, K] that the inputs of tokens at places span, in their order."""
    if not chosen:
        return inputs.place.new_zeros(inputs.place.shape[1], 0)
    span: Tensor = torch.linalg.qr(torch.stack([inputs.input(*one) for one in chosen.items()]).T)[0]
    return span


def _unexplained(rows: Tensor, span: Tensor) -> Tensor:
    """Return orthonormal directions [M, D] of what rows [R, D] have outside a span."""
    _, sizes, directions = torch.linalg.svd(rows - (rows @ span) @ span.T, full_matrices=False)
    unexplained: Tensor = directions[sizes > LEAST_LEFT]
    return unexplained


def _distance(rows: Tensor, span: Tensor) -> float:
    """Return how much of orthonormal rows lies outside a span, at most."""
    return float(torch.linalg.matrix_norm(rows - (rows @ span) @ span.T, 2))
