"""What papers print about their defenses, one TOML file a paper; `ppbench/federation/claim.py` says how it is read."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from ppbench.federation.claim import Paper, read_paper


@lru_cache
def paper(name: str) -> Paper:
    """Return what the paper prints that is kept in `name`.toml, read once a process."""
    return read_paper(Path(__file__).with_name(f"{name}.toml"))
