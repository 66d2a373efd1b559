"""Sandboxed processes for third-party code, and a test of what the sandbox really blocks.

`bubblewrap` (`bwrap`, of Flatpak) makes the sandbox where it is installed and allowed: separate namespaces for files,
network and processes, with only Python, the packages and two folders in them. Landlock and seccomp have no
well-kept Python library. Without bubblewrap the code runs in another process, in an empty folder, with an empty
environment. A probe process tries each forbidden access, and `confinement` reports what was blocked.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import util
from importlib.machinery import ModuleSpec
from pathlib import Path

from ppbench.base.files import read_regular, scratch
from ppbench.base.import_guard import PACKAGE
from ppbench.base.registry import all_known

_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
EXPIRED = 1000
"""Exit code that `WaitingProcess.ask` returns for a process that was killed because its time was up."""
_PASSED = ("PATH", "LANG", "LC_ALL", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
_PROBE = """
import json, os, socket, sys
file, port, process, work = sys.argv[1:]
refused = {}
def tried(name, act):
    try:
        act()
        refused[name] = False
    except OSError:
        refused[name] = True
tried("files", lambda: open(file).close())
tried("network", lambda: socket.create_connection(("127.0.0.1", int(port)), 2).close())
tried("processes", lambda: os.stat("/proc/" + process + "/environ") and os.kill(int(process), 0))
with open(os.path.join(work, "refused.json"), "w") as out:
    json.dump(refused, out)
"""


@dataclass(frozen=True)
class Confinement:
    """Whether a sandboxed process was blocked from foreign files, from the network and from other processes."""

    files: bool
    network: bool
    processes: bool

    @property
    def words(self) -> str:
        """The confinement in words: "in a process of its own, kept from your files, the network and ..."."""
        access = {"your files": self.files, "the network": self.network, "other processes": self.processes}
        kept, exposed = ([name for name, confined in access.items() if confined is side] for side in (True, False))
        words = "in a process of its own"
        if kept:
            words += f", kept from {_and(kept)}"
        return (
            f"{words}, NOT kept from {_and(exposed)} (install bubblewrap, or allow it namespaces)" if exposed else words
        )


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


@cache
def confinement() -> Confinement:
    """Return what a `WaitingProcess` is kept from, as a probe process observed it; cached."""
    behind_walls = _tried(walls=True) if _bwrap() else None
    return behind_walls or _tried(walls=False) or Confinement(False, False, False)


def _tried(walls: bool) -> Confinement | None:
    """Return what a probe process observed, None if it could not start."""
    with scratch("ppbench-probe") as home, socket.create_server(("127.0.0.1", 0)) as listener:
        canary, work = home / "canary", home / "work"
        canary.write_text("truth")
        work.mkdir()
        arguments = [str(canary), str(listener.getsockname()[1]), str(os.getpid()), str(work)]
        command = [sys.executable, "-I", "-S", "-c", _PROBE, *arguments]
        _ended(_started([*(_wall((), work, "cpu") if walls else ()), *command], work), 30)
        try:
            return Confinement(**json.loads(read_regular(work / "refused.json")))
        except (OSError, ValueError, TypeError):
            return None


class WaitingProcess:
    """A separate process that has loaded its packages and waits for one call of `ask`; its output is dropped.

    It ends with the thread that started it.
    """

    def __init__(
        self, target: str, arguments: Sequence[str], readable: Sequence[Path], work: Path, device: str
    ) -> None:
        """Start a process for `target` ("module:function") with `arguments`.

        readable: files and folders that it may read besides Python and packages; work: its working folder, empty at the
        start, the only one that it may write. device: as torch names it; unless it is "cpu", accelerators are visible.
        """
        module, _, function = target.partition(":")
        script = f"import sys; from {module} import {function}; sys.stdin.readline() and {function}(*sys.argv[1:])"
        walls = _wall(readable, work, device) if walled() else []
        self._process = _started([*walls, sys.executable, "-c", script, *arguments], work)

    def ask(self, seconds: float) -> int:
        """Start the call and return the exit code of the process, `EXPIRED` if it was killed after `seconds`."""
        return _ended(self._process, seconds)

    def end(self) -> None:
        """Kill the process and all that it started."""
        _kill(self._process)


def walled() -> bool:
    """Return whether processes are started in the sandbox on this machine."""
    return bool(_bwrap()) and _tried_walls()


@cache
def _bwrap() -> str | None:
    return shutil.which("bwrap") if sys.platform == "linux" else None


@cache
def _tried_walls() -> bool:
    return _tried(walls=True) is not None


def _started(command: Sequence[str], work: Path) -> subprocess.Popen[bytes]:
    environment = {name: os.environ[name] for name in _PASSED if name in os.environ}
    environment |= {"HOME": str(work), "TMPDIR": str(work), "USER": "nobody", "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in _paths())
    pipe, devnull = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(
        command, cwd=work, env=environment, stdin=pipe, stdout=devnull, stderr=devnull, start_new_session=True
    )


def _ended(process: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        process.communicate(b"\n", timeout=seconds)
        return process.returncode
    except subprocess.TimeoutExpired:
        return EXPIRED
    finally:  # after an interrupt too: nothing of it may go on
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # it has closed its end
            process.stdin.close()
    process.wait()


def _wall(readable: Sequence[Path], work: Path, device: str) -> list[str]:
    """Return the bubblewrap arguments that leave a command only Python, packages, `readable` and `work`."""
    arguments = [_bwrap() or "", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in (*map(Path, _SYSTEM), *_python(), *readable):
        arguments += ["--ro-bind-try", str(path), str(path)]
    if device != "cpu":
        for device_path in (*Path("/dev").glob("nvidia*"), *Path("/dev").glob("dri")):
            arguments += ["--dev-bind-try", str(device_path), str(device_path)]
    return [*arguments, "--bind", str(work), str(work), "--chdir", str(work), "--"]


def _paths() -> list[Path]:
    """Return the absolute paths on which this process finds modules, without the current folder."""
    return [path for text in sys.path if text and (path := Path(text)).is_absolute() and path.exists()]


@cache
def _python() -> tuple[Path, ...]:
    """Return Python and the installed packages; of other folders on the path only modules, packages and metadata.

    People keep results and packages in one folder, so such a folder must not be visible as a whole.
    """
    homes = {Path(text) for text in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    paths = dict.fromkeys([*sorted(homes), Path(sys.executable).resolve().parent])
    for path in _paths():
        visible = path.name in ("site-packages", "dist-packages") or any(path.is_relative_to(home) for home in homes)
        paths |= dict.fromkeys([path] if visible or path.is_file() else _modules(path))
    roots = {PACKAGE, *(plugin.root for plugin in all_known())}
    for spec in map(_spec, sorted(roots - {""})):
        places = [] if spec is None else [*(spec.submodule_search_locations or ()), spec.origin or ""]
        paths |= dict.fromkeys(path for text in places if text and (path := Path(text)).exists())
    return tuple(paths)


def _spec(root: str) -> ModuleSpec | None:
    try:
        return util.find_spec(root)
    except Exception:  # noqa: BLE001 - a broken package: whatever imports it reports so
        return None


def _modules(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.suffix in (".dist-info", ".egg-info", ".py", ".pth", ".so") or (path / "__init__.py").is_file():
            yield path
