"""Ternary vectors of FedPC: a step as entries -1, 0, 1 (Cao et al. 2022, Eq. 4-5), and how they travel."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Packing = Literal["two_bits", "base3"]
CODE_BITS = 2  # codes 00, 01 and 11 for 0, 1 and -1; 10 means nothing
PER_BYTE, PER_BYTE3 = 4, 5


def first_ternary(step: Tensor, alpha: float | Tensor) -> Tensor:
    """Return int8 of the shape of `step`: 0 where |step| <= alpha, elsewhere the step's sign (Eq. 4).

    Args:
        step: a worker's trained weights minus the initial ones.
        alpha: the worker's learning rate, a number or scalar tensor.
    """
    return torch.where(step.abs() <= alpha, 0, step.sign()).to(torch.int8)


def later_ternary(step: Tensor, previous: Tensor, beta: float) -> Tensor:
    """Return int8 of the shape of `step`: 0 where |step| < beta |previous|, elsewhere sign(step * previous) (Eq. 5).

    1 says that the worker goes on as the global model went in the last round, -1 that it turns back. Where the global
    model stood still (previous = 0) there is no direction to go on in, and the entry is 0 whatever the step.

    Args:
        step: a worker's trained weights minus the broadcast ones, Q^t - P^{t-1}.
        previous: the last step of the global model, P^{t-1} - P^{t-2}.
        beta: the threshold, in (0, 1).
    """
    signs = step.sign() * previous.sign()  # a product of the values could underflow to 0
    return torch.where(step.abs() < beta * previous.abs(), 0, signs).to(torch.int8)


def pack(trits: Tensor) -> Tensor:
    """Return int8 [M] of -1, 0, 1 as uint8 [ceil(M/4)], entry i in bits 2 (i mod 4) of byte i // 4, lowest first."""
    codes = _grouped(trits & 3, PER_BYTE)  # two's complement: -1 is 11
    return (codes << _shifts(trits.device)).sum(1, dtype=torch.uint8)


def unpack(data: Tensor, count: int) -> Tensor:
    """Return the `count` entries of `data`, int8 [count]: the inverse of `pack`.

    Raises:
        ValueError: another length than ceil(count / 4), the code 10, or padding that is not 0.
    """
    _check_bytes(data, -(-count // PER_BYTE), count)
    codes = ((data[:, None] >> _shifts(data.device)) & 3).flatten()
    if bool((codes == 2).any()):
        raise ValueError(f"entry {int((codes == 2).nonzero()[0])} has the code 10, which stands for nothing")
    return _unpadded(torch.where(codes == 3, -1, codes.to(torch.int8)), count)


def pack3(trits: Tensor) -> Tensor:
    """Return int8 [M] of -1, 0, 1 as uint8 [ceil(M/5)]: digits 0, 1, 2 for 0, 1, -1 in base 3, lowest first."""
    digits = _grouped(trits % 3, PER_BYTE3)
    return (digits * _powers(trits.device)).sum(1, dtype=torch.uint8)


def unpack3(data: Tensor, count: int) -> Tensor:
    """Return the `count` entries of `data`, int8 [count]: the inverse of `pack3`.

    Raises:
        ValueError: another length than ceil(count / 5), a byte above 242, or padding that is not 0.
    """
    _check_bytes(data, -(-count // PER_BYTE3), count)
    if bool((data > 242).any()):
        raise ValueError(f"byte {int((data > 242).nonzero()[0])} is above 242, the largest of five digits in base 3")
    digits = (data[:, None] // _powers(data.device) % 3).flatten()
    return _unpadded(torch.where(digits == 2, -1, digits.to(torch.int8)), count)


def encoded(trits: Tensor, packing: Packing, padded: bool) -> Tensor:
    """Return int8 [M] as the bytes of a message, uint8; `padded` with zeros to the 4 M bytes of a float32 model."""
    packed = pack(trits) if packing == "two_bits" else pack3(trits)
    return torch.nn.functional.pad(packed, (0, 4 * len(trits) - len(packed))) if padded else packed


def decoded(data: Tensor, count: int, packing: Packing, padded: bool) -> Tensor:
    """Return the `count` entries of a message, int8: the inverse of `encoded`; ValueError for what it never gives."""
    if padded:
        length = -(-count // (PER_BYTE if packing == "two_bits" else PER_BYTE3))
        if data.shape != (4 * count,) or bool(data[length:].any()):
            raise ValueError(f"{count} entries are padded with zeros to {4 * count} bytes")
        data = data[:length]
    return unpack(data, count) if packing == "two_bits" else unpack3(data, count)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, CODE_BITS * PER_BYTE, CODE_BITS, dtype=torch.uint8, device=device)


def _powers(device: torch.device) -> Tensor:
    return 3 ** torch.arange(PER_BYTE3, dtype=torch.uint8, device=device)


def _grouped(codes: Tensor, size: int) -> Tensor:
    """Return codes [M] as uint8 [ceil(M/size), size], filled up with 0."""
    return torch.nn.functional.pad(codes.to(torch.uint8), (0, -len(codes) % size)).view(-1, size)


def _check_bytes(data: Tensor, length: int, count: int) -> None:
    if data.dtype != torch.uint8 or data.shape != (length,):
        raise ValueError(
            f"{count} entries take uint8 of shape ({length},), not {data.dtype} of shape {tuple(data.shape)}"
        )


def _unpadded(trits: Tensor, count: int) -> Tensor:
    if bool(trits[count:].any()):
        raise ValueError(f"the padding behind entry {count - 1} is not 0")
    return trits[:count]
