"""Shamir's secret sharing of clients' private keys: a threshold of clients can decrypt everything.

A key of 32 bytes is 16 numbers below 2^16, each the value at 0 of a random polynomial modulo 2^16 + 1 of degree
threshold - 1; client c gets its value at c + 1 (Shamir 1979). Fewer shares than the threshold reveal nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

PRIME = 2**16 + 1
LIMBS = 16


def split_key(private: Tensor, clients: int, threshold: int, generator: torch.Generator) -> Tensor:
    """Return the shares [N, 16] int64 of a key [32] uint8 for `clients` clients; `threshold` of them restore it."""
    limbs = private.cpu().contiguous().view(torch.int16).to(torch.int64) % 2**16
    higher = torch.randint(0, PRIME, (threshold - 1, LIMBS), generator=generator)
    values = torch.zeros(clients, LIMBS, dtype=torch.int64)
    points = torch.arange(1, clients + 1)[:, None]
    for coefficient in (*higher.flip(0), limbs):  # Horner's rule
        values = (values * points + coefficient) % PRIME
    return values


def joined_key(shares: Mapping[int, Tensor]) -> Tensor:
    """Return the key [32] uint8 from at least `threshold` clients' shares [16]."""
    total = torch.zeros(LIMBS, dtype=torch.int64)
    for client, share in shares.items():
        weight = 1
        for other in shares:
            if other != client:
                weight = weight * (other + 1) * pow(other - client, -1, PRIME) % PRIME
        total = (total + weight * share) % PRIME
    low = total % 2**16
    return torch.where(low < 2**15, low, low - 2**16).to(torch.int16).view(torch.uint8)
