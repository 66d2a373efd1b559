"""The house: which package may import which, that none do so in a circle, and how long a file or function may be."""

from __future__ import annotations

import ast
import importlib.util
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ppbench"
LINES = 300


def drawing():
    spec = importlib.util.spec_from_file_location("house", ROOT / "docs" / "house.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house = drawing()
MODULES, SOURCES = house.MODULES, sorted(house.MODULES.values())
arrows_between, imports, room = house.arrows_between, house.imports, house.room


def circle(arrows: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_packages_do_not_import_one_another_in_a_circle():
    assert not (found := circle(arrows_between(room))), " -> ".join(found)


def test_the_check_finds_a_circle_through_a_plugin_package():
    planted = arrows_between(room)
    planted["ppbench.federation"] |= {"ppbench.defenses"}  # the contract must not know a defense
    assert "ppbench.defenses" in circle(planted)


def test_files_do_not_import_one_another_in_a_circle():
    assert not (found := circle(arrows_between(lambda module: module))), " -> ".join(found)


def test_the_house_is_small_and_its_picture_is_this_house():
    rooms = arrows_between(room)
    assert len(rooms) <= 20 and sum(map(len, rooms.values())) <= 100 and max(house.floors(rooms).values()) <= 10
    assert house.PICTURE.read_text() == house.picture(), "docs/images/house.svg is old; run: python docs/house.py"


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
