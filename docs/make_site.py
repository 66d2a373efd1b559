"""What `mkdocs build` (mkdocs.yml) adds to the documents: pages from the program, and what lies outside docs/.

A link is written as it works in the repository. Files outside docs/ that documents link to become part of the site,
pages as pages, so that it is whole without a network. Nothing of it is kept, so it cannot become old.
"""

from __future__ import annotations

import ast
import base64
import importlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
FRONT = "index.md"
"""The README as a page of the site: its first."""
WIDE = "---\nhide: [toc]\n---\n\n"
"""Gives a page of tables the place of its table of contents."""
IMAGES = {"The page, at a glance": "glance.png", "A board": "board.png", "A defense, in the dark": "defense-dark.png"}
REFERENCE = (
    "ppbench.run.config.configure",
    "ppbench.run.evaluation.Evaluation",
    "ppbench.report.compare.outcome.compare",
    "ppbench.questions.base.Question",
    "ppbench.claims.claim.read_paper",
    "ppbench.claims.claim.Claim",
)
"""What is public beside the names that `ppbench` and `ppbench.testing` export."""
BOARDS, PICTURES = ROOT / "leaderboards", ROOT / "leaderboards" / "pictures"
NOTEBOOK = ROOT / "examples" / "notebook" / "explore.ipynb"
BOOSTS = {"levels.md": 4.0, "tutorial-data.md": 4.0, "defenses.md": 3.0, "boards.md": 2.0, "deployed.md": 2.0}
MUTED = ("claims", "benchmarks", "api", "cli", "columns", "CONTRIBUTING", "leaderboards/boards", "examples")
"""In a search, pages that explain a word come before long tables that contain it."""
PAPER_BOOST = 0.001
"""Boost of papers' pages: their titles are the defenses' names, which are explained elsewhere."""


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


def linked(home: str, text: str) -> Iterator[str]:
    """Yield the files of the repository that a page of it, or with links from its top, links to."""
    for part in FENCE.split(text)[::2]:
        yield from (target(home, match[2]) for match in LINK.finditer(part))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with links that lead where they lead in the repository."""
    home, uri = in_repository(page.file.src_uri), page.file.src_uri
    muted = PAPER_BOOST if uri.startswith("claims/") else 0.2 if uri.startswith(MUTED) else 1.0
    page.meta["search"] = {"boost": BOOSTS.get(uri, muted)}
    if uri.startswith("leaderboards/"):
        page.meta["hide"] = ["toc"]  # as `WIDE`: GitHub would show it as text

    def led(match: re.Match[str]) -> str:
        there = os.path.relpath(in_site(target(home, match[2])), PurePosixPath(uri).parent)
        return f"{match[1]}{there}{match[3]}"

    if not (ROOT / home).is_file():
        return markdown  # made below, with the site's own links
    parts = FENCE.split(markdown)
    return "".join(part if number % 2 else LINK.sub(led, part) for number, part in enumerate(parts))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Return a page whose search, to the theme a dialog without a name, has one."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


# -- pages ------------------------------------------------------------------------------------------------------------
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every page that a name with a star in the navigation fits there; a name that fits none is left out."""
    made = [*generated_pages(), *(path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md"))]
    made += [path.relative_to(ROOT).as_posix() for path in BOARDS.glob("boards/*.md")]
    config.nav = filled(config.nav or [], sorted(made))
    return config


def filled(entries: Iterable[Any], pages: Iterable[str]) -> list[Any]:
    """Return entries of the navigation with the pages that names with a star fit."""
    results: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            results += [{n: filled(inner, pages) if isinstance(inner, list) else inner} for n, inner in entry.items()]
        else:
            results += [page for page in pages if PurePosixPath(page).match(entry)] if "*" in entry else [entry]
    return results


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made from the program, and what documents link to outside docs/, and what that links to."""
    left = ["README.md", *(f"docs/{file.src_uri}" for file in files if (ROOT / "docs" / file.src_uri).suffix == ".md")]
    for name, content in generated_pages().items():
        files.append(File.generated(config, name, content=content))
        left += linked(name, content) if isinstance(content, str) else ()
    for picture in PICTURES.glob("*.png"):
        files.append(File.generated(config, f"leaderboards/pictures/{picture.name}", abs_src_path=str(picture)))
    met: set[str] = set()
    while left:
        path = left.pop()
        if path in met or not (ROOT / path).is_file():
            continue  # mkdocs reports a link that leads nowhere
        met.add(path)
        if not path.startswith("docs/"):
            files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
        left += linked(path, (ROOT / path).read_text(encoding="utf-8")) if path.endswith(".md") else ()
    return files


@lru_cache
def generated_pages() -> dict[str, str | bytes]:
    """Return the pages that are made from the program and from results, and their pictures, by name."""
    own = {"defenses.md": defenses(), "attacks.md": attacks(), "boards.md": gallery(), "examples.md": examples()}
    return {**own, **reference(), "notebook.md": notebook_page(), **notebook_images()}


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


# -- the API, a page for each room -------------------------------------------------------------------------------------
def reference() -> dict[str, str]:
    """Return the pages of the API: an index of what is public, and of each room what mkdocstrings shows."""
    rooms: dict[str, list[tuple[str, str]]] = {}
    for path, name in public_names():
        rooms.setdefault(path.split(".")[1], []).append((path, name))
    head, rows, pages = ["Name", "What"], [], {}
    for room, names in sorted(rooms.items()):
        about = f"`ppbench.{room}`: {first_line(importlib.import_module(f'ppbench.{room}').__doc__)}"
        shown = (
            f"::: {path}\n    options:\n      heading: {name}\n      toc_label: {name.rpartition('.')[2]}\n"
            for path, name in names
        )
        pages[f"api/{room}.md"] = f"# API: {room}\n\n{about}\n\n" + "\n".join(shown)
        rows += [[f"[`{name}`](api/{room}.md)", first_line(documentation(path))] for path, name in names]
    start = "# API\n\nNames are loaded on first use. Everything else may change from version to version.\n\n"
    return {"api.md": f"{start}{table(head, rows)}", **pages}


def public_names() -> Iterator[tuple[str, str]]:
    """Yield what is public: where it is, and the name under which it is imported."""
    for module in ("ppbench", "ppbench.testing"):
        home = importlib.import_module(module)
        for name in home.__all__:
            if not name.startswith("__"):
                yield f"{home._HOME.get(name, module)}.{name}", f"{module}.{name}"
    yield from ((path, path) for path in REFERENCE)


def documentation(path: str) -> str:
    """Return the docstring of a class, a function or a module, "" of a constant: that of its class says nothing."""
    module, _, name = path.rpartition(".")
    public = getattr(importlib.import_module(module), name)
    return "" if isinstance(public, tuple | str | dict) else public.__doc__ or ""


def first_line(text: str | None) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join((text or "").strip().split("\n\n")[0].split())


# -- the gallery of boards ---------------------------------------------------------------------------------------------
KINDS = {"parquet:cifar10": "Color photographs (CIFAR-10)", "digits": "Handwritten digits", "csv": "Tables of people"}
KINDS["parquet:mnist"] = KINDS["digits"]
"""What boards are grouped by: a title for the data in their names."""
COSTS = "Bytes, memory and time of a client"
LINE = re.compile(r"^\| \[([\w-]+)\]\(boards/[\w-]+\.md\) \| (.+) \|$", re.MULTILINE)
CHOICE = re.compile(r"^## If you must choose\n\n(.+)$", re.MULTILINE)
SENTENCE = re.compile(r"(?<=\.) (?=[\w\\*])")


def gallery() -> str:
    """Return the gallery: of each published board picture, values, verdict and choice, as its own page has them."""
    cards: dict[str, list[tuple[float, str]]] = {}
    for name, line in LINE.findall((BOARDS / "README.md").read_text(encoding="utf-8")):
        kind, accuracy, text = card(name, *line.split(" | "))
        cards.setdefault(kind, []).append((-accuracy, text))
    if not cards:
        raise PluginError("leaderboards/README.md holds no board: the gallery would be empty")
    kinds = list(dict.fromkeys([*KINDS.values(), *cards]))
    kinds = [*(kind for kind in kinds if kind in cards and kind != COSTS), *({COSTS} & cards.keys())]
    parts = [f"## {kind}\n\n" + "\n".join(text for _, text in sorted(cards[kind])) for kind in kinds]
    parts += ["## What a run of yours gives\n", "A page that is one file, and tables.\n"]
    parts += [f"![{title}](images/{file})\n\n*{title}*\n" for title, file in IMAGES.items()]
    start = (
        "# Boards\n\nResults that the project produced itself; of each kind of data the most accurate undefended model "
    )
    return "\n".join([start + "first. The words: [levels](levels.md#the-words-of-a-verdict).\n", *parts])


def card(name: str, data: str, network: str, seeds: str, undefended: str, verdict: str) -> tuple[str, float, str]:
    """Return of a line of the boards' table the kind of data, the undefended accuracy in percent, and its card."""
    page = (BOARDS / "boards" / f"{name}.md").read_text(encoding="utf-8")
    kind = KINDS.get(data.replace("\\", ""), KINDS.get(data.partition(":")[0], data))
    facts = f"{data}, {network}; {seeds} seed{'' if seeds == '1' else 's'}; undefended {undefended}"
    lines = [f"### [{name}](leaderboards/boards/{name}.md)", f"{facts}.", f"**{verdict}**"]
    if (PICTURES / f"{name}.png").is_file():
        lines.append(f"![Victims of {name}, and what attacks rebuilt](leaderboards/pictures/{name}.png)")
    if "## What a client pays" in page:
        kind = COSTS
    elif chosen := CHOICE.search(page):
        lines.append(f"*If you must choose*: {' '.join(SENTENCE.split(chosen[1])[:2])}")
    accuracy = re.match(r"[\d.]+(?=%)", undefended)
    return kind, float(accuracy[0]) if accuracy else 0.0, "\n\n".join(lines) + "\n"


# -- examples, and the notebook with its outputs -----------------------------------------------------------------------
def examples() -> str:
    """Return the page of examples: what each is, in its own words, with a link to its files."""
    parts = ["# Examples\n\n[A notebook with its outputs](notebook.md): load a board, plot it, rebuild an image.\n"]
    parts.append("## Packages to copy\n")
    for path in sorted((ROOT / "examples").glob("my_*/README.md")):
        home = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        about = site_links(first_line(text.partition("\n\n")[2]), home)
        parts.append("\n\n".join([f"### [{path.parent.name}]({home})", about, *FENCE.findall(text), ""]))
    for title, folder in (("What was found in frameworks", "findings"), ("Guesses on a transcript", "outside")):
        parts.append(f"## {title}\n")
        for path in sorted((ROOT / "examples" / folder).glob("*.py")):
            about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            parts.append(f"### [{path.stem}]({path.relative_to(ROOT)})\n\n```text\n{about}\n```\n")
    return "\n".join(parts)


def site_links(markdown: str, home: str) -> str:
    """Return Markdown of a file of the repository with links that lead where they lead from the site's root."""
    return LINK.sub(lambda match: f"{match[1]}{in_site(target(home, match[2]))}{match[3]}", markdown)


def cells() -> list[tuple[int, dict[str, Any]]]:
    """Return the cells of the notebook with their numbers."""
    return list(enumerate(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]))


def notebook_page() -> str:
    """Return the notebook as a page: text, code, and the outputs that it keeps."""
    parts: list[str] = []
    for number, cell in cells():
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(site_links(source, NOTEBOOK.relative_to(ROOT).as_posix()))
            continue
        parts.append(f"```python\n{source}\n```")
        for place, output in enumerate(cell["outputs"]):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![{cell['metadata']['alt']}](notebook/{number}-{place}.png)")
            elif "text/html" in data:
                frame = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
                parts.append(re.sub(r"<table[^>]*>", "<table>", frame))  # the theme lets tables without a class scroll
            else:
                parts.append("```text\n" + "".join(data.get("text/plain", output.get("text", ""))).strip() + "\n```")
    return "\n\n".join(parts) + "\n"


def notebook_images() -> dict[str, bytes]:
    """Return the pictures among the outputs of the notebook by name."""
    return {
        f"notebook/{number}-{place}.png": base64.b64decode(output["data"]["image/png"])
        for number, cell in cells()
        for place, output in enumerate(cell.get("outputs", ()))
        if "image/png" in output.get("data", {})
    }
