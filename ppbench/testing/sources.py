"""Which code gave a result: a digest over the sources of ppbench and of all packages that bring it plugins.

Cells are named by versions and parameters, not by code: whoever works on a defense changes its code first and its
version when it is released. Results that tests keep must not outlive a change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import util
from pathlib import Path

from ppbench.registry import GROUPS, plugins

OWN = ("ppbench", "ppbench.attacks", "ppbench.defenses")


def source_digest(more: tuple[Path, ...] = ()) -> str:
    """Return a hash, 12 hex digits, of the .py files of ppbench and of its plugins' top-level packages.

    Args:
        more: further files that results depend on, such as a suite's.
    """
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
