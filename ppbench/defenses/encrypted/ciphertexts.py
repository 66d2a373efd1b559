"""Ciphertexts as they travel: what is hidden in them, and exactly as many bytes as the real scheme's have.

No round encrypts anything: a number in a ciphertext is a fixed-point number modulo 2^64 plus a pad that nobody knows
who could not decrypt it in the real scheme. So every view is the real one's, and a sum is exact. What real encryption
takes is timed apart (`run/ciphers.py`), by the counts that a `Ciphering` holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Tree, node
from ppbench.federation.ciphering import Ciphering

WORD = 8
"""Bytes of a padded number: a slot of 64 bits, in which sums of fixed-point numbers do not run over."""


@node
class Ciphertext:
    """Padded numbers in ciphertexts. words: [P] int64; rest: uint8, the bytes that ciphertexts have beside (zeros)."""

    words: Tensor
    rest: Tensor


def sealed(words: Tensor, form: Ciphering) -> Ciphertext:
    """Return padded numbers [P] int64 as ciphertexts of the scheme's size."""
    rest = form.nbytes(len(words)) - WORD * len(words)
    return Ciphertext(words, torch.zeros(rest, dtype=torch.uint8, device=words.device))


def words_of(client: int, message: Tree, count: int) -> Tensor:
    """Return the padded numbers [count] int64 of a client's message, on the CPU (ProtocolError: it is another)."""
    if not isinstance(message, Ciphertext) or (message.words.dtype, message.words.shape) != (torch.int64, (count,)):
        raise ProtocolError(f"Client {client} sent no ciphertexts of {count} numbers.")
    return message.words.cpu()
