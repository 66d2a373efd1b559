"""Augmented copies: the record first, images only, nothing invented at a border."""

from __future__ import annotations

import pytest
import torch

from ppbench.adversary.augment import MOST, augmentations
from ppbench.base.errors import UsageError


@pytest.mark.parametrize("count", [1, 2, 3, 7, MOST])
def test_the_record_comes_first_and_copies_are_many_and_unlike(count):
    x = torch.rand(3, 2, 5, 6)
    found = augmentations(x, count)
    assert found.shape == (count, 3, 2, 5, 6)
    assert torch.equal(found[0], x)
    assert len({tuple(copy.flatten().tolist()) for copy in found}) == count
    assert torch.equal(found, augmentations(x.clone(), 1000)[:count]) and len(augmentations(x, 1000)) == MOST


def test_the_second_is_the_mirror_image_and_the_third_a_shift():
    x = torch.arange(12.0).reshape(1, 1, 3, 4)
    found = augmentations(x, 4)
    assert torch.equal(found[1], x.flip(-1))
    assert found[2, 0, 0].tolist() == [[0, 0, 1, 2], [4, 4, 5, 6], [8, 8, 9, 10]]
    assert torch.equal(found[3], found[2].flip(-1))


@pytest.mark.parametrize("shape", [(4, 7), (4, 3, 8)])
def test_what_is_no_image_has_itself_only(shape):
    x = torch.rand(shape, dtype=torch.float64)
    found = augmentations(x, 5)
    assert torch.equal(found, x[None])
    assert found.data_ptr() != x.data_ptr()


def test_fewer_than_one_is_refused():
    with pytest.raises(UsageError, match="expected 1"):
        augmentations(torch.rand(1, 1, 4, 4), 0)
