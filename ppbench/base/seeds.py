"""One seed, one result: every random draw has a source of its own, derived from its purpose.

A source depends only on (master seed, secret, role, indices), so adding a client, a victim or an attack changes no
other draw.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from ppbench.base.secret_draws import SecretDraws

TWISTER = 624
"""Words of 32 bits that are the state of torch's CPU generator."""
PLACE = 24
"""Byte in `Generator.get_state()` where these words begin, each in 64 bits, after the seed and two counters."""


@dataclass(frozen=True)
class Seeds:
    """Derives seeds, generators and secret draws from one master seed and, if `salt` is set, a secret in hex."""

    master: int
    salt: str = ""

    def seed(self, role: str, *index: int | str) -> int:
        """Return a seed in [0, 2**63) for `role` and `index` (SHA-256 of their canonical text)."""
        return int.from_bytes(hashlib.sha256(self._text(role, *index)).digest()[:8], "big") >> 1

    def token(self, role: str, *index: int | str) -> str:
        """Return a name of 16 hex digits for `role` and `index` that does not reveal them."""
        return f"{self.seed('token', role, *index):016x}"

    def generator(self, role: str, *index: int | str) -> torch.Generator:
        """Return a fresh CPU generator for `role` and `index`. Draws are made on CPU on every device.

        With a secret, the whole state is drawn from it: torch keeps 32 bits of a seed, which one core can try in an
        hour. Still, whoever sees enough of its numbers can tell the others: what a party keeps secret is drawn by
        `secret`.
        """
        generator = torch.Generator().manual_seed(self.seed(role, *index))
        return generator.set_state(_filled(generator.get_state(), self._text(role, *index))) if self.salt else generator

    def secret(self, role: str, *index: int | str) -> SecretDraws:
        """Return the secret draws for `role` and `index`, keyed by SHA-256 of their canonical text."""
        return SecretDraws(hashlib.sha256(self._text("secret", role, *index)).digest())

    def _text(self, role: str, *index: int | str) -> bytes:
        return "/".join([str(self.master), *filter(None, [self.salt]), role, *map(str, index)]).encode()


def _filled(state: torch.Tensor, text: bytes) -> torch.Tensor:
    """Return the state of a CPU generator, uint8, with the Mersenne twister's words drawn by SHAKE-256 from `text`."""
    words = np.frombuffer(hashlib.shake_256(text).digest(4 * TWISTER), "<u4").astype(np.uint64)
    filled = state.clone()
    filled[PLACE : PLACE + 8 * TWISTER] = torch.from_numpy(words.view(np.uint8))
    return filled
