"""The page in a real browser: tables, figures, images, hash links, keyboard, phone, print, no scripts, no requests."""

import shutil

import numpy as np
import pytest

from ppbench.federation.contract import Claim
from ppbench.records.schema import Flag
from ppbench.records.store import Images
from ppbench.report.claims import Checked, Unchecked
from ppbench.report.claims.case import Finding
from ppbench.report.page.evaluations import Said
from ppbench.report.page.html import Page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
EVIL = "<img src=x onerror=alert(1)>"
WAIT_MS = 20_000


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Tab:
    """A tab that counts what a page must not do: requests, messages on the console, dialogs."""

    def __init__(self, browser, path, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
        self.context.route("**/*", self._ask)
        self.page, self.path = self.context.new_page(), path
        self.page.set_default_timeout(WAIT_MS)
        self.asked = []
        self.said = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append("dialog"), dialog.dismiss()))

    def _ask(self, route):
        url = route.request.url
        if url.partition("#")[0] == self.path.as_uri():
            route.continue_()
            return
        self.asked.append(url)
        route.abort()

    def __enter__(self):
        self.page.goto(self.path.as_uri())
        return self

    def __exit__(self, *_):
        self.context.close()
        self.check()

    def check(self):
        assert not self.asked and not self.said, (self.asked, self.said)

    def see_all(self):
        """Scroll through the page, a frame a section: what is far away is built when it comes near."""
        self.page.evaluate("""async () => { for (const part of document.querySelectorAll("section")) {
            part.scrollIntoView();
            await new Promise(done => requestAnimationFrame(() => setTimeout(done))); } }""")
        self.page.wait_for_selector("#cells .tabulator-row")


def records_of(make):
    """Return a board with both controls, a defense at three values and an evil one, and members of all of them."""
    flag = Flag(code=EVIL, severity="warning", detail=EVIL)
    found = []
    for defense, top, asr in (("none", 35.0, 0.9), ("full_noise", 6.0, 0.5)):
        found.append(make(defense, None, "dlg", "reconstruction", top))
        found.append(make(defense, None, "mia_loss", "membership", asr))
    for value in (0.01, 0.1, 1.0):
        about = dict(control="alpha2", accuracy=round(0.95 - value / 10, 3))
        found.append(make("spn", value, "dlg", "reconstruction", 30 - 20 * value, error=value, **about))
        found.append(make("spn", value, "strong", "reconstruction", 34 - value, adaptive=True, **about))
        found.append(make("spn", value, "mia_loss", "membership", 0.6, **about))
        found.append(make(EVIL, value, EVIL, "reconstruction", 20 + value, control=EVIL, reason=EVIL, adaptive=True))
    found.append(make(EVIL, 5.0, "dlg", "reconstruction", control=EVIL, status="failed"))
    return [r.model_copy(update={"flags": [flag]}) if r.config.defense.id == EVIL else r for r in found]


def images_of(record):
    if record.config.attack.kind != "reconstruction" or record.status != "complete":
        return None
    truth = np.linspace(0, 1, 4 * 64, dtype=np.float32).reshape(4, 1, 8, 8)
    return Images(truth[:, :, ::-1].copy(), truth)


@pytest.fixture(scope="module")
def page(fabricate, tmp_path_factory):
    claim = Claim("accuracy", 0.9, "digits", "mlp", None, EVIL, setting=EVIL, note=EVIL)
    finding = Finding("falls", "to 12.0%", EVIL, EVIL, EVIL, ("0" * 32,))
    text = Page(
        records_of(fabricate),
        reliability=[EVIL],
        claims=lambda _: EVIL,
        images=images_of,
        said=[Said("spn", "", "spn hides nothing."), Said(EVIL, EVIL, EVIL)],
        outcomes=[Checked("spn", claim, EVIL, finding), Unchecked(EVIL, claim, EVIL)],
    ).html()
    path = tmp_path_factory.mktemp("page") / "leaderboard.html"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def opened(browser, page):
    with Tab(browser, page) as tab:
        tab.page.wait_for_selector(f"{TABLE} .tabulator-row")
        yield tab


@pytest.fixture
def tab(opened):
    """A tab that several tests look at: none of them may take a row out of sight."""
    yield opened
    opened.check()


TABLE = "#b1 .tabulator"


def shown(tab, column):
    """Return a column of the first board as drawn; for figures the first word."""
    script = "([t, c]) => [...document.querySelectorAll(`${t} .tabulator-row`)].map(r => r.querySelector(`[tabulator-field=c${c}]`).innerText.trim())"  # noqa: E501
    return [text.split("\n")[0] for text in tab.page.evaluate(script, [TABLE, column])]


def test_tables_sort_and_filter(browser, page):
    with Tab(browser, page) as tab:
        tab.page.wait_for_selector(f"{TABLE} .tabulator-row")
        assert not tab.page.is_visible("#b1 .plain")
        head = tab.page.locator(f"{TABLE} [role=columnheader][tabulator-field=c6] button")
        for sign, order in ((1, "ascending"), (-1, "descending")):
            head.click()
            drawn = [sign * float(text.split()[0]) for text in shown(tab, 6) if text[0].isdigit()]
            assert len(drawn) >= 6 and drawn == sorted(drawn)
            assert tab.page.get_attribute(f"{TABLE} [tabulator-field=c6][role=columnheader]", "aria-sort") == order
        tab.page.get_by_label("Filter Defense").first.press_sequentially("SPN")
        playwright.expect(tab.page.locator(f"{TABLE} .tabulator-row")).to_have_count(3, timeout=WAIT_MS)
        assert set(shown(tab, 1)) == {"spn"}
        assert "3 of" in tab.page.locator("#b1 output").inner_text()
        # A figure's filter compares: of spn's accuracies .949, .94 and .85 one lies below .9.
        tab.page.get_by_label("Filter Accuracy").first.press_sequentially("<0.9")
        playwright.expect(tab.page.locator(f"{TABLE} .tabulator-row")).to_have_count(1, timeout=WAIT_MS)
        assert shown(tab, 2) == ["85.0 %"]


def test_figures_are_drawn_with_intervals_and_images_are_shown(tab):
    figure = tab.page.locator("#b1 figure.chart[data-chart^=spn]").first
    figure.scroll_into_view_if_needed()
    assert figure.locator("svg").count() == 1 and figure.locator("svg use").count() >= 12, "marks and whiskers"
    assert "alpha2" in "".join(figure.locator("svg text").all_text_contents())
    roc = tab.page.locator(".board details figure.chart").last
    roc.scroll_into_view_if_needed()
    assert float(roc.locator("svg").bounding_box()["width"]) > 300
    sprite = tab.page.locator("#defense-spn .sprite img").first
    sprite.scroll_into_view_if_needed()
    assert sprite.evaluate("async image => (await image.decode(), image.naturalWidth)") > 100
    names = tab.page.locator("#defense-spn .sprite li").all_inner_texts()
    assert [name.split("\n")[0].split()[0] for name in names[:3]] == ["originals", "dlg", "strong"]


def test_pointing_at_a_mark_tells_its_values_and_fades_the_other_lines(tab):
    pointed = """mark => { const box = mark.getBoundingClientRect();
        const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        return hit.querySelector("title").textContent; }"""
    opacity = "line => getComputedStyle(line).opacity"
    figure = tab.page.locator("#b1 figure.chart[data-chart^=spn]").first
    figure.scroll_into_view_if_needed()
    mark = figure.locator(".tip use").first
    assert mark.evaluate(pointed) == "alpha2 = 0.01: accuracy 0.949 (0.933 to 0.962)"
    mark.hover(force=True)
    lines = figure.locator(".tip").all()
    assert [line.evaluate(opacity) for line in lines] == ["1", *["0.15"] * (len(lines) - 1)] and len(lines) == 3


def test_names_stay_text_everywhere(tab):
    tab.see_all()
    for place, least in ((f"{TABLE} .tabulator-row", 3), ("#cells .tabulator-row", 3), ("section.defense", 1)):
        assert tab.page.locator(place, has_text=EVIL).count() >= least
    assert tab.page.locator("img[src=x]").count() == 0
    tab.page.locator("#b1 figure.chart", has_text="img").first.scroll_into_view_if_needed()
    tab.page.locator("#b1 figure.chart .tip use").last.hover(force=True)
    tab.page.wait_for_timeout(200)
    assert tab.page.locator("img[src=x]").count() == 0, "a tooltip"


def test_links_lead_to_a_defense_and_to_a_cell(tab, fabricate):
    tab.page.locator(f"{TABLE} a", has_text="spn").first.click()
    assert tab.page.evaluate("location.hash") == "#defense-spn"
    assert tab.page.locator("#defense-spn h3").is_visible()
    assert "falls" in tab.page.locator("#defense-spn").inner_text()
    tab.page.locator(f"{TABLE} .by a").first.click()
    tab.page.wait_for_selector("#cells .tabulator-row.found")
    cell = tab.page.evaluate("location.hash")[2:]
    assert cell in {r.cell_id for r in records_of(fabricate)}
    assert tab.page.locator("#cells .tabulator-row.found code").inner_text() == cell[:8]


def test_the_keyboard_is_enough(tab):
    tab.page.wait_for_selector(f"{TABLE} .tabulator-row")
    button = tab.page.locator(f"{TABLE} [role=columnheader] button", has_text="Accuracy").first
    button.focus()
    outline = "e => getComputedStyle(e).outlineStyle !== 'none' || getComputedStyle(e).boxShadow !== 'none'"
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Shift+Tab")
    assert button.evaluate(outline), "a focus that nobody sees"
    tab.page.keyboard.press("Enter")
    drawn = [float(text.split()[0]) for text in shown(tab, 2) if text[0].isdigit()]
    assert drawn == sorted(drawn) and len(drawn) > 4
    every, unnamed = (
        "[...document.querySelectorAll('input, button')]",
        "e => !(e.ariaLabel || e.textContent.trim())",
    )
    assert tab.page.evaluate(f"{every}.filter({unnamed}).length") == 0
    menu = tab.page.locator("details.menu summary").first
    menu.focus()
    tab.page.keyboard.press("Enter")
    assert tab.page.locator("details.menu[open] a").first.is_visible()
    tab.page.keyboard.press("Escape")
    assert tab.page.locator("details.menu[open]").count() == 0


def test_without_scripts_the_page_is_whole(browser, page):
    with Tab(browser, page, java_script_enabled=False) as tab:
        assert tab.page.locator("#b1 table.data tbody tr").count() >= 8
        assert tab.page.locator("#b1 table.data").is_visible() and tab.page.locator("#b1 figure svg").first.is_visible()
        assert tab.page.locator("#cells table tbody tr").count() >= 16
        assert tab.page.locator("#defense-spn .sprite img").first.is_visible()
        assert "{" not in tab.page.locator("#b1").inner_text(), "data blocks are not text"


def test_a_phone_does_not_scroll_sideways(browser, page):
    about = dict(viewport={"width": 375, "height": 740}, is_mobile=True, has_touch=True)
    with Tab(browser, page, **about) as tab:
        tab.see_all()
        assert tab.page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]") == [375, 375]
        assert float(tab.page.locator("#b1 figure.chart svg").first.bounding_box()["width"]) > 300


def test_dark_pages_have_light_ink_in_figures_and_print_shows_plain_tables(tab):
    tab.page.emulate_media(color_scheme="dark")
    figure = tab.page.locator("#b1 figure.chart[data-chart^=spn] svg").first
    light = "rgb(230, 235, 241)"
    assert figure.locator("text").first.evaluate("text => getComputedStyle(text).fill") == light
    assert figure.locator(".tip path").first.evaluate("line => getComputedStyle(line).stroke") == light
    tab.page.emulate_media(media="print")
    assert tab.page.locator("#b1 .plain").is_visible() and not tab.page.locator(TABLE).is_visible()
    assert tab.page.locator("#b1 figure.chart svg").first.is_visible()
    assert not tab.page.locator("nav.top").is_visible()
    assert len(tab.page.pdf()) > 10_000
    tab.page.emulate_media(media="screen", color_scheme="light")
