"""What this machine can hold: asked before much is allocated, since who runs out of memory is killed without a word."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from ppbench.base.errors import UsageError

GIB = 2**30


@cache
def memory() -> float:
    """Return the bytes of memory that this process may have: the machine's, or its container's where that is less."""
    try:
        whole = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return float("inf")  # this system does not tell
    try:
        return min(whole, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return whole


def check_room(size: float, what: str, right: str) -> None:
    """Refuse what needs `size` bytes or more, at the least, where there are not so many (UsageError).

    what: it, in words that begin a sentence; right: what to do, a clause.
    """
    if size > memory():
        raise UsageError(
            f"{what} would need {size / GIB:,.1f} GiB of memory or more, and there are {memory() / GIB:,.1f}; {right}."
        )
