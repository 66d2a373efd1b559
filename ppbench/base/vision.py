"""The one door to torchvision and lpips: they are imported on first use, and made importable where they are not.

The torchvision of PyPI is built for CUDA: on a CPU-only torch importing it ends in "operator torchvision::nms does not
exist". Declaring the missing schemas lets the import through; calling the operators still fails, as it should.
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
    """Return the module torchvision, imported on the first call (ImportError: it is not installed).

    The schemas are declared only after an import has failed for the lack of one: declaring them first and then
    loading a torchvision that works aborts the process. RuntimeError: the import fails for another reason.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as cause:
        if "torchvision::nms" not in str(cause):
            raise
    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]  # the half-imported modules of the failed attempt
    _declare_missing()
    return importlib.import_module("torchvision")


def importable(call: Callable[[], T]) -> T:
    """Return what `call` returns, which may import torchvision by itself; called again where that failed."""
    try:
        return call()
    except RuntimeError as cause:
        if "torchvision::nms" not in str(cause):
            raise
    torchvision()
    return call()


def lpips() -> ModuleType:
    """Return the module lpips, imported on the first call, behind a torchvision that can be imported."""
    torchvision()
    return importlib.import_module("lpips")


def _declare_missing() -> None:
    import torch  # who fails for the lack of a schema has imported it; a list of plugins must not

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _SCHEMAS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + _ARGUMENTS)
    _DECLARED.append(library)
