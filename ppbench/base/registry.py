"""The registry: names to plugins by entry points, for ppbench's own defenses and attacks as for third-party ones.

Listing reads only package metadata and source text, so that `ppbench list` does not import torch; third-party plugins
are imported, because only that shows whether they are broken.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from ppbench.base.declarations import CONTRACT, call_faults
from ppbench.base.errors import PluginError, Stopped, UsageError, one_line, shown, unknown
from ppbench.base.import_guard import PACKAGE, error_text, importable, interrupts, place, restored_process
from ppbench.base.installation import DISTRIBUTION as DISTRIBUTION
from ppbench.base.installation import HOME, fault
from ppbench.base.startup_code import close_packages, normalized, open_package
from ppbench.base.version import __version__

# -- Entry points of installed packages; a package with unreadable metadata is skipped with a warning --

FORMER_DISTRIBUTION = "ppbench"
"""Former distribution name of this program; on the Python package index it belongs to somebody else."""


def entry_points_of(group: str) -> list[tuple[str, metadata.EntryPoint]]:
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
                by_distribution.setdefault(normalized(dist.name), own_entries)  # the first on the path
            except Exception as cause:  # noqa: BLE001
                _unreadable(str(getattr(dist, "_path", "?")), error_text(cause))
        return [entry for own_entries in by_distribution.values() for entry in own_entries]


@lru_cache
def _unreadable(path: str, cause: str) -> None:
    if multiprocessing.parent_process() is None:
        warnings.warn(f"The metadata of the package at {one_line(path)} cannot be read ({cause}); its plugins are left "
                      "out. Repair or uninstall it.", stacklevel=4)  # fmt: skip


PluginGroup = Literal["defenses", "attacks", "datasets", "models", "questions", "adapters", "modalities"]
PLUGIN_GROUPS: tuple[PluginGroup, ...] = ("defenses", "attacks", "datasets", "models", "questions", "adapters")
GROUP_NOUNS: Mapping[PluginGroup, str] = {
    "defenses": "defense", "attacks": "attack", "datasets": "data set", "models": "model", "questions": "question",
    "adapters": "adapter", "modalities": "modality",
}  # fmt: skip
ADDRESSED = "(by address)"
"""Distribution of a plugin that is named by its address, MODULE:ATTRIBUTE, and not installed."""
ADDRESS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
STOCK_PREFIX = "stock/"
"""Prefix of names for what ships with an adapter's framework; other names are addresses of a user's code."""
BY_ADDRESS: frozenset[PluginGroup] = frozenset({"models", "datasets"})
"""Groups whose members need not be installed: functions of a user's own module."""
TESTED = "(under test)"
"""Distribution of a class under a conformance battery, installed or not; the battery checks it."""
PLUGIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""Allowed plugin names: they appear in lists, behind dots, before colons, in tables and in file names."""
RESERVED: Mapping[PluginGroup, frozenset[str]] = {
    "defenses": frozenset({"none", "full_noise"}),
    "attacks": frozenset({"quick", "standard", "all"}),
    "modalities": frozenset({"image", "mask", "row"}),
}
"""Names with another meaning: the controls, words for sets of attacks, and modalities that are no plugins."""
CONTRACTS: Mapping[PluginGroup, tuple[str, ...]] = {
    "defenses": ("ppbench.federation.contract:defense_faults", "ppbench.run.config:setting_faults"),
    "attacks": ("ppbench.adversary.attack:attack_faults",),
    "questions": ("ppbench.questions.base:question_faults",),
    "modalities": ("ppbench.metrics.modality:modality_faults",),
}
"""Functions that check a loaded plugin of a group, from (plugin, name) to faults. They are imported late, because this
module lies below them. Data sets and models are functions, see `_faults`."""


@dataclass(frozen=True)
class Plugin:
    """One entry point: its name, its target and its distribution.

    twin: another distribution with a plugin of that name. adapter: the adapter that turns the target, which belongs to
    another framework, into a plugin.
    """

    group: PluginGroup
    name: str
    target: str
    distribution: str
    entry: metadata.EntryPoint
    twin: str = ""
    adapter: str = ""

    @property
    def ours(self) -> bool:
        """Whether it is part of ppbench itself."""
        return self.distribution == DISTRIBUTION

    @property
    def words(self) -> str:
        """Its name in sentences: "The defense 'x' of package 'y' (module:Class)"; by address "The defense 'x'"."""
        name, target = shown(self.name, 80), one_line(self.target, 120) or "no target"
        if self.distribution == ADDRESSED:
            return f"The {GROUP_NOUNS[self.group]} {name}"
        return f"The {GROUP_NOUNS[self.group]} {name} of package {shown(self.distribution, 80)} ({target})"

    @property
    def module(self) -> str:
        """The module of its target."""
        return self.target.partition("[")[0].partition(":")[0].strip()

    @property
    def root(self) -> str:
        """The top-level package or module of its target."""
        return self.module.partition(".")[0]

    @cached_property
    def _import(self) -> tuple[Any, str]:
        """Its target, imported once, and in a sentence what is wrong with it, "" if nothing is."""
        with interrupts() as interrupted:
            try:
                open_package(self.distribution)
                with restored_process():
                    adapt = load_plugin("adapters", self.adapter) if self.adapter else None
                    loaded = adapt(self.name.partition(":")[2], self.name) if adapt else imported(self.entry)
                    return loaded, next((f"{self.words} {fault}." for fault in _faults(self, loaded)), "")
            except UsageError as refused:  # an adapter's own words
                return None, str(refused)
            except BaseException as cause:
                if isinstance(cause, Stopped) or (isinstance(cause, KeyboardInterrupt) and interrupted()):
                    raise
                where = place(cause, self.root)
                advice = "repair or uninstall that package"
                if isinstance(cause, ImportError) and (cause.name or "").startswith(f"{PACKAGE}."):
                    advice = f"import from ppbench.api (contract {CONTRACT}), whose names do not move"
                if self.distribution == ADDRESSED:
                    advice = "name what can be imported from here, as MODULE:NAME"
                return (
                    None,
                    f"{self.words} cannot be imported: {error_text(cause)}{f' ({where})' if where else ''}; {advice}.",
                )

    @cached_property
    def loaded(self) -> Any:
        """Its target. Raises PluginError: it cannot be imported, or breaks the contract of its group."""
        loaded, fault = self._import
        if fault:
            raise PluginError(fault)
        return loaded


def _faults(plugin: Plugin, loaded: Any) -> Iterator[str]:
    """Yield how a loaded plugin breaks the contract of its group."""
    if plugin.distribution == TESTED:
        return
    if plugin.distribution == ADDRESSED and not plugin.adapter:
        if not callable(loaded):
            yield f"is {shown(loaded, 60)}; it must be a function or a class"
        return
    if not plugin.ours and plugin.distribution != ADDRESSED:
        yield from _third_party_faults(plugin)
    if plugin.group == "models":
        yield from call_faults(loaded, (1, 8, 8), 10)
    elif plugin.group == "datasets":
        yield from call_faults(loaded, "", seed=0, root=Path())
    for target in CONTRACTS.get(plugin.group, ()):
        yield from metadata.EntryPoint("faults", target, "").load()(loaded, plugin.name)


def _third_party_faults(plugin: Plugin) -> Iterator[str]:
    if plugin.twin:
        yield f"has the name of one of package {plugin.twin!r}; uninstall one of the two"
    if not PLUGIN_NAME.fullmatch(plugin.name):
        yield "has a name that no plugin may have; use up to 64 letters, digits, _ and -"
    if plugin.name in RESERVED.get(plugin.group, ()):
        yield "has a name with another meaning; use another name"
    if plugin.root == PACKAGE or plugin.root in sys.stdlib_module_names:
        yield f"points into {plugin.root!r}, which is not that package's; point to a class of its own"


@lru_cache
def plugins(group: PluginGroup) -> dict[str, Plugin]:
    """Return the plugins of `group` by name; of a name that others claim too, ppbench's is used, with a warning.

    A name that two other packages claim is refused when it is used.
    """
    by_name: dict[str, Plugin] = {}
    for dist, entry in entry_points_of(group):
        plugin = Plugin(group, entry.name, entry.value, dist, entry)
        other = by_name.get(entry.name)
        if other is None or (plugin.ours and not other.ours):
            by_name[entry.name] = plugin
        if other is None or other.target == plugin.target:
            continue
        kept = by_name[entry.name]
        if kept.ours:
            claim = f"{GROUP_NOUNS[group]} {entry.name!r} is provided by {other.distribution} and by {dist}"
            warnings.warn(f"{claim}; {kept.distribution}'s is used", stacklevel=2)
        else:
            by_name[entry.name] = Plugin(group, kept.name, kept.target, kept.distribution, kept.entry, dist)
    return dict(sorted(by_name.items()))


def close_attacks() -> None:
    """Let nothing import the packages of other people's attacks by the way: only plugins loaded by name open theirs."""
    close_packages(sorted({one.distribution for one in plugins("attacks").values() if not one.ours}))


def find(group: PluginGroup, name: str) -> Plugin | None:
    """Return the plugin `name`, None if there is none: an installed one, an adapter's, or one at its address.

    A defense at an address is known only after `admit`: records name defenses, and may come from anybody.
    """
    name = canonical(name) if group == "defenses" else name
    plugin_known = plugins(group).get(name) or _addressed.get((group, name))
    if plugin_known is None and group in BY_ADDRESS and ADDRESS.fullmatch(name):
        return _at_address(group, name, name)
    adapter, argument = _adapter(group, name)
    if plugin_known is not None or adapter is None or not argument.startswith(STOCK_PREFIX):
        return plugin_known
    entry = metadata.EntryPoint(name, adapter.target, "")
    plugin = Plugin(group, name, entry.value, adapter.distribution, entry, adapter=adapter.name)
    return _addressed.setdefault((group, name), plugin)


def canonical(defense: str) -> str:
    """Return the name of a defense in records: ours, also for a framework's own name of it.

    Any other name, known or not, is returned unchanged.
    """
    adapter, argument = _adapter("defenses", defense)
    if adapter is None or not argument.startswith(STOCK_PREFIX):
        return defense
    name = argument.removeprefix(STOCK_PREFIX)
    own = next((own for own, theirs in stock_names(adapter).items() if name in theirs), name)
    return f"{adapter.name}:{STOCK_PREFIX}{own}"


def stock_names(adapter: Plugin) -> Mapping[str, tuple[str, ...]]:
    """Return the names, after "stock/", of what ships with an adapter's framework, each with the framework's own names.

    They are `STOCK_NAMES` in the adapter's module, which does not import the framework; empty if it is broken.
    """
    try:
        assert adapter.loaded is not None
    except PluginError:
        return {}
    names: Mapping[str, tuple[str, ...]] = getattr(sys.modules[adapter.module], "STOCK_NAMES", {})
    return names


def admit(defense: str) -> None:
    """Allow a defense that the user named by its address to be loaded, which runs its code."""
    adapter, argument = _adapter("defenses", defense)
    if adapter is not None and not argument.startswith(STOCK_PREFIX):
        _at_address("defenses", defense, argument, adapter.name)


def _adapter(group: PluginGroup, name: str) -> tuple[Plugin | None, str]:
    """Return the adapter in a defense's name, None if there is none, and the part of the name after it."""
    prefix, colon, argument = name.partition(":")
    return (plugins("adapters").get(prefix) if colon and group == "defenses" else None), argument


def _at_address(group: PluginGroup, name: str, address: str, adapter: str = "") -> Plugin:
    """Return the plugin at an address; modules of the current folder are found last."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    entry = metadata.EntryPoint(name, address, "")
    return _addressed.setdefault((group, name), Plugin(group, name, address, ADDRESSED, entry, adapter=adapter))


_addressed: dict[tuple[PluginGroup, str], Plugin] = {}
"""Plugins without an entry point that were found so far."""


def all_known() -> list[Plugin]:
    """Return every installed plugin, and those named by an address so far."""
    return [*(plugin for group in GROUP_NOUNS for plugin in plugins(group).values()), *_addressed.values()]


def load_plugin(group: PluginGroup, name: str) -> Any:
    """Return the plugin's target; UsageError: an unknown name; PluginError: a broken plugin."""
    plugin = find(group, name)
    if plugin is None:
        raise unknown(GROUP_NOUNS[group], name, [*plugins(group), *(_stock() if group == "defenses" else ())])
    return plugin.loaded


def _stock() -> Iterator[str]:
    """Yield every name, ours and the framework's, of what ships with the installed adapters' frameworks."""
    for adapter in plugins("adapters").values():
        for own, theirs in stock_names(adapter).items():
            yield from (f"{adapter.name}:{STOCK_PREFIX}{one}" for one in (own, *theirs))


def load_all(group: PluginGroup) -> dict[str, Any]:
    """Return the target of every plugin of `group`, by name; a broken one is left out with one warning."""
    loaded: dict[str, Any] = {}
    for name, plugin in plugins(group).items():
        try:
            loaded[name] = plugin.loaded
        except UsageError:
            _leave_out(plugin)
    return loaded


@lru_cache
def _leave_out(plugin: Plugin) -> None:
    """Warn, once, that a broken plugin is left out."""
    if multiprocessing.parent_process() is None:  # workers find it too, but their parent has warned
        warnings.warn(f"{plugin._import[1].rstrip('.')}; it is left out.", stacklevel=3)


# -- One-line summaries of plugins for lists: the first line of the docstring --


def summary(plugin: Plugin) -> str:
    """Return the first line of the plugin's docstring, read from source ("" if there is none), or why it is broken.

    Only third-party plugins are imported for it, to find out whether they are broken.
    """
    try:
        if not plugin.ours:
            assert plugin.loaded is not None
        spec = util.find_spec(plugin.module)
        if spec is None or spec.origin is None:
            return f"broken: no module {plugin.module}"
        text = Path(spec.origin).read_bytes().decode(errors="replace")  # a parser takes thrice as long for all plugins
    except PluginError as error:
        return f"broken: {error}"
    except Exception as cause:  # noqa: BLE001 - parents of a broken package may raise anything; shown in the list
        return f"broken: {error_text(cause)}" if plugin.ours else ""
    attribute = plugin.target.partition(":")[2]
    header = re.search(rf"^(?:class|def) {re.escape(attribute)}\b(?:.*\n)*?.*:[ \t]*(?:#.*)?\n\s*", text, re.MULTILINE)
    quoted = None if header is None else re.compile(r"[rR]?(\"\"\"|''')(.*?)(?:\1|\n)").match(text, header.end())
    return "" if quoted is None else one_line(quoted[2].strip())
