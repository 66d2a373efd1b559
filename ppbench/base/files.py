"""The one place where results and outputs touch the file system.

An error of the system about a user's path becomes one sentence. Files inside results are written whole or not at all,
never through a link and never over anything but a regular file; a link that a user named is followed. Temporary files
and folders carry their process in their names, so that the next run can remove those of dead processes.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from ppbench.base.errors import Unwritable, UsageError

PathKind = Literal["file", "folder", "link", "special"]

TEMPORARY = r"~([\w-]+)\.(\d+)-(\d+)\.tmp"
"""Ending of a temporary file's or folder's name: machine, process number, start of the process."""
_TEMPORARY = re.compile(rf".*{TEMPORARY}", re.DOTALL)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NAME = 160  # characters of a name that its temporary name keeps: file systems take 255
_THROUGH = ("/dev/", "/proc/")  # files that are open already: written to, never replaced


# -- looking ---------------------------------------------------------------------------------------------------------
def kind_of(path: Path, *, follow: bool = True) -> PathKind | None:
    """Return the kind of file at `path`, None if there is none. follow: the kind of a link's target instead of "link".

    "special" is a device, a pipe or a socket. UsageError: the path cannot be examined (no permission, a name too long,
    links in a circle).
    """
    try:
        mode = (path.stat() if follow else path.lstat()).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as cause:
        raise unusable(path, cause) from cause
    if stat.S_ISLNK(mode):
        return "link"
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "special"


def listing(folder: Path) -> list[Path]:
    """Return the paths in a folder, sorted; UsageError if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except (OSError, ValueError) as cause:
        raise unusable(folder, cause) from cause


def read_regular(path: Path) -> bytes:
    """Return the bytes of a regular file inside results; a link or pipe is never followed or waited for.

    Raises OSError, also for anything but a regular file.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return file.read()


def unusable(path: Path, cause: OSError | ValueError) -> UsageError:
    """Return the error for a path that the system rejects or does not let us examine."""
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return UsageError(f"{path} cannot be used ({reason}); give another path.")


def unwritable(path: Path, size: int, cause: OSError | ValueError) -> Unwritable:
    """Return the error for a file of `size` bytes that the system does not let us write."""
    if isinstance(cause, OSError) and cause.errno in _FULL:
        return Unwritable(
            f"No space is left to write {path.name} ({size} bytes) in {path.parent}; "
            "free some and run the same command again: finished cells are kept."
        )
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return Unwritable(f"{path} cannot be written ({reason}); choose an output folder that you may write to.")


# -- writing ---------------------------------------------------------------------------------------------------------
def write_atomic(path: Path, data: bytes) -> None:
    """Write a file of results, so that a reader, or a crash, sees the old file or the new one.

    Unwritable: no space or permission, or a link, a folder or a special file is in its place, which stays.
    """
    if (kind := kind_of(path, follow=False)) not in (None, "file"):
        raise Unwritable(f"{path} is a {_WORDS[kind]}, and results are not written over one; move it away.")
    try:
        _replace(path, data)
    except OSError as cause:
        raise unwritable(path, len(data), cause) from cause


_WORDS: dict[PathKind | None, str] = {"folder": "folder", "link": "link", "special": "device, pipe or socket"}


def write_output(path: Path, data: bytes) -> None:
    """Write a file that a user named, whole or not at all.

    A link's target is replaced and keeps its permissions; to a device, a pipe or an open file (/dev/stdout) the bytes
    are written directly. Unwritable: a folder, a pipe that nobody reads, no space or permission.
    """
    kind = kind_of(path)
    if kind == "folder":
        raise Unwritable(f"{path} is a folder; name a file in it.")
    try:
        if kind == "special" or str(path.absolute()).startswith(_THROUGH):
            _write_through(path, data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except (OSError, ValueError) as cause:
        raise unwritable(path, len(data), cause) from cause


def _write_through(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NONBLOCK", 0))  # a pipe without reader: ENXIO
    os.set_blocking(handle, True)
    with open(handle, "wb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]


def _replace(path: Path, data: bytes) -> None:
    temporary = temporary_of(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            _take_rights(path, temporary)
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _take_rights(path: Path, temporary: Path) -> None:
    """Give `temporary` the permissions of the file that it replaces, and as root its owner."""
    old = path.stat()
    temporary.chmod(stat.S_IMODE(old.st_mode))
    if hasattr(os, "chown") and os.geteuid() == 0:
        os.chown(temporary, old.st_uid, old.st_gid)


def make_folder(path: Path) -> Path:
    """Make a folder of results and return it; UsageError: anything else is at `path`, or it cannot be made."""
    if (kind := kind_of(path, follow=False)) not in (None, "folder"):
        raise UsageError(f"{path} is a {_WORDS.get(kind, 'file')}, where results have a folder; move it away.")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise unwritable(path, 0, cause) from cause
    return path


def publish_folder(home: Path, write: Callable[[Path], None]) -> None:
    """Make the folder `home` with what `write` puts into it, whole or not at all.

    Of two processes that make it at once, the first one's stays. A folder that is already at `home` is taken for
    damaged (else it would have been used) and removed. Unwritable: no space or permission; no draft stays behind.
    """
    make_folder(home.parent)
    draft = temporary_of(home)
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        try:
            write(draft)
            if home.is_symlink():
                home.unlink()
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


# -- what killed processes leave -------------------------------------------------------------------------------------
def temporary_of(path: Path, role: str = "") -> Path:
    """Return a temporary path beside `path` for this process; role: a word that makes it unique."""
    process = os.getpid()
    return path.with_name(f"{path.name[:_NAME]}{role}~{_host()}.{process}-{_beginning(process) or 0}.tmp")


@contextmanager
def scratch(name: str) -> Iterator[Path]:
    """Yield a private temporary folder of this process, removed at the end.

    Folders of that name left by killed processes are removed first. Unwritable: it cannot be made.
    """
    home = Path(tempfile.gettempdir())
    sweep_abandoned(home, name)
    folder = temporary_of(home / name, secrets.token_hex(4))
    try:
        folder.mkdir(mode=0o700)
    except OSError as cause:
        raise unwritable(folder, 0, cause) from cause
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep_abandoned(folder: Path, name: str = "") -> None:
    """Remove temporary files and folders in `folder` whose process is gone; name: only those that begin with it."""
    if kind_of(folder) != "folder":
        return
    for path in listing(folder):
        parts = _TEMPORARY.fullmatch(path.name)
        if parts and path.name.startswith(name[:_NAME]) and abandoned(*parts.groups()):
            if kind_of(path, follow=False) == "folder":
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def abandoned(host: str, process: str, beginning: str) -> bool:
    """Return whether the process in a temporary file's name ran on this machine and has ended.

    Process numbers are reused, in a container from 1 on, so the name holds the start of the process too.
    """
    if os.name != "posix" or host != _host():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    now = _beginning(int(process))
    return now is not None and now != int(beginning)


def _host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname()) or "host"


def _beginning(process: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if the system does not report it."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return None
    return int(status[status.rindex(b")") + 2 :].split()[19])


# -- Locks between processes, on a folder itself: no file stays behind, and a lock ends with its process --
# `filelock` locks a file and empties it whenever somebody waits for it, so that the holder could not be reported.

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
