"""Calls of a third-party attack: a folder of files in, a folder of files out, and a separate process between.

Answers are read from regular files only, up to a maximal size, and checked before they are used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ppbench.adversary.facts import HookCall, Reply
from ppbench.base import tree
from ppbench.base.confine import EXPIRED, WaitingProcess, walled
from ppbench.base.errors import PluginError, UsageError, because
from ppbench.base.files import kind_of, make_folder, read_regular, scratch
from ppbench.base.registry import plugins
from ppbench.base.seals import seal_value, unsealed
from ppbench.base.version import __version__
from ppbench.records.sources import code_of

LONG, SHORT = 6 * 3600.0, 300.0
"""Seconds that an attack may take for all challenges of a cell or for crafted weights, and for any other answer."""
LARGEST_ANSWER = 2 << 30
"""Most bytes of the tensors of an answer."""
ENTRY_FUNCTION = "ppbench.adversary.inside:main"


def remembered(ask: HookCall, plan: str = "", files: Sequence[Path] = ()) -> Reply:
    """Return the reply to a call that depends on the attack's code and parameters alone; cached on disk."""
    code, kinds = code_of(("attacks", ask.attack)), sorted({*plugins("defenses"), *plugins("questions")})
    key = hashlib.sha256(json.dumps([__version__, ask.model_dump(mode="json"), plan, code, kinds]).encode()).hexdigest()
    path = reply_cache() / f"{key[:32]}.json"
    if code and kind_of(path) == "file":
        with contextlib.suppress(UsageError, ValidationError):
            return Reply.model_validate(unsealed(path, files=False))
    reply, _ = isolated_answer(ask, lambda home: (home / "plan.json").write_text(plan), files)
    if code:  # "" for ppbench's own attacks, whose code changes between versions too
        with contextlib.suppress(UsageError):  # without a cache the attack is called again
            make_folder(path.parent)
            seal_value(path, reply.model_dump(mode="json"))
    return reply


def reply_cache() -> Path:
    """Return the folder of cached replies: "apart" in PPBENCH_CACHE, or in ~/.cache/ppbench."""
    return Path(os.environ.get("PPBENCH_CACHE") or Path.home() / ".cache" / "ppbench") / "apart"


def isolated_answer(ask: HookCall, write: Callable[[Path], object], files: Sequence[Path] = ()) -> tuple[Reply, Any]:
    """Return the reply of a separate process and its tree of tensors, None if it has none.

    write: writes the input into a folder; files: what else the process may read. Raises UsageError: the attack refuses
    the input; PluginError: it ended without an answer, took too long, or its answer is malformed.
    """
    title, seconds = plugins("attacks")[ask.attack].words, LONG if ask.hook in ("run", "crafted") else SHORT
    with contextlib.closing(_box(tuple(files), ask.device)) as box:
        write(box.home)
        (box.home / "ask.json").write_text(ask.model_dump_json())
        if ask.hook == "run":  # packages load for the next cell while this one is attacked and scored
            with contextlib.suppress(OSError, UsageError):  # then it is made, or fails, when it is needed
                _spares.append(_Box(box.files, box.device))
        ended = box.process.ask(seconds)
        if ended == EXPIRED:
            raise PluginError(f"{title} gave no answer in {seconds:,.0f} s, isolated.")
        reply = _reply(box.work / "answer.json", title, ended)
        if reply.refused:
            raise (PluginError if reply.plugin else UsageError)(reply.refused)
        tensors = box.work / "answer.safetensors"
        return reply, _tree(tensors, title) if kind_of(tensors, follow=False) is not None else None


class _Box:
    """Two folders and a process that waits between them for one call; `files`: what else it may read."""

    def __init__(self, files: tuple[Path, ...], device: str) -> None:
        self.files, self.device, self.maker, self.walls = files, device, os.getpid(), walled()
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(scratch("ppbench-apart"))
            self.home, self.work = folder / "ask", folder / "work"
            self.home.mkdir()
            self.work.mkdir()
            places = [str(self.home), str(self.work)]
            self.process = WaitingProcess(ENTRY_FUNCTION, places, [self.home, *files], self.work, device)
            stack.callback(self.process.end)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End the process and remove the folders."""
        if self.maker == os.getpid():  # in a fork they belong to the parent
            self._stack.close()


_spares: list[_Box] = []


def _box(files: tuple[Path, ...], device: str) -> _Box:
    """Return a waiting box with these settings, or a new one."""
    while _spares:
        box = _spares.pop()
        if (box.files, box.device, box.maker, box.walls) == (files, device, os.getpid(), walled()):
            return box
        box.close()
    return _Box(files, device)


def end_spares() -> None:
    """End the processes that wait for a next cell; called at the end of this process, also of a worker."""
    while _spares:
        _spares.pop().close()


Finalize(None, end_spares, exitpriority=10)


def _reply(path: Path, title: str, ended: int) -> Reply:
    try:
        return Reply.model_validate_json(_taken(path, 4 << 20))
    except FileNotFoundError:
        how = f"killed by {signal.Signals(-ended).name}" if ended < 0 else f"with exit code {ended}"
        raise PluginError(f"{title} ended its process without an answer ({how}), isolated.") from None
    except (OSError, ValueError, RecursionError) as cause:
        raise PluginError(f"{title} answers what cannot be read, isolated ({because(cause)}).") from cause


def _tree(path: Path, title: str) -> Any:
    try:
        return tree.unpacked(_taken(path, LARGEST_ANSWER))
    except (OSError, UsageError) as cause:
        raise PluginError(f"{title} answers tensors that cannot be read, isolated ({because(cause)}).") from cause


def _taken(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of `most` bytes or fewer; OSError for anything else."""
    size = path.lstat().st_size
    if size > limit:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes", str(path))
    return read_regular(path)
