"""Accuracy of a reconstructed table row: its share of right columns (Vero et al., ICML 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ppbench.federation.plan import Columns

NUMBER_TOLERANCE = 0.319
"""Largest error of a right number, in standard deviations of its column in the training data: a quarter of a normal
column's values lie that near to the mean."""


def row_accuracy(guess: Tensor, truth: Tensor, columns: Columns) -> float:
    """Return the share of columns that `guess` [D] has right, both rows being encoded by `columns`: 0 to 1.

    A category is right if the largest entry of its group is that of the truth, a number within `NUMBER_TOLERANCE`. What
    is not finite is wrong, as is a category unknown in training, all zeros in the truth.
    """
    guess = guess.where(guess.isfinite().all(), guess.new_tensor(float("nan")))
    (numbers, groups), (true_numbers, true_groups) = columns.split(guess), columns.split(truth.to(guess))
    hits = int(((numbers - true_numbers).abs() <= NUMBER_TOLERANCE).sum())
    for group, true_group in zip(groups, true_groups, strict=True):
        hits += bool(group.isfinite().all()) and bool(true_group[group.argmax()] > 0.5)
    return hits / (columns.numbers + len(columns.categories))
