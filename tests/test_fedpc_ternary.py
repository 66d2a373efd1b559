"""FedPC's ternary vectors: the rules of Eq. 4-5 at their borders, and packings that read back only what they write."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppbench.defenses.fedpc.ternary import (
    decoded,
    encoded,
    first_ternary,
    later_ternary,
    pack,
    pack3,
    unpack,
    unpack3,
)

TRITS = st.lists(st.sampled_from([-1, 0, 1]), max_size=70)


def trits_of(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)


@given(TRITS)
@settings(max_examples=200, deadline=None)
def test_packings_read_back_in_the_least_bytes(values):
    trits = trits_of(values)
    for write, read, per_byte in ((pack, unpack, 4), (pack3, unpack3, 5)):
        data = write(trits)
        assert data.dtype == torch.uint8 and len(data) == math.ceil(len(values) / per_byte)
        found = read(data, len(values))
        assert found.dtype == torch.int8 and found.tolist() == values


def test_entries_lie_lowest_bits_first():
    # 0 -> 00, 1 -> 01, -1 -> 11: entries 0, 1, -1, 0 give 00 11 01 00, the fifth a byte of its own.
    assert pack(trits_of([0, 1, -1, 0, 1])).tolist() == [0b00110100, 0b01]
    assert pack3(trits_of([1, -1, 0, 0, 1, -1])).tolist() == [1 + 2 * 3 + 81, 2]


@given(st.lists(st.integers(0, 255), min_size=1, max_size=12), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_two_bits_read_nothing_that_they_would_not_write(values, short):
    data = torch.tensor(values, dtype=torch.uint8)
    count = 4 * len(values) - short
    pairs = [value >> shift & 3 for value in values for shift in (0, 2, 4, 6)]
    if 2 in pairs or any(pairs[count:]):
        with pytest.raises(ValueError):
            unpack(data, count)
    else:
        assert torch.equal(pack(unpack(data, count)), data)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=12), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_base_3_reads_nothing_that_it_would_not_write(values, short):
    data, count = torch.tensor(values, dtype=torch.uint8), 5 * len(values) - short
    if max(values) > 242 or values[-1] >= 3 ** (5 - short):
        with pytest.raises(ValueError):
            unpack3(data, count)
    else:
        assert torch.equal(pack3(unpack3(data, count)), data)


@pytest.mark.parametrize("read", [unpack, unpack3])
@pytest.mark.parametrize(
    "data",
    [torch.zeros(3, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), torch.zeros(2, dtype=torch.int8),
     torch.zeros(2, 1, dtype=torch.uint8)],
)  # fmt: skip
def test_a_wrong_length_dtype_or_shape_is_refused(read, data):
    with pytest.raises(ValueError, match=r"7 entries take uint8 of shape \(2,\)"):
        read(data, 7)


@pytest.mark.parametrize("packing", ["two_bits", "base3"])
def test_padded_messages_are_as_long_as_a_model_and_padded_with_zeros(packing):
    trits = trits_of([1, -1, 0, 1, 1, -1, 0])
    data = encoded(trits, packing, padded=True)
    assert len(data) == 4 * len(trits) and torch.equal(decoded(data, len(trits), packing, padded=True), trits)
    assert torch.equal(encoded(trits, packing, padded=False), data[:2])
    data[-1] = 1
    with pytest.raises(ValueError, match="padded with zeros to 28 bytes"):
        decoded(data, len(trits), packing, padded=True)


def test_the_first_rule_takes_the_threshold_itself_for_no_move():
    alpha = 0.25
    step = torch.tensor([-0.3, -0.25, 0.0, 0.25, 0.3])
    assert first_ternary(step, alpha).tolist() == [-1, 0, 0, 0, 1]  # Eq. 4: 0 where |D| <= alpha
    assert first_ternary(step, torch.tensor(alpha)).tolist() == [-1, 0, 0, 0, 1]


def test_the_later_rule_takes_the_threshold_itself_for_a_move():
    previous = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    step = torch.tensor([0.25, 0.24, -0.25, 0.25, -0.24, -0.25])
    assert later_ternary(step, previous, 0.25).tolist() == [1, 0, -1, -1, 0, 1]  # Eq. 5: 0 where |D| < beta |Dp|


def test_where_the_model_stood_still_there_is_no_direction_to_tell():
    assert later_ternary(torch.tensor([1.0, -1.0, 0.0]), torch.zeros(3), 0.2).tolist() == [0, 0, 0]


def test_tiny_steps_keep_their_direction():
    tiny = torch.tensor([1e-30, -1e-30])  # a product of the two is below the smallest float32
    assert later_ternary(tiny, torch.full((2,), 1e-30), 0.2).tolist() == [1, -1]


@given(st.integers(0, 2**31 - 1), st.floats(0.01, 0.99))
@settings(max_examples=60, deadline=None)
def test_what_is_told_is_the_exact_direction_and_at_least_the_threshold(seed, beta):
    generator = torch.Generator().manual_seed(seed)
    step, previous = torch.randn(2, 50, generator=generator)
    told = later_ternary(step, previous, beta)
    seen = told != 0
    assert torch.equal((told * previous.sign())[seen], step.sign()[seen])
    assert bool((step.abs() >= beta * previous.abs())[seen].all())
    assert bool((step.abs() < beta * previous.abs())[~seen].all())
