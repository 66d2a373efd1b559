"""The head of the page: which control value a row tells of, its verdict, and what could not be read."""

import json
import re
import warnings
from html import escape, unescape

import numpy as np
import pytest

from ppbench.base.errors import UsageError
from ppbench.claims.check import PAPER_CLAIMS
from ppbench.records.schema import Metric
from ppbench.records.store import CellImages, Store
from ppbench.report.cap import caps
from ppbench.report.costs import cost_rows, relative_costs
from ppbench.report.frame import frame_of, key_of
from ppbench.report.knowing import Knowledge
from ppbench.report.page import html
from ppbench.report.page.board import rebuild, summary_of, up_to_date, write_board
from ppbench.report.page.boards import boards_of, defense_sentences, judged_evaluations, no_claims, table_rows
from ppbench.report.page.curves import ppcs
from ppbench.report.page.html import Page, write_figures
from ppbench.report.page.overview import overviews
from ppbench.report.page.profiles import Album
from ppbench.report.page.sections import PLAIN_ROWS

DRAWN = True

BLIND = "no better than blind"


def controls(make, **about):
    return [make(d, None, "dlg", "reconstruction", db, **about) for d, db in (("none", 35.0), ("full_noise", 6.0))]


def tables(records):
    ranked = boards_of(records, no_claims)
    return overviews(ranked, judged_evaluations(records), cost_rows(ranked, records, lambda _: None))


def row(records, defense="dp"):
    (table,) = tables(records)
    return next(one for one in table.rows if one.value.entry.defense.id == defense)


def head(records):
    """Return the part of a page of several defenses in which they are told at a glance."""
    page = unescape(Page(records, sentences=defense_sentences(judged_evaluations(records))).html())
    return page[page.index("At a glance") : page.index("<nav")]


def grid(make, *values, **about):
    """Return a defense at control values, each with its worst case in dB and its accuracy."""
    more = dict(control="sigma", adaptive=True) | about
    return [make("dp", v, "adaptive_dp", "reconstruction", db, accuracy=acc, **more) for v, db, acc in values]


@pytest.mark.parametrize(
    ("values", "verdict", "message"),
    [
        (((0.0, 35.0, 0.95), (0.1, 8.0, 0.93), (1.0, 7.0, 0.9)), BLIND, 0.1),  # of equals the best model
        (((0.1, 30.0, 0.95), (1.0, 24.0, 0.2)), "rebuilt by adaptive_dp", 0.1),
        (((0.1, 30.0, 0.95), (1.0, 8.0, 0.4)), "rebuilt by adaptive_dp", 0.1),  # a useless model is no row's
        (((0.1, 8.0, 0.899), (1.0, 8.0, 0.4)), f"no usable setting; {BLIND}", 0.1),
        (((0.1, 30.0, 0.6), (1.0, 8.0, 0.4)), f"no usable setting; {BLIND}", 1.0),
        (((0.1, 30.0, 0.6), (1.0, 29.0, 0.4)), "no usable setting; rebuilt by adaptive_dp", 0.1),
        (((0.1, 30.0, 0.95), (1.0, 18.7, 0.9)), "recognizable by adaptive_dp", 1.0),
        (((0.1, 16.0, 0.95), (1.0, 12.0, 0.9)), "undecided", 1.0),
        (((0.1, 12.0, 0.95), (1.0, 8.0, 0.9)), BLIND, 1.0),
        (((1.0, 8.0, 0.9),), BLIND, 1.0),
    ],
)
def test_a_row_tells_of_the_usable_value_that_leaks_least(fabricate, values, verdict, message):
    entry = row(controls(fabricate) + grid(fabricate, *values))
    assert (entry.verdict, entry.value.entry.defense.control.value) == (verdict, message)
    assert len(entry.grid) == len(values)


def test_what_falls_everywhere_is_told_where_it_looked_best(fabricate):
    """At its off level a defense leaks no more than elsewhere and has the best model; that says nothing of it."""
    plain = [
        fabricate("dp", v, "dlg", "reconstruction", db, accuracy=0.9, control="sigma")
        for v, db in ((0.0, 35.0), (0.1, 8.0), (0.5, 12.0))
    ]
    known = grid(fabricate, (0.0, 34.0, 0.9), (0.1, 40.0, 0.9), (0.5, 41.0, 0.9))
    entry = row(controls(fabricate) + plain + known)
    assert (entry.verdict, entry.value.entry.defense.control.value) == ("rebuilt by adaptive_dp", 0.1)


def test_figures_of_a_row_are_those_of_its_value_beside_the_undefended(fabricate):
    entry = row(controls(fabricate) + grid(fabricate, (0.0, 35.0, 0.95), (0.1, 8.0, 0.93), (1.0, 7.0, 0.9)))
    assert entry.value.loss == pytest.approx(-2.0) and entry.value.metric.value == pytest.approx(9.0)
    assert entry.value.shown.cost.ratios.up == 1.0


def test_what_only_plain_attacks_stand_for_is_marked(fabricate):
    records = controls(fabricate) + grid(fabricate, (0.1, 8.0, 0.93), adaptive=False)
    assert row(records).verdict == f"{BLIND}, untested"
    assert "plain attacks only" in head([*records, *other(fabricate)])


def test_where_an_attack_failed_what_leaks_is_undecided(fabricate):
    records = controls(fabricate) + grid(fabricate, (0.1, 8.0, 0.93), (1.0, 7.0, 0.9))
    failed = fabricate("dp", 0.1, "ig", "reconstruction", control="sigma", accuracy=0.93, status="failed")
    assert row([*records, failed]).value.entry.defense.control.value == 1.0, "the one at which all attacks ran"
    alone = [r for r in records if r.config.defense.control is None or r.config.defense.control.value == 0.1]
    assert row([*alone, failed]).verdict == "undecided, attacks failed"


@pytest.mark.parametrize(
    ("labels", "asr", "verdict"),
    [(0.1, 0.5, BLIND), (1.0, 0.5, f"{BLIND}, gives labels"), (0.1, 0.9, f"{BLIND}, gives members"),
     (1.0, 0.9, f"{BLIND}, gives labels, gives members")],
)  # fmt: skip
def test_what_else_is_given_away_at_that_value_is_said(fabricate, labels, asr, verdict):
    about = dict(control="sigma", accuracy=0.93)
    records = controls(fabricate) + grid(fabricate, (0.1, 8.0, 0.93), (0.0, 35.0, 0.95))
    records.append(fabricate("dp", 0.1, "label_recovery", "label", labels, **about))
    records.append(fabricate("dp", 0.1, "mia_loss", "membership", asr, **about))
    records.append(fabricate("dp", 0.0, "mia_loss", "membership", 0.9, **about | {"accuracy": 0.95}))
    assert row(records).verdict == verdict
    (table,) = tables(records)
    assert [table.has_column(what) for what in ("labels", "members", "canaries", "outputs")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_refuted_epsilon_is_the_verdict(fabricate):
    (verdict,) = grid(fabricate, (0.1, 8.0, 0.93), epsilon=2.0)
    audit = fabricate("dp", 0.1, "mia_loss", "membership", stage="audit", control="sigma", accuracy=0.93, epsilon=2.0)
    bound = Metric(name="epsilon_lower", value=3.0, method="one run", n=400, higher_is_safer=False)
    audit = audit.model_copy(update={"metrics": [*audit.metrics, bound]})
    assert row([*controls(fabricate), verdict, audit]).verdict == "epsilon refuted by audit"
    page = head([*controls(fabricate), verdict, audit, *other(fabricate)])
    assert "audit: ≥ 3.00" in page and ">refuted (2)</span>" in page


@pytest.mark.parametrize(
    ("asr", "none", "verdict"),
    [(0.5, 0.9, "members not found"), (0.5, 0.5, "nothing concluded"), (0.85, 0.9, "gives members to mia_loss"),
     (0.5, 0.55, "undecided")],
)  # fmt: skip
def test_where_only_members_were_asked_they_decide(fabricate, asr, none, verdict):
    def ask(defense, value, share, n=2000):
        return fabricate(defense, value, "mia_loss", "membership", share, n=n, control="sigma")

    mine = ask("dp", 0.1, asr, 100 if verdict == "undecided" else 2000)
    assert row([ask("none", None, none), ask("full_noise", None, 0.5), mine]).verdict == verdict


def test_rows_of_tables_fall_when_half_are_within_a_tenth(fabricate):
    def at(error):
        about = dict(shape=(16,), adaptive=True)
        none = fabricate("none", None, "linear", "reconstruction", 50.0, error=0.01, shape=(16,))
        noise = fabricate("full_noise", None, "linear", "reconstruction", 8.0, error=0.9, shape=(16,))
        return [none, noise, fabricate("dp", 0.1, "adaptive_dp", "reconstruction", 50.0, error=error, **about)]

    assert row(at(0.05)).verdict == "rebuilt by adaptive_dp"
    assert row(at(0.5)).verdict == "undecided, recognition not measured", "which columns come out right is not known"


def test_a_role_that_falls_takes_the_control_value_with_it(fabricate):
    quiet, loud = grid(fabricate, (0.1, 8.0, 0.93)), grid(fabricate, (0.1, 30.0, 0.93), role="pilot")
    entry = row([*controls(fabricate), *quiet, *loud])
    assert entry.verdict == "rebuilt by adaptive_dp" and len(entry.grid) == 1


def other(make):
    return [make("spn", 0.1, "adaptive_dp", "reconstruction", 34.0, adaptive=True, control="alpha2")]


def test_one_defense_has_its_sentences_at_the_top_and_several_a_table(fabricate):
    records = controls(fabricate) + grid(fabricate, (0.1, 8.0, 0.93))
    alone = unescape(Page(records, sentences=defense_sentences(judged_evaluations(records))).html())
    sentence = (
        "dp at sigma=0.1: the attacks tried here see no more of images than a blind guess (best: adaptive_dp: 9.0"
    )
    assert sentence in alone[: alone.index("<nav")]
    assert re.search(r"<tr class=\"compared\"[^>]*>.*sigma = 0.1", alone[: alone.index("<nav")], re.DOTALL)
    both = head(records + other(fabricate))
    assert sentence not in both and '<a href="#defense-dp">dp</a>' in both


@pytest.fixture
def damaged(fabricate, tmp_path):
    """A folder with three good records, a truncated one, one of a newer schema, and one whose images are gone."""
    store = Store(tmp_path / "<b>out")
    cut, newer, *rest = [*grid(fabricate, (0.1, 8.0, 0.9), (0.2, 8.0, 0.9), (0.3, 8.0, 0.9)), *controls(fabricate)]
    for one in (cut, newer, *rest):
        images = np.zeros((2, 1, 8, 8), dtype=np.float32)
        store.save(one, tensors={"guess": images, "truth": images} if one is rest[0] else None)
    paths = [store.folder / f"{one.cell_id}.json" for one in (cut, newer)]
    paths[0].write_bytes(paths[0].read_bytes()[:300])
    paths[1].write_text(paths[1].read_text().replace("ppbench.run/1", "ppbench.run/2"))
    (store.folder / f"{rest[0].cell_id}.safetensors").unlink()
    return store


def test_what_cannot_be_read_is_named_and_the_rest_is_shown_if_there_is_any(damaged):
    written = rebuild(damaged, PAPER_CLAIMS)
    assert len(written.problems) == 3 and all(path.is_file() for path in written.paths)
    assert len(damaged.csv_path.read_text().splitlines()) == 1 + 3
    page = damaged.html_path.read_text()
    for words in ("is not a whole record", "ppbench.run/2", "does not hold the cell"):
        (sentence,) = (problem for problem in written.problems if words in problem)
        assert escape(sentence, quote=True).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in page
    assert "3 files could not be read" in page and "<b>out" not in page
    assert not up_to_date(damaged, PAPER_CLAIMS), "it is said each time"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert damaged.html_path in write_board(damaged, PAPER_CLAIMS), "as evaluations and sweeps do"
    assert sorted(str(w.message) for w in caught) == sorted(written.problems)
    for path in damaged.folder.glob("*.json"):
        path.write_text("{}")
    with pytest.raises(UsageError, match="holds no record that can be read"):
        rebuild(damaged, PAPER_CLAIMS)


def test_a_png_is_drawn_again_only_when_its_figure_changed(fabricate, tmp_path):
    def drawn(*values):
        ranked = boards_of([*controls(fabricate), *grid(fabricate, *values)], no_claims)
        (path,) = (p for p in write_figures(tmp_path, ranked, Knowledge()) if p.match("ppc-*.png"))
        return path.read_bytes(), path.stat().st_mtime_ns

    first = drawn((0.1, 8.0, 0.9), (0.2, 9.0, 0.8))
    assert drawn((0.1, 8.0, 0.9), (0.2, 9.0, 0.8)) == first
    next(tmp_path.glob("ppc-*.png")).write_bytes(b"no picture")
    assert drawn((0.1, 8.0, 0.9), (0.2, 9.0, 0.8))[0] == first[0], "equal figures, equal bytes"
    assert drawn((0.1, 8.0, 0.9), (0.3, 7.0, 0.7))[0] != first[0]


def test_evaluations_stand_in_the_order_of_their_seeds(fabricate):
    """Records come in the order of their files, which digests name: seed 10 was told between 1 and 2."""
    records = [record for seed in (10, 2, 0) for record in controls(fabricate, seed=seed)]
    assert [one.about.rpartition(", seed ")[2] for one in judged_evaluations(records)] == ["0", "2", "10"]
    assert [record.config.seed for one in judged_evaluations(records) for record in one.records] == [0, 0, 2, 2, 10, 10]


# -- many records: what grows with their number, and what the page does about it --------------------------------------
@pytest.fixture(scope="module")
def many(bench_page):
    """Return 816 cells of two suites that ask for labels and owners: nothing to resample, nothing to rebuild."""
    return list(bench_page.synthetic(816, kinds=("label", "tracing")))


def test_work_on_boards_is_linear_in_the_records(many, monkeypatch):
    """Counts what is done for a record, because seconds depend on the machine."""
    counts = []
    for number in (204, 408, 816):
        calls = []

        def keyed(config, calls=calls):
            calls.append(config)
            return key_of(config)

        monkeypatch.setattr("ppbench.report.frame.key_of", keyed)
        frame = frame_of(many[:number])
        caps(frame), relative_costs(frame), judged_evaluations(frame), boards_of(frame, no_claims)
        counts.append(len(calls) / number)
    assert counts == [1, 1, 1], "each record's key is made once, whatever is made of the records"


def test_boards_keep_suites_apart_and_seeds_together_each_with_lines_of_its_own(many):
    ranked = boards_of(many, no_claims)
    assert len({b.setting.suite for b in ranked}) == 2
    labels = [b for b in ranked if b.setting.kind == "reconstruction"]
    assert len(labels) == 2, "one board a suite, all seeds on it"
    names = [entry.name for entry in labels[0].entries if entry.defense.id == "spn"]
    assert len(names) == len(set(names)) == 18 and "spn strength = 0.01, seed 1" in names
    known = Knowledge.of(many)
    for board in ranked[:3]:
        for ppc in ppcs(board, known):
            for line in ppc.lines:
                controls = [point.control for point in line.points]
                assert len(controls) == len(set(controls)) == 6, (ppc.title, line.attack)
            assert {line.attack.rpartition(", ")[2] for line in ppc.lines} == {"seed 0", "seed 1", "seed 2"}


def test_an_attack_knows_the_defense_through_what_it_follows(many, bench_page):
    record = next(r for r in many if r.config.attack.kind == "tracing")
    follows = record.config.attack.follows
    assert not Knowledge().adaptive(record) and Knowledge(frozenset([follows])).adaptive(record)
    result = bench_page.synthetic(2, kinds=("membership",))
    assert follows not in Knowledge.of(many).declared and Knowledge.of(result).declared == {"mia_knowing"}


def test_a_page_of_many_cells_has_them_as_data_the_first_as_a_plain_table_and_figures_as_there_is_place(
    many, monkeypatch
):
    monkeypatch.setattr(html, "FIGURE_BUDGET", 1)
    page = Page(many).html()
    (text,) = re.findall(r'<script type="application/json" id="cell-data">(.*?)</script>', page)
    data = json.loads(text)
    assert len(data["rows"]) == len(many) and [c["title"] for c in data["columns"]][:2] == ["Suite", "Defense"]
    assert {row[-1] for row in data["rows"]} == {r.cell_id for r in many}
    table = table_rows(many)
    place = [c["title"] for c in data["columns"]].index("Accuracy")
    assert [row[place] for row in data["rows"]] == pytest.approx([row["accuracy"] for row in table], rel=1e-5)
    assert page.count('<tr id="c') == PLAIN_ROWS
    assert (
        f"all {len(many)} cells" in page
        and f"the first {PLAIN_ROWS}" in page
        and "leaderboard.csv has the rest" in page
    )
    figures = page.count('<figure class="chart"')
    assert figures > 40 and page.count("<svg role") == 1
    assert page.count("no place for it on this page; it lies in figures/") == figures - 1


def test_sprites_stop_at_a_number_of_bytes_and_are_counted(bench_page):
    noise = np.random.default_rng(0).random((10, 3, 32, 32)).astype(np.float32)
    record = next(bench_page.synthetic(1))
    album = Album(lambda _: CellImages(noise, noise), budget=100_000)
    results = [album.strip(record) for _ in range(5)]
    assert results[0] is not None and results[-1] is None
    assert album.refused == sum(uri is None for uri in results) > 0


def test_a_defense_has_a_row_only_where_its_uploads_were_attacked_in_that_way(fabricate):
    """Membership of a model stands beside each attack on its uploads, but is no evaluation of uploads by itself."""
    rounds = dict(probe_rounds=4)
    records = [*controls(fabricate), *controls(fabricate, **rounds), *grid(fabricate, (0.1, 20.0, 0.9))]
    records += [fabricate("spn", 0.1, "dlg", "reconstruction", 30.0, control="alpha2", **more) for more in ({}, rounds)]
    for defense, control in (("dp", "sigma"), ("spn", "alpha2"), ("ppdl", "sigma")):
        records.append(fabricate(defense, 0.1, "mia_loss", "membership", control=control))
    shown = [[one.value.entry.defense.id for one in table.compared] for table in tables(records)]
    assert shown == [["dp", "ppdl", "spn"], ["ppdl", "spn"]], "ppdl: no uploads were attacked, its model is in both"


def test_an_evaluation_of_the_undefended_model_alone_has_a_row_on_a_board_and_no_choice(fabricate, tmp_path):
    larger = dict(options={"hidden": "99"})
    store = Store(tmp_path)
    for record in [*controls(fabricate), *controls(fabricate, **larger), *grid(fabricate, (0.1, 20.0, 0.9))]:
        store.save(record)
    board = summary_of(store, "two networks")
    names = [(about, [row[1][0] for row in rows]) for about, rows in board.best.groups]
    assert names == [("mlp", ["undefended", "dp"]), ("mlp (hidden=99)", ["undefended"])]
    assert "and 1 further evaluation" in board.about and len(board.choices) == 1


def test_an_evaluation_of_the_undefended_model_beside_others_is_a_result_and_no_control(fabricate):
    """Adapters that no attack reads are a finding; alone, or beside a defense, the attack is too weak."""
    weak = [
        fabricate("none", None, "dlg", "reconstruction", 6.0),
        fabricate("full_noise", None, "dlg", "reconstruction", 6.0),
    ]
    strong = dict(options={"hidden": "99"})
    beside = [*controls(fabricate, **strong), *grid(fabricate, (0.1, 20.0, 0.9), **strong)]
    assert [one.reliable for one in judged_evaluations(weak)] == [False]
    assert [one.reliable for one in judged_evaluations([*weak, *beside])] == [True, True]
    defended = [*weak, *grid(fabricate, (0.1, 5.0, 0.9)), *beside]
    assert sorted(one.reliable for one in judged_evaluations(defended)) == [False, True]


def test_an_alarm_of_noise_is_rare_over_all_evaluations_together(fabricate):
    """A cell of 200 candidates at 62 % (p = 0.0004) is one too rare among a few, and not among a hundred."""

    def noise(count, share=0.5):
        return [
            fabricate("full_noise", None, f"mia_{i}", "membership", share, n=200, options={"hidden": str(i)})
            for i in range(count)
        ]

    lucky = fabricate("full_noise", None, "mia_nn", "membership", 0.62, n=200)

    def alarms(records):
        return [
            c.sentence
            for one in judged_evaluations(records)
            for c in one.checks
            if c.control == "full_noise" and c.ok is False
        ]

    assert len(alarms([lucky, *noise(4)])) == 1 and not alarms([lucky, *noise(99)])
    assert len(alarms([fabricate("full_noise", None, "mia_nn", "membership", 0.7, n=200), *noise(99)])) == 1
