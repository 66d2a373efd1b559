"""Photograph pages for docs/images: `python docs/make_images.py [DIGITS SPN]`, results with their reconstructions.

DIGITS: the --out of `ppbench sweep digits-quick`; SPN: of `ppbench evaluate --defense spn`; without them only the
picture of the board `deployed` is made, from its committed records. Needs playwright (of the extra `dev`) and a
chromium on the PATH. The pages are drawn anew in a folder of their own, so that they name no other.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from ppbench.claims.check import PAPER_CLAIMS
from ppbench.records.archive import unpack_archive
from ppbench.records.store import Store
from ppbench.report.page.board import rebuild

IMAGES = Path(__file__).parent / "images"
DEPLOYED = Path(__file__).parents[1] / "leaderboards" / "results" / "deployed-two-cores" / "records.zip"
DRAWN_FROM = ("records", "times", "ppbench.json", "selftest.json")
"""What of a folder of results its page is drawn from; the command that made it names folders of one machine."""


def page_of(results: Path, place: Path) -> str:
    """Draw the page of some results in a new folder and return its address."""
    for name in DRAWN_FROM:
        source = results / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place / name)
    store = Store(place)
    rebuild(store, PAPER_CLAIMS)
    return store.html_path.resolve().as_uri()


def photograph(page: Page, address: str, heading: str, height: int, name: str) -> None:
    """Write what a window of 1400 by `height` shows from a heading on, from the top where it is ""."""
    page.set_viewport_size({"width": 1400, "height": height})
    page.goto(address)
    if heading:
        place = page.get_by_role("heading", name=heading).locator("visible=true").first
        place.evaluate("e => window.scrollTo(0, e.getBoundingClientRect().top + window.scrollY - 90)")
    page.screenshot(path=IMAGES / name)


def photograph_table(page: Page, address: str, height: int, name: str) -> None:
    """Write the first `height` pixels of the table at a glance."""
    page.set_viewport_size({"width": 1200, "height": 4000})
    page.goto(address)
    box = page.locator("table.glance").first.bounding_box()
    assert box is not None  # it is on every page
    page.screenshot(path=IMAGES / name, clip={**box, "height": height})


def main() -> None:
    """Write the images that README.md, docs/make_site.py and leaderboards/README.md show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="*", help="DIGITS and SPN, or nothing")
    results = parser.parse_args().results
    if len(results) not in (0, 2):
        parser.error("give both folders of results, or none")
    with tempfile.TemporaryDirectory() as made, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        deployed = Path(made) / "deployed"
        if problems := unpack_archive(DEPLOYED, deployed):
            raise SystemExit(problems[0])
        store = Store(deployed)
        rebuild(store, PAPER_CLAIMS)
        photograph_table(browser.new_page(), store.html_path.resolve().as_uri(), 1020, "deployed.png")
        if not results:
            return
        folders = [Path(made) / name for name in ("digits", "spn")]
        for folder in folders:
            folder.mkdir()
        board, defense = (page_of(*pair) for pair in zip(results, folders, strict=True))
        photograph(browser.new_page(), board, "", 1240, "glance.png")
        photograph(browser.new_page(), defense, "Reconstruction and label recovery", 1360, "board.png")
        photograph(browser.new_page(color_scheme="dark"), defense, "Reconstructions", 900, "defense-dark.png")


if __name__ == "__main__":
    main()
