"""The suites that come with ppbench: where their files are and what they are called. Light, for `ppbench list`."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

FOLDER = "ppbench.suites"


def shipped() -> dict[str, Path]:
    """Return the files of the suites that come with ppbench, by name."""
    return {path.stem: path for path in sorted(Path(str(resources.files(FOLDER))).glob("*.toml"))}


def titles() -> dict[str, str]:
    """Return their titles by name, each with its presets: "... (presets: two-cores)"."""
    found = {}
    for name, path in shipped().items():
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        presets = ", ".join(raw.get("preset", {}))
        found[name] = str(raw.get("title", "")) + (f" (presets: {presets})" if presets else "")
    return found


__all__ = ["FOLDER", "shipped", "titles", "tomllib"]
