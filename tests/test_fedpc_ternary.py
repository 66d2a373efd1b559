"""FedPC's ternary vectors: the rules of Eq. 4-5 at their borders, and packings that read back only what they write."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppbench.defenses.fedpc.ternary import decoded, encoded, first_ternary, later_ternary, pack, unpack

PER_BYTE = {"two_bits": 4, "base3": 5}
each_packing = pytest.mark.parametrize("packing", PER_BYTE)


def trits_of(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)


@each_packing
@given(st.lists(st.sampled_from([-1, 0, 1]), max_size=70))
@settings(max_examples=60, deadline=None)
def test_packings_read_back_in_the_least_bytes(packing, values):
    data = pack(trits_of(values), packing)
    assert data.dtype == torch.uint8 and len(data) == math.ceil(len(values) / PER_BYTE[packing])
    found = unpack(data, len(values), packing)
    assert found.dtype == torch.int8 and found.tolist() == values


def test_entries_lie_lowest_bits_first():
    # 0 -> 00, 1 -> 01, -1 -> 11: entries 0, 1, -1, 0 give 00 11 01 00, the fifth a byte of its own.
    assert pack(trits_of([0, 1, -1, 0, 1]), "two_bits").tolist() == [0b00110100, 0b01]
    assert pack(trits_of([1, -1, 0, 0, 1, -1]), "base3").tolist() == [1 + 2 * 3 + 81, 2]


@each_packing
@given(st.lists(st.integers(0, 255), min_size=1, max_size=12), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_what_is_read_is_only_what_would_be_written(packing, values, short):
    data, count = torch.tensor(values, dtype=torch.uint8), PER_BYTE[packing] * len(values) - short
    pairs = [value >> shift & 3 for value in values for shift in (0, 2, 4, 6)]
    wrong = 2 in pairs or any(pairs[count:])
    if packing == "base3":
        wrong = max(values) > 242 or values[-1] >= 3 ** (5 - short)
    if wrong:
        with pytest.raises(ValueError, match="stands for nothing or padding not 0"):
            unpack(data, count, packing)
    else:
        assert torch.equal(pack(unpack(data, count, packing), packing), data)


@each_packing
@pytest.mark.parametrize(
    "data",
    [torch.zeros(3, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), torch.zeros(2, dtype=torch.int8),
     torch.zeros(2, 1, dtype=torch.uint8)],
)  # fmt: skip
def test_a_wrong_length_dtype_or_shape_is_refused(packing, data):
    with pytest.raises(ValueError, match=r"7 entries take uint8 of shape \(2,\)"):
        unpack(data, 7, packing)


@each_packing
def test_padded_messages_are_as_long_as_a_model_and_padded_with_zeros(packing):
    trits = trits_of([1, -1, 0, 1, 1, -1, 0])
    data = encoded(trits, packing, padded=True)
    assert len(data) == 4 * len(trits) and torch.equal(decoded(data, len(trits), packing, padded=True), trits)
    assert torch.equal(encoded(trits, packing, padded=False), data[:2])
    data[-1] = 1
    with pytest.raises(ValueError, match="padded with zeros to 28 bytes"):
        decoded(data, len(trits), packing, padded=True)


def test_the_first_rule_takes_the_threshold_itself_for_no_move():
    step = torch.tensor([-0.3, -0.25, 0.0, 0.25, 0.3])
    for alpha in (0.25, torch.tensor(0.25)):
        assert first_ternary(step, alpha).tolist() == [-1, 0, 0, 0, 1]  # Eq. 4: 0 where |D| <= alpha


def test_the_later_rule_takes_the_threshold_itself_for_a_move():
    previous = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    step = torch.tensor([0.25, 0.24, -0.25, 0.25, -0.24, -0.25])
    assert later_ternary(step, previous, 0.25).tolist() == [1, 0, -1, -1, 0, 1]  # Eq. 5: 0 where |D| < beta |Dp|
    # Where the model stood still there is no direction to tell; tiny steps keep theirs, though a product underflows.
    assert later_ternary(torch.tensor([1.0, -1.0, 0.0]), torch.zeros(3), 0.2).tolist() == [0, 0, 0]
    assert later_ternary(torch.tensor([1e-30, -1e-30]), torch.full((2,), 1e-30), 0.2).tolist() == [1, -1]


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
