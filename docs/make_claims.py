"""Write docs/claims.md and docs/claims/*.md from our published records: `python docs/make_claims.py [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from ppbench.base.toml_files import tomllib
from ppbench.claims.claim import About
from ppbench.claims.page import (
    JUDGED_FATES,
    PaperPage,
    Source,
    about,
    escape,
    markdown_table,
    paper_pages,
    rules_page,
    sources_of,
)

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS, FIGURES = ROOT / "leaderboards" / "results", ROOT / "benchmarks" / "results"
TIMED = ("baffle", "perturbation", "rounds")
"""Benchmarks whose figures are ratios of times that papers claim."""
INDEX = """Papers print figures and theorems about their defenses. Each has a page here, with its own tables: in each
cell what it prints, what our records say, and a verdict. [How claims are judged](claims/rules.md)."""


def sources() -> Iterator[Source]:
    """Yield the published records with their boards' pages and commands, and the benchmarks."""
    for source in sources_of(sorted(RESULTS.glob("*/records.zip"))):
        manifest = tomllib.loads((RESULTS / source.name / "manifest.toml").read_text(encoding="utf-8"))
        link = f"../../leaderboards/boards/{source.name}.md"
        yield replace(source, link=link, command=manifest["command"])
    run = " ".join(f"bench_{name}.py" for name in TIMED)
    yield Source("benchmark", (), "../benchmarks.md", f"pytest {run} --benchmark-only")


def pages() -> dict[Path, str]:
    """Return the text of every page, by its path."""
    known = tuple(sources())
    papers = [page for page in paper_pages(known, [FIGURES / f"{name}.json" for name in TIMED]) if page.paper.name]
    texts = {DOCS / "claims" / f"{file_name(page)}.md": page.markdown() for page in papers}
    texts[DOCS / "claims" / "rules.md"] = rules_page()
    return texts | {DOCS / "claims.md": index(papers, known)}


def file_name(page: PaperPage) -> str:
    """Return the name of a paper's page, without its ending: "mp-dp"."""
    return page.paper.name.lower()


def index(papers: Sequence[PaperPage], known: Sequence[Source]) -> str:
    """Return the page that names all papers, with the tallies of their facts."""
    rows = [["Paper", "Its central claims", *(f"{kind.capitalize()}: fall, hold, open" for kind in get_args(About))]]
    for page in papers:
        link = f"[{escape(page.name)}](claims/{file_name(page)}.md)"
        rows.append([link, escape(page.answer()), *(", ".join(tally(page, kind)) for kind in get_args(About))])
    total = [str(sum(page.count(kind, fate) for page in papers for kind in get_args(About))) for fate in JUDGED_FATES]
    every = sum(len(page.facts) for page in papers)
    counted = f"Of {every} facts {total[0]} fall, {total[1]} hold and {total[2]} are inconclusive."
    closing = f'A fact is counted once, in however many cells; "open" are all without a verdict. {counted}'
    return (
        "\n\n".join(
            ["# What papers claim, and what the records say", INDEX, markdown_table(rows), closing, about(known)]
        )
        + "\n"
    )


def tally(page: PaperPage, kind: About) -> tuple[str, str, str]:
    """Return how many facts of a kind fall, hold, and have no verdict."""
    falls, holds = (page.count(kind, fate) for fate in JUDGED_FATES[:2])
    every = sum(fact.leading.claim.about == kind for fact in page.facts)
    return str(falls), str(holds), str(every - falls - holds)


def main(words: list[str]) -> int:
    """Write the pages, or with --check say whether they are what the records give; the exit code."""
    if words not in ([], ["--check"]):
        print("usage: python docs/make_claims.py [--check]", file=sys.stderr)
        return 2
    texts = pages()
    old = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    left = sorted(set((DOCS / "claims").glob("*.md")) - texts.keys())
    if words and (old or left):
        names = ", ".join(str(path.relative_to(DOCS)) for path in [*old, *left])
        print(f"not what the records give: {names}; run: python docs/make_claims.py", file=sys.stderr)
        return 1
    for path in [] if words else left:
        path.unlink()
    for path in old:
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
