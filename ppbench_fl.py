"""The entry point of the command `ppbench` and of its pytest plugin, outside of the package `ppbench`.

Another distribution on the index has a package `ppbench` too. If it was installed later, Python runs its
`ppbench/__init__.py`, which may raise anything, before any module of ours. So this file checks before it imports.
"""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def fault() -> str:
    """Return in a sentence why the package `ppbench` is not ours, "" if it is: see `ppbench.base.installation`."""
    path = Path(__file__).parent / "ppbench" / "base" / "installation.py"
    spec = util.spec_from_file_location("_ppbench_installation", path)
    if spec is None or spec.loader is None or not path.is_file():
        return f"The installation of ppbench-fl lacks {path}; pip install --force-reinstall --no-deps ppbench-fl"
    installation = sys.modules[spec.name] = util.module_from_spec(spec)
    spec.loader.exec_module(installation)
    return str(installation.fault())


def main() -> None:
    """Run the command line, or print in a sentence why it cannot be run and exit with code 2."""
    if message := fault():
        print(f"ppbench: {message}", file=sys.stderr)
        sys.exit(2)
    from ppbench import commands

    commands.main(checked=True)


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Load the plugin; pytest.UsageError: the package `ppbench` is not ours."""
    if message := fault():
        import pytest

        raise pytest.UsageError(f"ppbench: {message}")
    pluginmanager.import_plugin("ppbench.testing.pytest_plugin")


if __name__ == "__main__":
    main()
