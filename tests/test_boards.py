"""The short pages of boards: one row per defense over all seeds, what to choose; the committed ones are true."""

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from PIL import Image

from ppbench.commands import app
from ppbench.records.store import Store
from ppbench.report.learning import USABLE
from ppbench.report.page.board import summary_of
from ppbench.report.page.headline import answer_of
from ppbench.report.page.html import Page
from ppbench.report.page.overview import choice_of
from ppbench.report.page.profiles import LABEL_WIDTH, labelled_png

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "leaderboards" / "results"
NAMES = sorted(path.parent.name for path in RESULTS.glob("*/records.zip"))
SMALL = ("bank-marketing-two-cores", "cost")
"""Boards whose pages are made again by day; all are in `.ci/run` and by night."""
EVIL = "<img src=x onerror=alert(1)>|x"


def controls(make, seed=0, accuracy=0.95, falls=35.0):
    about = dict(seed=seed, accuracy=accuracy)
    return [make(d, None, "dlg", "reconstruction", db, **about) for d, db in (("none", falls), ("full_noise", 6.0))]


def dp(make, value, decibels, accuracy, seed=0, **more):
    about = dict(control="sigma", adaptive=True, accuracy=accuracy, seed=seed) | more
    return make(about.pop("defense", "dp"), value, "adaptive_dp", "reconstruction", decibels, **about)


def standalone(make, accuracy, seed=0):
    record = make(
        "standalone", None, "dlg", "reconstruction", accuracy=accuracy, seed=seed, bytes_up=0.0, status="failed"
    )
    return record.model_copy(update={"reason": "attack 'dlg': nothing in the view of server/1 can be read"})


def table_of(records):
    (table,) = answer_of(records, None).tables
    return table


def named(choice):
    return {v and (v.entry.defense.id, v.entry.key.value) for v in (choice.least, choice.guarded, choice.alone)}


def board_of(records, folder):
    store = Store(folder)
    for record in records:
        store.save(record)
    return summary_of(store, folder.name)


def rows_of(markdown):
    """Return the rows of every table of a page, as a browser would see them: lists of texts of cells."""
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    tables = re.findall(r"<table>(.*?)</table>", html, re.DOTALL)
    cells = [
        [re.findall(r"<t[hd]>(.*?)</t[hd]>", r, re.DOTALL) for r in re.findall(r"<tr>(.*?)</tr>", t, re.DOTALL)]
        for t in tables
    ]
    return [
        [[re.sub(r"</?(strong|a)\b[^>]*>", "", re.sub(r"<br>", " ", cell)) for cell in row] for row in table]
        for table in cells
    ]


# -- what to choose ----------------------------------------------------------------------------------------------------
LEVELS = st.sampled_from([8.0, 12.5, 16.0, 20.0, 30.0])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(LEVELS, st.sampled_from([0.95, 0.93, 0.91, 0.88, 0.6, 0.3])), min_size=1, max_size=4))
def test_a_setting_that_is_not_usable_is_never_best_and_of_the_usable_none_leaks_less(fabricate, points):
    records = controls(fabricate)
    for k, (decibels, accuracy) in enumerate(points):
        records.append(dp(fabricate, 0.1 * (k + 1), decibels, accuracy))
    table = table_of(records)
    choice, grid = choice_of(table), table.compared[0].grid
    bearable = [db for db, accuracy in points if 95 - 100 * accuracy <= USABLE]
    assert (choice.least is None) == (not bearable)
    if choice.least is None:
        assert choice.words.startswith("No setting is usable")
        return
    assert choice.least.usable and choice.least is table.compared[0].value
    order = {"stands": 0, "undecided": 1, "falls": 2}
    assert order[choice.least.judgement.fate] == min(order[v.judgement.fate] for v in grid if v.usable)
    recommended = choice.words.startswith("dp at")
    assert recommended == (choice.least.judgement.fate != "falls"), "what falls is named, and not as a choice"


def test_what_leaks_wherever_its_loss_can_be_borne_is_said_to(fabricate):
    records = [*controls(fabricate), dp(fabricate, 0.1, 30.0, 0.94), dp(fabricate, 1.0, 8.0, 0.3)]
    choice = choice_of(table_of(records))
    assert choice.words.startswith("Every usable setting leaks; dp at sigma=0.1 leaks least: rebuilt")
    assert "No epsilon holds for any defense here" in choice.words and "No setting keeps" not in choice.words


def withstanding(make, seed=0):
    """Return an evaluation whose undefended model is not rebuilt."""
    return [*controls(make, seed, falls=7.0), dp(make, 0.1, 8.0, 0.94, seed, epsilon=1.0)]


def unlearned(make, accuracy):
    return [*controls(make, accuracy=accuracy), dp(make, 0.1, 8.0, accuracy, epsilon=1.0)]


def one_of_two_seeds(make):
    return [*withstanding(make, 1), *controls(make), dp(make, 0.1, 8.0, 0.94)]


def costs(make):
    about = dict(accuracy=0.9, control="sigma")
    places = (("none", None, 1000.0), ("full_noise", None, 1000.0), ("dp", 0.1, 7.0))
    return [make(d, value, "label_recovery", "label", 0.9, bytes_up=up, **about) for d, value, up in places]


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        (withstanding, "controls fail or did not run"),
        (one_of_two_seeds, "controls fail or did not run"),
        (lambda make: [dp(make, 0.1, 8.0, 0.94)], "controls fail or did not run"),
        (lambda make: unlearned(make, 0.1), "learned nothing that can be shown"),
        (lambda make: unlearned(make, 0.14), "is not shown to be 5 points above"),
        (costs, "No setting is recommended"),
    ],
)
def test_where_nothing_can_be_concluded_no_setting_is_named(fabricate, records, reason):
    choice = choice_of(table_of(records(fabricate)))
    assert named(choice) == {None} and reason in choice.words and "sigma" not in choice.words.partition(": ")[0]
    assert "keeps accuracy" not in choice.words


@pytest.mark.parametrize(
    ("epsilon", "words"),
    [(2.5, "dp at sigma=0.1 keeps accuracy and gives a guarantee"), (10.0, "keeps accuracy and gives a guarantee"),
     (10.5, "No setting has a guarantee; closest is dp at sigma=0.1: no guarantee (epsilon 10)"),
     (4e4, "no guarantee (epsilon 4e4)"), (None, "No epsilon holds for any defense here")],
)  # fmt: skip
def test_an_epsilon_above_ten_is_no_guarantee(fabricate, epsilon, words, tmp_path):
    records = [*controls(fabricate), dp(fabricate, 0.1, 8.0, 0.94, epsilon=epsilon)]
    choice = choice_of(table_of(records))
    assert words in choice.words and (choice.guarded is None) == (epsilon is None or epsilon > 10)
    assert ("No setting keeps accuracy and gives a guarantee" in choice.words) == (epsilon is not None and epsilon > 10)
    page = board_of(records, tmp_path / "board").markdown()
    assert (
        ("no guarantee" in rows_of(page)[0][2][rows_of(page)[0][0].index("Epsilon")])
        if epsilon and epsilon > 10
        else True
    )


def test_a_guarantee_at_a_loss_that_nobody_bears_keeps_no_accuracy(fabricate):
    records = [
        *controls(fabricate),
        dp(fabricate, 0.1, 8.0, 0.94, epsilon=4e4),
        dp(fabricate, 1.0, 8.0, 0.5, epsilon=2.5),
    ]
    choice = choice_of(table_of(records))
    assert (
        choice.guarded.entry.key.value == 1.0 and "45.0 points below the undefended 95.0%, not usable" in choice.words
    )
    assert choice.words.startswith("No setting keeps accuracy and gives a guarantee. ")


@pytest.mark.parametrize(
    ("accuracy", "words", "beaten"),
    [(0.7, "20.0 points better than dp at sigma=1", True), (0.3, "20.0 points worse than dp at sigma=1", False),
     (0.51, "level with dp at sigma=1", False)],
)  # fmt: skip
def test_training_alone_is_compared_with_the_guarantee_both_ways(fabricate, accuracy, words, beaten):
    records = []
    for seed in (0, 1):
        records += [
            *controls(fabricate, seed),
            dp(fabricate, 1.0, 8.0, 0.5, seed, epsilon=2.5),
            standalone(fabricate, accuracy, seed),
        ]
    choice = choice_of(table_of(records))
    assert words in choice.words and choice.alone.entry.defense.id == "standalone"
    assert ("training alone is more accurate than every guarantee" in choice.words) == beaten
    assert choice.least is None, "training alone is no defense that one chooses"


def test_one_seed_in_which_training_alone_is_no_better_is_enough_to_leave_it_open(fabricate):
    records = []
    for seed, accuracy in ((0, 0.7), (1, 0.5)):
        records += [
            *controls(fabricate, seed),
            dp(fabricate, 1.0, 8.0, 0.5, seed, epsilon=2.5),
            standalone(fabricate, accuracy, seed),
        ]
    assert "level with dp at sigma=1" in choice_of(table_of(records)).words


def test_a_loss_that_one_can_bear_alone_needs_no_defense(fabricate):
    records = [*controls(fabricate), dp(fabricate, 1.0, 8.0, 0.5, epsilon=2.5), standalone(fabricate, 0.94)]
    assert choice_of(table_of(records)).sentences[0].endswith("training alone keeps accuracy and sends nothing.")


def test_the_paragraph_is_the_same_on_page_in_terminal_and_in_json(fabricate, tmp_path):
    records = [*controls(fabricate), dp(fabricate, 0.1, 8.0, 0.94), dp(fabricate, 0.2, 30.0, 0.94, defense="spn")]
    answer = answer_of(records, None)
    words = choice_of(answer.tables[0]).words
    assert answer.as_dict()["choices"][0]["words"] == words
    assert words in Page(records).html() and words in board_of(records, tmp_path / "board").html()


# -- the table ---------------------------------------------------------------------------------------------------------
def test_seeds_are_pooled_into_one_row_per_defense_and_a_setting_stands_once_among_all(fabricate, tmp_path):
    records = []
    for seed, lost in ((0, 0.0), (1, 0.01), (2, 0.02)):
        records += controls(fabricate, seed)
        records += [dp(fabricate, 0.1, 8.0, 0.94 - lost, seed), dp(fabricate, 1.0, 8.0, 0.4, seed)]
        records.append(dp(fabricate, 0.2, 30.0 + seed, 0.95, seed, defense="spn"))
    page = board_of(records, tmp_path / "board").markdown()
    best, every = rows_of(page)
    assert best[0] == [
        "Rank",
        "Defense and setting",
        "Accuracy",
        "Leak, worst case",
        "Re-identified",
        "Epsilon",
        "Upload",
    ]
    assert [row[1] for row in best[1:]] == ["undefended", "dp sigma=0.1", "spn sigma=0.2"]
    assert [row[0] for row in every[1:]] == [
        "undefended",
        "dp sigma=0.1",
        "dp sigma=1",
        "spn sigma=0.2",
    ]
    assert [row[0] for row in best[1:]] == ["\u2013", "1", "2"]
    assert best[2][2] == "93.0% -2.0 points", "the mean of 94, 93 and 92"
    assert "rebuilt" in best[3][3] and "no better than blind" in best[2][3] and "not usable" in every[3][2]


def test_what_is_not_usable_has_no_rank_and_rows_that_overlap_share_theirs(fabricate, tmp_path):
    records = [*controls(fabricate), dp(fabricate, 0.1, 30.0, 0.94), dp(fabricate, 0.1, 30.2, 0.94, defense="spn")]
    records.append(dp(fabricate, 0.1, 8.0, 0.3, defense="ppdl"))
    (best,) = rows_of(board_of(records, tmp_path / "board").markdown())
    assert {row[1].split()[0]: row[0] for row in best[1:]} == {
        "undefended": "\u2013",
        "dp": "1-2",
        "spn": "1-2",
        "ppdl": "\u2013",
    }


def test_what_sends_nothing_is_not_applicable_and_never_failed(fabricate, tmp_path):
    records = [*controls(fabricate), dp(fabricate, 0.1, 8.0, 0.94), standalone(fabricate, 0.7)]
    page = board_of(records, tmp_path / "board").markdown()
    assert "not applicable: nothing is sent" in page and "failed" not in page


def test_a_board_of_costs_leads_with_costs(fabricate, tmp_path):
    records = costs(fabricate)
    board = board_of(records, tmp_path / "board")
    (best,) = rows_of(board.markdown())
    assert board.costly and best[0][:3] == ["Defense and setting", "Upload", "Download"]
    assert best[2][:2] == ["dp sigma=0.1", "7 B 1/143"]


def test_why_no_epsilon_holds_is_said_and_a_parameter_of_that_name_is_a_claim(fabricate, tmp_path):
    records = [*controls(fabricate), dp(fabricate, 3.0, 8.0, 0.94, control="epsilon", reason="it is *bare*")]
    board = board_of(records, tmp_path / "board")
    assert board.reasons == (("dp", "it is *bare*"),) and "Why no epsilon holds for 1 defense" in board.html()
    assert "- dp: it is \\*bare\\*" in board.markdown()
    assert "(the parameter of dp is a claim), so none carries a guarantee" in board.choices[0][1]
    assert rows_of(board.markdown())[0][2][rows_of(board.markdown())[0][0].index("Epsilon")] == "none"


def test_names_are_text_in_markdown_and_html(fabricate, tmp_path):
    records = [*controls(fabricate), dp(fabricate, 0.1, 8.0, 0.94, defense=EVIL, control="`*_[x](y)|")]
    board = board_of(records, tmp_path / "board")
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(board.markdown())
    for page in (html, board.html()):
        assert "<img" not in page and "&lt;img src=x" in page
    assert {len(row) for row in rows_of(board.markdown())[0]} == {7}


def test_victims_that_are_kept_stand_on_the_page_and_without_any_there_is_no_picture(fabricate, tmp_path):
    records = [*controls(fabricate), dp(fabricate, 0.1, 30.0, 0.94), dp(fabricate, 0.1, 20.0, 0.94, defense="spn")]
    pages = []
    for name, count in (("without", 0), ("with", 4)):
        store, images = Store(tmp_path / name), np.linspace(0, 1, 4 * 64, dtype=np.float32).reshape(4, 1, 8, 8)
        for record in records:
            store.save(record, tensors={"guess": images, "truth": images} if count else None)
        board = summary_of(store, name)
        pages.append(board.html())
    words = (
        "The first victims of the list, batch 1, initial weights; rows from above: original; undefended (dlg) 36.0 dB; "
    )
    assert f'alt="{words}' in pages[1] and "<li>blind guess" not in pages[1], "none was kept"
    assert "![" not in board.markdown() and f"![{words[:30]}" in replace(board, picture="p.png").markdown()
    picture = Image.open(io.BytesIO(labelled_png(board.pictures)))
    (sheet,) = (Image.open(io.BytesIO(base64.b64decode(one.uri.partition(",")[2]))) for one in board.pictures)
    assert picture.width == LABEL_WIDTH + sheet.width and sheet.height < picture.height < sheet.height + 60
    places = [LABEL_WIDTH + 66 * k + 32 for k in range(4)], [18 + 66 * k + 32 for k in range(4)]
    drawn = [[picture.convert("L").getpixel((x, y)) for x in places[0]] for y in places[1]]
    shown = [[sheet.convert("L").getpixel((x - LABEL_WIDTH, y - 18)) for x in places[0]] for y in places[1]]
    assert drawn == shown and len({*drawn[0]}) == 4, "the pictures as they are, below the line of their setting"
    labels = np.asarray(picture.convert("L"))[18:, :LABEL_WIDTH]
    assert all((labels[66 * k : 66 * (k + 1)] < 128).sum() > 50 for k in range(4)), "a label beside each row"
    assert "data:image/png" not in pages[0]
    assert pages[1].count("data:image/png") == 1 and "The first victims of the list, not the best" in pages[1]
    assert "dp sigma=0.1 (adaptive_dp)" in pages[1]


# -- the committed pages -----------------------------------------------------------------------------------------------
published = pytest.mark.skipif(not NAMES, reason="no board is here")


@pytest.fixture(scope="module")
def made(script):
    return script(ROOT / "docs" / "make_boards.py")


@published
@pytest.mark.parametrize("name", [n if n in SMALL else pytest.param(n, marks=pytest.mark.nightly) for n in NAMES])
def test_committed_pages_are_what_the_archives_give(made, name):
    board = made.summary(name)
    texts = {"boards/{}.md": made.markdown(name, board), "pages/{}.html": board.html()}
    old = [f for f, text in texts.items() if (made.HOME / f.format(name)).read_text(encoding="utf-8") != text]
    assert not old, "run: python docs/make_boards.py"
    line = made.index([board]).splitlines()[-1]
    assert line in made.INDEX.read_text(encoding="utf-8").splitlines(), "run: python docs/make_boards.py"


@published
def test_every_board_has_its_pages_within_their_size_and_the_index_is_short(made):
    index = made.INDEX.read_text(encoding="utf-8")
    assert re.findall(r"\]\(boards/([\w-]+)\.md\)", index) == NAMES == made.boards()
    assert len(re.findall(r"[^\s|]+", index)) < 600 + 6 * len(NAMES), "words, and the bars of a table"
    for name in NAMES:
        page, html = (made.HOME / folder / f"{name}.{end}" for folder, end in (("boards", "md"), ("pages", "html")))
        text = page.read_text(encoding="utf-8")
        assert html.stat().st_size < 2_000_000 and len(text.split()) < 4_000
        pictures = re.findall(r"!\[[^\]]*\]\((.*?)\)", text)
        assert len(pictures) == ("data:image/png" in html.read_text(encoding="utf-8")), "one file has all strips"
        assert all((page.parent / one).stat().st_size < 200_000 for one in pictures)
        for table in rows_of(text):
            assert not any("seed" in row[0] for row in table), "seeds are pooled"
            assert {len(row) for row in table} == {len(table[0])} and len(table[0]) <= 10, name


@published
def test_figures_of_a_page_are_those_of_the_records_counted_by_hand(made):
    """Mean accuracies, and ratios of bytes, without any code of the report."""
    by_place = {}
    for record in Store(RESULTS / "fedpc-theorems-two-cores" / "records.zip").load_all():
        place = record.config.federation.clients, record.config.defense.id
        by_place.setdefault(place, {})[record.config.seed] = record.utility.accuracy
    means = sorted(f"{100 * sum(s.values()) / 3:.1f}%" for (_, d), s in by_place.items() if d != "full_noise")
    assert means == sorted(cell.split()[0] for cell in column_of(made, "fedpc-theorems-two-cores", "Accuracy"))
    by_place = {}
    for record in Store(RESULTS / "cost" / "records.zip").load_all():
        place = record.config.model.id, record.config.federation.model_dump_json()
        by_place.setdefault(place, {})[record.config.defense.id] = record.cost.bytes_up
    shares = [up / some["none"] for some in by_place.values() for d, up in some.items() if d != "full_noise"]
    cells = [cell.split()[-1] for cell in column_of(made, "cost", "Upload")]
    assert sorted(f"{share:.2f}x" for share in shares if share >= 0.01) == sorted(c for c in cells if "/" not in c)
    assert sorted(f"1/{1 / share:,.0f}" for share in shares if share < 0.01) == sorted(c for c in cells if "/" in c)


@published
@pytest.mark.parametrize("name", NAMES)
def test_a_row_leads_to_the_page_of_its_paper_and_to_its_costs(name):
    page = RESULTS.parent / "boards" / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    places = re.findall(r'<a id="([\w-]+)"></a>', text)
    assert len(places) == len(set(places)) and "undefended" in places
    led = dict(re.findall(r'<a id="([\w-]+)"></a>\[\*\*[^\]]+\*\*\]\((.*?)\)', text))
    assert led.keys() >= {"spn", "baffle", "fedpc", "mpdp", "pbpfl"} & set(places)
    assert all((page.parent / link).is_file() for link in led.values())
    for place in re.findall(r"\(cost\.md#([\w-]+)\)", text):
        assert f'<a id="{place}"></a>' in (page.parent / "cost.md").read_text(encoding="utf-8")
    assert "(cost.md#" in text or not {"spn", "baffle", "fedpc", "mpdp", "pbpfl"} & set(places) or name == "cost"
    html = (RESULTS.parent / "pages" / f"{name}.html").read_text(encoding="utf-8")
    assert re.findall(r'<th scope="row" id="([\w-]+)">', html) == places


@published
def test_a_papers_page_leads_back_to_rows_that_are_there():
    for paper in ("spn", "mp-dp", "baffle", "fedpc", "pbpfl"):
        page = ROOT / "docs" / "claims" / f"{paper}.md"
        back = re.findall(r"\]\((\S+/boards/\S+\.md)#([\w-]+)\)", page.read_text(encoding="utf-8"))
        assert back
        for board, place in back:
            assert f'<a id="{place}"></a>' in (page.parent / board).read_text(encoding="utf-8"), (board, place)


def test_what_is_installed_names_its_paper_and_what_is_not_has_no_line(fabricate, tmp_path):
    records = [
        *controls(fabricate),
        dp(fabricate, 0.1, 20.0, 0.94),
        dp(fabricate, 0.1, 20.0, 0.94, defense="of_nobody"),
    ]
    board = board_of(records, tmp_path / "papers")
    assert [one.name for one in board.origins] == ["dp"]
    for page in (board.markdown(), board.html()):
        assert "Fan et al." in page and "https://arxiv.org/abs/2006.11601" in page and "cost.md" not in page


def column_of(made, name, title):
    """Return the cells of a column of a board's first table, without those of groups."""
    head, *rows = rows_of((made.HOME / "boards" / f"{name}.md").read_text(encoding="utf-8"))[0]
    return [cell for row in rows if (cell := row[head.index(title)])]


@published
def test_the_command_writes_both_forms_of_an_archive_and_refuses_another_name(tmp_path, capsys):
    archive = str(RESULTS / "bank-marketing-two-cores" / "records.zip")
    for name in ("board.md", "board.html"):
        app(["leaderboard", archive, "--summary", str(tmp_path / name)], standalone_mode=False)
        assert "pbpfl" in (tmp_path / name).read_text(encoding="utf-8")
    from ppbench.base.errors import UsageError

    with pytest.raises(UsageError, match=r"ends with \.md or \.html"):
        app(["leaderboard", archive, "--summary", str(tmp_path / "board.txt")], standalone_mode=False)
