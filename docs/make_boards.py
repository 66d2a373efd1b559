"""Write leaderboards/README.md's index, boards/*.md, pages/*.html, pictures/*.png: `docs/make_boards.py [--check]`.

All figures are computed from the archives in leaderboards/results; the index stands between its two marks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ppbench.base.toml_files import tomllib
from ppbench.claims.claim import papers_of
from ppbench.records.store import Store
from ppbench.report.compare.report import markdown_text
from ppbench.report.page.board import BoardSummary, summary_of
from ppbench.report.page.profiles import labelled_png
from ppbench.report.setting import Setting

HOME = Path(__file__).resolve().parent.parent / "leaderboards"
INDEX = HOME / "README.md"
BEGIN, END = "<!-- begin: python docs/make_boards.py -->\n", "<!-- end -->\n"
FACTS = {
    "Accepted": "accepted",
    "Machine": "machine",
    "ppbench": "ppbench",
    "torch": "torch",
    "Python": "python",
    "Cells": "cells",
    "Processor hours": "cpu_hours",
}
"""What of a manifest stands on a board's page."""
COSTS, DEPLOYED = "cost", "../../docs/deployed.md"
"""The board of costs, and the page on what ships with frameworks."""


def boards() -> list[str]:
    """Return the names of the published boards."""
    return sorted(path.parent.name for path in (HOME / "results").glob("*/records.zip"))


def summary(name: str) -> BoardSummary:
    """Return the summary of a published board, with how it was made."""
    place = HOME / "results" / name
    about: dict[str, Any] = tomllib.loads((place / "manifest.toml").read_text(encoding="utf-8"))
    archive = f"leaderboards/results/{name}/records.zip"
    commands = {
        "Run": about["command"],
        "Open with all cells": f"ppbench leaderboard {archive} --out {name}",
        "Check": f"ppbench verify {archive}",
    }
    facts = {title: str(about[key]) for title, key in FACTS.items()}
    board = summary_of(Store(place / "records.zip"), name)
    picture = f"../pictures/{name}.png" if board.pictures else ""
    links = {one: link for one in board.defenses if (link := paper_page(one))}
    costly = tuple(one for one in board.defenses if name != COSTS and one in priced())
    about = dict(facts=facts, commands=commands, links=links, costs=COSTS, priced=costly)
    return replace(board, picture=picture, **about)


def paper_page(defense: str) -> str:
    """Return the page on what a defense's paper claims, or on the framework that ships it, from a board's; or ""."""
    paper = next((paper for paper in papers_of(defense) if paper.name), None)
    return f"../../docs/claims/{paper.name.lower()}.md" if paper else DEPLOYED if ":" in defense else ""


@lru_cache
def priced() -> frozenset[str]:
    """Return the defenses on the board of costs."""
    return frozenset(record.config.defense.id for record in Store(HOME / "results" / COSTS / "records.zip").load_all())


def markdown(name: str, board: BoardSummary) -> str:
    """Return a board's page for GitHub and the site."""
    links = f"[All boards](../README.md); [this page as one file](../pages/{name}.html).\n"
    return f"{board.markdown()}\n{links}"


def index(summaries: Iterable[BoardSummary]) -> str:
    """Return the table of all boards."""
    lines = [["Board", "Data", "Network", "Seeds", "Undefended", "Says"], ["---"] * 6, *map(_line, summaries)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _line(board: BoardSummary) -> list[str]:
    tables = board.answer.tables
    keys = [table.rows[0].value.entry.key for table in tables]
    undefended = [row.value for table in tables for row in table.rows if row.value.entry.defense.id == "none"]
    cells = (
        _each(key.data for key in keys),
        _each(key.network.split(" (")[0] for key in keys),
        _each(str(table.seeds) for table in tables),
        _uses(undefended),
        _brief(board),
    )
    return [f"[{board.title}](boards/{board.title}.md)", *map(markdown_text, cells)]


def _brief(board: BoardSummary) -> str:
    """Return the first sentence of the headline, of several defenses without their names.

    Where the undefended model learned nothing it goes without saying that no setting is usable.
    """
    first = (re.match(r'(?:"[^"]*"|[^".]|\.(?! ))*', board.answer.headline.words) or [""])[0].removesuffix(".") + "."
    return first if board.costly else re.sub(r" \([^()]*\)|; no setting can be called usable", "", first)


def _each(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _uses(undefended: Sequence[Setting]) -> str:
    """Return the accuracy, or the error, of the undefended models, over all evaluations."""
    shares = [v.accuracy for v in undefended if v.accuracy is not None]
    if shares:
        return " to ".join(dict.fromkeys(f"{end:.1%}" for end in (min(shares), max(shares))))
    errors = [v.mse for v in undefended if v.mse is not None]
    return "MSE " + " to ".join(dict.fromkeys(f"{end:.3g}" for end in (min(errors), max(errors)))) if errors else ""


def pages(names: Sequence[str]) -> dict[Path, bytes]:
    """Return the bytes of every file that is made, by its path."""
    summaries = {name: summary(name) for name in names}
    head, _, rest = INDEX.read_text(encoding="utf-8").partition(BEGIN)
    texts = {INDEX: f"{head}{BEGIN}{index(summaries.values())}{END}{rest.partition(END)[2]}"}
    texts |= {HOME / "boards" / f"{name}.md": markdown(name, board) for name, board in summaries.items()}
    texts |= {HOME / "pages" / f"{name}.html": board.html() for name, board in summaries.items()}
    drawn = {name: board.pictures for name, board in summaries.items() if board.pictures}
    images = {HOME / "pictures" / f"{name}.png": labelled_png(strips) for name, strips in drawn.items()}
    return {path: text.encode() for path, text in texts.items()} | images


def main(words: list[str]) -> int:
    """Write the pages, or with --check say whether they are what the archives give; the exit code."""
    if words not in ([], ["--check"]):
        print("usage: python docs/make_boards.py [--check]", file=sys.stderr)
        return 2
    texts = pages(boards())
    made = {path for folder in ("boards", "pages", "pictures") for path in (HOME / folder).glob("*")}
    old = [path for path, text in texts.items() if not path.is_file() or path.read_bytes() != text]
    left = sorted(made - texts.keys())
    if words and (old or left):
        names = ", ".join(str(path.relative_to(HOME)) for path in [*old, *left])
        print(f"not what the archives give: {names}; run: python docs/make_boards.py", file=sys.stderr)
        return 1
    for path in left if not words else ():
        path.unlink()
    for path in old:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(texts[path])
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
