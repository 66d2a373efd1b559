"""Names to plugins, by entry points: the in-tree defenses and attacks enter by the same door as a stranger's.

Listing reads package metadata and source text only, so that `ppbench list` never pays for importing torch; what other
packages bring is loaded, as nothing else tells whether it is broken.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from ppbench.base.declared import call_faults
from ppbench.base.entries import FORMER as FORMER
from ppbench.base.entries import OWN as OWN
from ppbench.base.entries import entries, imported
from ppbench.base.errors import PluginError, UsageError, one_line, shown, unknown
from ppbench.base.exits import Stopped
from ppbench.base.guard import PACKAGE, interrupts, kept, place, told

Group = Literal["defenses", "attacks", "datasets", "models", "questions", "adapters", "modalities"]
GROUPS: tuple[Group, ...] = ("defenses", "attacks", "datasets", "models", "questions", "adapters")
KINDS: Mapping[Group, str] = {
    "defenses": "defense", "attacks": "attack", "datasets": "data set", "models": "model", "questions": "question",
    "adapters": "adapter", "modalities": "modality",
}  # fmt: skip
ADDRESSED = "(by address)"
"""Stands for the package of what is named by its address, MODULE:ATTRIBUTE, and installed as a plugin by nobody."""
ADDRESS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
STOCK = "stock/"
"""Begins an adapter's names of what ships with its framework; all others are somebody's code."""
BY_ADDRESS: frozenset[Group] = frozenset({"models", "datasets"})
"""Groups whose members need not be installed: functions of somebody's own module."""
TESTED = "(under test)"
"""Stands for the package of a class that a battery asks, installed or not: the battery says what is wrong with it."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""What a plugin may be called: names stand in lists, behind dots, before colons, in tables and in files' names."""
RESERVED: Mapping[Group, frozenset[str]] = {
    "defenses": frozenset({"none", "full_noise"}),
    "attacks": frozenset({"quick", "standard", "all"}),
    "modalities": frozenset({"image", "mask", "row"}),
}
"""Names that mean something else: the controls, words for many attacks, and modalities that are no plugins."""
CONTRACTS: Mapping[Group, tuple[str, ...]] = {
    "defenses": ("ppbench.federation.declared:faults", "ppbench.run.config:setting_faults"),
    "attacks": ("ppbench.adversary.declared:faults",),
    "questions": ("ppbench.questions.declared:faults",),
    "modalities": ("ppbench.metrics.modality:faults",),
}
"""What checks a loaded plugin of a group, (plugin, name) to faults, in the room of its contract: named and imported
late, as plugins are, for this room is below theirs. Data sets and models are functions, see `_faults`."""


@dataclass(frozen=True)
class Plugin:
    """One entry point: its name, where it points to and the distribution it is of.

    twin: another that has its name. adapter: what makes a plugin of what it points to, which is another framework's.
    """

    group: Group
    name: str
    target: str
    distribution: str
    entry: metadata.EntryPoint
    twin: str = ""
    adapter: str = ""

    @property
    def ours(self) -> bool:
        """Whether it came with ppbench itself."""
        return self.distribution == OWN

    @property
    def words(self) -> str:
        """For sentences: "The defense 'x' of package 'y' (module:Class)"; who is named by an address has it alone."""
        name, target = shown(self.name, 80), one_line(self.target, 120) or "no target"
        if self.distribution == ADDRESSED:
            return f"The {KINDS[self.group]} {name}"
        return f"The {KINDS[self.group]} {name} of package {shown(self.distribution, 80)} ({target})"

    @property
    def module(self) -> str:
        """The module that it points to."""
        return self.target.partition("[")[0].partition(":")[0].strip()

    @property
    def root(self) -> str:
        """The top-level package, or module, that it points into."""
        return self.module.partition(".")[0]

    @cached_property
    def _found(self) -> tuple[Any, str]:
        """What it points to, imported once, and what is wrong with it, "" for nothing."""
        with interrupts() as interrupted:
            try:
                with kept():
                    loaded = _adapted(self) if self.adapter else imported(self.entry)
                    return loaded, next((f"{self.words} {fault}." for fault in _faults(self, loaded)), "")
            except UsageError as refused:  # an adapter's own words
                return None, str(refused)
            except BaseException as cause:
                if isinstance(cause, Stopped) or (isinstance(cause, KeyboardInterrupt) and interrupted()):
                    raise
                where = place(cause, self.root)
                right = "repair or uninstall that package"
                if self.distribution == ADDRESSED:
                    right = "name what can be imported from here, as MODULE:NAME"
                return None, f"{self.words} cannot be imported: {told(cause)}{f' ({where})' if where else ''}; {right}."

    @cached_property
    def loaded(self) -> Any:
        """What it points to. Raises PluginError: it cannot be imported, or is not what its group asks for."""
        loaded, fault = self._found
        if fault:
            raise PluginError(fault)
        return loaded

    @cached_property
    def _told(self) -> bool:
        if multiprocessing.parent_process() is None:  # workers find it too; who started them has said so
            warnings.warn(f"{self._found[1].rstrip('.')}; it is left out.", stacklevel=4)
        return True

    def leave_out(self) -> None:
        """Warn, once, that this broken plugin is left out."""
        assert self._told


def _adapted(plugin: Plugin) -> Any:
    """Return what an adapter makes of what stands behind its name."""
    return load("adapters", plugin.adapter)(plugin.name.partition(":")[2], plugin.name)


def _faults(plugin: Plugin, loaded: Any) -> Iterator[str]:
    """Yield what a plugin is not that its group asks for."""
    if plugin.distribution == TESTED:
        return
    if plugin.distribution == ADDRESSED and not plugin.adapter:
        if not callable(loaded):
            yield f"is {shown(loaded, 60)}; it must be a function or a class"
        return
    if not plugin.ours and plugin.distribution != ADDRESSED:
        yield from _stranger_faults(plugin)
    if plugin.group == "models":
        yield from call_faults(loaded, (1, 8, 8), 10)
    elif plugin.group == "datasets":
        yield from call_faults(loaded, "", seed=0, root=Path())
    for target in CONTRACTS.get(plugin.group, ()):
        yield from metadata.EntryPoint("faults", target, "").load()(loaded, plugin.name)


def _stranger_faults(plugin: Plugin) -> Iterator[str]:
    if plugin.twin:
        yield f"has the name of one of package {plugin.twin!r}; uninstall one of the two"
    if not NAME.fullmatch(plugin.name):
        yield "has a name that no plugin may have; take up to 64 letters, digits, _ and -"
    if plugin.name in RESERVED.get(plugin.group, ()):
        yield "has a name that means something else; take another"
    if plugin.root == PACKAGE or plugin.root in sys.stdlib_module_names:
        yield f"points into {plugin.root!r}, which is not that package's; point to a class of its own"


@lru_cache
def plugins(group: Group) -> dict[str, Plugin]:
    """Return the plugins of `group` by name; a name that others claim too stays with ppbench, which warns.

    A name that two other packages claim is refused where it is asked for: neither may stand for the other.
    """
    found: dict[str, Plugin] = {}
    for dist, entry in entries(group):
        plugin = Plugin(group, entry.name, entry.value, dist, entry)
        other = found.get(entry.name)
        if other is None or (plugin.ours and not other.ours):
            found[entry.name] = plugin
        if other is None or other.target == plugin.target:
            continue
        kept_ = found[entry.name]
        if kept_.ours:
            about = f"{KINDS[group]} {entry.name!r} is provided by {other.distribution} and by {dist}"
            warnings.warn(f"{about}; {kept_.distribution}'s is used", stacklevel=2)
        else:
            found[entry.name] = Plugin(group, kept_.name, kept_.target, kept_.distribution, kept_.entry, dist)
    return dict(sorted(found.items()))


def find(group: Group, name: str) -> Plugin | None:
    """Return the plugin called so, None where there is none: an installed one, an adapter's, or one at its address.

    Defenses at an address are known once they were asked for (`admit`): records name defenses, and are anybody's.
    """
    name = canonical(name) if group == "defenses" else name
    known = plugins(group).get(name) or _addressed.get((group, name))
    if known is None and group in BY_ADDRESS and ADDRESS.fullmatch(name):
        return _at_address(group, name, name)
    adapter, argument = _adapter(group, name)
    if known is not None or adapter is None or not argument.startswith(STOCK):
        return known
    entry = metadata.EntryPoint(name, adapter.target, "")
    found = Plugin(group, name, entry.value, adapter.distribution, entry, adapter=adapter.name)
    return _addressed.setdefault((group, name), found)


def canonical(defense: str) -> str:
    """Return the one name that records keep of a defense: ours, also where a framework's own name was typed.

    Any other name, known or not, comes back as it is.
    """
    adapter, argument = _adapter("defenses", defense)
    if adapter is None or not argument.startswith(STOCK):
        return defense
    name = argument.removeprefix(STOCK)
    own = next((own for own, theirs in stock_names(adapter).items() if name in theirs), name)
    return f"{adapter.name}:{STOCK}{own}"


def stock_names(adapter: Plugin) -> Mapping[str, tuple[str, ...]]:
    """Return names of what ships with an adapter's framework, behind "stock/", each with the framework's own for it.

    They are `STOCK_NAMES` in the adapter's module, which is imported without the framework; none where it is broken.
    """
    try:
        assert adapter.loaded is not None
    except PluginError:
        return {}
    names: Mapping[str, tuple[str, ...]] = getattr(sys.modules[adapter.module], "STOCK_NAMES", {})
    return names


def admit(defense: str) -> None:
    """Let a defense that the user names by its address be loaded: whoever calls this lets its code run."""
    adapter, argument = _adapter("defenses", defense)
    if adapter is not None and not argument.startswith(STOCK):
        _at_address("defenses", defense, argument, adapter.name)


def _adapter(group: Group, name: str) -> tuple[Plugin | None, str]:
    """Return the adapter that a defense's name is handed to, and what of it."""
    before, colon, argument = name.partition(":")
    return (plugins("adapters").get(before) if colon and group == "defenses" else None), argument


def _at_address(group: Group, name: str, address: str, adapter: str = "") -> Plugin:
    """Return what lies at an address; modules of the present folder count where no other is called so."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    entry = metadata.EntryPoint(name, address, "")
    return _addressed.setdefault((group, name), Plugin(group, name, address, ADDRESSED, entry, adapter=adapter))


_addressed: dict[tuple[Group, str], Plugin] = {}
"""What no entry point names, once it was found."""


def all_known() -> list[Plugin]:
    """Return every installed plugin, and what was named by its address so far."""
    return [*(plugin for group in GROUPS for plugin in plugins(group).values()), *_addressed.values()]


def load(group: Group, name: str) -> Any:
    """Return what the plugin points to; UsageError for an unknown name, PluginError for a broken plugin."""
    plugin = find(group, name)
    if plugin is None:
        raise unknown(KINDS[group], name, [*plugins(group), *(_stock() if group == "defenses" else ())])
    return plugin.loaded


def _stock() -> Iterator[str]:
    """Yield every name of what ships with a framework, ours and the framework's."""
    for adapter in plugins("adapters").values():
        for own, theirs in stock_names(adapter).items():
            yield from (f"{adapter.name}:{STOCK}{one}" for one in (own, *theirs))


def load_all(group: Group) -> dict[str, Any]:
    """Return every plugin of `group` that is not broken; a broken one is named in one warning and left out."""
    loaded: dict[str, Any] = {}
    for name, plugin in plugins(group).items():
        try:
            loaded[name] = plugin.loaded
        except UsageError:
            plugin.leave_out()
    return loaded
