"""Which tokens stand where in a batch of texts, and which of them are of one text, by what they weigh in a gradient.

Where a token stands at two places of a batch, the row space of the first layer's gradient holds the difference of the
two places, and then every token of the one lies in it at the other, too. The gradient G = sum_v d_v x_v^T over pairs v
of a token and a place says more than its rows: with few exceptions each true pair has a cotangent d_v of its own, and
the sum over a place, or over a token's places, has no shorter explanation. So the pairs are those of the explanation of
least summed norms ||d_v||, then of least sum of ||d_v||^0.7 (M-FOCUSS: Cotter, Rao, Engan and Kreutz-Delgado, IEEE
Transactions on Signal Processing 2005). MiniLM, reviews of 32 tokens: of 116 true pairs of four texts among 1,887 the
largest 116 have 110, of 221 of eight texts among 4,372 they have 188; by rows alone none can be told.

Cotangents of one text are alike, since its loss reaches all of its tokens through one vector: 0.31 against 0.00 (mean
cosine of four reviews within and between texts), 0.20 against 0.01 of eight. That sorts the pairs into texts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ppbench.attacks.reconstruction.row_spaces import RowSpace
from ppbench.base.vocabulary import PADDING

Pair = tuple[int, int]
"""A token's number and its place."""
NORM_POWERS = ((1.0, 40), (0.7, 40))
"""Exponents p of the sums of ||d_v||^p, and iterations under each."""
LEAST_SIZE = 1e-4
"""Norm of a cotangent, relative to the largest, that counts as 0."""
EVENED = 0.75
"""Power to which the singular values of the gradient, its rows of norm 1, are raised: few would outweigh all others."""
DIAGONAL = 1e-13
"""Added to the system's diagonal, relative to its mean."""
SEEDS, TURNS = 6, 15
"""Places whose tokens start a clustering, and turns of each."""
ENDED = 0.4
"""Likeness to its text, relative to that of the text's other tokens, below which a shared token is none of it."""
USED = 0.5
"""What likeness to a text loses where a text that is read has the token."""


@dataclass(frozen=True, eq=False)
class TokenPairs:
    """Tokens at places. tokens, places: [P] int64; cotangents: [P, M] float64, and their norms `sizes` [P]."""

    tokens: Tensor
    places: Tensor
    cotangents: Tensor
    sizes: Tensor

    def strongest(self, count: int, length: int) -> list[list[int]]:
        """Return the tokens of largest cotangents at each of `length` places, at most `count`."""
        chosen = []
        for place in range(length):
            here = (self.places == place).nonzero()[:, 0]
            order = self.sizes[here].topk(min(count, len(here))).indices
            chosen.append([int(token) for token in self.tokens[here[order]]])
        return chosen


def token_pairs(
    candidates: Sequence[Pair], inputs: Tensor, space: RowSpace, gradients: Sequence[Tensor], sure: Collection[Pair]
) -> TokenPairs:
    """Return the cotangents of the sparsest explanation of a gradient.

    inputs: what a layer reads of each candidate, [P, D]. space: of its `gradients`, each [m, D]. sure: pairs that are
    known to be true.
    """
    rows = space.rows[space.weights > 0.5].double()
    along = inputs.double() @ rows.T
    seen = torch.cat([gradient.double() for gradient in gradients]) @ rows.T
    norms = seen.norm(dim=1, keepdim=True).clamp(min=1e-30)
    basis, strengths, directions = torch.linalg.svd(seen / norms, full_matrices=False)
    image = strengths[:, None] ** EVENED * directions
    known = torch.tensor([pair in sure for pair in candidates])
    reach, added = torch.ones(len(candidates), dtype=torch.double), max(DIAGONAL, space.floor**2)
    for power, turns in NORM_POWERS:
        for _ in range(turns):
            system = along.T @ (reach[:, None] * along)
            system.diagonal().add_(added * system.diagonal().mean())
            explained = reach[:, None] * (along @ torch.linalg.solve(system, image.T))
            sizes = explained.norm(dim=1)
            reach = (sizes + LEAST_SIZE * sizes.max()) ** (2 - power)
            if sure:
                reach[known] = reach[known].clamp(min=float(reach[known].mean()))
    tokens, places = (torch.tensor(some) for some in zip(*candidates, strict=True))
    return TokenPairs(tokens, places, explained * strengths ** (1 - EVENED) @ (basis * norms).T, sizes)


def texts_by_cotangents(
    pairs: TokenPairs, count: int, length: int, read: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Return `count` texts of `length` token numbers that sort the strongest pairs by likeness.

    read: texts that are known; the others come after them.
    """
    kept = [(place, token) for place, tokens in enumerate(pairs.strongest(count, length)) for token in tokens]
    number = {pair: i for i, pair in enumerate(zip(pairs.places.tolist(), pairs.tokens.tolist(), strict=True))}
    directions = normalize(pairs.cotangents[[number[pair] for pair in kept]], dim=1)
    by_place = [[i for i, (place, _) in enumerate(kept) if place == here] for here in range(length)]
    fixed = [
        [next((i for i in by_place[place] if kept[i][1] == text[place]), None) for place in range(length)]
        for text in read
    ]
    strength = pairs.sizes[[number[pair] for pair in kept]]
    full = [here for here in range(length) if len(by_place[here]) >= count - len(read)]
    order = sorted(full, key=lambda here: -float(strength[by_place[here]].min()))[:SEEDS]
    best = max(
        (_clustered(directions, by_place, fixed, count, here) for here in order), key=lambda one: one[0], default=None
    )
    if best is None:
        return [tuple(text) for text in read]
    sorted_texts = [tuple(PADDING if i is None else kept[i][1] for i in places) for places in best[1]]
    return [*(tuple(text) for text in read), *sorted_texts[len(read) :]]


Assignment = list[list[int | None]]
"""The number of a text's pair at each place, by text."""


def _clustered(
    directions: Tensor, by_place: Sequence[Sequence[int]], fixed: Sequence[Sequence[int | None]], count: int, seed: int
) -> tuple[float, Assignment]:
    """Return the summed likeness of pairs to their texts, and the texts, from the pairs of the place `seed`."""
    from scipy.optimize import linear_sum_assignment  # here, because it is slow to import

    used = [{text[place] for text in fixed} for place in range(len(by_place))]
    starts = [i for i in by_place[seed] if i not in used[seed]] or list(by_place[seed])
    chosen: Assignment = [list(text) for text in fixed]
    chosen += [[None] * len(by_place) for _ in range(count - len(fixed))]
    centers = torch.stack([_center(directions, text) for text in chosen])
    for row, i in zip(range(len(fixed), count), starts, strict=False):
        centers[row] = directions[i]
    total = 0.0
    for _ in range(TURNS):
        total, free = 0.0, range(len(fixed), count)
        for place, here in enumerate(by_place):
            if not here:
                continue
            likeness = directions[list(here)] @ normalize(centers[len(fixed) :], dim=1).T
            likeness -= USED * torch.tensor([[float(i in used[place])] for i in here])
            rows, columns = linear_sum_assignment(-likeness.numpy())
            for text in free:
                chosen[text][place] = None
            for row, column in zip(rows, columns, strict=True):
                chosen[free[column]][place] = here[row]
                total += float(likeness[row, column])
        centers = torch.stack([_center(directions, text) for text in chosen])
    for text in range(len(fixed), count):
        _share(directions, by_place, chosen[text], centers[text])
    return total, chosen


def _center(directions: Tensor, text: Sequence[int | None]) -> Tensor:
    """Return the sum of the directions of a text's pairs."""
    own = [i for i in text if i is not None]
    return directions[own].sum(0)


def _share(directions: Tensor, by_place: Sequence[Sequence[int]], text: list[int | None], center: Tensor) -> None:
    """Fill the places where a text has no pair of its own with the likeliest one of others, until it ends.

    It ends behind its last own pair, where no pair is like it.
    """
    likeness = directions @ normalize(center, dim=0)
    own = [place for place, i in enumerate(text) if i is not None]
    usual = float(likeness[[i for i in text if i is not None]].mean()) if own else 1.0
    for place, here in enumerate(by_place):
        if text[place] is None and here:
            nearest = max(here, key=lambda i: float(likeness[i]))
            if place > max(own, default=-1) and float(likeness[nearest]) < ENDED * usual:
                break
            text[place] = nearest
