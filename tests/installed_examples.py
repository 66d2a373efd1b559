"""The examples of other people's packages, laid out as pip leaves them; `tests/wheel_test.sh` has pip do it."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from ppbench.base.toml_files import tomllib

EXAMPLES = Path(__file__).parent.parent / "examples"


def lay_out(example: Path, site: Path, requires: Sequence[str] = ()) -> None:
    """Put the package in the folder `example` into the folder `site`; requires: requirements beside its own."""
    shutil.copytree(
        example / "src", site, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
    )
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    needs = [f"Requires-Dist: {one}" for one in (*project["dependencies"], *requires)]
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}", *needs]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())])
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups) + "\n")
    modules = [path.name for path in (example / "src").iterdir() if path.suffix != ".egg-info"]
    (info / "top_level.txt").write_text("".join(f"{name}\n" for name in modules))
    names = [path.relative_to(site).as_posix() for name in modules for path in _files(site / name)]
    names += [f"{info.name}/{name}" for name in ("METADATA", "entry_points.txt", "top_level.txt", "RECORD")]
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))


def _files(path: Path) -> list[Path]:
    return sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
