"""What installed distributions run without being asked: files and entry points that Python and its libraries load.

An attack that runs in a process of its own (`--isolate`) must bring nothing that runs in this one. What its package and
the packages that it requires bring is read from pip's lists of files and from metadata; nothing is imported. What
ppbench itself requires is trusted, as are the tools that install packages.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from ppbench.base.errors import one_line, shown
from ppbench.base.import_guard import PACKAGE
from ppbench.base.installation import DISTRIBUTION, source_of

INSTALLERS = ("pip", "setuptools", "wheel", "uv")
STARTED_BY_PYTHON = ("sitecustomize", "usercustomize")
"""Modules that Python imports at its start, if they are there."""
SCRIPTS = ("console_scripts", "gui_scripts")
COMMANDS = ("bwrap", "git", "python", "python3", "ppbench")
"""Commands that ppbench runs, or that run it; the folder of scripts stands first on the path."""
LOADED_GROUPS = (
    "torch.backends", "torch_dynamo_backends", "pydantic", "numba_extensions", "networkx.backends", "networkx.plugins",
    "matplotlib.backend", "fsspec.specs", "hypothesis", "pytest11", "jax_plugins", "array_api",
)  # fmt: skip
"""Groups whose entry points libraries load by themselves; torch does so in `import torch`."""
_MODULE = re.compile(r"([A-Za-z_]\w*)(?:\.[\w-]+)*\.(?:py|so|pyd)|([A-Za-z_]\w*)")
_RUNS = re.compile(r"import[ \t]")
CLOSED_VARIABLE = "PPBENCH_CLOSED"
"""Environment variable with the distributions whose modules no worker may import by the way, see `close`."""


def normalized(name: str) -> str:
    """Return the name of a distribution as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(name: str) -> metadata.Distribution | None:
    """Return an installed distribution, None without one, or if its metadata cannot be read."""
    try:
        return metadata.distribution(name)
    except Exception:  # noqa: BLE001 - another package's metadata may be anything
        return None


def closure(names: Sequence[str], without: frozenset[str] = frozenset(), extras: bool = True) -> frozenset[str]:
    """Return distributions with all installed ones that they require, by normalized name, except `without`.

    extras: whether those count, too, that requirements require for extras alone.
    """
    start = [normalized(name) for name in names]
    left, reached = [*start], set[str]()
    while left:
        name = left.pop()
        if name in reached or name in without or (dist := installed(name)) is None:
            continue
        reached.add(name)
        left += required(dist, extras or name in start)
    return frozenset(reached)


def required(dist: metadata.Distribution, extras: bool) -> Iterator[str]:
    """Yield the normalized names of what a distribution requires; nothing without readable metadata."""
    try:
        requirements = list(dist.requires or ())
    except Exception:  # noqa: BLE001 - another package's metadata may be anything
        return
    for text in requirements:
        word = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", text.strip())
        if word is not None and (extras or "extra" not in text.partition(";")[2]):
            yield normalized(word[0])


@lru_cache(maxsize=1)
def trusted() -> frozenset[str]:
    """Return ours, all that it may require, and what installs packages, by normalized name."""
    return closure([DISTRIBUTION, *INSTALLERS], extras=False)


# -- What one distribution brings --------------------------------------------------------------------------------------
def refusals(name: str, roots: Sequence[str]) -> list[str]:
    """Return what a distribution and those that it requires bring that runs in any process, a clause each.

    name: of the distribution of an attack; roots: the top-level modules of its plugins, whose owners count too.
    """
    own = normalized(name)
    owners = [dist for root in roots for dist in _owners().get(root, ())]
    every = closure([own, *owners], trusted() - {own, *owners})
    if own not in every:
        return [f"brings no metadata that can be read ({shown(name, 80)})"]
    clauses = [*_strange(own, roots)]
    for other in sorted(every - {own}):
        clauses += [f"requires the package {other}, which {clause}" for clause in _runs_anywhere(other)]
    return clauses


def _strange(name: str, roots: Sequence[str]) -> Iterator[str]:
    """Yield what the distribution of a plugin brings besides it."""
    dist = installed(name)
    files = None if dist is None else _files(dist)
    if dist is None or files is None:
        yield "has no list of its files (RECORD)"
        return
    yield from _runs_anywhere(name)
    for group in sorted({entry.group for entry in _entries(dist)} - {*LOADED_GROUPS}):
        if group in SCRIPTS:
            yield "installs scripts, which stand before other commands of that name"
        elif not group.startswith(f"{PACKAGE}."):
            yield f"declares entry points of the group {shown(group, 80)}"
    for path in files:
        if path.startswith("/") or path.split("/")[0] == "..":
            yield f"installs {shown(path, 80)}, outside of the folder of packages"
    for top in sorted(_tops(files) - {*STARTED_BY_PYTHON}):
        if clause := _foreign(top, name, roots):
            yield f"installs {shown(top, 80)}, {clause}"
    infos = {path.split("/")[0] for path in files if re.match(r"[^/]+\.(dist|egg)-info/", path)}
    if len(infos) > 1:
        yield f"installs the metadata of other packages ({', '.join(sorted(infos)[:3])})"


def _foreign(top: str, name: str, roots: Sequence[str]) -> str:
    """Return why a top-level module is not a distribution's own, a clause, "" if it is."""
    others = sorted({*_owners().get(top, ())} - {name})
    if top in sys.stdlib_module_names or top in (PACKAGE, "ppbench_fl"):
        return f"a name of {'ppbench' if top.startswith(PACKAGE) else 'Python'}"
    if others:
        return f"which is of the package {others[0]}"
    helper = top.lower().lstrip("_").startswith(name.replace("-", "_"))  # begins as the distribution's name
    return "" if top in roots or helper else "a name that is neither its plugin's nor its own"


def _runs_anywhere(name: str) -> Iterator[str]:
    """Yield what of a distribution runs in any Python process, or in any that imports torch or such, a clause each."""
    dist = installed(name)
    if dist is None:
        return
    for group in sorted({entry.group for entry in _entries(dist)} & {*LOADED_GROUPS}):
        yield f"declares entry points of the group {shown(group, 80)}, which libraries load by themselves"
    files = _files(dist) or ()
    scripts = {entry.name for entry in _entries(dist) if entry.group in SCRIPTS}
    scripts |= {Path(path).stem for path in files if Path(path).parent.name in ("bin", "Scripts", "scripts")}
    for command in sorted(scripts & {*COMMANDS}):
        yield f"installs the command {command}, which ppbench runs"
    for path in files:
        if "/" not in path and path.endswith(".pth"):
            yield from _pth_clauses(Path(str(dist.locate_file(path))), bool(_editable_source(dist)))
    for top in sorted(_tops(files) & {*STARTED_BY_PYTHON}):
        yield f"installs {top}, which every Python process runs"


def _pth_clauses(path: Path, editable: bool) -> Iterator[str]:
    """Yield what a .pth file does beyond leading to the source of an editable install."""
    name = shown(path.name, 80)
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError:
        yield f"installs {name}, which cannot be read"
        return
    if any(map(_RUNS.match, lines)):
        yield f"installs {name}, of which every Python process runs a line"
        return
    folders = [path.parent / line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if folders and not editable:
        yield f"installs {name}, which adds folders to the path of every Python process"
    for folder in folders:
        if any((folder / f"{module}{end}").exists() for module in STARTED_BY_PYTHON for end in ("", ".py", ".so")):
            yield f"installs {name}, which leads to a sitecustomize or usercustomize that every Python process runs"


def _entries(dist: metadata.Distribution) -> list[metadata.EntryPoint]:
    try:
        return list(dist.entry_points)
    except Exception:  # noqa: BLE001 - another package's metadata may be anything
        return []


def _files(dist: metadata.Distribution) -> list[str] | None:
    """Return the relative paths of a distribution's files with "/", None without a list of them."""
    try:
        return None if dist.files is None else [path.as_posix() for path in dist.files]
    except Exception:  # noqa: BLE001
        return None


def _tops(files: Sequence[str]) -> set[str]:
    """Return the names of the top-level modules and packages among files."""
    tops = set[str]()
    for path in files:
        first, slash, rest = path.partition("/")
        match = _MODULE.fullmatch(first)
        if (
            match is not None
            and (match[2] if slash else match[1])
            and (not slash or rest.endswith((".py", ".so", ".pyd")))
        ):
            tops.add(match[1] or match[2])
    return tops


def _editable_source(dist: metadata.Distribution) -> str:
    """Return the folder of the source of an editable install, "" for any other."""
    try:
        source = source_of(dist)
        return source.target if source.editable and Path(source.target).is_dir() else ""
    except Exception:  # noqa: BLE001
        return ""


@lru_cache(maxsize=1)
def _owners() -> dict[str, list[str]]:
    """Return which distributions install a top-level module, by its name."""
    owners: dict[str, list[str]] = {}
    for dist in metadata.distributions():
        try:
            name = normalized(dist.name)
            files = _files(dist) or ()
        except Exception:  # noqa: BLE001
            continue
        for top in _tops(files):
            owners.setdefault(top, []).append(name)
    return owners


# -- What runs in every process here, whoever brings it ----------------------------------------------------------------
def startup_code() -> list[str]:
    """Return what runs in every Python process here, or in any that imports torch, and is of no trusted package."""
    entries = []
    for folder in dict.fromkeys(map(Path, filter(None, sys.path))):
        paths = sorted(folder.glob("*.pth")) if folder.name in ("site-packages", "dist-packages") else []
        for path in paths:
            if any("runs a line" in clause for clause in _pth_clauses(path, editable=True)):
                owner = _owner_of(path.name)
                known = normalized(owner) in (*INSTALLERS, DISTRIBUTION)
                entries += [] if known or normalized(owner) in trusted() else [f"{path.name} of {owner}"]
    for group in LOADED_GROUPS[:1]:
        points = metadata.entry_points(group=group)
        names = {one_line(str(entry.dist.name), 80) for entry in points if entry.dist is not None}
        entries += [f"{group} of {name}" for name in sorted(names) if normalized(name) not in trusted()]
    return entries


def _owner_of(pth: str) -> str:
    """Return the distribution that lists a `.pth` file of site-packages, "no package" if none does.

    The usual owners are asked first, and lists are searched as text: parsing all of them takes a second.
    """
    usual = [dist for name in (*INSTALLERS, DISTRIBUTION) if (dist := installed(name)) is not None]
    for dist in chain(usual, metadata.distributions()):
        try:
            listed = f"\n{pth}," in f"\n{dist.read_text('RECORD') or ''}"
            name = str(dist.name)
        except Exception:  # noqa: BLE001 - another package's metadata may be anything
            continue
        if listed:
            return one_line(name, 80)
    return "no package"


# -- Modules of packages with attacks, which this process may import only as plugins that it loads by name -------------
# A library may try to import an optional module by itself, as torch does opt_einsum; an attack's package may have that
# name. So such packages are closed before torch is imported, and opened when one of their plugins is loaded here.


class _Refusing(Loader):
    """A loader that refuses to run a module."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return None: the usual kind of module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Raise ModuleNotFoundError."""
        name = module.__name__
        raise ModuleNotFoundError(f"No module named {name!r} here: its package brings isolated attacks", name=name)


class _Closed(MetaPathFinder):
    """Finds the modules of closed packages, which then do not run. homes: folders and files, by distribution."""

    def __init__(self, homes: dict[str, tuple[str, ...]]) -> None:
        self.homes = homes

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a closed top-level module with a loader that refuses, None for any other module."""
        if "." in fullname or not self.homes:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((one for finder in others if (one := finder.find_spec(fullname, path, target))), None)
        origin = os.path.realpath(spec.origin) if spec is not None and spec.origin else ""
        if spec is None or not any(origin.startswith(home) for some in self.homes.values() for home in some):
            return None
        spec.loader = _Refusing()
        return spec


_closed = _Closed({})


def close_packages(names: Sequence[str]) -> None:
    """Close these distributions, with what they require and ppbench does not, here and in processes started here."""
    for name in closure(names, trusted() - {*map(normalized, names)}) if names else ():
        _closed.homes.setdefault(name, tuple(_homes(name)))
    if _closed.homes:
        os.environ[CLOSED_VARIABLE] = " ".join(sorted(_closed.homes))
        if _closed not in sys.meta_path:
            sys.meta_path.insert(0, _closed)


def open_package(name: str) -> None:
    """Open a closed package, with what it requires, as one of its plugins is loaded here."""
    for one in closure([name], trusted() - {normalized(name)}) if _closed.homes else ():
        _closed.homes.pop(one, None)


def _homes(name: str) -> Iterator[str]:
    """Yield the real paths of what a distribution installs, of an editable one the folder of its source."""
    dist = installed(name)
    if dist is None:
        return
    if source := _editable_source(dist):
        yield os.path.realpath(source) + os.sep
    for path in _files(dist) or ():
        if path.endswith((".py", ".so", ".pyd")):
            yield os.path.realpath(str(dist.locate_file(path)))
