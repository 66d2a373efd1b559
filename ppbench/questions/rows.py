"""How much of a table row a reconstruction tells: its columns, numbers and categories (Vero et al., ICML 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ppbench.federation.plan import Columns

TOLERANCE = 0.319
"""How far a number may be off, in standard deviations of its column in the training data: one in four of a normal
column's values lies that near to the mean."""


def row_accuracy(guess: Tensor, truth: Tensor, columns: Columns) -> float:
    """Return the share of a row's columns that `guess` [D] has right, both encoded as `columns` says: 0 to 1.

    A category is right where the largest entry of its group is that of the truth, a number within `TOLERANCE`. What is
    not finite is wrong, as is a category that training never had, all zeros in the truth.
    """
    guess = guess.where(guess.isfinite().all(), guess.new_tensor(float("nan")))
    (number, groups), (right, wanted) = columns.split(guess), columns.split(truth.to(guess))
    hits = int(((number - right).abs() <= TOLERANCE).sum())
    for group, one in zip(groups, wanted, strict=True):
        hits += bool(group.isfinite().all()) and bool(one[group.argmax()] > 0.5)
    return hits / (columns.numbers + len(columns.categories))
