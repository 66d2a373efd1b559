"""Files of tensors: named weights read without running anything, and digests of what caches keep."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from ppbench.base.errors import UsageError, because
from ppbench.base.files import read_regular, write_atomic

# -- Files of named tensors, read without running code in them --


def named_tensors(path: Path) -> Mapping[str, Any]:
    """Return the named tensors of a .safetensors file or a torch checkpoint (UsageError: it cannot be read as one)."""
    try:
        if path.suffix == ".safetensors":
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


# -- Digests of cached files: a bit that flips on a disk must cost time, never change a result --
# A file of tensors carries the SHA-256 of its tensors; a folder of files has one JSON file with the SHA-256 of each,
# and of itself. Digests detect damage, not forgery: whoever can write a cache can also write its digests.

DIGEST_ENTRY = "ppbench.sha256"


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256, in hex, of tensors on CPU by name: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def packed_with_digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return tensors on CPU as the bytes of a safetensors file with their digest, for `unpacked_with_digest`."""
    contiguous = {name: value.contiguous() for name, value in sorted(tensors.items())}
    return _settled(save(contiguous, {**(metadata or {}), DIGEST_ENTRY: digest_of(contiguous)}))


def _settled(data: bytes) -> bytes:
    """Return the bytes of a safetensors file with its metadata sorted: the library's order differs by process."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def unpacked_with_digest(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of `packed_with_digest`. UsageError: it is unreadable, damaged or without digest."""
    try:
        with safe_open(path, framework="pt") as file:
            stated = (file.metadata() or {}).get(DIGEST_ENTRY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError) as cause:
        raise UsageError(f"{path} cannot be read ({cause}).") from cause
    if stated != digest_of(tensors):
        raise UsageError(f"{path} {'carries no digest' if stated is None else 'is damaged: its digest differs'}.")
    return tensors


def seal(folder: Path, name: str, about: Any) -> None:
    """Write `about`, a JSON value, to the file `name` in `folder`, with the digests of the other files there."""
    files = {path.name: _file_digest(path) for path in sorted(folder.iterdir()) if path.is_file() and path.name != name}
    seal_value(folder / name, about, files)


def seal_value(path: Path, about: Any, files: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write `about`, a JSON value, to a file with its digest, for `unsealed`; files: digests of others beside it."""
    body = {"about": about, "files": dict(files)}
    text = json.dumps({**body, "sha256": _body_digest(body)}, sort_keys=True)
    write_atomic(path, text.encode())


def unsealed(path: Path, files: bool = True) -> Any:
    """Return what `seal` wrote to `path`; files: whether those beside it are checked too.

    Raises UsageError: the file is missing, damaged or without digest, or another file is missing or differs.
    """
    try:
        content = json.loads(read_regular(path))
        body = {"about": content["about"], "files": dict(content["files"])}
        intact = content["sha256"] == _body_digest(body)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as cause:
        raise UsageError(f"{path} is damaged, or older than digests ({type(cause).__name__})") from cause
    if not intact:
        raise UsageError(f"{path} is damaged: its digest differs")
    for name, stated in body["files"].items() if files else ():
        try:
            computed = _file_digest(path.parent / Path(name).name)
        except OSError as cause:
            raise UsageError(f"{path.parent / Path(name).name} cannot be read ({cause.strerror})") from cause
        if computed != stated:
            raise UsageError(f"{path.parent / Path(name).name} is damaged: its digest differs")
    return body["about"]


def _body_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
