"""What the exit codes of the command line mean, and how a signal ends a command."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType


class Exit(IntEnum):
    """Exit codes; of a signal 128 and its number, as shells have it."""

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
    Exit.OK: "all that was asked for is there and complete, and nothing speaks against it",
    Exit.FOUND: "something was found: a regression (`compare`); what differs (`verify`); what does not hold "
    "(`submit`); records that cannot be read (`leaderboard`); "
    "cells that failed, or a defense of which no cell is complete (`evaluate`, `sweep`)",
    Exit.USAGE: "input that cannot be used, also a broken plugin that was asked for, a broken installation, or a "
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
    """A signal that asks the command to end. number: which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def stopping() -> Iterator[list[int]]:
    """Have SIGINT, SIGTERM and SIGHUP raise Stopped in the main thread, once; give the numbers of those that came.

    A second one ends the process at once. What is ignored, as SIGHUP under nohup is, stays ignored. In the end the
    handlers of before are back.
    """
    came: list[int] = []
    wanted = [n for name in ("SIGINT", "SIGTERM", "SIGHUP") if (n := getattr(signal, name, None)) is not None]
    before = {number: signal.getsignal(number) for number in wanted if signal.getsignal(number) != signal.SIG_IGN}

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        for one in before:
            signal.signal(one, signal.SIG_DFL)
        raise Stopped(number)

    for number in before:
        signal.signal(number, stop)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def held_back() -> Iterator[None]:
    """Keep signals that ask to end waiting while the body runs: processes that it starts begin with them waiting too.

    So a Ctrl-C, which the terminal sends to all, ends no process while it starts, and is not lost either.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
