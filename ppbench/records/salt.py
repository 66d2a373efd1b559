"""The secret of a folder of results: every draw depends on it if other packages' attacks are isolated.

OUT/salt holds it, readable by its owner alone. Draws from the master seed only, as an attack that reads data by itself
could make, give other victims and other members. Records carry its digest. Archives and baselines do not contain it:
pass it on to whoever recomputes the draws, or copy it to a new folder whose cells are to be compared with these.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path

from ppbench.base.errors import UsageError
from ppbench.base.files import kind_of, read_regular, unwritable

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
