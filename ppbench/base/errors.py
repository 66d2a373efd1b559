"""The errors that a user sees: one sentence that says what is wrong, where, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class UsageError(Exception):
    """Input that cannot be used. The command line prints the sentence and exits with code 2."""


class PluginError(UsageError):
    """A plugin of another package that is malformed, or whose code raised; the sentence names it and its package."""


class Unwritable(UsageError):
    """A file that the system would not let us write: no cell's fault, and no cell can be kept."""


class ProtocolError(Exception):
    """A message that breaks the protocol of a round; names the party that sent it."""


class Overflow(ProtocolError):
    """A value has left the range of what a protocol can send: training has diverged."""


def one_line(text: object, most: int = 300) -> str:
    """Return a stranger's text (str of it may raise) as one line of printable characters, cut at `most`."""
    try:
        words = " ".join(str(text).split())
    except Exception:  # noqa: BLE001 - a class of a stranger's own
        return "(its words cannot be read)"
    line = "".join(c if c.isprintable() else "?" for c in words)
    return line if len(line) <= most else f"{line[: most - 3]}..."


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """Return the error for `name`, misspelt by a user, of a `kind` ("defense"), with what is close to it."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known are {', '.join(names)}."
    return UsageError(f"There is no {kind} named {name!r}; {hint}")


def first_of(problems: Sequence[str]) -> str:
    """Return the first of some problems, without its full stop, and how many more there are."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0].rstrip(".") + more
