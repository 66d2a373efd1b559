"""The origin of results: command, day and commit, in OUT/origin.json. For people; no figure depends on it."""

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
from ppbench.records.store import Store, canonical_json

ORIGIN = "origin.json"
_PIECE = re.compile(r"((?:[\w-]{2,}:)*)(.*)", re.S)
"""A prefix such as "parquet:", and the path after it."""
_ABSOLUTE = re.compile(r"[\\/]|~[\w.-]*[\\/]|[A-Za-z]:[\\/]")


class Origin(Strict):
    """How cells of a folder were last computed.

    command: as typed, without the folders of absolute paths, "" if it was no command line; date: the day, UTC, as
    "2026-11-23"; commit: of the checkout that ppbench ran from, as git abbreviates it, "" if it was none; data: how
    data sets were read, `Dataset.notes`.
    """

    schema_: Literal["ppbench.origin/1"] = Field(default="ppbench.origin/1", alias="schema")
    command: str = ""
    date: str = ""
    commit: str = ""
    data: tuple[str, ...] = ()


def command_of(words: Sequence[str]) -> str:
    """Return the command line of the arguments `words` without folders of this machine, as results are passed on.

    Of an absolute path the last part stays ("parquet:/home/ann/cifar10" becomes "parquet:cifar10", as in records), also
    in lists and behind "="; what follows a "?" belongs to a data set and stays.
    """
    shown = []
    for word in words:
        head, mark, query = word.partition("?")
        shown.append("".join([*map(_bare, re.split("([=,])", head)), mark, query]))
    return shlex.join(["ppbench", *shown])


def _bare(piece: str) -> str:
    """Return a piece of a word without the folders of an absolute path; relative paths and addresses stay."""
    scheme, path = _PIECE.fullmatch(piece).groups()  # type: ignore[union-attr]  # everything matches
    address = scheme not in ("", "file:") and re.match(r"//\w", path)
    last = re.split(r"[\\/]", path.rstrip("\\/"))[-1]
    return scheme + last if last and not address and _ABSOLUTE.match(path) else piece


def typed_command() -> str:
    """Return the command line of this process, without folders of this machine."""
    return command_of(sys.argv[1:])


def save_origin(out: Path, command: str, data: Sequence[str] = ()) -> None:
    """Keep today's origin in the results folder `out`, with notes on `data`. UsageError: it cannot be written."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    write_atomic(out / ORIGIN, canonical_json(Origin(command=command, date=today, commit=_commit(), data=tuple(data))))


def restate(out: Path, command: str) -> None:
    """Replace the command in the origin of a folder by one that computes all of its cells. Raises as `origin_of`."""
    write_atomic(out / ORIGIN, canonical_json(origin_of(Store(out)).model_copy(update={"command": command})))


def origin_of(store: Store) -> Origin:
    """Return the origin kept in a folder, a blank one for an older ppbench; UsageError: the file is damaged."""
    try:
        return Origin.model_validate_json(store.files.read(ORIGIN), strict=True)
    except FileNotFoundError:
        return Origin()
    except (OSError, ValidationError) as cause:
        raise UsageError(f"{store.out / ORIGIN} does not say where results come from; delete it.") from cause


def commit_of(folder: Path) -> str:
    """Return the commit, 40 hex digits, that a folder's files are of; "" if unknown.

    It is unknown outside of a checkout, for files that git does not track, and after changes.
    """
    if not _git(folder, "ls-files", "--", ".") or _git(folder, "status", "--porcelain", "--", ".") != "":
        return ""
    return _git(folder, "rev-parse", "HEAD") or ""


def _commit() -> str:
    """Return the short commit of the checkout of this file, "" without a checkout or git."""
    folder = Path(__file__).resolve().parents[2]
    return (_git(folder, "rev-parse", "--short", "HEAD") or "") if (folder / ".git").exists() else ""


def _git(folder: Path, *words: str) -> str | None:
    """Return the output of git in a folder, None if git is missing or fails: a line for people is worth no failure."""
    try:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
