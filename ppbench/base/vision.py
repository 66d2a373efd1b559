"""Imports of torchvision and lpips: on first use, and with a workaround for a torchvision that cannot be imported.

The torchvision of PyPI is built for CUDA: on a CPU-only torch its import fails with "operator torchvision::nms does not
exist". With the missing schemas declared the import succeeds; calling the operators still fails, as it should.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

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
