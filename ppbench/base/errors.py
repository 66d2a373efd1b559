"""The errors that a user sees: one sentence that says what is wrong, where, and what would be right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

SHOWN = 80
"""Characters of an input that a sentence repeats."""
_WORD = 240  # characters without a space that a sentence may hold: longer ones are cut; paths of some depth are not
_SENTENCE = 1200  # characters after which even a sentence of ours is cut in its middle


class UsageError(Exception):
    """Input that cannot be used. The command line prints the sentence and exits with code 2.

    Whatever stands in it comes out as one line that a terminal can print, see `plain`.
    """

    def __init__(self, sentence: str = "", *more: object) -> None:
        super().__init__(plain(sentence), *more)


def plain(sentence: str) -> str:
    """Return a sentence as one printable line: control characters and surrogates escaped, what is very long cut."""
    line = "".join(c if c.isprintable() else _escaped(c) for c in " ".join(sentence.split("\n")))
    line = re.sub(rf"\S{{{_WORD + 1},}}", lambda found: _cut(found[0], _WORD), line)
    return _cut(line, _SENTENCE)


def shown(value: object, most: int = SHOWN) -> str:
    """Return an input as sentences repeat it: its repr as one printable line, cut in the middle to `most` characters.

    Only so much of a long text or list is looked at, so that an input of any size costs nothing.
    """
    if isinstance(value, str):
        whole = value if len(value) <= 4 * most else value[: 2 * most] + value[-2 * most :]
        text = repr(whole)  # escapes control characters and surrogates
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
    """Return what a library says went wrong, as the inside of a sentence: one line, cut, without a full stop.

    Objects that Python names by their address are left out, and so is advice that does not concern a user of ours.
    """
    text = re.sub(r"<[^<>]* at 0x[0-9a-f]+>", "it", " ".join(str(cause).split()))
    return _cut(plain(text), most).strip().rstrip(".:;, ") or type(cause).__name__


def first_fault(error: ValidationError) -> str:
    """Return the first thing that is wrong in a form, where and what, as the inside of a sentence."""
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
    """A plugin of another package that is malformed, or whose code raised; the sentence names it and its package."""


class Unwritable(UsageError):
    """A file that the system would not let us write: no cell's fault, and no cell can be kept."""


class ProtocolError(Exception):
    """A message that breaks the protocol of a round; names the party that sent it."""


class Overflow(ProtocolError):
    """A value has left the range of what a protocol can send: training has diverged."""


def one_line(text: object, most: int = 300) -> str:
    """Return a stranger's text (str of it may raise) as one printable line, its middle cut to `most` characters."""
    try:
        words = " ".join(str(text).split())
    except Exception:  # noqa: BLE001 - a class of a stranger's own
        return "(its words cannot be read)"
    return _cut(plain(words), most)


def unknown(kind: str, name: str, known: Iterable[str], known_are: str = "known are") -> UsageError:
    """Return the error for `name`, misspelt by a user, of a `kind` ("defense"), with what is close to it, or all known.

    known_are: how the list of these begins.
    """
    names = sorted(known)
    close = closest(name, names)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"{known_are} {listed(names)}."
    return UsageError(f"There is no {kind} named {shown(name)}; {hint}")


def closest(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Return up to `most` of `names` that `name` may stand for, the nearest first; case and punctuation aside."""
    forms: dict[str, list[str]] = {}
    for one in names:
        forms.setdefault(_folded(one), []).append(one)
    form = _folded(name[:SHOWN])
    close = [form] if form in forms else difflib.get_close_matches(form, forms, n=most, cutoff=0.5)
    return [one for form in close for one in forms[form]][:most]


def _folded(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def listed(names: Sequence[str], most: int = 200) -> str:
    """Return names with commas between, as many as `most` characters hold, and how many more there are."""
    told = [plain(names[0])[:most]] if names else []
    for name in names[1:]:
        if len(", ".join([*told, name])) > most:
            return f"{', '.join(told)} and {len(names) - len(told)} more"
        told.append(plain(name))
    return ", ".join(told)


def count_of(count: int, noun: str, more: str = "s") -> str:
    """Return a number of things in words: "1 client", "2 clients". more: what several have at their end."""
    return f"{count} {noun}{'' if count == 1 else more}"


def first_of(problems: Sequence[str]) -> str:
    """Return the first of some problems, without its full stop, and how many more there are."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0].rstrip(".") + more
