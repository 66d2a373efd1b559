"""Data sets by name, from an installed plugin or a user's function."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from ppbench.base.blame import guard, refuse, stranger
from ppbench.base.errors import UsageError, because, shown
from ppbench.base.registry import ADDRESS, ADDRESSED, find, load, plugins
from ppbench.base.vision import importable
from ppbench.task.dataset import Dataset, default_root
from ppbench.task.given import dataset_from


def named(text: str) -> tuple[str, str]:
    """Return the registered name in `text` and its argument; an address, MODULE:FUNCTION, is all name."""
    name, _, argument = text.partition(":")
    return (text, "") if name not in plugins("datasets") and ADDRESS.fullmatch(text) else (name, argument)


def plugins_of(text: str) -> tuple[str, ...]:
    """Return the registered names of all plugins that make the data set `text`: for "warped:csv:FILE" both."""
    name, argument = named(text)
    return (name, named(argument)[0]) if name == "warped" else (name,)


def open_dataset(text: str, *, seed: int, root: Path | None = None) -> Dataset:
    """Return the data set that `text` names. Raises UsageError: the name is unknown or the data cannot be used.

    Args:
        text: NAME or NAME:ARGUMENT, e.g. "digits", "parquet:FOLDER" or "csv:FILE?target=y&sep=;". NAME is an entry
            point of the group `ppbench.datasets`: a callable (argument: str, *, seed: int, root: Path) -> Dataset. Or
            MODULE:FUNCTION, without arguments; for its result see `task.given`.
        seed: of the split into train and test, if the source has none.
        root: folder of downloads and caches; `default_root()` when None.
    """
    name, argument = named(text)
    loader, plugin = load("datasets", name), find("datasets", name)
    by_address = plugin is not None and plugin.distribution == ADDRESSED
    try:
        with guard("datasets", name):
            if by_address:
                dataset = dataset_from(name, importable(loader), seed)
            else:
                dataset = loader(argument, seed=seed, root=default_root() if root is None else root)
    except (OSError, MemoryError, RecursionError, OverflowError) as cause:
        reason = (cause.strerror if isinstance(cause, OSError) else None) or because(cause)
        raise UsageError(f"The data set {shown(text)} cannot be read ({reason}); give one that can.") from cause
    if not isinstance(dataset, Dataset):
        raise UsageError(f"The data set plugin {name!r} returned {type(dataset).__name__}; it must return a Dataset.")
    if stranger("datasets", name):
        with guard("datasets", name):
            refuse("datasets", name, _faults(dataset, name))
    return dataset


def _faults(dataset: Dataset, name: str) -> Iterator[str]:
    """Yield faults of a third-party data set in its name, tensors or digest."""
    if not isinstance(dataset.name, str) or not f"{dataset.name}:".startswith(f"{name}:"):
        yield f"returns a data set called {dataset.name!r}; call it {name!r}, or {name + ':'!r} and more"
    for split in (dataset.train, dataset.test):
        for tensor in (split.x, split.y, *([] if split.domain is None else [split.domain])):
            if type(tensor) is not Tensor or tensor.requires_grad or tensor.device.type != "cpu" or tensor.is_sparse:
                yield "returns tensors that are not plain ones on the CPU without gradients; detach and copy them"
    if dataset.sha256() != Dataset.sha256(dataset):
        yield "returns a data set with a digest of its own; return a Dataset"
