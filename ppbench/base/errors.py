"""The errors that a user sees: one sentence with what is wrong, where, and what would be right."""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


SHOWN_CHARACTERS = 80
"""Characters of an input that a sentence repeats."""
_WORD = 240  # characters without a space that a sentence may hold: longer ones are cut; paths of some depth are not
_SENTENCE = 1200  # characters after which even a sentence of ours is cut in its middle


class UsageError(Exception):
    """Input that cannot be used. The command line prints the sentence and exits with code 2.

    The sentence is made one printable line, see `plain`.
    """

    def __init__(self, sentence: str = "", *more: object) -> None:
        super().__init__(plain(sentence), *more)


def plain(sentence: str) -> str:
    """Return a sentence as one printable line: control characters and surrogates escaped, what is very long cut."""
    line = "".join(c if c.isprintable() else _escaped(c) for c in " ".join(sentence.split("\n")))
    line = re.sub(rf"\S{{{_WORD + 1},}}", lambda word: _cut(word[0], _WORD), line)
    return _cut(line, _SENTENCE)


def shown(value: object, most: int = SHOWN_CHARACTERS) -> str:
    """Return an input as sentences quote it: its repr as one printable line, cut in the middle to `most` characters.

    Only the ends of a long text are read, and of a long list only its length, so that inputs of any size cost little.
    """
    if isinstance(value, str):
        excerpt = value if len(value) <= 4 * most else value[: 2 * most] + value[-2 * most :]
        text = repr(excerpt)  # escapes control characters and surrogates
    elif isinstance(value, bool | int | float | None):
        text = repr(value) if not isinstance(value, int) or value.bit_length() < 4 * most else "a very large number"
    elif isinstance(value, list | tuple | dict | set):
        text = (
            f"{'a table' if isinstance(value, dict) else 'a list'} of {len(value)}" if len(value) > 4 else repr(value)
        )
    else:
        text = repr(value)
    return _cut(plain(text), most)


def because(cause: BaseException, most: int = 160) -> str:
    """Return a library's error message as a clause: one line, cut to `most` characters, without a full stop.

    Objects that Python names by their address become "it".
    """
    text = re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "it", " ".join(str(cause).split()))
    return _cut(plain(text), most).strip().rstrip(".:;, ") or type(cause).__name__


def first_fault(error: ValidationError) -> str:
    """Return the place and message of the first validation error, as a clause."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(shown(part, 60).strip("'") for part in first["loc"][:6]) or "the whole file"
    return f"{where}: {because(ValueError(first['msg']))}"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _cut(text: str, most: int) -> str:
    """Return `text`, its middle replaced by dots where it has more than `most` characters."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 3]}...{text[-end:]}"


class PluginError(UsageError):
    """A third-party plugin is malformed, or its code raised; the sentence names the plugin and its package."""


class Unwritable(UsageError):
    """A file cannot be written: the fault of no cell, and no cell can be saved."""


class ProtocolError(Exception):
    """A message breaks the protocol of a round; the error names its sender."""


class Overflow(ProtocolError):
    """A value left the range that a protocol can send: training has diverged."""


def one_line(text: object, most: int = 300) -> str:
    """Return third-party text (whose `str` may raise) as one printable line, cut in the middle to `most` characters."""
    try:
        line = " ".join(str(text).split())
    except Exception:  # noqa: BLE001 - a third-party class
        return "(its words cannot be read)"
    return _cut(plain(line), most)


def unknown(kind: str, name: str, known: Iterable[str], known_are: str = "known are") -> UsageError:
    """Return the error for an unknown `name` of a `kind` ("defense"), with similar names, or all known ones.

    known_are: how the list of all known names begins.
    """
    names = sorted(known)
    close = closest(name, names)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"{known_are} {listed(names)}."
    return UsageError(f"There is no {kind} named {shown(name)}; {hint}")


def closest(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Return up to `most` of `names` that resemble `name`, the nearest first; case and punctuation do not count."""
    forms: dict[str, list[str]] = {}
    for known_name in names:
        forms.setdefault(_folded(known_name), []).append(known_name)
    form = _folded(name[:SHOWN_CHARACTERS])
    close = [form] if form in forms else difflib.get_close_matches(form, forms, n=most, cutoff=0.5)
    return [known_name for form in close for known_name in forms[form]][:most]


def _folded(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def listed(names: Sequence[str], most: int = 200) -> str:
    """Return names joined by commas, as many as fit into `most` characters, and how many more there are."""
    printed = [plain(names[0])[:most]] if names else []
    for name in names[1:]:
        if len(", ".join([*printed, name])) > most:
            return f"{', '.join(printed)} and {len(names) - len(printed)} more"
        printed.append(plain(name))
    return ", ".join(printed)


def count_of(count: int, noun: str, more: str = "s") -> str:
    """Return a count with its noun: "1 client", "2 clients". more: the ending of the plural."""
    return f"{count} {noun}{'' if count == 1 else more}"


def first_of(problems: Sequence[str]) -> str:
    """Return the first of `problems` without its full stop, and how many more there are."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0].rstrip(".") + more


# -- Exit codes of the command line, and signals that end a command --


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
    Exit.FOUND: "something was found: a regression (`compare`); more than a limit allows (`audit`); what differs "
    "(`verify`); a check that fails (`submit`); records that cannot be read (`leaderboard`); "
    "cells that failed, or a defense of which no cell is complete (`evaluate`, `sweep`)",
    Exit.USAGE: "input that cannot be used, also a broken plugin that was named, a broken installation, or a "
    "machine without memory, files or processes for it; one sentence says what would be right",
    Exit.CONTROLS: "a control failed, changed or did not run, nothing could have been found, or a limit is undecided "
    "(`audit`): conclude nothing; it takes precedence over 1",
    Exit.MISSING: "rows of the baseline are missing (`compare`)",
    Exit.INTERNAL: "an error of ppbench's own; the sentence names the file with the traceback",
    Exit.HANGUP: "SIGHUP: the terminal closed",
    Exit.INTERRUPTED: "SIGINT (Ctrl-C); what is finished is kept, and the same command goes on from there",
    Exit.PIPE: "the reader of the output closed it, as `| head` does",
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
