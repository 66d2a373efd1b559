"""A public name of the package means one thing: what is defined in several places is listed here, with the reason."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = {p: p.read_text() for p in sorted((ROOT / "ppbench").rglob("*.py")) if "vendor" not in p.parts}

REASONS = {
    "a type variable": {"T"},
    "one for each adapter of a framework": {"FRAMEWORK", "STOCK_NAMES", "defense", "mechanism"},
    "the defenses that a package has or checks": {"defenses"},
    "a defense, and the attack that is aware of it or the mechanism that it is made of": {
        *("baffle", "dp", "secagg", "spn"),
    },
    "a question, the attacks that answer it, and its metrics": {
        *("extraction", "labels", "membership", "recognition", "tracing"),
    },
    "a command, and the function that it calls": {
        *("accept", "audit", "baseline", "compare", "evaluate", "publish", "score", "sweep", "verify"),
    },
    "a figure, and the function whose result it draws": {"worst_case"},
    "what a user's word opens: a data set (entry points), or results (`ppbench.load`)": {"load"},
    "what a process starts with": {"main"},
    "one in the package of each defense": {"protocol"},
}
"""Names that may be defined in several places, by the reason."""


def defined(path: Path, source: str) -> set[str]:
    """Return the public names that a file defines at its top, and its own name as a module."""
    names = set() if path.stem == "__init__" else {path.stem}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def places_of_duplicates(sources: dict[Path, str]) -> dict[str, list[str]]:
    """Return the names that several files define, with these files."""
    places = defaultdict(list)
    for path, source in sources.items():
        for name in defined(path, source):
            places[name].append(str(path))
    return {name: files for name, files in places.items() if len(files) > 1}


def test_a_public_name_is_defined_once_or_listed_with_the_reason():
    duplicates, allowed = places_of_duplicates(SOURCES), [name for names in REASONS.values() for name in names]
    assert len(allowed) == len(set(allowed)), "a name has two reasons"
    new = {name: files for name, files in duplicates.items() if name not in allowed}
    assert not new, f"rename all but one, or list the name with its reason in {Path(__file__).name}: {new}"
    assert not (stale := set(allowed) - set(duplicates)), f"defined once now, take them off the list: {stale}"


def test_classes_functions_constants_and_modules_count_and_private_or_inner_names_do_not():
    sources = {
        Path("a/one.py"): "class Two: ...\n\n\ndef three(): ...\n\n\nFOUR = 1\nFive: int = 5\n_SIX = 6\n",
        Path("b/Two.py"): "from a.one import three\n\n\ndef seven():\n    FOUR = 2\n",
        Path("b/three.py"): "FOUR: int = 3\n\n\nclass Eight:\n    def seven(self): ...\n\n\n_SIX = 6\n",
        Path("b/__init__.py"): "async def Five(): ...\n",
        Path("a/__init__.py"): "",
    }
    assert places_of_duplicates(sources) == {
        "Two": ["a/one.py", "b/Two.py"],
        "three": ["a/one.py", "b/three.py"],
        "FOUR": ["a/one.py", "b/three.py"],
        "Five": ["a/one.py", "b/__init__.py"],
    }
