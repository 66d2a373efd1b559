"""Which room of the package imports which, and the picture of it: `python docs/house.py` writes docs/images/house.svg.

A room is a package below `ppbench`, or a module that lies at its top. A floor stands above everything its rooms import.
The picture leaves out an arrow that follows from two others; `tests/test_structure.py` holds it to the program.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ppbench"
PICTURE = ROOT / "docs" / "images" / "house.svg"
WIDTH, HIGH, BOX, GAP = 860, 76, 150, 60
Arrows = dict[str, set[str]]


def module_of(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if "vendor" not in path.parts}


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules of this package that a file names in an import statement, wherever it stands: also under
    TYPE_CHECKING and inside functions, which hide a circle and do not undo it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}: a relative import; write the whole name")
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= whole & set(MODULES) or {str(node.module)} & set(MODULES)
    return frozenset(names)


def room(module: str) -> str:
    """Return the package below ppbench that a module lies in, or the module itself at the top (`ppbench.plot`)."""
    return ".".join(module.split(".")[:2])


def arrows_between(level: Callable[[str], str]) -> Arrows:
    """Return what each unit imports, a unit being what `level` makes of a module's name."""
    arrows: Arrows = {}
    for module, path in MODULES.items():
        own = arrows.setdefault(level(module), set())
        own |= {level(other) for other in imports(path)} - {level(module), "ppbench"}
    arrows.pop("ppbench", None)  # the face: it names the public API, for readers of types
    return arrows


def floors(arrows: Arrows) -> dict[str, int]:
    """Return each room's floor, from 1: one above the highest room that it imports. Raises CycleError on a circle."""
    heights: dict[str, int] = {}
    for name in TopologicalSorter(arrows).static_order():
        heights[name] = 1 + max((heights[other] for other in arrows[name]), default=0)
    return heights


def direct(arrows: Arrows) -> Arrows:
    """Return the arrows that do not follow from others (the transitive reduction)."""
    below: Arrows = {}
    for name in TopologicalSorter(arrows).static_order():
        below[name] = arrows[name].union(*(below[other] for other in arrows[name]))
    return {name: own - set().union(*(below[other] for other in own)) for name, own in arrows.items()}


def places(arrows: Arrows) -> dict[str, tuple[float, float]]:
    """Return the middle of each room's box: right under the lowest room that imports it."""
    heights = floors(arrows)
    for name in reversed([*TopologicalSorter(arrows).static_order()]):
        heights[name] = min((heights[other] - 1 for other, own in arrows.items() if name in own), default=heights[name])
    top, spots = max(heights.values()), {}
    for floor in range(1, top + 1):
        row = sorted(name for name, height in heights.items() if height == floor)
        row.sort(key=lambda name: sum(spots[o][0] for o in arrows[name]) / max(1, len(arrows[name])))
        left = (WIDTH - len(row) * BOX - (len(row) - 1) * GAP) / 2
        for place, name in enumerate(row):
            spots[name] = (left + place * (BOX + GAP) + BOX / 2, (top - floor) * HIGH + HIGH / 2)
    return spots


def picture() -> str:
    """Return the house as an SVG document."""
    arrows = arrows_between(room)
    spots, size = places(direct(arrows)), max(floors(arrows).values()) * HIGH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {size}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{size}" fill="#ffffff"/>',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#5b6b7b"/></marker></defs>',
    ]
    for name, own in sorted(direct(arrows).items()):
        for other in sorted(own):
            (x, y), (u, v) = spots[name], spots[other]
            parts.append(
                f'<path d="M{x:.0f},{y + 18:.0f} C{x:.0f},{y + 46:.0f} {u:.0f},{v - 46:.0f} {u:.0f},{v - 18:.0f}" '
                'fill="none" stroke="#5b6b7b" stroke-width="1.3" marker-end="url(#tip)"/>'
            )
    for name, (x, y) in sorted(spots.items()):
        parts.append(
            f'<rect x="{x - BOX / 2:.0f}" y="{y - 18:.0f}" width="{BOX}" height="36" rx="6" fill="#e8eef5" '
            f'stroke="#33475b"/><text x="{x:.0f}" y="{y + 5:.0f}" font-size="15" text-anchor="middle" fill="#16202a">'
            f"{escape(name.removeprefix('ppbench.'))}</text>"
        )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(picture())
