"""Locks between processes, on a folder itself: no file stays behind, and a lock ends with its process.

`filelock` locks a file and empties it whenever somebody waits for it, so that the holder could not be reported.
"""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppbench.base.errors import UsageError
from ppbench.base.files import unusable

LOCK_PATIENCE = 60.0
"""Seconds to wait for another process."""
_PAUSE = 0.05
_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # network file systems


@contextmanager
def locked(folder: Path, what: str, patience: float | None = None) -> Iterator[None]:
    """Hold the lock of an existing folder while the body runs; what: the work in words, "moving the baseline".

    UsageError: another process, named in the sentence, still holds it after `patience` seconds, by default
    `LOCK_PATIENCE`. On a file system without locks the body runs without, after a warning.
    """
    if os.name != "posix":
        yield
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as cause:
        raise unusable(folder, cause) from cause
    try:
        end = time.monotonic() + (LOCK_PATIENCE if patience is None else patience)
        while not _taken(handle, folder):
            if time.monotonic() > end:
                raise UsageError(f"{folder} is in use by {_holder(handle)}; wait until it has ended before {what}.")
            time.sleep(_PAUSE)
        yield
    finally:
        os.close(handle)


def _taken(handle: int, folder: Path) -> bool:
    from fcntl import LOCK_EX, LOCK_NB, flock

    try:
        flock(handle, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as cause:
        if cause.errno not in _NO_LOCKS:
            raise unusable(folder, cause) from cause
        warnings.warn(f"{folder} lies where there are no locks: run one command at a time in it.", stacklevel=3)
    return True


def _holder(handle: int) -> str:
    """Return in words which process holds the lock of an open folder, as far as the system reports it."""
    status = os.fstat(handle)
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
        process = next(fields[4] for line in lines if "->" not in (fields := line.split()) and inode in fields)
        command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (OSError, StopIteration, IndexError):
        return "another process"
    return f"process {process} ({command})"
