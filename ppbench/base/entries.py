"""Entry points of installed packages; a package with unreadable metadata is skipped with a warning."""

from __future__ import annotations

import multiprocessing
import re
import warnings
from collections.abc import Iterable
from functools import lru_cache
from importlib import metadata
from typing import Any

from ppbench.base.errors import UsageError, one_line
from ppbench.base.guard import error_text
from ppbench.base.installation import DISTRIBUTION as DISTRIBUTION
from ppbench.base.installation import HOME, fault
from ppbench.base.version import __version__
from ppbench.base.vision import importable

FORMER_DISTRIBUTION = "ppbench"
"""Former distribution name of this program; on the Python package index it belongs to somebody else."""


def entries(group: str) -> list[tuple[str, metadata.EntryPoint]]:
    """Return the entry points of `group`, each with its distribution's name.

    An installation under the former name may stay behind when the program is installed anew; its entry points are left
    out. If it is the only one, in a checkout that was updated but not reinstalled, it counts as ours.
    """
    names: dict[int, str] = {}  # each `name` parses its distribution's metadata anew
    named_entries = []
    for entry in _raw(f"ppbench.{group}"):
        if id(entry.dist) not in names:
            names[id(entry.dist)] = _name_of(entry.dist)
            if names[id(entry.dist)] == DISTRIBUTION:
                _check_version(getattr(entry.dist, "version", __version__))
        named_entries.append((names[id(entry.dist)], entry))
    if DISTRIBUTION in names.values():
        return [(name, entry) for name, entry in named_entries if name != FORMER_DISTRIBUTION]
    return [(DISTRIBUTION if name == FORMER_DISTRIBUTION else name, entry) for name, entry in named_entries]


def imported(entry: metadata.EntryPoint) -> Any:
    """Return the object of an entry point; see `vision.importable` for the torchvision that it may import.

    UsageError: it lacks a part of ppbench that another distribution has overwritten.
    """
    try:
        return importable(entry.load)
    except ImportError as cause:
        if message := fault():
            raise UsageError(message) from cause
        raise


def _name_of(dist: metadata.Distribution | None) -> str:
    try:
        return one_line(dist.name or "?", 80) if dist is not None else "?"
    except Exception:  # noqa: BLE001 - metadata that cannot be read; the plugin is named with "?"
        return "?"


@lru_cache
def _check_version(installed: str) -> None:
    """Warn where the metadata of another version than this code's names the plugins: some may be missing, or gone."""
    if installed != __version__ and multiprocessing.parent_process() is None:
        versions = (
            f"{DISTRIBUTION} is installed as version {one_line(installed, 40)}, and the code in {HOME} is {__version__}"
        )
        advice = "install it again, or uninstall the other one"
        warnings.warn(f"{versions}: the plugins are those of the installed one; {advice}.", stacklevel=4)


def _raw(group: str) -> Iterable[metadata.EntryPoint]:
    """Return all entry points of a group; a package whose metadata cannot be read is named in a warning."""
    try:
        return metadata.entry_points(group=group)
    except Exception:  # noqa: BLE001 - one broken package fails the whole query: read each package by itself
        by_distribution: dict[str, list[metadata.EntryPoint]] = {}
        for dist in metadata.distributions():
            try:
                own_entries = [entry for entry in dist.entry_points if entry.group == group]
                by_distribution.setdefault(
                    re.sub(r"[-_.]+", "-", dist.name).lower(), own_entries
                )  # the first on the path
            except Exception as cause:  # noqa: BLE001
                _unreadable(str(getattr(dist, "_path", "?")), error_text(cause))
        return [entry for own_entries in by_distribution.values() for entry in own_entries]


@lru_cache
def _unreadable(path: str, cause: str) -> None:
    if multiprocessing.parent_process() is None:
        warnings.warn(f"The metadata of the package at {one_line(path)} cannot be read ({cause}); its plugins are left "
                      "out. Repair or uninstall it.", stacklevel=4)  # fmt: skip
