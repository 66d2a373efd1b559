"""A probe in words."""

from __future__ import annotations


def probe_words(probe: str, rounds: int) -> str:
    """Return what a probed client did in words: "probe gradient", "probe local, 2 rounds"."""
    return f"probe {probe}" + (f", {rounds} rounds" if rounds > 1 else "")
