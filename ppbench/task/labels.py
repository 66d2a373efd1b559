"""Checks that labels are class numbers from 0."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppbench.base.errors import UsageError, shown
from ppbench.task.dataset import MAX_CLASSES

MANY_CLASSES = 20
"""Number of classes above which labels that hardly repeat are taken for names of examples."""
_USED = 4
"""At least one of so many class numbers must be in use."""


def class_numbers(source: str, labels: Iterable[Any]) -> Tensor:
    """Return labels as class numbers, int64 [N]; True and 3.0 are allowed.

    source: their origin in error messages. UsageError: a label is a fraction, no number, missing, below 0, or not below
    `MAX_CLASSES`.
    """
    numbers = []
    for row, label in enumerate(labels):
        value = label
        if isinstance(label, Tensor | np.ndarray | np.generic) and math.prod(label.shape) == 1:
            value = label.item()
        try:
            number = int(value) if isinstance(value, bool | int | float) else -1
        except (OverflowError, ValueError):  # infinite, or no number
            number = -1
        if number != value or not 0 <= number < MAX_CLASSES:
            raise UsageError(
                f"Row {row} of {source} has label {shown(value, 40)}; labels must be class numbers, whole and from 0 "
                f"to {MAX_CLASSES - 1} (numbers to fit: csv:FILE?task=regression)."
            )
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.int64)


def classes_of(source: str, labels: Tensor) -> int:
    """Return the number of classes of labels int64 [N]: one more than the largest.

    UsageError: there is no class 0, few of the numbers are in use, or labels hardly repeat.
    """
    used, classes = labels.unique(), int(labels.max()) + 1
    if len(used) > MANY_CLASSES and 2 * len(used) > len(labels):
        fault = (
            f"has {len(used)} labels in {len(labels)} examples, as names of examples do; give the number of each class"
        )
    elif int(used[0]) > 0:
        fault = f"has labels from {int(used[0])} on; classes are numbered from 0: subtract {int(used[0])}"
    elif len(used) * _USED < classes:
        fault = f"has {len(used)} labels, the largest {classes - 1}; number the classes from 0 without gaps"
    else:
        return classes
    raise UsageError(f"{source} {fault}.")


def empty_classes(labels: Tensor, classes: int) -> str:
    """Return a remark on classes without an example in labels int64 [N], "" if all have some."""
    empty = sorted({*range(classes)} - {*labels.tolist()})
    if not empty:
        return ""
    names = ", ".join(map(str, empty[:5])) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
    return f", of which {names} {'has' if len(empty) == 1 else 'have'} no example for training"
