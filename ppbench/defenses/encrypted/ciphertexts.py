"""Simulated ciphertexts, with exactly as many bytes as the real scheme's.

No round encrypts anything: a number in a ciphertext is a fixed-point number modulo 2^64 plus a pad, known only to those
who could decrypt it in the real scheme. So every view equals the real one, and sums are exact. Real encryption is timed
separately (`run/ciphers.py`), by the counts of a `Ciphering`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Tree, node
from ppbench.federation.ciphering import Ciphering

WORD_BYTES = 8
"""Bytes of a padded number: a slot of 64 bits, in which sums of fixed-point numbers do not overflow."""


@node
class Ciphertext:
    """Padded numbers in ciphertexts. words: [P] int64; rest: uint8 zeros, the ciphertexts' further bytes."""

    words: Tensor
    rest: Tensor


def ciphertext_of(words: Tensor, form: Ciphering) -> Ciphertext:
    """Return padded numbers [P] int64 as a `Ciphertext` of the scheme's size."""
    rest = form.nbytes(len(words)) - WORD_BYTES * len(words)
    return Ciphertext(words, torch.zeros(rest, dtype=torch.uint8, device=words.device))


def ciphertext_words(client: int, message: Tree, count: int) -> Tensor:
    """Return the padded numbers [count] int64 of a client's message, on the CPU (ProtocolError: other content)."""
    if not isinstance(message, Ciphertext) or (message.words.dtype, message.words.shape) != (torch.int64, (count,)):
        raise ProtocolError(f"Client {client} sent no ciphertexts of {count} numbers.")
    return message.words.cpu()
