"""The documentation as a site: built without a warning, whole without a network, made from this program."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import pytest

import ppbench
import ppbench.testing
from ppbench.base.registry import plugins, summary

ROOT = Path(__file__).resolve().parent.parent
for module in ("mkdocs", "material", "mkdocstrings"):
    pytest.importorskip(module, reason="the extra `docs` is not installed")
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="the documents are not here")
LOADED = re.compile(
    r"<(?:script|img|iframe|source|use)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\">]+"
    r"|<link\b(?=[^>]*\brel=\"?(?:stylesheet|preconnect|icon|preload))[^>]*\bhref=\"?(?:https?:)?//[^\">]+"
    r"|(?:url\(|@import )[\"']?(?:https?:)?//[^\"')]+"
)
"""What a browser asks for by itself, of another machine."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # its advertisement for a successor is no warning of ours
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert not done.returncode and "WARNING" not in done.stderr, done.stderr
    return folder


def text(path):
    """Return the words of a page."""
    return " ".join(unescape(re.sub(r"<[^>]+>", "", path.read_text(encoding="utf-8"))).split())


def test_no_page_asks_anything_of_a_network(site):
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 20
    results = [f"{path.name}: {match[0]}" for path in files for match in LOADED.finditer(path.read_text())]
    assert not results, results
    assert LOADED.search('<link href="https://fonts.example/css" rel="stylesheet">')
    assert LOADED.search("<script src=//cdn.example/x.js>") and LOADED.search("a{b:url('https://x.example/f')}")
    assert not LOADED.search('<a href="https://example.org">')


def test_every_document_keeps_its_address_and_can_be_searched(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    pages |= {Path("index.html")}
    assert len(pages) > 10 and not [page for page in pages if not (site / page).is_file()]
    index = json.loads((site / "search/search_index.json").read_text())
    results = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {str(page) for page in pages} <= results | {"index.html"}


@pytest.mark.parametrize("group", ["defenses", "attacks"])
def test_tables_name_every_plugin_as_the_list_has_it(site, group):
    page = text(site / f"{group}.html").replace("`", "")
    own = [plugin for plugin in plugins(group).values() if plugin.target.startswith("ppbench.")]
    assert len(own) > 10
    assert not [one.name for one in own if " ".join(summary(one).replace("`", "").split()) not in page]


def test_the_reference_has_every_name_that_is_exported(site):
    page = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    assert all(
        f"{name}</code></a>" in (site / "api.html").read_text() for name in ("ppbench.evaluate", "ppbench.invert")
    )
    for home in (ppbench, ppbench.testing):
        for name in home.__all__:
            assert name.startswith("__") or f"{home.__name__}.{name}" in page, name
    for name in ("configure", "Question", "compare", "read_paper"):
        assert re.search(rf'id="ppbench[\w.]*\.{name}"', page), name


def test_the_gallery_has_every_board_that_is_kept(site):
    page = text(site / "boards.html")
    manifests = sorted((ROOT / "leaderboards/results").glob("*/manifest.toml"))
    assert manifests
    for manifest in manifests:
        document, name = tomllib.loads(manifest.read_text()), manifest.parent.name
        assert f'href="leaderboards/boards/{name}.html"' in (site / "boards.html").read_text(), manifest
        own = text(site / f"leaderboards/boards/{name}.html")
        assert document["command"] in own and str(document["cells"]) in own, manifest
        assert (site / f"leaderboards/pages/{name}.html").is_file(), "the page as one file"
    assert page.count("If you must choose: ") >= 10 and "undefended 50.1%" in page


def test_a_boards_page_has_its_best_settings_and_all_of_them_in_tables(site):
    """The columns once held the parameter's name for its value, and seeds stood in rows of their own."""
    page = (site / "leaderboards/boards/cifar10-dlnet-two-cores.html").read_text(encoding="utf-8")
    tables = re.findall(r"<table>(.*?)</table>", page, re.DOTALL)
    assert len(tables) == 2 and re.search(r"<details>\s*<summary>All \d+ settings</summary>.*?<table>", page, re.DOTALL)
    cells = [
        re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        for row in re.findall(r"<tr>(.*?)</tr>", tables[1], re.DOTALL)
    ]
    settings = [re.sub(r"</?strong>", "", re.sub(r"<br ?/?>", " ", row[0])) for row in cells if row]
    assert len(settings) == len(set(settings)) > 10
    assert [s for s in settings if re.fullmatch(r"dp sigma=[\d.]+", s)] and not [s for s in settings if "seed" in s]


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path):
    """In a small site with our hook: what is outside docs/ is found there, what is nowhere is told."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "more").mkdir()
    (tmp_path / "README.md").write_text("# Front\n[a guide](docs/guide.md)\n")
    (tmp_path / "more/README.md").write_text("# More\n[up](../docs/guide.md#guide) [data](x.csv)\n")
    (tmp_path / "more/x.csv").write_text("1\n")
    hook = (ROOT / "docs/make_site.py").read_text() + "\ndef generated_pages():\n    return {}\n"
    (tmp_path / "docs/make_site.py").write_text(hook)
    settings = (
        'site_name: x\ndocs_dir: docs\nexclude_docs: "*.py"\nhooks: [docs/make_site.py]\nuse_directory_urls: false\n'
    )
    (tmp_path / "mkdocs.yml").write_text(settings + "plugins: []\nvalidation: { anchors: warn }\n")
    outcomes, pages = [], []
    for link in ("../less/README.md", "../more"):
        (tmp_path / "docs/guide.md").write_text(
            f"# Guide\n[it]({link}) and [the\nfront](../README.md)\n\n~~~\n[a](b)\n~~~\n".replace("~", "`")
        )
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", "site"]
        outcomes.append(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True))
        pages.append((tmp_path / "site/guide.html").read_text())
    assert outcomes[0].returncode and "less/README.md" in outcomes[0].stderr
    assert not outcomes[1].returncode, outcomes[1].stderr
    assert 'href="more/index.html"' in pages[1] and 'href="index.html"' in pages[1] and "[a](b)" in pages[1]
    assert (tmp_path / "site/more/x.csv").exists() and (tmp_path / "site/index.html").exists()


# -- every page, its links, in a browser -------------------------------------------------------------------------------
LINKED = re.compile(r"""<(?:a|img|script|link)\b[^>]*?\s(?:href|src)=["']?([^"'\s>]+)""")
ID = re.compile(r"""\s(?:id|name)=["']?([^"'\s>]+)""")


def broken_links(folder):
    """Return the links of all pages to a file, or to a place in one, that is not there."""
    ids = {path: set(ID.findall(path.read_text(encoding="utf-8"))) for path in folder.rglob("*.html")}
    broken = []
    for path in ids:
        for link in LINKED.findall(path.read_text(encoding="utf-8")):
            address, _, place = unescape(link).partition("#")
            if re.match(r"[a-z]+:|//", address) or path.name == "404.html":
                continue
            there = (path.parent / unquote(address.partition("?")[0])).resolve() if address else path
            leads = there.is_file() and (not place or there not in ids or unquote(place) in ids[there])
            broken += [] if leads else [f"{path.relative_to(folder)}: {link}"]
    return broken


def test_every_internal_link_of_every_page_leads_somewhere(site, tmp_path):
    assert len(list(site.rglob("*.html"))) > 50 and not (broken := broken_links(site)), broken
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x"></a><a href="c.html"></a><a href="b.html#y"></a><img src=d.png>'
    )
    (tmp_path / "b.html").write_text('<p id="x">')
    assert broken_links(tmp_path) == ["a.html: c.html", "a.html: b.html#y", "a.html: d.png"]


@pytest.fixture(scope="module")
def tab(site):
    """A browser's tab, the address of the site on this machine, and what no page may do: errors, failed requests."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium on this machine")
    handler = partial(SilentHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, playwright.sync_playwright() as running:
        Thread(target=server.serve_forever, daemon=True).start()
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page, heard = browser.new_page(viewport={"width": 1400, "height": 900}), []
        page.set_default_timeout(120_000)
        page.on("console", lambda message: heard.append(f"{page.url}: {message.text}"))
        page.on("pageerror", lambda error: heard.append(f"{page.url}: {error}"))
        page.on("requestfailed", lambda request: left(request) or heard.append(f"{page.url}: {request.url}"))
        yield page, f"http://127.0.0.1:{server.server_port}", heard
        browser.close()
        server.shutdown()


def left(request):
    """Return whether a request ended because the tab went on to another page."""
    return "ERR_ABORTED" in (request.failure or "")


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


DAILY = ("boards.html", "notebook.html", "tutorial-data.html")
BOARD, PAPERS = (
    "leaderboards/boards/cifar10-dlnet-two-cores.html",
    ("spn", "mp-dp", "baffle", "fedpc", "pbpfl", "rules"),
)
NEW = (*DAILY, "index.html", "levels.html", "examples.html", "deployed.html", "api.html", "api/run.html", "claims.html")
NEW = (*NEW, BOARD, "leaderboards/boards/cost.html", "leaderboards/index.html", *(f"claims/{p}.html" for p in PAPERS))


@pytest.mark.nightly
def test_every_page_opens_in_a_browser_without_a_complaint(site, tab):
    page, address, heard = tab
    for path in sorted(site.rglob("*.html")):
        page.goto(f"{address}/{path.relative_to(site).as_posix()}", wait_until="load")
        assert page.locator("h1").count() >= 1, path
    assert not heard, heard


@pytest.mark.parametrize("name", [n if n in DAILY else pytest.param(n, marks=pytest.mark.nightly) for n in NEW])
def test_nothing_serious_stands_in_the_way_of_whoever_reads_a_page(tab, name):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page, address, heard = tab
    for width, scheme in ((390, "dark"), (1400, "light"), (390, "light"), (1400, "dark"))[: 2 if name in DAILY else 4]:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{address}/{name}", wait_until="load")
        failures = axe.Axe().run(page).response["violations"]
        serious = {one["id"]: one["nodes"][0]["html"] for one in failures if one["impact"] in ("serious", "critical")}
        assert not serious, (name, width, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not heard, heard


def test_on_a_phone_a_row_of_a_board_is_a_card_and_on_a_wide_screen_labels_of_pictures_have_their_size(tab):
    page, address, _ = tab
    page.goto(f"{address}/{BOARD}", wait_until="load")
    page.set_viewport_size({"width": 390, "height": 900})
    ends = "cells => cells.filter(c => c.offsetParent).map(c => c.getBoundingClientRect().right)"
    cells = page.locator('article table[data-cards] td[data-title="Upload"]')
    assert len(cells.evaluate_all(ends)) >= 6 and max(cells.evaluate_all(ends)) <= 390
    heights = "rows => rows.map(row => row.getBoundingClientRect().height)"
    assert min(page.locator("article table[data-cards] tbody tr").evaluate_all(heights)[:6]) > 100, (
        "cells stand in lines"
    )
    page.set_viewport_size({"width": 1400, "height": 900})
    width, own = page.locator('article img[src*="pictures/"]').evaluate("img => [img.width, img.naturalWidth]")
    assert width == own > 600


@pytest.mark.parametrize(
    ("words", "first"), [("SPN", "defenses"), ("own data", "tutorial-data"), ("re-identified", "levels")]
)
def test_a_search_finds_a_word_where_it_is_explained(tab, words, first):
    page, address, _ = tab
    page.set_viewport_size({"width": 1400, "height": 900})
    page.goto(f"{address}/index.html")
    page.keyboard.press("/")
    page.fill("input.md-search__input", words)
    link = page.locator(".md-search-result__item a").first
    link.wait_for(state="attached")
    assert f"/{first}.html" in link.get_attribute("href")
