"""One seed makes one result: every random draw has a generator derived from what it is for.

A generator depends on (master seed, secret, role, indices) and on nothing else, so adding a client, a victim or an
attack moves no other draw.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Seeds:
    """Derives seeds and generators from one master seed, and a secret in hex if there is one: then nobody else can."""

    master: int
    salt: str = ""

    def seed(self, role: str, *index: int | str) -> int:
        """Return a seed in [0, 2**63) for `role` and `index` (SHA-256 of their canonical text)."""
        text = "/".join([str(self.master), *filter(None, [self.salt]), role, *map(str, index)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def token(self, role: str, *index: int | str) -> str:
        """Return a name of 16 characters for `role` and `index` that tells nothing of them."""
        return f"{self.seed('token', role, *index):016x}"

    def generator(self, role: str, *index: int | str) -> torch.Generator:
        """Return a fresh CPU generator for `role` and `index`. Draws are made on CPU on every device."""
        return torch.Generator().manual_seed(self.seed(role, *index))
