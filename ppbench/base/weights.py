"""Files of named tensors, read without running code in them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ppbench.base.errors import UsageError, because


def named_tensors(path: Path) -> Mapping[str, Any]:
    """Return the named tensors of a .safetensors file or a torch checkpoint (UsageError: it cannot be read as one)."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with warnings.catch_warnings():  # torch warns about files of other libraries
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as cause:  # torch's own message advises to run the code in the file
        raise UsageError(
            f"{path} is no file of weights that can be read (it holds other things than tensors)."
        ) from cause
    except Exception as cause:  # a damaged file makes its reader raise anything
        raise UsageError(f"{path} is no file of weights that can be read ({because(cause)}).") from cause
    if not isinstance(state, Mapping):
        raise UsageError(f"{path} holds no tensors by name; give a .safetensors file or a torchvision checkpoint.")
    return state
