"""Papers' claims found by the name of a defense; no defense knows what its paper prints.

Those about ppbench's own defenses lie in `papers/`, one file per paper. Those about another package's defense lie
beside its module, in files whose names end in "claims.toml". `ppbench/claims/claim.py` describes the format.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from ppbench.base.errors import UsageError
from ppbench.base.registry import Plugin, find, load_all
from ppbench.claims.claim import Claim, Paper, read_paper

PAPERS = Path(__file__).with_name("papers")


@lru_cache
def claims_of(defense: str) -> tuple[Claim, ...]:
    """Return the claims about a defense, in the order of its papers; () without any, or where it is not installed.

    A file that cannot be read is left out with a warning.
    """
    try:
        plugin = find("defenses", defense)
        known = None if plugin is None else plugin.loaded
    except UsageError:  # records of a broken plugin stay readable
        return ()
    if plugin is None:
        return ()
    files = PAPERS.glob("*.toml") if plugin.ours else _beside(plugin)
    claims = tuple(claim for file in sorted(files) if (paper := _paper(file)) for claim in paper.claims(defense))
    return claims or _stated(plugin, getattr(known, "claimed", ()))


def claimed_by_all() -> dict[str, tuple[Claim, ...]]:
    """Return the claims of every installed defense that has any, by its name."""
    return {name: claims for name in load_all("defenses") if (claims := claims_of(name))}


def _beside(plugin: Plugin) -> Iterable[Path]:
    """Return the files of claims beside a plugin's module."""
    file = getattr(sys.modules.get(plugin.module), "__file__", None)
    return () if file is None else Path(file).parent.glob("*claims.toml")


@lru_cache
def _paper(file: Path) -> Paper | None:
    try:
        return read_paper(file)
    except UsageError as cause:
        warnings.warn(f"{str(cause).rstrip('.')}; the claims in it are left out.", stacklevel=2)
        return None


def _stated(plugin: Plugin, claimed: object) -> tuple[Claim, ...]:
    """Return the claims in the class itself, as plugins stated them before claims were files."""
    if isinstance(claimed, tuple) and all(isinstance(claim, Claim) for claim in claimed):
        return claimed
    warnings.warn(
        f"{plugin.words} sets `claimed`, which is no tuple of claims; it is left out. Write a file "
        f"{plugin.name}.claims.toml beside its module.",
        stacklevel=2,
    )
    return ()
