"""Memory of this machine, checked before large allocations: a process that runs out of memory is killed silently."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from ppbench.base.errors import UsageError

GIB = 2**30


@cache
def memory() -> float:
    """Return the bytes of memory that this process may use: the machine's, or its container's if that is less."""
    try:
        physical = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return float("inf")  # this system does not report it
    try:
        return min(physical, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return physical


def check_room(size: float, what: str, right: str, room: float | None = None) -> None:
    """Raise UsageError if `size` bytes are more than `room`, by default `memory`.

    what: what needs them, the subject of the sentence; right: what to do instead, a clause.
    """
    there = memory() if room is None else room
    if size > there:
        raise UsageError(
            f"{what} would need {size / GIB:,.1f} GiB of memory or more, and there are {there / GIB:,.1f}; {right}."
        )


_SHORT = ("MemoryError", "OutOfMemoryError", "OSError", "BlockingIOError")
_SAYS = ("allocate memory", "out of memory", "failed to map segment", "start new thread", "create a primitive")


def of_machine(error: BaseException) -> bool:
    """Return whether an error is due to the machine: too little memory, too few open files or processes.

    Judged by class name and message, because nothing else of an error survives its way from another process. Errors
    about missing or foreign files do not count; they have classes of their own.
    """
    return type(error).__name__ in _SHORT or any(words in str(error) for words in _SAYS)
