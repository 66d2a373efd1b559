"""Blame for errors: what a third-party plugin raises is reported with plugin, package, file and line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ppbench.base.errors import PluginError, ProtocolError, shown
from ppbench.base.guard import PACKAGE, error_text, frames, module_of, place, within
from ppbench.base.registry import Plugin, PluginGroup, all_known, find


@contextmanager
def guard(group: PluginGroup | None = None, name: str = "") -> Iterator[None]:
    """Turn what a third-party plugin raises in the block, exits too, into a PluginError with its name and package.

    Blamed is the plugin whose code the error passed (`blame`), else the one named here, whose result was in use.
    ppbench's own errors and interrupts pass unchanged, as do errors without a third-party plugin.
    """
    try:
        yield
    except BaseException as error:
        culprit = _culprit(error, group, name)
        if culprit is None:
            raise
        where = place(error, culprit.root)
        at = f" ({where})" if where else " in ppbench's own code, on its result"
        raise PluginError(f"{culprit.words} raised {error_text(error)}{at}.") from error


def _culprit(error: BaseException, group: PluginGroup | None, name: str) -> Plugin | None:
    # A ProtocolError is the fault of the third-party plugin, if there is one; an Overflow means that training diverged.
    ours = type(error).__module__.partition(".")[0] == PACKAGE and type(error) is not ProtocolError
    if ours or isinstance(error, KeyboardInterrupt | GeneratorExit):
        return None
    stack = frames(error)
    if not isinstance(error, Exception) and (not stack or within(module_of(stack[0]), PACKAGE)):
        return None  # raised by a signal, wherever the process was
    blamed = blame(error)
    named = None if group is None else find(group, name)
    if named is None or named.ours or (blamed is not None and blamed.root != named.root):
        return blamed
    return named


def blame(error: BaseException) -> Plugin | None:
    """Return the third-party plugin whose code the error was raised in or passed, the innermost first; or None.

    Of several in one package, the one whose class was running, else the first.
    """
    strangers = [p for p in all_known() if not p.ours and p.root]
    strangers = [p for p in strangers if p.root != PACKAGE and p.root not in sys.stdlib_module_names]
    for frame in frames(error) if strangers else ():
        module = module_of(frame)
        candidates = [p for p in strangers if within(module, p.root)]
        if candidates:
            at_work = type(frame.f_locals.get("self")).__mro__
            names = {cls.__qualname__ for cls in at_work if within(cls.__module__, candidates[0].root)}
            exact = [p for p in candidates if p.target.partition(":")[2] in names]
            return (exact or [p for p in candidates if p.module == module] or candidates)[0]
    return None


def refuse(group: PluginGroup, name: str, faults: Iterable[str]) -> None:
    """Raise PluginError with the first of `faults` of a plugin, if there is one."""
    for fault in faults:
        plugin = find(group, name)
        raise PluginError(f"{plugin.words if plugin else shown(name)} {fault}.")


def stranger(group: PluginGroup, name: str) -> bool:
    """Return whether the plugin `name` belongs to another package than ppbench."""
    plugin = find(group, name)
    return plugin is not None and not plugin.ours
