"""The page in a real browser: tables, figures, images, hash links, keyboard, phone, print, no scripts, no requests."""

import csv
import io
import json
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ppbench.claims.case import ClaimFinding
from ppbench.claims.check import Checked, Unchecked
from ppbench.claims.claim import Claim
from ppbench.records.schema import Flag
from ppbench.records.store import CellImages, Store
from ppbench.report.controls import Check
from ppbench.report.page.boards import DefenseSentence
from ppbench.report.page.html import Page

DRAWN = True

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
EVIL = "<img src=x onerror=alert(1)>"
WAIT_MS = 20_000


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def shown(browser, board, **options):
    """Yield a tab, and what it did that a page must not do: requests, messages on the console, dialogs."""
    context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
    page, heard = context.new_page(), []

    def ask(route):
        if route.request.url.partition("#")[0] == board.as_uri():
            route.continue_()
        else:
            heard.append(route.request.url)
            route.abort()

    context.route("**/*", ask)
    page.set_default_timeout(WAIT_MS)
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("dialog", lambda dialog: (heard.append("dialog"), dialog.dismiss()))
    page.goto(board.as_uri())
    yield page, heard
    context.close()
    assert not heard, heard


def see_all(page):
    """Scroll through the page, a frame a section, all unfolded: what is far away is built when it comes near."""
    page.evaluate("""async () => { document.querySelectorAll("main details").forEach(one => { one.open = true; });
        for (const part of document.querySelectorAll("section")) {
        part.scrollIntoView();
        await new Promise(done => requestAnimationFrame(() => setTimeout(done))); } }""")
    page.wait_for_selector("#cells .tabulator-row")


def records_of(make):
    """Return a board with both controls, a defense at three values and an evil one, and members of all of them."""
    flag = Flag(code=EVIL, severity="warning", detail=EVIL)
    results = []
    for defense, top, asr in (("none", 35.0, 0.9), ("full_noise", 6.0, 0.5)):
        results.append(make(defense, None, "dlg", "reconstruction", top))
        results.append(make(defense, None, "mia_loss", "membership", asr))
    for value in (0.01, 0.1, 1.0):
        about = dict(control="alpha2", accuracy=round(0.95 - value / 10, 3))
        results.append(make("spn", value, "dlg", "reconstruction", 30 - 20 * value, error=value, **about))
        results.append(make("spn", value, "strong", "reconstruction", 34 - value, adaptive=True, **about))
        results.append(make("spn", value, "mia_loss", "membership", 0.6, **about))
        results.append(make(EVIL, value, EVIL, "reconstruction", 20 + value, control=EVIL, reason=EVIL, adaptive=True))
    results.append(make(EVIL, 5.0, "dlg", "reconstruction", control=EVIL, status="failed"))
    return [r.model_copy(update={"flags": [flag]}) if r.config.defense.id == EVIL else r for r in results]


def images_of(record):
    if record.config.attack.kind != "reconstruction" or record.status != "complete":
        return None
    truth = np.linspace(0, 1, 4 * 64, dtype=np.float32).reshape(4, 1, 8, 8)
    return CellImages(truth[:, :, ::-1].copy(), truth)


@pytest.fixture(scope="module")
def board(fabricate, tmp_path_factory):
    claim = Claim("accuracy", 0.9, "digits", "mlp", None, EVIL, setting=EVIL, note=EVIL)
    finding = ClaimFinding("falls", "to 12.0%", EVIL, EVIL, EVIL, ("0" * 32,))
    text = Page(
        records_of(fabricate), harness=Check("harness", True, EVIL), claims=lambda _: EVIL, images=images_of,
        sentences=[DefenseSentence("spn", "", "spn hides nothing."), DefenseSentence(EVIL, EVIL, EVIL)],
        outcomes=[Checked("spn", claim, EVIL, finding), Unchecked(EVIL, claim, EVIL)],
    ).html()  # fmt: skip
    path = tmp_path_factory.mktemp("page") / "leaderboard.html"
    path.write_text(text, encoding="utf-8")
    return path


TABLE = "#b1 .tabulator"


@pytest.fixture(scope="module")
def opened(browser, board):
    with shown(browser, board) as (page, heard):
        page.wait_for_selector(f"{TABLE} .tabulator-row")
        page.evaluate("document.querySelectorAll('.board details').forEach(one => { one.open = true; })")
        yield page, heard


@pytest.fixture
def page(opened):
    """A tab that several tests look at: none of them may take a row out of sight."""
    yield opened[0]
    assert not opened[1], opened[1]


def drawn(page, column):
    """Return a column of the first board as drawn; for figures the first word."""
    script = "([t, c]) => [...document.querySelectorAll(`${t} .tabulator-row`)].map(r => r.querySelector(`[tabulator-field=c${c}]`).innerText.trim())"  # noqa: E501
    return [text.split("\n")[0] for text in page.evaluate(script, [TABLE, column])]


def test_tables_sort_and_filter(browser, board):
    with shown(browser, board) as (page, _):
        page.wait_for_selector(f"{TABLE} .tabulator-row")
        assert not page.is_visible("#b1 .plain")
        head = page.locator(f"{TABLE} [role=columnheader][tabulator-field=c6] button")
        for sign, order in ((1, "ascending"), (-1, "descending")):
            head.click()
            figures = [sign * float(text.split()[0]) for text in drawn(page, 6) if text[0].isdigit()]
            assert len(figures) >= 6 and figures == sorted(figures)
            assert page.get_attribute(f"{TABLE} [tabulator-field=c6][role=columnheader]", "aria-sort") == order
        page.get_by_label("Filter Defense").first.press_sequentially("SPN")
        playwright.expect(page.locator(f"{TABLE} .tabulator-row")).to_have_count(3, timeout=WAIT_MS)
        assert set(drawn(page, 1)) == {"spn"}
        assert "3 of" in page.locator("#b1 output").inner_text()
        # A figure's filter compares what is shown: of spn's 94.9, 94.0 and 85.0 % one lies below 90.
        page.get_by_label("Filter Accuracy").first.press_sequentially("<90")
        playwright.expect(page.locator(f"{TABLE} .tabulator-row")).to_have_count(1, timeout=WAIT_MS)
        assert drawn(page, 2) == ["85.0 %"]


def test_figures_are_drawn_with_intervals_and_images_are_shown(page):
    figure = page.locator("#b1 figure.chart[data-chart^=spn]").first
    figure.scroll_into_view_if_needed()
    assert figure.locator("svg").count() == 1 and figure.locator("svg use").count() >= 12, "marks and whiskers"
    assert "alpha2" in "".join(figure.locator("svg text").all_text_contents())
    page.evaluate("location.hash = '#b2'")
    roc = page.locator("#b2 details figure.chart").last
    roc.scroll_into_view_if_needed()
    assert float(roc.locator("svg").bounding_box()["width"]) > 300
    page.evaluate("location.hash = '#b1'")
    sprite = page.locator("#defense-spn .sprite img").first
    sprite.scroll_into_view_if_needed()
    assert sprite.evaluate("async image => (await image.decode(), image.naturalWidth)") > 100
    names = page.locator("#defense-spn .sprite li").all_inner_texts()
    assert [name.split("\n")[0].split()[0] for name in names[:3]] == ["originals", "dlg", "strong"]


def test_pointing_at_a_mark_tells_its_values_and_fades_the_other_lines(page):
    pointed = """mark => { const box = mark.getBoundingClientRect();
        const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
        return hit.querySelector("title").textContent; }"""
    opacity = "line => getComputedStyle(line).opacity"
    figure = page.locator("#b1 figure.chart[data-chart^=spn]").first
    figure.scroll_into_view_if_needed()
    mark = figure.locator(".tip use").first
    assert mark.evaluate(pointed) == "alpha2 = 0.01: accuracy 0.949 (0.933 to 0.962)"
    mark.hover(force=True)
    lines = figure.locator(".tip").all()
    assert [line.evaluate(opacity) for line in lines] == ["1", *["0.15"] * (len(lines) - 1)] and len(lines) == 3


def test_names_stay_text_everywhere(page):
    see_all(page)
    for place, least in ((f"{TABLE} .tabulator-row", 3), ("#cells .tabulator-row", 3), ("section.defense", 1)):
        assert page.locator(place, has_text=EVIL).count() >= least
    assert page.locator("img[src=x]").count() == 0
    page.locator("#b1 figure.chart", has_text="img").first.scroll_into_view_if_needed()
    page.locator("#b1 figure.chart .tip use").last.hover(force=True)
    page.wait_for_timeout(200)
    assert page.locator("img[src=x]").count() == 0, "a tooltip"


def test_links_lead_to_a_defense_and_to_a_cell(page, fabricate):
    page.locator(f"{TABLE} a", has_text="spn").first.click()
    assert page.evaluate("location.hash") == "#defense-spn"
    assert page.locator("#defense-spn h3").is_visible()
    assert "falls" in page.locator("#defense-spn").text_content()
    page.locator(f"{TABLE} .by a").first.click()
    page.wait_for_selector("#cells .tabulator-row.found")
    cell = page.evaluate("location.hash")[2:]
    assert cell in {r.cell_id for r in records_of(fabricate)}
    assert page.locator("#cells .tabulator-row.found code").inner_text() == cell[:8]


def test_the_keyboard_is_enough(page):
    page.wait_for_selector(f"{TABLE} .tabulator-row")
    button = page.locator(f"{TABLE} [role=columnheader] button", has_text="Accuracy").first
    button.focus()
    outline = "e => getComputedStyle(e).outlineStyle !== 'none' || getComputedStyle(e).boxShadow !== 'none'"
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    assert button.evaluate(outline), "a focus that nobody sees"
    page.keyboard.press("Enter")
    figures = [float(text.split()[0]) for text in drawn(page, 2) if text[0].isdigit()]
    assert figures == sorted(figures) and len(figures) > 4
    unnamed = "every => every.filter(e => !(e.ariaLabel || e.textContent.trim())).length"
    assert page.locator("input, button").evaluate_all(unnamed) == 0
    menu = page.locator("details.menu summary").first
    menu.focus()
    page.keyboard.press("Enter")
    assert page.locator("details.menu[open] a").first.is_visible()
    page.keyboard.press("Escape")
    assert page.locator("details.menu[open]").count() == 0


def test_without_scripts_the_page_is_whole(browser, board):
    with shown(browser, board, java_script_enabled=False) as (page, _):
        assert page.locator("#b1 table.data tbody tr").count() >= 8
        assert page.locator("#b1 table.data").is_visible() and page.locator("#b1 figure svg").first.is_visible()
        assert page.locator("#cells table tbody tr").count() >= 16
        assert page.locator("#defense-spn .sprite img").first.is_visible()
        assert "{" not in page.locator("#b1").inner_text(), "data blocks are not text"


def test_a_phone_does_not_scroll_sideways(browser, board):
    about = dict(viewport={"width": 375, "height": 740}, is_mobile=True, has_touch=True)
    with shown(browser, board, **about) as (page, _):
        see_all(page)
        assert page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]") == [375, 375]
        assert float(page.locator("#b1 figure.chart svg").first.bounding_box()["width"]) > 300


def test_dark_pages_have_light_ink_in_figures_and_print_shows_plain_tables(page):
    page.emulate_media(color_scheme="dark")
    figure = page.locator("#b1 figure.chart[data-chart^=spn] svg").first
    light = "rgb(230, 235, 241)"
    assert figure.locator("text").first.evaluate("text => getComputedStyle(text).fill") == light
    assert figure.locator(".tip path").first.evaluate("line => getComputedStyle(line).stroke") == light
    page.emulate_media(media="print")
    assert page.locator("#b1 .plain").is_visible() and not page.locator(TABLE).is_visible()
    assert page.locator("#b1 figure.chart svg").first.is_visible()
    assert not page.locator("nav.top").is_visible()
    assert len(page.pdf()) > 10_000
    page.emulate_media(media="screen", color_scheme="light")


# -- the first screen --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), pytest.param(1400, "light", marks=pytest.mark.nightly)])
def test_nothing_serious_stands_in_the_way_of_whoever_reads(browser, board, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    with shown(browser, board, viewport={"width": width, "height": 900}, color_scheme=scheme) as (page, _):
        see_all(page)
        failures = axe.Axe().run(page).response["violations"]
        serious = {one["id"]: one["nodes"][0]["html"] for one in failures if one["impact"] in ("serious", "critical")}
        assert not serious
        page.evaluate("document.querySelector('h1').className = 'planted'")
        page.add_style_tag(content="h1 { color: #ccc; background: #ddd }")
        failures = axe.Axe().run(page, "h1", {"runOnly": ["color-contrast"]}).response["violations"]
        assert any(one["id"] == "color-contrast" for one in failures), "this test can fail"


SHORT_PAGES = Path(__file__).parents[1] / "leaderboards" / "pages"


@pytest.mark.skipif(not SHORT_PAGES.is_dir(), reason="the boards' pages are not here")
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), pytest.param(1400, "dark", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["cost", pytest.param("cifar10-dlnet-two-cores", marks=pytest.mark.nightly)])
def test_the_short_page_of_a_board_is_one_that_anybody_can_read(browser, name, width, scheme):
    """It asks for nothing, runs no script, does not scroll sideways, and axe has nothing serious to say."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    about = dict(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    with shown(browser, SHORT_PAGES / f"{name}.html", **about) as (page, _):
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        failures = axe.Axe().run(page).response["violations"]
        assert not {one["id"] for one in failures if one["impact"] in ("serious", "critical")}


ARCHIVES = SHORT_PAGES.parent / "results"
opened_pages = pytest.mark.parametrize(
    "name",
    [
        path.stem if path.stem in ("digits-quick", "cost") else pytest.param(path.stem, marks=pytest.mark.nightly)
        for path in sorted(SHORT_PAGES.glob("*.html"))
    ],
)


def accuracies(name):
    """Return for each defense the mean accuracies over seeds of its settings, by hand, in percent."""
    by_setting = {}
    for record in Store(ARCHIVES / name / "records.zip").load_all():
        config = record.config
        network, federation = config.model.model_dump_json(), config.federation.model_dump_json()
        place = network, federation, config.role, json.dumps(config.defense.parameters)
        by_setting.setdefault((config.defense.id, config.data.name, *place), {})[config.seed] = record.utility.accuracy
    means = {}
    for (defense, *_), seeds in by_setting.items():
        if None not in seeds.values():
            means.setdefault(defense, set()).add(100 * sum(seeds.values()) / len(seeds))
    return means


def worst_cases(name):
    """Return for each defense its worst cases in the archive's table, in decibels with their interval."""
    cases, ends = {}, [f"worst_psnr_median{end}" for end in ("", "_low", "_high")]
    for row in csv.DictReader(
        io.StringIO(Store(ARCHIVES / name / "records.zip").files.read("worst_case.csv").decode())
    ):
        if all(row.get(end) for end in ends):
            printed = "{:.1f} dB [{:.1f}, {:.1f}]".format(*(float(row[end]) for end in ends))
            cases.setdefault(row["defense"], set()).add(printed)
    return cases


ROWS = """() => [...document.querySelectorAll("tr:has(th[scope=row])")].map(row => [
    row.querySelector("th").firstChild.textContent.trim(),
    Object.fromEntries([...row.querySelectorAll("td[data-title]")].map(td => [td.dataset.title, td.innerText]))])"""


@opened_pages
def test_no_figure_of_a_boards_page_differs_from_the_archives(browser, name):
    known, cases, checked = accuracies(name), worst_cases(name), 0
    with shown(browser, SHORT_PAGES / f"{name}.html", bypass_csp=True) as (page, _):
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        rows = page.evaluate(ROWS)
    assert {"none" if who == "undefended" else who for who, _ in rows} >= known.keys() - {"full_noise"}
    for who, cells in rows:
        defense = "none" if who == "undefended" else who
        for share in re.findall(r"^[\d.]+%", cells.get("Accuracy", "")):
            off = min(abs(float(share[:-1]) - mean) for mean in known[defense])
            assert off <= 0.05 + 1e-9, (who, cells)  # a tie, 22.35, is rounded either way
            checked += 1
        for decibels in re.findall(r"[\d.]+ dB \[[\d., ]+\]", cells.get("Leak, worst case", "")):
            assert decibels in cases[defense], (who, cells)
            checked += 1
    assert checked >= len(rows) // 2 or name in COSTS_ALONE, "figures were compared"


COSTS_ALONE = ("cost", "messages", "bank-marketing-two-cores")
"""Boards without accuracies or decibels to compare; tests/test_boards.py counts some of their figures by hand."""


@opened_pages
def test_a_printed_board_has_at_most_two_pages_and_no_letter_is_larger_than_its_figures(browser, name):
    with shown(browser, SHORT_PAGES / f"{name}.html", bypass_csp=True) as (page, _):
        page.emulate_media(media="print")
        size = "parts => Math.max(...parts.map(part => parseFloat(getComputedStyle(part).fontSize)))"
        assert page.locator("td > *").evaluate_all(size) <= page.locator("td > span").evaluate_all(size)
        sheets = len(re.findall(rb"/Type\s*/Page\b(?!s)", page.pdf(prefer_css_page_size=True)))
    assert 1 <= sheets <= 2


def test_on_a_phone_a_row_of_the_glance_is_a_card_and_in_print_its_verdict_is_no_larger_than_figures(browser, board):
    about = dict(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    with shown(browser, board, **about) as (page, _):
        box = page.locator("table.glance").first
        assert box.evaluate("table => table.parentElement.scrollWidth <= table.parentElement.clientWidth")
        titles = box.locator("tbody tr").first.locator("td").evaluate_all("all => all.map(td => td.dataset.title)")
        assert titles == box.locator("thead th").all_text_contents()[1:]
        name = page.locator(".glance .key .big").first
        assert name.inner_text() == "undefended" and name.evaluate("e => e.getClientRects().length") == 1, "not split"
    with shown(browser, board) as (page, _):
        page.emulate_media(media="print")
        size = "parts => Math.max(...parts.map(part => parseFloat(getComputedStyle(part).fontSize)))"
        assert page.locator(".glance .badge").evaluate_all(size) <= page.locator(".glance .big").evaluate_all(size)


def test_line_and_pictures_stand_on_the_first_screen_and_enlarge_and_too_great_losses_are_folded(browser, board):
    with shown(browser, board) as (page, _):
        assert page.locator("h1").inner_text().endswith(".") and page.locator("h1").bounding_box()["y"] < 200
        box = page.locator(".pictures img").bounding_box()
        assert box["y"] + box["height"] < 900 and box["height"] / 3 >= 48, "three rows of at least 48 pixels"
        assert page.locator("table.glance").bounding_box()["y"] < 900
        page.locator(".pictures img").focus()
        page.keyboard.press("Enter")
        large = page.locator("dialog.zoomed img")
        assert large.is_visible() and large.bounding_box()["width"] > box["width"]
        page.keyboard.press("Escape")
        assert not large.is_visible()
        rows = page.locator("table.glance tbody tr:visible")
        shown_first = rows.count()
        page.locator("input.loss").fill("0")
        assert rows.count() < shown_first and "folded" in page.locator("output.folded").inner_text()
        page.locator("input.loss").fill("100")
        assert rows.count() >= shown_first and page.locator("output.folded").inner_text() == ""


def test_board_and_filters_stay_in_the_address_and_a_cut_address_harms_nothing(browser, board):
    with shown(browser, board) as (page, _):
        assert page.locator("section.board:visible").count() == 1 and page.locator("#b1").is_visible()
        page.get_by_label("Question").select_option("Membership inference")
        assert page.locator("#b2").is_visible() and not page.locator("#b1").is_visible()
        assert page.url.endswith("#b2")
        page.reload()
        assert (
            page.locator("#b2").is_visible() and page.get_by_label("Question").input_value() == "Membership inference"
        )
        page.get_by_label("Question").select_option(index=0)
        page.wait_for_selector(f"{TABLE} .tabulator-row")
        page.get_by_label("Filter Defense").first.press_sequentially("SPN")
        playwright.expect(page.locator(f"{TABLE} .tabulator-row")).to_have_count(3, timeout=WAIT_MS)
        page.wait_for_function("location.hash.includes('&f=')")
        page.reload()
        playwright.expect(page.locator(f"{TABLE} .tabulator-row")).to_have_count(3, timeout=WAIT_MS)
        page.get_by_label("Question").select_option("Membership inference")
        assert "#b2&f=" in page.url and page.locator("#b2").is_visible()
        page.evaluate("location.hash = '#b1&f=%7B%22cut'")
        page.reload()
        page.wait_for_selector(f"{TABLE} .tabulator-row")
        assert page.locator(f"{TABLE} .tabulator-row").count() > 3


def test_a_row_opens_its_images_scores_settings_and_records(page, fabricate):
    page.locator(f"{TABLE} .tabulator-row", has_text="spn").first.locator("button.open").click()
    panel = page.locator("dialog.opened")
    assert panel.is_visible() and "spn" in panel.locator("h3").inner_text() and panel.locator("img").is_visible()
    cells = {f"records/{record.cell_id}.json" for record in records_of(fabricate)}
    lines = panel.locator("tr").all_inner_texts()
    assert len(lines) == 3 and all(any(cell in line for cell in cells) for line in lines[1:]), "two attacks"
    assert "Attack" in lines[0] and {"dlg", "strong"} <= set(" ".join(lines).split())
    page.keyboard.press("Escape")
    assert not panel.is_visible()
