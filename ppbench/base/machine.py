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


def check_room(size: float, what: str, right: str, room: float | None = None) -> None:
    """Refuse what needs `size` bytes or more, at the least, where there are not so many (UsageError).

    what: it, in words that begin a sentence; right: what to do, a clause. room: bytes that there are, by default
    `memory`.
    """
    there = memory() if room is None else room
    if size > there:
        raise UsageError(
            f"{what} would need {size / GIB:,.1f} GiB of memory or more, and there are {there / GIB:,.1f}; {right}."
        )


_SHORT = ("MemoryError", "OutOfMemoryError", "OSError", "BlockingIOError")
_SAYS = ("allocate memory", "out of memory", "failed to map segment", "start new thread", "create a primitive")


def of_machine(error: BaseException) -> bool:
    """Return whether somebody's error is the machine's: want of memory, of open files or of processes.

    Of errors that came from another process only name and words are left, so these are looked at. Errors of the system
    are among them, but not those of files that are not there or not ours, which have classes of their own.
    """
    return type(error).__name__ in _SHORT or any(words in str(error) for words in _SAYS)
