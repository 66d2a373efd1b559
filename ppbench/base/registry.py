"""Names to plugins, by entry points: the in-tree defenses and attacks enter by the same door as a stranger's.

Listing reads package metadata and source text only, so that `ppbench list` never pays for importing torch.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from ppbench.base.errors import UsageError, unknown

Group = Literal["defenses", "attacks", "datasets", "models", "questions"]
GROUPS: tuple[Group, ...] = ("defenses", "attacks", "datasets", "models", "questions")
OWN = "ppbench-fl"
FORMER = "ppbench"
"""What pip calls this program, and what it did before: on the Python package index that is somebody else's."""


@dataclass(frozen=True)
class Plugin:
    """One entry point: its name, where it points to and which distribution brought it."""

    group: Group
    name: str
    target: str
    distribution: str
    entry: metadata.EntryPoint

    @property
    def ours(self) -> bool:
        """Whether it came with ppbench itself."""
        return self.distribution == OWN

    @cached_property
    def loaded(self) -> Any:
        """What it points to, imported once: every lookup of an entry point walks its module anew."""
        return self.entry.load()


@lru_cache
def plugins(group: Group) -> dict[str, Plugin]:
    """Return the plugins of `group` by name; a name that two distributions claim stays with ppbench and warns."""
    found: dict[str, Plugin] = {}
    for dist, entry in _entries(group):
        plugin = Plugin(group, entry.name, entry.value, dist, entry)
        other = found.get(entry.name)
        if other is None or (plugin.ours and not other.ours):
            found[entry.name] = plugin
        if other is not None and other.target != plugin.target:
            kept = found[entry.name].distribution
            warnings.warn(
                f"{group[:-1]} {entry.name!r} is provided by {other.distribution} and by {dist}; {kept}'s is used",
                stacklevel=2,
            )
    return dict(sorted(found.items()))


def _entries(group: Group) -> list[tuple[str, metadata.EntryPoint]]:
    """Return the entry points of `group`, each with its distribution's name.

    An installation under the former name stays behind when the program is installed anew: what it names is old, and
    left out. Where it is the only one, in a checkout that was updated and not installed again, it stands for ours.
    """
    names: dict[int, str] = {}  # each `name` parses its distribution's metadata anew
    found = []
    for entry in metadata.entry_points(group=f"ppbench.{group}"):
        if id(entry.dist) not in names:
            names[id(entry.dist)] = "?" if entry.dist is None else entry.dist.name
        found.append((names[id(entry.dist)], entry))
    if OWN in names.values():
        return [(name, entry) for name, entry in found if name != FORMER]
    return [(OWN if name == FORMER else name, entry) for name, entry in found]


def load(group: Group, name: str) -> Any:
    """Return what the plugin points to; UsageError for an unknown name, or a plugin that fails on import."""
    known = plugins(group)
    if name not in known:
        raise unknown(group[:-1], name, known)
    plugin = known[name]
    try:
        return plugin.loaded
    except Exception as cause:
        raise UsageError(
            f"The {group[:-1]} {name!r} of package {plugin.distribution!r} ({plugin.target}) cannot be imported: "
            f"{type(cause).__name__}: {cause}; repair or uninstall that package."
        ) from cause


def load_all(group: Group) -> dict[str, Any]:
    """Return every plugin of `group` that can be imported; a broken one is named in a warning and left out."""
    loaded: dict[str, Any] = {}
    for name in plugins(group):
        try:
            loaded[name] = load(group, name)
        except UsageError as error:
            warnings.warn(str(error), stacklevel=2)
    return loaded


def summary(plugin: Plugin) -> str:
    """Return the first line of the plugin's docstring, read from source without importing it ("" if not found)."""
    module, _, attribute = plugin.target.partition(":")
    try:
        spec = util.find_spec(module)
    except Exception as cause:  # noqa: BLE001 - parents of a broken package may raise anything; shown in the list
        return f"broken: {type(cause).__name__}: {cause}"
    if spec is None or spec.origin is None:
        return f"broken: no module {module}"
    text = Path(spec.origin).read_text(encoding="utf-8")  # a parser takes thrice as long for all plugins
    header = re.search(rf"^(?:class|def) {re.escape(attribute)}\b(?:.*\n)*?.*:[ \t]*(?:#.*)?\n\s*", text, re.MULTILINE)
    quoted = None if header is None else re.compile(r"[rR]?(\"\"\"|''')(.*?)(?:\1|\n)").match(text, header.end())
    return "" if quoted is None else quoted[2].strip()
