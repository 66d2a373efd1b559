"""Entry points as installed packages state them; metadata that cannot be read takes none of the others along."""

from __future__ import annotations

import multiprocessing
import re
import warnings
from collections.abc import Iterable
from functools import lru_cache
from importlib import metadata
from typing import Any

from ppbench.base.errors import UsageError, one_line
from ppbench.base.guard import told
from ppbench.base.installation import HOME, fault
from ppbench.base.installation import OWN as OWN
from ppbench.base.version import __version__
from ppbench.base.vision import importable

FORMER = "ppbench"
"""What pip called this program before: on the Python package index that is somebody else's."""


def entries(group: str) -> list[tuple[str, metadata.EntryPoint]]:
    """Return the entry points of `group`, each with its distribution's name.

    An installation under the former name stays behind when the program is installed anew: what it names is old, and
    left out. Where it is the only one, in a checkout that was updated and not installed again, it stands for ours.
    """
    names: dict[int, str] = {}  # each `name` parses its distribution's metadata anew
    found = []
    for entry in _raw(f"ppbench.{group}"):
        if id(entry.dist) not in names:
            names[id(entry.dist)] = _name_of(entry.dist)
            if names[id(entry.dist)] == OWN:
                _check_version(getattr(entry.dist, "version", __version__))
        found.append((names[id(entry.dist)], entry))
    if OWN in names.values():
        return [(name, entry) for name, entry in found if name != FORMER]
    return [(OWN if name == FORMER else name, entry) for name, entry in found]


def imported(entry: metadata.EntryPoint) -> Any:
    """Return what an entry point points to; a torchvision that it imports is made importable where it is not.

    UsageError: it lacks something of ppbench, which another distribution has overwritten.
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
        versions = f"{OWN} is installed as version {one_line(installed, 40)}, and the code in {HOME} is {__version__}"
        right = "install it again, or uninstall the other one"
        warnings.warn(f"{versions}: the plugins are those of the installed one; {right}.", stacklevel=4)


def _raw(group: str) -> Iterable[metadata.EntryPoint]:
    """Return all entry points of a group; a package whose metadata cannot be read is named in a warning."""
    try:
        return metadata.entry_points(group=group)
    except Exception:  # noqa: BLE001 - one such package takes all others' along: each is asked by itself
        found: dict[str, list[metadata.EntryPoint]] = {}
        for dist in metadata.distributions():
            try:
                some = [entry for entry in dist.entry_points if entry.group == group]
                found.setdefault(re.sub(r"[-_.]+", "-", dist.name).lower(), some)  # the first on the path
            except Exception as cause:  # noqa: BLE001
                _unreadable(str(getattr(dist, "_path", "?")), told(cause))
        return [entry for some in found.values() for entry in some]


@lru_cache
def _unreadable(path: str, cause: str) -> None:
    if multiprocessing.parent_process() is None:
        warnings.warn(f"The metadata of the package at {one_line(path)} cannot be read ({cause}); its plugins are left "
                      "out. Repair or uninstall it.", stacklevel=4)  # fmt: skip
