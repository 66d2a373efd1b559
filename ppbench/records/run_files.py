"""Files beside the records: origin, salt, the self-test's result, a client's time beside an undefended one."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ppbench.base.errors import UsageError
from ppbench.base.files import kind_of, make_folder, read_regular, unwritable, write_atomic
from ppbench.records.archive import Files, Folder
from ppbench.records.schema import DataInfo, FederationInfo, ModelInfo, Record, Scalar, Strict
from ppbench.records.scores import Amount, AtLeastOne, Count
from ppbench.records.store import TIMES_FOLDER, Store, canonical_json

# -- The origin of results: command, day and commit, in OUT/origin.json. For people; no figure depends on it --

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


# -- The secret of a folder of results: every draw depends on it if other packages' attacks are isolated --
# OUT/salt holds it, readable by its owner alone. Draws from the master seed only, as an attack that reads data by
# itself could make, give other victims and other members. Records carry its digest. Archives and baselines do not
# contain it: pass it on to whoever recomputes the draws, or copy it to a new folder whose cells are to be compared
# with these.

SALT_FILE = "salt"
_FORM = re.compile(r"[0-9a-f]{64}")


def commitment(salt: str) -> str:
    """Return the first 32 hex digits of the SHA-256 of a secret, "" for none."""
    return hashlib.sha256(f"ppbench.salt/{salt}".encode()).hexdigest()[:32] if salt else ""


def salt_of(out: Path, fresh: bool = True) -> str:
    """Return the secret of a folder, 64 hex digits. Without one: a new one, not yet written, if `fresh`, else "".

    Raises UsageError: the file cannot be read, or holds something else.
    """
    path = out / SALT_FILE
    if kind_of(path, follow=False) is None:
        return secrets.token_hex(32) if fresh else ""
    try:
        salt = read_regular(path).decode().strip()
    except (OSError, ValueError) as cause:
        raise UsageError(f"{path} cannot be read; give back the file that was there, or another --out.") from cause
    if not _FORM.fullmatch(salt):
        raise UsageError(f"{path} holds no secret of 64 hex digits; give back what was there, or another --out.")
    return salt


def keep_salt(out: Path, salt: str) -> None:
    """Write a secret, unless "", to a folder without one, readable by its owner alone.

    Raises UsageError: the folder has another secret; Unwritable: the file cannot be written.
    """
    if not salt:
        return
    path = out / SALT_FILE
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except FileExistsError:
        if salt_of(out) != salt:
            raise UsageError(f"{path} is the secret of other results; give another --out, or no salt.") from None
        return
    except OSError as cause:
        raise unwritable(path, len(salt), cause) from cause
    with open(handle, "w") as file:
        file.write(f"{salt}\n")


# -- The outcome of the self-test where cells were last computed: OUT/selftest.json, beside the records --

SELFTEST = "selftest.json"
FALLEN = 0.5
"""Share of a network's victims that must be rebuilt."""


class SelftestTrial(Strict):
    """An undefended network under an attack that must break it. share: of victims rebuilt; error: "" if it ran."""

    model: str
    attack: str
    share: float = Field(ge=0, le=1)
    error: str = ""

    @property
    def fell(self) -> bool:
        """Whether the attack broke the network."""
        return self.share >= FALLEN

    def __str__(self) -> str:
        """Return it in words."""
        error = f" ({self.error})" if self.error else ""
        return f"{self.attack} breaks {self.share:.0%} of an undefended {self.model}{error}"


class Soundness(Strict):
    """The outcome of a self-test, with versions; code: digest over the sources, as in sources.json."""

    schema_: Literal["ppbench.selftest/1"] = Field(default="ppbench.selftest/1", alias="schema")
    ppbench: str
    code: str
    torch: str
    python: str
    trials: list[SelftestTrial] = Field(min_length=1)


def save_soundness(out: Path, outcome: Soundness) -> None:
    """Keep the outcome in the results folder `out`, whole or not at all. Raises UsageError: it cannot be written."""
    write_atomic(out / SELFTEST, canonical_json(outcome))


def soundness_of(store: Store) -> Soundness | None:
    """Return the outcome kept in a folder, None for an older ppbench; UsageError: the file is damaged."""
    try:
        return Soundness.model_validate_json(store.files.read(SELFTEST), strict=True)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as cause:
        advice = "delete it, and evaluate or sweep into the folder again"
        raise UsageError(f"{store.out / SELFTEST} holds no outcome of a self-test; {advice}.") from cause


# -- How long a client takes beside an undefended one: OUT/times/<training>.json, one file per training --
# Equal runs give equal records byte for byte; times differ, so records contain none, and nothing depends on them.


class EncryptionTime(Strict):
    """The time that real encryption adds to a round, in wall-clock seconds: seconds per operation times their number.

    client: including decryption if clients decrypt. server: adding up and decrypting. library: the timed library with
    its version. reason: why nothing was timed, else "".
    """

    client: Amount | None
    server: Amount | None
    library: str
    reason: str


class ClientTime(Strict):
    """A client's part of a round in wall-clock time, in pairs with an undefended client.

    ratio, seconds, undefended_seconds: medians; low, high: of 95 % or more, null below six pairs; machine: the GPU's
    name if one was used; encryption: of a defense that encrypts, not part of `seconds`.
    """

    ratio: Amount
    low: Amount | None
    high: Amount | None
    pairs: Count
    seconds: Amount
    undefended_seconds: Amount
    machine: str
    threads: AtLeastOne
    encryption: EncryptionTime | None = None


def training_id(
    ppbench: str,
    defense: tuple[str, str, dict[str, Scalar]],
    parts: tuple[DataInfo, ModelInfo, FederationInfo],
    seed: int,
) -> str:
    """Return the name of a training: a hash of all that determines it, including the version of ppbench."""
    about = [ppbench, *defense, seed, *(part.model_dump(mode="json") for part in parts)]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def training_of(record: Record) -> str:
    """Return the name of the training that a record is from."""
    config, defense = record.config, record.config.defense
    parts = config.data, config.model, config.federation
    return training_id(
        record.environment.ppbench, (defense.id, defense.edition, defense.parameters), parts, config.seed
    )


def save_time(out: Path, training: str, time: ClientTime) -> None:
    """Keep a training's client time, whole or not at all. Raises UsageError: it cannot be written."""
    write_atomic(make_folder(out / TIMES_FOLDER) / f"{training}.json", canonical_json(time))


def time_of(out: Path | Files, record: Record) -> ClientTime | None:
    """Return the client time of a record's training, or None; UsageError: the file holds something else.

    out: the folder of results, or the files of a folder or an archive.
    """
    files, name = Folder(out) if isinstance(out, Path) else out, f"{TIMES_FOLDER}/{training_of(record)}.json"
    try:
        return ClientTime.model_validate_json(files.read(name), strict=True)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as cause:
        raise UsageError(
            f"{files.path / name} holds no times of a client; delete it, the page does without."
        ) from cause
