"""What encryption a round takes, in counts: a defense states it, `run/ciphers.py` times one of each operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scheme = Literal["paillier", "mife", "mcfe"]


@dataclass(frozen=True)
class Ciphering:
    """The encryption of one round.

    Attributes:
        scheme: "paillier": threshold Paillier (Damgard and Jurik 2001); "mife": multi-input functional encryption of
            inner products (Abdalla et al. 2018, from Agrawal, Libert and Stehle); "mcfe": the same with labels (Chotard
            et al. 2018).
        bits: of Paillier's modulus, or of the group's order.
        slots: numbers in one ciphertext.  size: bytes of one ciphertext.
        clients, threshold: how many encrypt, and how many must decrypt (0 where a key of the server's does).
        values: numbers that a client encrypts.
    """

    scheme: Scheme
    bits: int
    slots: int
    size: int
    clients: int
    threshold: int
    values: int

    def blocks(self, values: int) -> int:
        """Return in how many ciphertexts `values` numbers travel."""
        return -(-values // self.slots)

    def nbytes(self, values: int) -> int:
        """Return the bytes of the ciphertexts of `values` numbers."""
        return self.blocks(values) * self.size


SLOT = 64
"""Bits of a number in a packed Paillier ciphertext."""
POINT = 32
"""Bytes of an element of the group of functional encryption, a point of Curve25519."""


def paillier(bits: int, clients: int, threshold: int, values: int) -> Ciphering:
    """Return threshold Paillier: a ciphertext is a number modulo n^2, and holds as many slots as n has room for."""
    return Ciphering("paillier", bits, (bits - 1) // SLOT, 2 * bits // 8, clients, threshold, values)


def functional(scheme: Scheme, clients: int, values: int) -> Ciphering:
    """Return functional encryption number by number: three points each, (r, r a, x + u + r W a); with labels one."""
    return Ciphering(scheme, 8 * POINT, 1, (1 if scheme == "mcfe" else 3) * POINT, clients, 0, values)
