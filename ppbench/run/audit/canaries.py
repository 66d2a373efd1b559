"""Canaries: records that nothing but membership explains, so that a model which remembers one gives it away.

Carlini et al. 2019 and Aerni et al. 2024: attacks on average records hide how badly a defense treats its
worst-protected ones. All are made from the test part and from noise, never from clients' data.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate, one_hot

from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.federation.plan import Data
from ppbench.run.task import Task

AVERAGE = "average"
FAMILIES = ("mislabelled", "blank", "out_of_distribution")
"""Families of canaries: a test record with a wrong target; one without content; one of uniform noise."""
BLOCKS = 4
"""Blocks of columns of a blank table row; the image's are its quarters."""


def canaries(task: Task, count: int, seeds: Seeds) -> tuple[Data, tuple[str, ...], Tensor]:
    """Return `count` canaries of each family, family by family; the family of each; int64 [count], test records used.

    Mislabelled: test records with another class, or another one's mask or number. Blank: each quarter of an image, in
    each channel, at one level drawn from the data range; of tables each of four blocks of columns at one share of its
    range. (One level for a whole image would put all blanks on one line, where they hide each other: AUC of LiRA .77
    against .88.) Out of distribution: every entry drawn from that range. Targets of the last two are drawn from those
    that there are.

    Raises UsageError: the test part has not more than `count` examples.
    """
    test = task.test
    if count >= len(test.x):
        raise UsageError(
            f"Option canaries={count} cannot be used: mislabelled canaries are test examples and the test part of "
            f"{task.dataset.name!r} has {len(test.x)}, some of which are left for other uses; give fewer."
        )
    generator = seeds.generator("canaries")
    used = torch.randperm(len(test.x), generator=generator)[:count]
    low, high = _range(task)
    level, noise = _blank(count, low.shape, generator), torch.rand(count, *low.shape, generator=generator)
    x = torch.cat([test.x[used], low + (high - low) * level, low + (high - low) * noise])
    y = torch.cat([_wrong(task, used, generator), _random(task, 2 * count, generator)])
    return Data(x, y), tuple(name for name in FAMILIES for _ in range(count)), used


def _range(task: Task) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each entry of a record, both [*shape] float32."""
    example = task.test.x[0]
    if task.dataset.kind == "tabular":
        return task.test.x.amin(0), task.test.x.amax(0)
    low, high = task.plan.data_range
    return torch.full_like(example, low), torch.full_like(example, high)


def _blank(count: int, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Return [count, *shape] in [0, 1]: one value in each quarter of each channel, or in each block of columns."""
    if len(shape) == 3:
        return interpolate(
            torch.rand(count, shape[0], 2, 2, generator=generator), size=tuple(shape[1:]), mode="nearest"
        )
    columns = torch.rand(count, 1, BLOCKS, generator=generator)
    return interpolate(columns, size=shape.numel(), mode="nearest").reshape(count, *shape)


def _wrong(task: Task, used: Tensor, generator: torch.Generator) -> Tensor:
    """Return targets [n, C] not those of the test records `used` [n]: another class, or that of the record after."""
    if not task.classified:
        return task.test.y[(used + 1) % len(task.test.y)]
    y = task.test.y[used]
    classes = y.shape[1]
    step = torch.randint(1, classes, (len(y),), generator=generator)
    return one_hot((y.argmax(1) + step) % classes, classes).to(y.dtype)


def _random(task: Task, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` targets drawn uniformly from the classes, or from the targets of the test part."""
    y = task.test.y
    if not task.classified:
        return y[torch.randint(0, len(y), (count,), generator=generator)]
    return one_hot(torch.randint(0, y.shape[1], (count,), generator=generator), y.shape[1]).to(y.dtype)
