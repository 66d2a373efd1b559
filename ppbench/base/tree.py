"""Trees of tensors, of which states and messages are made: copying, counting and storing them.

A tree is a tensor, a tuple, list or dict of trees, or a registered `node`; decoding builds nothing else.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as tensors_of
from safetensors.torch import load_file, save_file
from safetensors.torch import save as bytes_of
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import dataclass_transform

from ppbench.base.errors import UsageError

Tree = Any
Params = dict[str, Tensor]
T = TypeVar("T")
_NODES: dict[str, type] = {}
_NAMES: dict[type, str] = {}
_FIELDS: dict[type, tuple[str, ...]] = {}


@overload
def node(cls: type[T]) -> type[T]: ...
@overload
def node(*, name: str) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True)
def node(cls: type[T] | None = None, *, name: str = "") -> type[T] | Callable[[type[T]], type[T]]:
    """Make `cls` a frozen dataclass that may cross vmap, the Wire and the disk; every field holds a tree.

    name: of the class in saved states, where its module has moved since the first of them was written; by default
    module and class. torch's pytree registration is private, so this is the only place that touches it.
    """
    if cls is None:
        return lambda cls: _registered(cls, name)
    return _registered(cls, name)


def _registered(cls: type[T], name: str) -> type[T]:
    made = dataclass(frozen=True)(cls)
    names = [field.name for field in fields(made)]  # type: ignore[arg-type]  # a dataclass since the line above
    name = name or f"{cls.__module__}.{cls.__qualname__}"

    def flatten(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, field) for field in names], None

    def unflatten(children: Any, _: None) -> Any:
        return made(*children)

    pytree.register_pytree_node(made, flatten, unflatten, serialized_type_name=name)
    _NODES[name], _NAMES[made], _FIELDS[made] = made, name, tuple(names)
    return made


def tree_map(function: Callable[[Tensor], Any], tree: T) -> T:
    """Return `tree` with `function` applied to every tensor."""
    return _mapped(function, tree)  # type: ignore[no-any-return]


def _mapped(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Map as torch's pytree does, in a quarter of the time: a round of a small network maps some hundred tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        changed = {key: _mapped(function, value) for key, value in tree.items()}
        return changed if type(tree) is dict else _refilled(tree, changed)
    if isinstance(tree, tuple | list):
        values = [_mapped(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    names = _FIELDS.get(type(tree))
    return tree if names is None else type(tree)(*[_mapped(function, getattr(tree, name)) for name in names])


def _refilled(tree: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of `tree`, which may be a subclass of dict such as OrderedDict, with other values."""
    copied = copy.copy(tree)
    copied.update(values)
    return copied


def leaves(tree: Tree) -> list[Tensor]:
    """Return the tensors of `tree`, in order."""
    tensors: list[Tensor] = []
    _collect(tree, tensors)
    return tensors


def filled(tree: T, values: Iterable[Tensor]) -> T:
    """Return `tree` with other tensors, as `leaves` orders them."""
    remaining = iter(values)
    return tree_map(lambda _: next(remaining), tree)


def _collect(tree: Tree, tensors: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        tensors.append(tree)
    elif isinstance(tree, dict):
        for value in tree.values():
            _collect(value, tensors)
    elif isinstance(tree, tuple | list):
        for value in tree:
            _collect(value, tensors)
    else:
        for name in _FIELDS.get(type(tree), ()):
            _collect(getattr(tree, name), tensors)


def structure(tree: Tree) -> object:
    """Return the kinds, keys, shapes and dtypes of a tree, hashable; equal for trees that differ in values alone."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    if isinstance(tree, dict):
        return type(tree), tuple(tree), tuple([structure(value) for value in tree.values()])
    if isinstance(tree, tuple | list):
        return type(tree), tuple([structure(value) for value in tree])
    names = _FIELDS.get(type(tree))
    if names is None:
        return tree
    return type(tree), tuple([structure(getattr(tree, name)) for name in names])


def tree_digest(tree: Tree) -> bytes:
    """Return the SHA-256 of a tree's structure and of its tensors: types, shapes and values."""
    digest = hashlib.sha256(repr(structure(tree)).encode())
    update_digest(digest, *leaves(tree))
    return digest.digest()


def finite(tree: Tree) -> bool:
    """Return whether every number of `tree` is finite."""
    # If an entry is not finite, neither is the sum: one pass. A sum that only overflows needs a check of each entry.
    return all(math.isfinite(leaf.sum().item()) or bool(leaf.isfinite().all()) for leaf in leaves(tree))


def norm(tree: Tree) -> float:
    """Return the Euclidean norm of all tensors of a tree together, summed in float64."""
    return float(torch.stack([leaf.double().norm() for leaf in leaves(tree)]).norm())


def nbytes(tree: Tree) -> int:
    """Return the size of the tree's tensors in bytes, without framing."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def detached(tree: T) -> T:
    """Return a copy of `tree` in storage of its own, without autograd history."""
    return tree_map(lambda leaf: leaf.detach().clone(), tree)


def moved(tree: T, device: torch.device) -> T:
    """Return `tree` with every tensor on `device`."""
    return tree_map(lambda leaf: leaf.to(device), tree)


def encode(tree: Tree, store: dict[str, Tensor], seen: dict[int, str]) -> Any:
    """Return the JSON structure of `tree`; tensors go to `store`, each object once (identity survives)."""
    if isinstance(tree, Tensor):
        if id(tree) not in seen:
            seen[id(tree)] = f"t{len(store)}"
            store[seen[id(tree)]] = tree.detach().cpu().contiguous().clone()
        return {"tensor": seen[id(tree)]}
    if isinstance(tree, dict):
        return {"dict": [[key, encode(value, store, seen)] for key, value in tree.items()]}
    if isinstance(tree, tuple | list):
        return {type(tree).__name__: [encode(value, store, seen) for value in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    name = _NAMES.get(type(tree))
    if name is None:
        kind = f"{type(tree).__module__}.{type(tree).__qualname__}"
        raise TypeError(f"{kind} cannot be saved: make it a @node of tensors")
    return {
        "node": name,
        "fields": [encode(getattr(tree, field.name), store, seen) for field in fields(tree)],
    }


def decode(data: Any, store: dict[str, Tensor]) -> Tree:
    """Return the tree that `encode` described; raises UsageError for a node class that is not registered."""
    ((kind, content),) = [(key, value) for key, value in data.items() if key != "fields"]
    if kind == "tensor":
        return store[content]
    if kind == "dict":
        return {key: decode(value, store) for key, value in content}
    if kind == "tuple":
        return tuple(decode(value, store) for value in content)
    if kind == "list":
        return [decode(value, store) for value in content]
    if kind == "value":
        return content
    if content not in _NODES:
        raise UsageError(
            f"A saved state needs the class {content}, which is not loaded; import its defense first, or, if an older "
            "ppbench wrote the state, delete it."
        )
    return _NODES[content](*(decode(value, store) for value in data["fields"]))


def save_tree(tree: Tree, path: Path) -> None:
    """Write `tree` to the safetensors file `path`, its structure as metadata."""
    tensors, metadata = _flat(tree)
    save_file(tensors, path, metadata=metadata)


def packed(tree: Tree) -> bytes:
    """Return the bytes that `save_tree` writes."""
    tensors, metadata = _flat(tree)
    return bytes_of(tensors, metadata=metadata)


def _flat(tree: Tree) -> tuple[dict[str, Tensor], dict[str, str]]:
    store: dict[str, Tensor] = {}
    structure = encode(tree, store, {})
    return store or {"empty": torch.zeros(0)}, {"tree": json.dumps(structure)}


def update_digest(digest: hashlib._Hash, *tensors: Tensor) -> None:
    """Update a digest with tensors: types, shapes and values, little-endian."""
    for tensor in tensors:
        array = tensor.detach().cpu().contiguous().numpy()
        little = array.dtype.newbyteorder("<")
        digest.update(f"{little.str}{array.shape}".encode())
        digest.update(array.astype(little, copy=False).data)


def values_digest(*trees: Params) -> str:
    """Return the SHA-256 of names, shapes and values; equal for float32 and for the same numbers in float64."""
    digest = hashlib.sha256()
    for tree in trees:
        digest.update(f"{list(tree)}".encode())
        update_digest(digest, *(value.double() for value in tree.values()))
    return digest.hexdigest()


class Recent(Generic[T]):
    """The last `most` results of a pure function, by keys: attacks on one view ask the same of the same tensors."""

    def __init__(self, most: int) -> None:
        self._most, self._results = most, OrderedDict[Hashable, T]()

    def of(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the result that is kept under `key`, else that of `compute`, which is kept."""
        if key not in self._results:
            self._results[key] = compute()
            if len(self._results) > self._most:
                self._results.popitem(last=False)
        self._results.move_to_end(key)
        return self._results[key]


def load_tree(path: Path) -> Tree:
    """Return the tree in a file of `save_tree`. Raises UsageError: the file is no such file."""
    try:
        with safe_open(path, framework="pt") as file:
            structure = json.loads(file.metadata()["tree"])
        # Clones are aligned as fresh tensors are: kernels round differently off the 64-byte grid.
        return decode(structure, {name: value.clone() for name, value in load_file(path).items()})
    except (SafetensorError, OSError, TypeError, KeyError, ValueError, AttributeError, RecursionError) as cause:
        raise UsageError(f"{path} is not a saved ppbench state ({cause}); delete it, and it is made again.") from cause


LARGEST_HEADER = 1 << 24
"""Most bytes of names and structure in an untrusted tree: as Python objects they take twenty times as many."""


def unpacked(data: bytes) -> Tree:
    """Return the tree in the bytes of `packed`. Raises UsageError: they are something else."""
    try:
        if (size := int.from_bytes(data[:8], "little")) > LARGEST_HEADER:
            raise UsageError(f"their header has {size:,} bytes, more than {LARGEST_HEADER:,}")
        tensors = tensors_of(data)  # first, because this checks the header
        return decode(json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["tree"]), tensors)
    except (SafetensorError, TypeError, KeyError, ValueError, AttributeError, RecursionError, IndexError) as cause:
        raise UsageError(f"they are no saved ppbench state ({type(cause).__name__})") from cause
