"""The encryption of a round, in counts that a defense states; `run/ciphers.py` times one of each operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CipherScheme = Literal["paillier", "mife", "mcfe"]


@dataclass(frozen=True)
class Ciphering:
    """The encryption of one round.

    Attributes:
        scheme: "paillier": threshold Paillier (Damgard and Jurik 2001); "mife": multi-input functional encryption of
            inner products (Abdalla et al. 2018, from Agrawal, Libert and Stehle); "mcfe": the same with labels (Chotard
            et al. 2018).
        bits: of Paillier's modulus, or of the group's order.
        slots: numbers in one ciphertext.  size: bytes of one ciphertext.
        clients, threshold: how many encrypt, and how many must decrypt (0 if the server's key decrypts).
        values: numbers that a client encrypts.
    """

    scheme: CipherScheme
    bits: int
    slots: int
    size: int
    clients: int
    threshold: int
    values: int

    def blocks(self, values: int) -> int:
        """Return the number of ciphertexts for `values` numbers."""
        return -(-values // self.slots)

    def nbytes(self, values: int) -> int:
        """Return the bytes of the ciphertexts of `values` numbers."""
        return self.blocks(values) * self.size


SLOT_BITS = 64
"""Bits of a number in a packed Paillier ciphertext."""
POINT_BYTES = 32
"""Bytes of an element of the group of functional encryption, a point of Curve25519."""


def paillier(bits: int, clients: int, threshold: int, values: int) -> Ciphering:
    """Return threshold Paillier: a ciphertext is a number modulo n^2 with as many slots as fit into n."""
    return Ciphering("paillier", bits, (bits - 1) // SLOT_BITS, 2 * bits // 8, clients, threshold, values)


def functional(scheme: CipherScheme, clients: int, values: int) -> Ciphering:
    """Return functional encryption of each number: three points, (r, r a, x + u + r W a); with labels ("mcfe") one."""
    return Ciphering(scheme, 8 * POINT_BYTES, 1, (1 if scheme == "mcfe" else 3) * POINT_BYTES, clients, 0, values)
