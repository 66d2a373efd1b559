"""One-line summaries of plugins for lists: the first line of the docstring."""

from __future__ import annotations

import re
from importlib import util
from pathlib import Path

from ppbench.base.errors import PluginError, one_line
from ppbench.base.guard import error_text
from ppbench.base.registry import Plugin


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
