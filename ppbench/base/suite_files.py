"""The suites that come with ppbench: where their files are and what they are called. Light, for `ppbench list`."""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

FOLDER = Path(__file__).parents[1] / "suites"


def shipped() -> dict[str, Path]:
    """Return the files of the suites that come with ppbench, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def suite_titles() -> dict[str, str]:
    """Return their titles by name, each with its presets: "... (presets: two-cores)"."""
    by_name = {}
    for name, path in shipped().items():
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        presets = ", ".join(raw.get("preset", {}))
        by_name[name] = str(raw.get("title", "")) + (f" (presets: {presets})" if presets else "")
    return by_name


__all__ = ["shipped", "suite_titles", "tomllib"]
