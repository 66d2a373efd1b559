"""Ternary vectors of FedPC: a step as entries -1, 0, 1 (Cao et al. 2022, Eq. 4-5), and their encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Packing = Literal["two_bits", "base3"]
PACKING_DIGITS: Mapping[Packing, tuple[int, int]] = {"two_bits": (4, 4), "base3": (3, 5)}
"""Base, and digits per byte. -1 is the highest digit; the two-bit code 10 is invalid."""


def first_ternary(step: Tensor, alpha: float | Tensor) -> Tensor:
    """Return int8 of the shape of `step` Q - P: 0 where |step| <= alpha, the learning rate, else its sign (Eq. 4)."""
    return torch.where(step.abs() <= alpha, 0, step.sign()).to(torch.int8)


def later_ternary(step: Tensor, previous: Tensor, beta: float) -> Tensor:
    """Return int8 of the shape of `step` Q^t - P^{t-1}: 0 below beta |previous|, else sign(step * previous) (Eq. 5).

    1 continues the global model's last step, `previous` = P^{t-1} - P^{t-2}; 0 where that is 0.
    """
    signs = step.sign() * previous.sign()  # a product of the values could underflow to 0
    return torch.where(step.abs() < beta * previous.abs(), 0, signs).to(torch.int8)


def pack_trits(trits: Tensor, packing: Packing) -> Tensor:
    """Return int8 [M] of -1, 0, 1 as digits of base 4 or 3, several a byte, the first one lowest: uint8."""
    base, size = PACKING_DIGITS[packing]
    digits = torch.nn.functional.pad(trits % base, (0, -len(trits) % size)).to(torch.uint8).view(-1, size)
    return (digits * _powers(base, size, trits.device)).sum(1, dtype=torch.uint8)


def unpack_trits(data: Tensor, count: int, packing: Packing) -> Tensor:
    """Return the `count` entries of `data`, int8: the inverse of `pack_trits` (ValueError: invalid bytes)."""
    base, size = PACKING_DIGITS[packing]
    length = -(-count // size)
    if data.dtype != torch.uint8 or data.shape != (length,):
        actual = f"{data.dtype} of shape {tuple(data.shape)}"
        raise ValueError(f"{count} entries take uint8 of shape ({length},), not {actual}")
    digits = (data[:, None] // _powers(base, size, data.device) % base).flatten()[:count]
    trits = (digits == 1).to(torch.int8) - (digits == base - 1).to(torch.int8)
    wrong = pack_trits(trits, packing) != data
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise ValueError(f"byte {place} is {int(data[place])}, with a digit that stands for nothing or padding not 0")
    return trits


def encoded(trits: Tensor, packing: Packing, padded: bool) -> Tensor:
    """Return int8 [M] as the bytes of a message, uint8; `padded` with zeros to the 4 M bytes of a float32 model."""
    packed = pack_trits(trits, packing)
    return torch.nn.functional.pad(packed, (0, 4 * len(trits) - len(packed))) if padded else packed


def decoded(data: Tensor, count: int, packing: Packing, padded: bool) -> Tensor:
    """Return the `count` entries of a message, int8: the inverse of `encoded` (ValueError: invalid bytes)."""
    if padded:
        length = -(-count // PACKING_DIGITS[packing][1])
        if data.shape != (4 * count,) or bool(data[length:].any()):
            raise ValueError(f"{count} entries are padded with zeros to {4 * count} bytes")
        data = data[:length]
    return unpack_trits(data, count, packing)


def _powers(base: int, size: int, device: torch.device) -> Tensor:
    return base ** torch.arange(size, dtype=torch.uint8, device=device)
