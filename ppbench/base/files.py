"""Files that are written whole or not at all, and what killed processes leave of them."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from ppbench.base.errors import Unwritable

TEMPORARY = r"~([\w-]+)\.(\d+)\.tmp"
"""How the name of a temporary file goes on after that of the file it is for: the machine and the process."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def _host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname()) or "host"


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash, sees the old file or the new one (or Unwritable)."""
    temporary = path.with_name(f"{path.name}~{_host()}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as cause:
        raise unwritable(path, len(data), cause) from cause


def publish_folder(home: Path, prefix: str, write: Callable[[Path], None]) -> None:
    """Make the folder `home` with what `write` puts into it: whole or not at all; drafts beside it begin with `prefix`.

    Of two processes that make the same at once, the first one's stays. What lies at `home` before is taken for damaged,
    or it would have been used, and goes. Unwritable: no space is left, or no right; no draft stays behind.
    """
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=prefix, dir=home.parent))
        try:
            write(draft)
            shutil.rmtree(home, ignore_errors=True)
            draft.rename(home)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except SafetensorError as cause:  # what safetensors makes of a full disk
        raise unwritable(home, 0, OSError(errno.ENOSPC, str(cause))) from cause
    except OSError as cause:
        if cause.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster with the same
            return
        raise unwritable(home, 0, cause) from cause


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable; only POSIX systems can open a folder for that."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unwritable(path: Path, size: int, cause: OSError) -> Unwritable:
    """Return the sentence for a file of `size` bytes that the system would not let us write."""
    if cause.errno in _FULL:
        return Unwritable(
            f"No space is left to write {path.name} ({size} bytes) in {path.parent}; "
            "free some and run the same command again: finished cells are kept."
        )
    reason = cause.strerror or type(cause).__name__
    return Unwritable(f"{path} cannot be written ({reason}); choose an output folder that you may write to.")


def abandoned(host: str, process: str) -> bool:
    """Return whether a temporary file's name tells of a process of this machine that no longer runs."""
    if os.name != "posix" or host != _host():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False
