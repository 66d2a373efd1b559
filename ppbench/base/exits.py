"""Exit codes of the command line, and signals that end a command."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType


class Exit(IntEnum):
    """Exit codes; for a signal 128 plus its number, as in shells."""

    OK = 0
    FOUND = 1
    USAGE = 2
    CONTROLS = 3
    MISSING = 4
    INTERNAL = 70
    HANGUP = 129
    INTERRUPTED = 130
    PIPE = 141
    TERMINATED = 143


MEANINGS: Mapping[Exit, str] = {
    Exit.OK: "everything requested is there and complete, and nothing contradicts it",
    Exit.FOUND: "something was found: a regression (`compare`); what differs (`verify`); what does not hold "
    "(`submit`); records that cannot be read (`leaderboard`); "
    "cells that failed, or a defense of which no cell is complete (`evaluate`, `sweep`)",
    Exit.USAGE: "input that cannot be used, also a broken plugin that was named, a broken installation, or a "
    "machine without memory, files or processes for it; one sentence says what is right",
    Exit.CONTROLS: "a control failed, changed or did not run, or nothing could have been found: conclude nothing; it "
    "goes before 1",
    Exit.MISSING: "rows of the baseline are missing (`compare`)",
    Exit.INTERNAL: "an error of ppbench's own; the sentence names the file with the traceback",
    Exit.HANGUP: "SIGHUP: the terminal went away",
    Exit.INTERRUPTED: "SIGINT (Ctrl-C); what is finished is kept, and the same command goes on from there",
    Exit.PIPE: "whoever read the output went away, as `| head` does",
    Exit.TERMINATED: "SIGTERM, as SIGINT",
}


class Stopped(KeyboardInterrupt):
    """A signal asked the command to end. number: the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def stopping() -> Iterator[list[int]]:
    """Make SIGINT, SIGTERM and SIGHUP raise Stopped in the main thread, once; yield the list of received numbers.

    A second signal ends the process at once. A signal that is ignored, as SIGHUP under nohup, stays ignored. The former
    handlers are restored at the end.
    """
    received: list[int] = []
    numbers = [n for name in ("SIGINT", "SIGTERM", "SIGHUP") if (n := getattr(signal, name, None)) is not None]
    handlers = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for signal_number in handlers:
            signal.signal(signal_number, signal.SIG_DFL)
        raise Stopped(number)

    for number in handlers:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def held_back() -> Iterator[None]:
    """Block SIGINT, SIGTERM and SIGHUP while the body runs; processes that it starts inherit the block.

    So a Ctrl-C, which the terminal sends to all processes, ends none while it starts, and is not lost either.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    former = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
