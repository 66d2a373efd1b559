"""The HTML page without a browser: what it carries and shows, that names stay text, figures and sprites."""

import hashlib
import io
import re
from functools import partial
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from ppbench.claims.case import ClaimFinding
from ppbench.claims.check import Checked, Unchecked
from ppbench.claims.claim import Claim
from ppbench.records.run_files import ClientTime, save_time, time_of, training_of
from ppbench.records.schema import Played
from ppbench.records.store import CellImages
from ppbench.report.cap import Distance, PpcPoint
from ppbench.report.controls import Check
from ppbench.report.page.boards import (
    DefenseSentence,
    checks_of,
    csv_text,
    defense_sentences,
    judged_evaluations,
    standalone_sentences,
)
from ppbench.report.page.curves import ROC_LINES, AttackLine, Budget, BudgetLine, Ppc, RocLine, Rocs
from ppbench.report.page.figures import Picture, svg_of
from ppbench.report.page.html import VENDOR, Page, assets, role_counts, script_digest
from ppbench.report.page.profiles import anchors, sprite

DRAWN = True


class Reader(HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self, page):
        super().__init__()
        self.loads, self.tags, self.words, self.data_blocks = [], [], [], 0
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.data_blocks += (tag, dict(attrs).get("type")) == ("script", "application/json")
        self.loads += [v or "" for k, v in attrs if k in ("src", "srcset", "href", "xlink:href", "poster", "action")]

    def handle_data(self, data):
        self.words += data.split()

    @property
    def text(self):
        return " ".join(self.words)


def part(page, first, last):
    """Return what stands between the elements of two ids."""
    start = page.index(f'id="{first}"')
    return page[start : page.index(f'id="{last}"', start)]


def gradient_images(record=None):
    truth = np.linspace(0, 1, 3 * 3 * 8 * 8, dtype=np.float32).reshape(3, 3, 8, 8)
    return CellImages(truth[:, :, ::-1].copy(), truth)


@pytest.fixture(scope="module")
def records(fabricate):
    """Both controls, a defense under a plain and a knowing attack, a diverged and a failed cell, members."""
    cells = [
        fabricate(d, None, "dlg", "reconstruction", db, **about)
        for d, db, about in (("none", 35.0, {}), ("full_noise", 6.0, {}), ("ppdl", 15.0, {"status": "failed"}))
    ]
    cells += [fabricate(d, None, "mia_loss", "membership", s) for d, s in (("none", 0.9), ("full_noise", 0.5))]
    for value in (0.1, 0.5):
        spn = partial(fabricate, "spn", value, control="alpha2")
        cells += [spn("dlg", "reconstruction", 18.0), spn("strong", "reconstruction", 30.0, adaptive=True)]
    more = dict(control="sigma", status="diverged", accuracy=None)
    return [*cells, fabricate("dp", 0.5, "dlg", "reconstruction", **more)]


@pytest.fixture(scope="module")
def page(records):
    claim = Claim("asr", 0.5, "cifar10", "dlnet", None, "Table 4")
    outcomes = [
        Checked("spn", claim, "here", ClaimFinding("falls", "to 71.0%", "above chance", "50%", "71%", ())),
        Unchecked("spn", claim, "no record of mnist"),
    ]
    values = [DefenseSentence("spn", "", "spn hides nothing."), DefenseSentence("dp", "", "dp hides all.")]
    return Page(records, images=gradient_images, sentences=values, outcomes=outcomes).html()


def test_the_page_asks_nobody_for_anything_and_names_the_scripts_that_stand_in_it(page):
    assert all(load.startswith(("data:image/png;base64,", "#")) for load in Reader(page).loads)
    own = page.replace(str(assets().scripts[0]), "")  # the vendored script names XML's namespaces
    assert not re.search(r"https?://|@import|url\((?!#)|sourceMappingURL", own)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "default-src 'none'" in policy[1] and "unsafe-eval" not in policy[1]
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert (
        re.findall(r"'(sha256-[^']*)'", policy[1]) == [script_digest(script) for script in scripts]
        and len(scripts) == 2
    )


def test_vendored_files_are_those_that_were_published_and_their_licenses_lie_beside_them():
    lines = (VENDOR / "SHA256SUMS").read_text().splitlines()
    sums = {name: value for value, name in (line.split() for line in lines)}
    assert set(sums) == {path.name for path in VENDOR.iterdir()} - {"SHA256SUMS", "README.md"}
    for name, value in sums.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == value, name
    about = (VENDOR / "README.md").read_text()
    assert all(name in about for name in sums) and "LICENSE.tabulator" in sums


def test_the_page_shows_every_cell_and_why_some_failed(page, records):
    assert all(f'id="c{r.cell_id}"' in page for r in records)
    shown = Reader(page).text
    for words in ("diverged", "failed", "it broke", "plain attacks only", "adaptive", "TPR", "Controls hold."):
        assert words in shown
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_equal_records_give_equal_pages_whatever_their_order_and_none_a_page_that_says_so(records):
    assert Page(records).html() == Page(records[::-1]).html()
    assert "Nothing was evaluated" in Page([]).html()


def test_names_and_sentences_stay_text(fabricate):
    evil = "<img src=x onerror=alert(1)><script>"
    about = dict(control=evil, reason=evil, dataset=evil)
    some = [fabricate(evil, v, evil, "reconstruction", 10.0 * v, clients=3, **about) for v in (1.0, 2.0)]
    failed = fabricate(evil, 3.0, evil, "reconstruction", clients=4, status="failed", **about)
    page = Page(
        [*some, failed.model_copy(update={"reason": evil})], sentences=[DefenseSentence(evil, "", evil)],
        harness=Check("harness", True, evil), claims=lambda _: evil, images=gradient_images,
        times=lambda _: lasting(machine=evil), problems=[evil],
    ).html()  # fmt: skip
    result = Reader(page)
    assert evil not in page and page.count("&lt;img src=x") > 20
    assert all(load.startswith("data:image/png") or re.fullmatch(r"#[\w-]+", load) for load in result.loads)
    assert result.data_blocks == result.tags.count("script") - len(assets().scripts)


@pytest.mark.parametrize("fault", ["none stands", "noise leaks", "no noise", "canaries stand"])
def test_nothing_is_said_of_an_evaluation_whose_controls_fail_and_the_others_keep_theirs(fabricate, fault):
    def one(clients, bad):
        rows = [("none", 10.0 if bad and fault == "none stands" else 35.0), ("dp", 30.0)]
        rows += [] if bad and fault == "no noise" else [("full_noise", 35.0 if bad and fault == "noise leaks" else 6.0)]
        about = dict(control="sigma", clients=clients)
        return [fabricate(d, 0.1 if d == "dp" else None, "dlg", "reconstruction", db, **about) for d, db in rows]

    some, sound = one(3, True) + one(4, False), fault != "canaries stand"
    verdict = judged_evaluations(some, sound)
    checks, result = checks_of(verdict), standalone_sentences(defense_sentences(verdict))
    assert len(checks) == 4 and {"3 clients" in sentence for sentence in result} == ({False} if sound else set())
    shown = Reader(Page(some, sentences=defense_sentences(judged_evaluations(some, sound)), sound=sound).html()).text
    top = shown[shown.index("At a glance") : shown.index("How to read this")]
    assert top.count("nothing concluded") == top.count("Controls fail: nothing is concluded here.") == 2 - sound


def test_a_defense_has_its_sentences_rows_images_and_claims_and_controls_have_none(page):
    own = part(page, "defense-spn", "claims")
    for words in ("spn hides nothing.", "falls", "to 71.0%", "no record of mnist", "alpha2 = 0.5", "strong"):
        assert words in own, words
    assert "dp hides all." not in own and own.count("data:image/png") == 2, "a sprite a control value"
    assert 'id="defense-none"' not in page and 'href="#defense-spn"' in page[: page.index('id="defense-dp"')]
    claims = part(page, "claims", "cost")
    assert "ASR 50.00%" in claims and "falls to 71.0%" in claims
    (names, *_) = re.findall(r"<ul>(.*?)</ul>", own[own.index('class="sprite"') :])
    assert [Reader(name).words[0] for name in names.split("</li>")[:-1]] == ["originals", "dlg", "strong"]


def test_anchors_are_words_and_no_two_names_share_one():
    result = anchors(["spn", "a b", "a/b", "<x>", "x", ""])
    assert result["spn"] == "defense-spn" and len(set(result.values())) == 6
    assert all(re.fullmatch(r"[A-Za-z][\w-]*", anchor) for anchor in result.values())


def test_the_page_shows_who_played_which_role_how_often(fabricate, page):
    played = Played(roles=["pilot", "ternary"], rounds=[[5, 0, 1], [1, 6, 5]], examples=[30, 90, 60])
    fedpc = [fabricate("fedpc", beta, "dlg", "reconstruction", control="beta") for beta in (0.8, 0.2)]
    some = [r.model_copy(update={"played": played}) for r in fedpc]
    (counted,) = role_counts([*some, fabricate("none", None, "dlg", "reconstruction")])
    assert (counted.role, counted.labels, counted.counts) == ("pilot", ("beta=0.2", "beta=0.8"), ((5, 0, 1),) * 2)
    own = Page(some).html()
    assert "Who played which role" in own and "rounds as pilot" in own and "Who played which role" not in page
    assert own.index("(90)") < own.index("(60)") < own.index("(30)"), "most examples first"


def costly(record, memory):
    return record.model_copy(update={"cost": record.cost.model_copy(update={"memory_peak": memory})})


def lasting(ratio=12.3, machine="x86_64", pairs=9):
    ends = dict(low=11.1, high=13.5) if pairs > 5 else dict(low=None, high=None)
    more = dict(pairs=pairs, seconds=0.0421, undefended_seconds=0.0034, machine=machine, threads=1)
    return ClientTime.model_validate(dict(ratio=ratio) | ends | more)


def cost_board(page):
    """Return the rows of the cost board, tags dropped."""
    body = part(page, "cost", "cells").partition("<tbody>")[2]
    return [Reader(f"<tr{row}").text for row in body.split("<tr")[1:]]


def test_the_cost_board_has_bytes_memory_and_time_beside_the_undefended(fabricate, tmp_path):
    none = costly(fabricate("none", None, "dlg", "reconstruction", 35.0, bytes_up=46_552.0), 465_540)
    mine = costly(fabricate("pbpfl", 10.0, "dlg", "reconstruction", bytes_up=15_419.0), 93_108)
    bare = fabricate("spn", 1.0, "dlg", "reconstruction", control="alpha2")
    again = fabricate("pbpfl", 10.0, "strong", "reconstruction").model_copy(update={"cost": mine.cost})
    ours = {mine.cell_id, again.cell_id}
    times = lambda r: lasting() if r.cell_id in ours else None  # noqa: E731
    result = cost_board(Page([bare, again, mine, none], times=times).html())
    assert [row.split()[0] for row in result] == ["none", "pbpfl", "spn"], "one row a setting, the undefended first"
    whole = "kappa = 10 15.4 kB 0.33 1.0 kB 1.00 80 B 93.1 kB 0.20 42.1 ms x86_64, 1 thread 12.30 11.10 to 13.50"
    assert whole in result[1] and "clients" not in result[0]
    assert "alpha2 = 1 1.0 kB 0.02 1.0 kB 1.00 80 B not measured n/a not measured no epsilon" in result[2]
    three = fabricate("none", None, "dlg", "reconstruction", clients=3)
    few, other = sorted(cost_board(Page([mine, three], times=lambda _: lasting(pairs=1)).html()), key=len)[::-1]
    assert "n/a" in few and "12.30 1 pair no epsilon" in few and "mlp, 10 clients, 20 rounds, seed 0" in few
    assert "3 clients" in other
    page, table = Page([mine], times=partial(time_of, tmp_path)), csv_text([mine])
    assert "12.30" not in page.html()
    save_time(tmp_path, training_of(mine), lasting())
    assert "12.30" in page.html() and csv_text([mine]) == table, "the page takes times from its folder, the table none"


def points(ratios):
    return tuple(
        PpcPoint(c, r if ratios else None, a, a - 0.02, None, Distance("recon/1", d, d - 0.1, d + 0.1))
        for c, r, a, d in [(0.001, 126.0, 0.7, 0.2), (0.1, 1.26, 0.69, 0.9), (0.5, 0.25, 0.66, 1.1)]
    )


LINE = RocLine(EVIL := "$\\frac{ <script> & $", (0.0, 0.0, 0.5, 1.0), (0.0, 0.2, 0.2, 1.0), 10, 20)
PLOTS = {
    "ratios": Ppc(EVIL, "a_$^", "recon/1", (AttackLine(EVIL, False, points(True)),)),
    "no ratios": Ppc(EVIL, "a_$^", "recon/1", (AttackLine(EVIL, False, points(False)),)),
    "budget": Budget(EVIL, ((EVIL, (BudgetLine(EVIL, (1, 10), (0.0, 1.0), (3.0, 30.0)),)),)),
    "roc": Rocs(EVIL, (LINE,), ()),
    "rocs": Rocs(EVIL, (LINE,) * ROC_LINES, (LINE,)),
}
SAID = {
    "ratios": ("gradient / perturbation", "#2ca25f", "#de2d26"),
    "budget": ("10 evaluations, 100.0% above 20 dB</title>",),
    "roc": ("n = 10 + 20", "chance", "TPR 20.0% at 1%, 20.0% at 10%, 20.0% at 50% FPR</title>"),
}


@pytest.mark.parametrize("name", PLOTS)
def test_figures_are_the_same_bytes_twice_survive_any_name_and_tell_values(name):
    plot = PLOTS[name]
    svg, one, other = svg_of(plot, inline=True), Picture(plot), Picture(plot)
    assert one.svg == other.svg and one.png() == other.png() and svg == svg_of(plot, inline=True)
    assert "<script>" not in svg and "http" not in svg and svg.startswith("<svg role=") and "mathdefault" not in svg
    assert svg_of(plot).startswith("<?xml") and "max-width" not in svg_of(plot)
    for key, words in SAID.items():
        assert key != name or all(word in svg for word in words), key
    assert name != "no ratios" or not any(word in svg for word in SAID["ratios"])


def test_pointing_at_a_mark_of_a_figure_tells_its_values():
    evil = '"<&\n>'
    svg = svg_of(Ppc("t", "sigma", "recon/1", (AttackLine(evil, True, points(ratios=True)),)))
    titles = [title.text for title in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]
    assert titles[:2] == ["accuracy", "sigma = 0.5: accuracy 0.660, gradient / perturbation 0.25"], "one end is none"
    ends = '"<& > (adaptive), sigma = 0.001: recon/1 0.200 (0.100 to 0.300), gradient / perturbation 126'
    assert titles[4] == '"<& > (adaptive)' and titles[-1] == ends and len(titles) == 8


def test_a_sprite_puts_truth_above_guess_marks_what_is_not_finite_and_shows_the_first_ten():
    truth = np.zeros((2, 1, 8, 8), dtype=np.float32)
    guess = np.ones((2, 1, 8, 8), dtype=np.float32) * 7
    guess[1] = np.nan
    image = np.asarray(Image.open(io.BytesIO(sprite((truth, guess)))))
    assert image.shape == (66, 66, 4)
    assert (image[:32, :32, :3] == 0).all() and (image[34:, :32, :3] == 255).all()
    assert set(np.unique(image[34:, 34:, :3])) == {110, 150}
    assert (image[32:34, :, 3] == 0).all()
    many = np.zeros((30, 3, 32, 32), dtype=np.float32)
    assert Image.open(io.BytesIO(sprite((many, many)))).size == (10 * 34 - 2, 66)


def test_an_audit_whose_headline_has_no_figure_shows_the_others(fabricate):
    audited = fabricate("dp", 0.1, "mia_loss", "membership", 0.7, stage="audit", audit=dict(references=0, canaries=2))
    assert audited.metric("canary_auc") is None
    board = part(Page([audited]).html(), "b1", "defenses")
    assert "Canaries, AUC" in board and f'<td class="n " data-v="{audited.metric("auc").value}">' in board
    assert f'<a href="#c{audited.cell_id}">mia_loss</a>' in board
