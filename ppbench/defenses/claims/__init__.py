"""Papers' claims about their defenses, one TOML file per paper; `ppbench/federation/claim.py` describes the format."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from ppbench.federation.claim import Paper, read_paper


@lru_cache
def paper(name: str) -> Paper:
    """Return the paper in `name`.toml, read once per process."""
    return read_paper(Path(__file__).with_name(f"{name}.toml"))
