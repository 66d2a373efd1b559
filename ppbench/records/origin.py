"""Where results come from: command, day and commit, in OUT/origin.json. For people; no figure depends on it."""

from __future__ import annotations

import datetime
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ppbench.base.errors import UsageError
from ppbench.base.files import write_atomic
from ppbench.records.schema import Strict
from ppbench.records.store import Store, canonical

ORIGIN = "origin.json"
_PIECE = re.compile(r"((?:[\w-]{2,}:)*)(.*)", re.S)
"""What stands before a path, as "parquet:", and the path."""
_ABSOLUTE = re.compile(r"[\\/]|~[\w.-]*[\\/]|[A-Za-z]:[\\/]")


class Origin(Strict):
    """How cells of a folder were last computed.

    command: as typed but for the folders of absolute paths, "" where it was no command line; date: the day, UTC, as
    "2026-11-23"; commit: of the checkout that ppbench ran from, as git abbreviates it, "" where it was none; data: how
    data sets were read, `Dataset.notes`.
    """

    schema_: Literal["ppbench.origin/1"] = Field(default="ppbench.origin/1", alias="schema")
    command: str = ""
    date: str = ""
    commit: str = ""
    data: tuple[str, ...] = ()


def command_of(words: Sequence[str]) -> str:
    """Return the command line of the arguments `words` as another can type it: results are handed on, and with them
    goes no folder of this machine. Of an absolute path the last part stays ("parquet:/home/ann/cifar10" is
    "parquet:cifar10", as records call it, too), also in lists and behind "="; what follows a "?" is a data set's own.
    """
    shown = []
    for word in words:
        head, mark, query = word.partition("?")
        shown.append("".join([*map(_bare, re.split("([=,])", head)), mark, query]))
    return shlex.join(["ppbench", *shown])


def _bare(piece: str) -> str:
    """Return a piece of a word without the folders of an absolute path; one that is none, or an address, as it is."""
    scheme, path = _PIECE.fullmatch(piece).groups()  # type: ignore[union-attr]  # everything matches
    address = scheme not in ("", "file:") and re.match(r"//\w", path)
    last = re.split(r"[\\/]", path.rstrip("\\/"))[-1]
    return scheme + last if last and not address and _ABSOLUTE.match(path) else piece


def typed() -> str:
    """Return the command line that this process was started with, as another can type it."""
    return command_of(sys.argv[1:])


def save_origin(out: Path, command: str, data: Sequence[str] = ()) -> None:
    """Keep today's origin in the results folder `out`, with notes on `data`. UsageError where that cannot be."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    write_atomic(out / ORIGIN, canonical(Origin(command=command, date=today, commit=_commit(), data=tuple(data))))


def restate(out: Path, command: str) -> None:
    """Put another command into the origin of a folder: one that makes all of its cells. Raises as `origin_of`."""
    write_atomic(out / ORIGIN, canonical(origin_of(Store(out)).model_copy(update={"command": command})))


def origin_of(store: Store) -> Origin:
    """Return what was kept in a folder, blank in those of an older ppbench; UsageError where it is something else."""
    try:
        return Origin.model_validate_json(store.files.read(ORIGIN), strict=True)
    except FileNotFoundError:
        return Origin()
    except (OSError, ValidationError) as cause:
        raise UsageError(f"{store.out / ORIGIN} does not say where results come from; delete it.") from cause


def commit_of(folder: Path) -> str:
    """Return the commit, 40 hex digits, whose files those of a folder are; "" where no git says so.

    So of a folder that is in no checkout, or is not kept in it, as an environment there, or was changed since.
    """
    if not _git(folder, "ls-files", "--", ".") or _git(folder, "status", "--porcelain", "--", ".") != "":
        return ""
    return _git(folder, "rev-parse", "HEAD") or ""


def _commit() -> str:
    """Return the commit of the checkout that this file lies in, "" where there is none or no git."""
    folder = Path(__file__).resolve().parents[2]
    return (_git(folder, "rev-parse", "--short", "HEAD") or "") if (folder / ".git").exists() else ""


def _git(folder: Path, *words: str) -> str | None:
    """Return what git says of a folder, None where it is not there or refuses: a line for people, worth no failure."""
    try:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
