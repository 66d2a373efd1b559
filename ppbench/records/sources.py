"""Which code gave a result: digests over the sources of ppbench, and of packages that bring it plugins.

Cells of our plugins are named by versions and parameters, not by code: whoever works on ppbench changes its code first
and its version when it is released; who finds finished cells of other code of ppbench is told (OUT/sources.json).

Cells that a stranger's plugin took part in are named by its code too (`code_of`), so that an edited one never finds its
older cells: of the .py files of the package that its entry point lies in, and of what else its distribution installs
at the top (`top_level.txt`), where they lie; an editable install is read in its source tree. It sees neither data
files, nor compiled code beside .py files, nor dependencies: raise the version when these change. Any edit in the
package counts, a comment too, for all of its plugins.
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
from ppbench.base.registry import GROUPS, Group, Plugin, find, plugins

OWN = ("ppbench",)
CODE = "sources.json"


def tell_changed(out: Path, reused: bool, computing: bool) -> None:
    """Warn where finished cells of `out` that are used are of other code, and note today's where cells are computed."""
    path, now = out / CODE, source_digest(own=True)
    try:
        known = [str(word) for word in json.loads(read_regular(path))]
    except (OSError, ValueError, TypeError):  # results of before it was noted, or nothing yet: nothing can be said
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
    """Return a hash, 12 hex digits, of ppbench's .py files, of `more` files and, unless `own`, of its plugins'."""
    digest = hashlib.sha256()
    for path in sorted({*_sources(own), *more}):
        digest.update(f"{path.name}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _sources(own: bool) -> Iterator[Path]:
    roots = set() if own else {plugin.root for group in GROUPS for plugin in plugins(group).values()}
    for name in (*OWN, *sorted(roots - {*OWN, ""})):
        yield from _files(name).values()


def _files(name: str) -> dict[str, Path]:
    """Return the source files of a module or package by their names in it, none where it is not found."""
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
def code_of(*named: tuple[Group, str]) -> str:
    """Return a digest, 12 hex digits, of the code of those of some plugins that are not ours; "" where all are.

    Raises PluginError: a file of them cannot be read.
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
    """Return the first of the packages that hold a module which is no namespace, shared with other distributions."""
    parts = module.split(".")
    for count in range(1, len(parts)):
        name = ".".join(parts[:count])
        spec = util.find_spec(name)
        if spec is not None and spec.origin is not None:
            return name
    return module


def _beside(plugin: Plugin) -> Iterator[str]:
    """Yield the other modules that a plugin's distribution installs at the top, where its metadata tell."""
    try:
        top_level = plugin.entry.dist.read_text("top_level.txt") if plugin.entry.dist is not None else None
    except Exception:  # noqa: BLE001 - metadata that cannot be read say nothing
        top_level = None
    for name in (top_level or "").split():
        spec = util.find_spec(name) if name.isidentifier() and name not in OWN else None
        if spec is not None and spec.origin is not None:
            yield name
