"""Whose code it was: what a stranger's plugin raises is told by plugin, package, file and line."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ppbench.base.errors import PluginError, ProtocolError, shown
from ppbench.base.guard import PACKAGE, frames, module_of, place, told, within
from ppbench.base.registry import Group, Plugin, all_known, find


@contextmanager
def guard(group: Group | None = None, name: str = "") -> Iterator[None]:
    """Turn what a stranger's plugin raises in the block, exits too, into a PluginError that names it and its package.

    The plugin is whose code the error passed (`blame`), else the one named here: what it returned was used then.
    Errors of ppbench's own and interrupts pass, and so does what comes up where no stranger's plugin is involved.
    """
    try:
        yield
    except BaseException as error:
        culprit = _culprit(error, group, name)
        if culprit is None:
            raise
        where = place(error, culprit.root)
        at = f" ({where})" if where else " in ppbench's own code, on what it gave"
        raise PluginError(f"{culprit.words} raised {told(error)}{at}.") from error


def _culprit(error: BaseException, group: Group | None, name: str) -> Plugin | None:
    # Of a broken protocol somebody is to blame: who brought it, if a stranger did. What leaves the range has diverged.
    own = type(error).__module__.partition(".")[0] == PACKAGE and type(error) is not ProtocolError
    if own or isinstance(error, KeyboardInterrupt | GeneratorExit):
        return None
    passed = frames(error)
    if not isinstance(error, Exception) and (not passed or within(module_of(passed[0]), PACKAGE)):
        return None  # a signal's, raised wherever the process was
    found = blame(error)
    named = None if group is None else find(group, name)
    if named is None or named.ours or (found is not None and found.root != named.root):
        return found
    return named


def blame(error: BaseException) -> Plugin | None:
    """Return the plugin of another package whose code an error came up in, or passed, the innermost first; or None.

    Of several in one package, whose class was at work, else the first.
    """
    strangers = [p for p in all_known() if not p.ours and p.root]
    strangers = [p for p in strangers if p.root != PACKAGE and p.root not in sys.stdlib_module_names]
    for frame in frames(error) if strangers else ():
        module = module_of(frame)
        some = [p for p in strangers if within(module, p.root)]
        if some:
            at_work = type(frame.f_locals.get("self")).__mro__
            names = {cls.__qualname__ for cls in at_work if within(cls.__module__, some[0].root)}
            exact = [p for p in some if p.target.partition(":")[2] in names]
            return (exact or [p for p in some if p.module == module] or some)[0]
    return None


def refuse(group: Group, name: str, faults: Iterable[str]) -> None:
    """Raise PluginError with the first of what is wrong with a plugin's answers, if anything is."""
    for fault in faults:
        plugin = find(group, name)
        raise PluginError(f"{plugin.words if plugin else shown(name)} {fault}.")


def stranger(group: Group, name: str) -> bool:
    """Return whether the plugin called so came with another package."""
    found = find(group, name)
    return found is not None and not found.ours
