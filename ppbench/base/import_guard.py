"""Protection of the process while a third-party module is imported, and its errors in words."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

from ppbench.base.errors import one_line

PACKAGE = "ppbench"


@contextmanager
def restored_process() -> Iterator[None]:
    """Restore the folder, warning filters and torch's defaults after the block; its stdout goes to stderr."""
    folder, torch = os.getcwd(), sys.modules.get("torch")
    dtype, grad = (None, None) if torch is None else (torch.get_default_dtype(), torch.is_grad_enabled())
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            yield
    finally:
        with contextlib.suppress(OSError):  # the folder is gone
            os.chdir(folder)
        if torch is not None:
            torch.set_default_dtype(dtype)
            torch.set_grad_enabled(grad)


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT came in the block: a module may raise KeyboardInterrupt itself."""
    received: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: True
        return

    def noted(number: int, frame: FrameType | None) -> None:
        received.append(number)
        handler(number, frame)

    signal.signal(signal.SIGINT, noted)
    try:
        yield lambda: bool(received)
    finally:
        if signal.getsignal(signal.SIGINT) is noted:
            signal.signal(signal.SIGINT, handler)


def frames(error: BaseException) -> list[FrameType]:
    """Return the frames that an error passed, the innermost first, then those of its causes."""
    all_frames: list[FrameType] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and len(seen) < 20:
        seen.add(id(current))
        all_frames += reversed([frame for frame, _ in traceback.walk_tb(current.__traceback__)])
        current = current.__cause__ or current.__context__
    return all_frames


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs, "" if it has none."""
    name = frame.f_globals.get("__name__")
    return name if isinstance(name, str) else ""


def within(module: str, root: str) -> bool:
    """Return whether a module is `root` or lies in the package `root`."""
    return module == root or module.startswith(f"{root}.")


def error_text(error: BaseException) -> str:
    """Return an error as "ZeroDivisionError: division by zero"; without a message the class alone."""
    name, message = one_line(type.__dict__["__name__"].__get__(type(error)), 80), one_line(error)
    return f"{name}: {message}" if message else name


def place(error: BaseException, root: str) -> str:
    """Return "name.py, line 12" of the innermost line of package `root` that an error passed, "" if there is none.

    Read from the traceback, for frames may have moved on to other lines.
    """
    own = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if within(module_of(frame), root)]
    return f"{Path(own[-1][0].f_code.co_filename).name}, line {own[-1][1]}" if own else ""


# -- Imports of torchvision and lpips: on first use, and with a workaround for a torchvision that cannot be imported --
# The torchvision of PyPI is built for CUDA: on a CPU-only torch its import fails with "operator torchvision::nms does
# not exist". With the missing schemas declared the import succeeds; calling the operators still fails, as it should.

T = TypeVar("T")
_SCHEMAS = ("nms", "qnms")
_ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# torch withdraws a declaration when its Library object dies, so these live as long as the process.
_DECLARED: list[Any] = []


def torchvision() -> ModuleType:
    """Return the module torchvision, imported on the first call (ImportError: it is not installed)."""
    return importable(lambda: importlib.import_module("torchvision"))


def importable(call: Callable[[], T]) -> T:
    """Return what `call` returns; call it again with the workaround if its import of torchvision failed.

    The schemas are declared only after an import has failed for the lack of one: declaring them first and then
    loading a torchvision that works aborts the process.
    """
    try:
        return call()
    except RuntimeError as cause:
        if "torchvision::nms" not in str(cause):
            raise
    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]  # the half-imported modules of the failed attempt
    _declare_missing()
    return call()


def lpips() -> ModuleType:
    """Return the module lpips, imported on the first call, behind a torchvision that can be imported."""
    torchvision()
    return importlib.import_module("lpips")


def _declare_missing() -> None:
    import torch  # already imported where a schema is missing; listing plugins must not import it

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + _ARGUMENTS)
    _DECLARED.append(library)
