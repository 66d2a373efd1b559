"""Which code gave a result: a digest over the sources of ppbench and of all packages that bring it plugins.

Cells are named by versions and parameters, not by code: whoever works on a defense changes its code first and its
version when it is released. So results that tests keep must not outlive a change, and who finds finished cells of other
code is told: OUT/sources.json has the digests of the code by which cells were computed.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from importlib import util
from pathlib import Path

from ppbench.base.files import write_atomic
from ppbench.base.registry import GROUPS, plugins

OWN = ("ppbench",)
CODE = "sources.json"


def tell_changed(out: Path, found: bool, computing: bool) -> None:
    """Warn where finished cells of `out` that are used are of other code, and note today's where cells are computed."""
    path, now = out / CODE, source_digest()
    try:
        known = [str(word) for word in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError):  # results of before it was noted, or nothing yet: nothing can be said
        known = []
    if found and known and known != [now]:
        warnings.warn(
            f"Code of ppbench or of a plugin has changed since cells in {out} were computed, and they are not computed "
            "again: they are named by versions. Raise the version of what you changed, or give another --out.",
            stacklevel=2,
        )
    if computing and now not in known:
        write_atomic(path, (json.dumps([*known, now]) + "\n").encode())


def source_digest(more: tuple[Path, ...] = ()) -> str:
    """Return a hash, 12 hex digits, of the .py files of ppbench and its plugins, and of `more` files."""
    found = hashlib.sha256()
    for path in sorted({*_sources(), *more}):
        found.update(f"{path.name}\n".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:12]


def _sources() -> Iterator[Path]:
    roots = {
        plugin.target.partition(":")[0].partition(".")[0] for group in GROUPS for plugin in plugins(group).values()
    }
    for name in (*OWN, *sorted(roots - {"ppbench"})):
        try:
            spec = util.find_spec(name)
        except (ImportError, ValueError):  # a broken plugin: its cells fail and say so
            continue
        if spec is None:
            continue
        for folder in spec.submodule_search_locations or ():
            yield from (path for path in Path(folder).rglob("*.py") if path.is_file())
        if not spec.submodule_search_locations and spec.origin is not None and Path(spec.origin).is_file():
            yield Path(spec.origin)
