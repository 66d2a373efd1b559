"""The house: which package may import which, that none do so in a circle, and how long a file or function may be."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ppbench"
LINES, FUNCTION = 300, 40
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "vendor" not in path.parts)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCES}


@cache
def imports(path: Path) -> frozenset[str]:
    """The modules of this package that a file names in an import statement, wherever it stands: also under
    TYPE_CHECKING and inside functions, which hide a circle and do not undo it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import; write the whole name"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= whole & set(MODULES) or {str(node.module)} & set(MODULES)
    return frozenset(found)


def room(module: str) -> str:
    """The package below ppbench, or the module itself where it lies at the top (`ppbench.cli`)."""
    return ".".join(module.split(".")[:2])


def circle(arrows: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def arrows_between(level: Callable[[str], str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        own = found.setdefault(level(module), set())
        own |= {level(other) for other in imports(path)} - {level(module), "ppbench"}
    found.pop("ppbench", None)  # the face: it names the public API, for readers of types
    return found


def test_packages_do_not_import_one_another_in_a_circle():
    assert not (found := circle(arrows_between(room))), " -> ".join(found)


def test_the_check_finds_a_circle_through_a_plugin_package():
    planted = arrows_between(room)
    planted["ppbench.federation"] |= {"ppbench.defenses"}  # the contract must not know a defense
    assert "ppbench.defenses" in circle(planted)


def test_files_do_not_import_one_another_in_a_circle():
    assert not (found := circle(arrows_between(lambda module: module))), " -> ".join(found)


@pytest.mark.parametrize(
    ("part", "closed"),
    [
        ("defenses", ("ppbench.attacks", "ppbench.run", "ppbench.report")),
        ("attacks", ("ppbench.run", "ppbench.report")),
        ("metrics", ("ppbench.records", "ppbench.federation", "ppbench.adversary")),
        ("records", ("ppbench.run", "ppbench.report", "ppbench.questions")),
        ("report", ("ppbench.run", "ppbench.testing")),
    ],
)
def test_what_a_package_must_never_know(part, closed):
    for path in (PACKAGE / part).rglob("*.py"):
        assert not [m for m in imports(path) if m.startswith(closed)], path


def test_only_plugins_know_plugins():
    for module, path in MODULES.items():
        if room(module) not in ("ppbench.attacks", "ppbench.defenses"):
            assert not [m for m in imports(path) if room(m) in ("ppbench.attacks", "ppbench.defenses")], path


def test_nobody_imports_through_the_links_at_the_top():
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        named = [n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        assert not [m for m in named if m.split(".")[0] in ("attacks", "defenses")], path


def test_no_pickle_and_no_unsafe_load():
    for path in SOURCES:
        text = path.read_text()
        assert "import pickle" not in text, path
        assert text.count("torch.load(") == text.count("weights_only=True)"), path  # nothing but tensors is read


def test_modules_stay_under_300_lines():
    assert not [str(path) for path in SOURCES if len(path.read_text().splitlines()) > LINES]
