"""Check that the package `ppbench` is the one that `ppbench-fl` installed: another distribution has that name too.

pip writes both into one folder, and the later one silently wins, file by file. This file imports only the standard
library, because `ppbench_fl`, which starts the command, runs it even if the package around it is not ours.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "ppbench-fl"
STAMP = b"from ppbench.base.version import __version__"
"""A line of our `ppbench/__init__.py`, in every version, and of nobody else's."""
HOME = Path(os.path.realpath(__file__)).parents[1]
"""The folder of our package."""


@dataclass(frozen=True)
class PipSource:
    """Where pip got a distribution from. target: what pip installs it from again, the folder of an editable one, "" for
    the index."""

    target: str
    editable: bool = False


def fault() -> str:
    """Return in a sentence why this installation is broken and what repairs it, "" if nothing is wrong.

    Compares `__init__.py` and the size of each of our files with pip's list; owners are looked up only on a fault.
    """
    init = _imported()
    if init is None:
        return _damaged([HOME / "__init__.py"])
    if not _ours(init):
        return _overwritten([init]) if init.parent == HOME else _shadowed(init)
    if init.parent != HOME:  # another copy of ours that was put before this one
        return ""
    infos = sorted(HOME.parent.glob("ppbench_fl-*.dist-info"))
    if len(infos) > 1:
        versions = " and ".join(info.stem.partition("-")[2] for info in infos)
        advice = f"pip uninstall {DISTRIBUTION} until none is left, then install it again"
        return f"Two versions of {DISTRIBUTION}, {versions}, are installed over one another in {HOME.parent}; {advice}."
    changed = [path for info in infos for path in _changed(info / "RECORD")]
    if missing := [path for path in changed if not path.exists()]:
        return _damaged(missing)
    return _overwritten(changed) if _owners(changed) else ""  # what nobody else installed was edited by hand


def _imported() -> Path | None:
    """Return the file that `import ppbench` runs or has run, None for a folder without `__init__.py`."""
    try:
        spec = util.find_spec("ppbench")
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(os.path.realpath(spec.origin))


def _ours(init: Path) -> bool:
    """Return whether an `__init__.py` belongs to our package; True if it cannot be read, as in a zip."""
    try:
        return STAMP in init.read_bytes()
    except OSError:
        return True


def _changed(record: Path) -> Iterator[Path]:
    """Yield our .py files that are missing or differ in size from pip's list of files."""
    try:
        lines = record.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        name, *_, size = line.split(",")
        if name.startswith("ppbench/") and name.endswith(".py"):
            path = f"{HOME.parent}{os.sep}{name}"  # no Path: several hundred files at every start
            try:
                same = str(os.stat(path).st_size) == size
            except OSError:
                same = False
            if not same:
                yield Path(path)


def _owners(paths: Sequence[Path]) -> list[metadata.Distribution]:
    """Return the other distributions that installed one of these files, or whose source folder holds it."""
    owners = []
    for dist in metadata.distributions() if paths else ():
        try:
            if dist.name != DISTRIBUTION and _owns(dist, paths):
                owners.append(dist)
        except Exception:  # noqa: BLE001 - metadata that cannot be read names no owner
            continue
    return owners


def _owns(dist: metadata.Distribution, paths: Sequence[Path]) -> bool:
    source = source_of(dist)
    if source.editable:
        return any(path.is_relative_to(os.path.realpath(source.target)) for path in paths)
    if "ppbench/" not in (dist.read_text("RECORD") or ""):  # in a hundredth of the time of what follows
        return False
    return any(Path(os.path.realpath(str(dist.locate_file(file)))) in paths for file in dist.files or ())


def source_of(dist: metadata.Distribution) -> PipSource:
    """Return where pip got a distribution from, as its metadata have it."""
    origin = json.loads(dist.read_text("direct_url.json") or "{}")
    url, vcs = str(origin.get("url", "")), origin.get("vcs_info")
    if vcs:
        return PipSource(f"{vcs['vcs']}+{url}@{vcs['commit_id']}")
    if origin.get("dir_info", {}).get("editable"):
        return PipSource(unquote(urlsplit(url).path), editable=True)
    return PipSource(url)


def _again() -> str:
    """Return the command that reinstalls ours, from where it was installed if that still exists."""
    try:
        source = source_of(metadata.distribution(DISTRIBUTION))
    except Exception:  # noqa: BLE001 - no metadata of ours that can be read
        source = PipSource("")
    if source.target.startswith("file:") and not os.path.exists(unquote(urlsplit(source.target).path)):
        source = PipSource("")
    requirement = f"{DISTRIBUTION} @ {source.target}" if source.target else DISTRIBUTION
    requirement = f"-e {shlex.quote(source.target)}" if source.editable else shlex.quote(requirement)
    return f"pip install --force-reinstall --no-deps {requirement}"


def _damaged(missing: Sequence[Path]) -> str:
    more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
    return f"The installation of {DISTRIBUTION} lacks {missing[0]}{more}; repair it: {_again()}"


def _overwritten(paths: Sequence[Path]) -> str:
    owners = _owners(paths)
    if not owners:
        return f"{paths[0]} is not the file that {DISTRIBUTION} installed; repair it: {_again()}"
    return (
        f"The package ppbench of {DISTRIBUTION} was overwritten by the distribution {_titles(owners)}, which has a "
        f"package of that name too ({paths[0]}); one environment cannot hold both. Repair it: {_uninstall(owners)} && "
        f"{_again()}"
    )


def _shadowed(init: Path) -> str:
    owners = _owners([init])
    whose = f", of the distribution {_titles(owners)}," if owners else ""
    advice = _uninstall(owners) if owners else "rename it, or take its folder off the path"
    ours = f"that of {DISTRIBUTION} in {HOME}"
    return f"Python imports the package ppbench from {init}{whose} and not {ours}; repair it: {advice}"


def _titles(dists: Sequence[metadata.Distribution]) -> str:
    return " and ".join(f"{dist.name} {dist.version}" for dist in dists)


def _uninstall(dists: Sequence[metadata.Distribution]) -> str:
    return f"pip uninstall {' '.join(dist.name for dist in dists)}"
