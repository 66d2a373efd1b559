"""The code behind a result: digests over the sources of ppbench and of packages with plugins.

Cells of our plugins are named by versions and parameters, not by code: a developer of ppbench changes the code first
and the version at a release. Reusing finished cells of other code of ppbench gives a warning (OUT/sources.json).

Cells with another package's plugin are named by its code too (`code_of`), so that an edited plugin never reuses its
older cells. The digest covers the .py files of the package of its entry point, and of other packages that its
distribution installs at the top (`top_level.txt`); an editable install is read in its source tree. It covers neither
data files, nor compiled code, nor dependencies: raise the version when these change. Any edit in the package counts,
even of a comment, for all of its plugins.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import util
from pathlib import Path

from ppbench.base.errors import PluginError
from ppbench.base.files import read_regular, write_atomic
from ppbench.base.registry import PLUGIN_GROUPS, Plugin, PluginGroup, find, plugins

OWN_PACKAGES = ("ppbench",)
SOURCES_FILE = "sources.json"


def warn_changed(out: Path, reused: bool, computing: bool) -> None:
    """Warn if cells of `out` are reused that other code computed; note today's code if cells are computed now."""
    path, now = out / SOURCES_FILE, source_digest(own=True)
    try:
        known = [str(word) for word in json.loads(read_regular(path))]
    except (OSError, ValueError, TypeError):  # older results, or none yet: nothing to compare
        known = []
    if reused and known and known != [now]:
        warnings.warn(
            f"Code of ppbench has changed since cells in {out} were computed, and they are not computed "
            "again: they are named by versions. Raise the version of what you changed, or give another --out.",
            stacklevel=2,
        )
    if computing and now not in known:
        write_atomic(path, (json.dumps([*known, now]) + "\n").encode())


def source_digest(more: tuple[Path, ...] = (), own: bool = False) -> str:
    """Return a hash, 12 hex digits, of ppbench's .py files, of `more` files and, unless `own`, of its plugins."""
    digest = hashlib.sha256()
    for path in sorted({*_sources(own), *more}):
        digest.update(f"{path.name}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _sources(own: bool) -> Iterator[Path]:
    roots = set() if own else {plugin.root for group in PLUGIN_GROUPS for plugin in plugins(group).values()}
    for name in (*OWN_PACKAGES, *sorted(roots - {*OWN_PACKAGES, ""})):
        yield from _files(name).values()


def _files(name: str) -> dict[str, Path]:
    """Return the source files of a module or package by relative path; {} if it is not found."""
    try:
        spec = util.find_spec(name)
    except Exception:  # noqa: BLE001 - a broken plugin: its cells fail and say so
        return {}
    if spec is None:
        return {}
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = {p.relative_to(folder).as_posix(): p for folder in folders for p in folder.rglob("*.py") if p.is_file()}
    origin = Path(spec.origin or "")
    whole = next((path for path in (origin, *origin.parents) if path.is_file()), None)  # in a zip: the zip
    return files if files or whole is None else {whole.name: whole}


@cache
def code_of(*named: tuple[PluginGroup, str]) -> str:
    """Return a digest, 12 hex digits, of the code of the plugins that are not ours; "" if all are ours.

    Raises PluginError: a file cannot be read.
    """
    digest, seen = hashlib.sha256(), False
    for group, name in named:
        plugin = find(group, name)
        if plugin is not None and not plugin.ours:
            seen = True
            digest.update(_digest_of(plugin).encode())
    return digest.hexdigest()[:12] if seen else ""


def _digest_of(plugin: Plugin) -> str:
    digest = hashlib.sha256()
    for root in sorted({_package(plugin.module), *_beside(plugin)}):
        for name, path in sorted(_files(root).items()):
            try:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError as cause:
                raise PluginError(f"{plugin.words} has the file {path}, which cannot be read ({cause}).") from cause
            digest.update(f"{root}\n{name}\n{content}\n".encode())
    return digest.hexdigest()


def _package(module: str) -> str:
    """Return the outermost package of a module that is no namespace package (which distributions may share)."""
    parts = module.split(".")
    for count in range(1, len(parts)):
        name = ".".join(parts[:count])
        spec = util.find_spec(name)
        if spec is not None and spec.origin is not None:
            return name
    return module


def _beside(plugin: Plugin) -> Iterator[str]:
    """Yield the other top-level modules of a plugin's distribution, if its metadata list them."""
    try:
        top_level = plugin.entry.dist.read_text("top_level.txt") if plugin.entry.dist is not None else None
    except Exception:  # noqa: BLE001 - metadata may be unreadable
        top_level = None
    for name in (top_level or "").split():
        spec = util.find_spec(name) if name.isidentifier() and name not in OWN_PACKAGES else None
        if spec is not None and spec.origin is not None:
            yield name
