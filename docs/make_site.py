"""What `mkdocs build` (mkdocs.yml) adds to the documents: pages from the program, and what lies outside docs/.

A link is written as it works in the repository. Files outside docs/ that documents link to become part of the site,
pages as pages, so that it is whole without a network. Nothing of it is kept, so it cannot become old.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FRONT = "index.md"
"""The README as a page of the site: its first."""
WIDE = "---\nhide: [toc]\n---\n\n"
"""Gives a page of tables the place of its table of contents."""
IMAGES = {"The page, at a glance": "glance.png", "A board": "board.png", "A defense, in the dark": "defense-dark.png"}
REFERENCE = {
    "Evaluate": [
        "ppbench.run.config:configure",
        "ppbench.run.evaluation:Evaluation",
        "ppbench.report.compare.outcome:compare",
    ],
    "Ask another question": ["ppbench.questions.base:Question"],
    "State what a paper claims": ["ppbench.claims.claim:read_paper", "ppbench.claims.claim:Claim"],
}
"""What is public beside the names that `ppbench` and `ppbench.testing` export."""


# -- links ------------------------------------------------------------------------------------------------------------
def in_site(path: str) -> str:
    """Return where a file of the repository lies in the site."""
    return FRONT if path == "README.md" else path.removeprefix("docs/")


def in_repository(uri: str) -> str:
    """Return where a page of the site lies in the repository."""
    return "README.md" if uri == FRONT else f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri


def target(home: str, link: str) -> str:
    """Return the file of the repository that a link of another one leads to; of a folder, its README."""
    path = os.path.normpath(PurePosixPath(home).parent / link)
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def linked(home: str) -> Iterator[str]:
    """Yield the files of the repository that a page of it links to."""
    for part in FENCE.split((ROOT / home).read_text(encoding="utf-8"))[::2]:
        yield from (target(home, match[2]) for match in LINK.finditer(part))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with links that lead where they lead in the repository."""
    home, uri = in_repository(page.file.src_uri), page.file.src_uri
    if uri.startswith("leaderboards/"):
        page.meta["hide"] = ["toc"]  # as `WIDE`: GitHub would show it as text

    def led(match: re.Match[str]) -> str:
        there = os.path.relpath(in_site(target(home, match[2])), PurePosixPath(uri).parent)
        return f"{match[1]}{there}{match[3]}"

    if not (ROOT / home).is_file():
        return markdown  # made below, with the site's own links
    parts = FENCE.split(markdown)
    return "".join(part if number % 2 else LINK.sub(led, part) for number, part in enumerate(parts))


# -- pages ------------------------------------------------------------------------------------------------------------
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made from the program, and what documents link to outside docs/, and what that links to."""
    for name, text in generated_pages().items():
        files.append(File.generated(config, name, content=text))
    left = ["README.md", *(f"docs/{file.src_uri}" for file in files if (ROOT / "docs" / file.src_uri).suffix == ".md")]
    met: set[str] = set()
    while left:
        path = left.pop()
        if path in met or not (ROOT / path).is_file():
            continue  # mkdocs reports a link that leads nowhere
        met.add(path)
        if not path.startswith("docs/"):
            files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
        left += linked(path) if path.endswith(".md") else ()
    return files


def generated_pages() -> dict[str, str]:
    """Return the pages that are made from the program and from results, by name."""
    return {"defenses.md": defenses(), "attacks.md": attacks(), "api.md": reference(), "boards.md": boards()}


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def ours(group: str) -> list[tuple[str, str, Any]]:
    """Return the plugins of this package: name, what in one line as `ppbench list` has it, and the class."""
    from ppbench.base.registry import plugins, summary

    own = [plugin for plugin in plugins(group).values() if plugin.target.startswith("ppbench.")]
    return [(plugin.name, summary(plugin), plugin.loaded) for plugin in own]


def named(names: Iterable[str]) -> str:
    """Return names in alphabetical order, as code."""
    return ", ".join(f"`{name}`" for name in sorted(names))


def defenses() -> str:
    """Return the page of defenses."""
    from ppbench.claims.claim import papers_of

    known = [(name, attack) for name, _, attack in ours("attacks") if attack.adaptive]
    rows = []
    for name, what, plugin in ours("defenses"):
        knows = named(attack for attack, kind in known if name in (kind.targets or ()))
        papers = papers_of(name)
        claims = ", ".join(f"[{len(paper.claims(name))}](claims/{paper.name.lower()}.md)" for paper in papers)
        rows.append([f"`{name}`", what, plugin.paper, claims, f"`{plugin.control}`" if plugin.control else "", knows])
    head = ["Name", "What", "Paper", "Claims", "Control parameter", "Attacks that know it"]
    return (
        WIDE + "# Defenses\n\nAs `ppbench list defenses` has them; `--defense NAME`. Yours is added by "
        "[a package of your own](tutorial-defense.md).\n\n" + table(head, rows)
    )


def attacks() -> str:
    """Return the page of attacks, a table for each question."""
    parts = [
        WIDE
        + "# Attacks\n\nAs `ppbench list attacks` has them; `--attack NAME,NAME`. `quick`, `standard` and `all` stand "
        "for several ([what can be asked](using.md)). An attack that is built for a defense runs on that. "
        "What each party sees: "
        "[threat models](threat-models.md). Yours is added by [a package of your own](tutorial-attack.md).\n"
    ]
    every = ours("attacks")
    head = ["Name", "What", "From", "Built for", "Threat models", "Runs"]
    for kind in dict.fromkeys(attack.kind for _, _, attack in every):
        rows = [
            [f"`{name}`", what, attack.reference, named(attack.targets or ()), named(attack.threats),
             f"in audits ({attack.audit})" if attack.audit else "by `standard`" if attack.standard else "when named"]
            for name, what, attack in every if attack.kind == kind
        ]  # fmt: skip
        parts.append(f"## {kind.replace('_', ' ').capitalize()}\n\n{table(head, rows)}")
    return "\n".join(parts)


def reference() -> str:
    """Return the page of the API: what is exported, and what is public beside it, each as mkdocstrings shows it."""
    parts = ["# API\n\nNames are loaded on first use. Everything else may change from version to version.\n"]
    for module in ("ppbench", "ppbench.testing"):
        home = importlib.import_module(module)
        parts.append(f"## `{module}`\n\n{(home.__doc__ or '').strip()}\n")
        for name in home.__all__:
            if not name.startswith("__"):
                parts.append(shown(f"{home._HOME.get(name, module)}.{name}", f"{module}.{name}"))
    for title, names in REFERENCE.items():
        parts += [f"## {title}\n", *(shown(name.replace(":", "."), name.replace(":", ".")) for name in names)]
    return "\n".join(parts)


def shown(path: str, heading: str) -> str:
    """Return what has mkdocstrings show a name, under the name by which it is imported."""
    return f"::: {path}\n    options:\n      heading: {heading}\n      toc_label: {heading.rpartition('.')[2]}\n"


def boards() -> str:
    """Return the gallery: pages in pictures, and what was run for each board that is kept in the repository."""
    parts = ["# Boards\n\nWhat a run gives: a page that is one file, here in pictures, and tables.\n"]
    parts += [f"![{title}](images/{file})\n\n*{title}*\n" for title, file in IMAGES.items()]
    parts.append(
        "Results that the project has produced itself, each with its page; [what they say](leaderboards/README.md).\n"
    )
    manifests = sorted((ROOT / "leaderboards" / "results").glob("*/manifest.toml"))
    if not manifests:
        raise PluginError("leaderboards/results holds no manifest: the gallery would be empty")
    rows = []
    for manifest in manifests:
        facts, name = tomllib.loads(manifest.read_text(encoding="utf-8")), manifest.parent.name
        seeds = ", ".join(map(str, facts["seeds"]))
        rows.append([f"[{name}](leaderboards/boards/{name}.md)", f"`{facts['command']}`", facts["cells"], seeds])
    return "\n".join([*parts, table(["Board", "Command", "Cells", "Seeds"], rows)])
