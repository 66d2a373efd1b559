"""The tables of a folder: CSV, boards and their ranks, evaluations and what is said of them, costs, what is rebuilt."""

import csv
import io
from functools import partial

import pytest

from ppbench.claims.check import PAPER_CLAIMS, claimed
from ppbench.claims.claim import Claim
from ppbench.records.store import Store
from ppbench.report.entries import badges_of
from ppbench.report.frame import EVALUATION, frame_of
from ppbench.report.knowing import Knowledge
from ppbench.report.page.board import up_to_date, write_board
from ppbench.report.page.boards import (
    boards_of,
    checks_of,
    csv_field,
    csv_text,
    defense_sentences,
    judged_evaluations,
    no_claims,
    standalone_sentences,
)
from ppbench.report.page.html import FIGURE_LIST
from ppbench.report.words import evaluation_words


def ranks(board):
    return {f"{e.defense.id} {e.control}".strip(): e.rank for e in board.entries}


def board_of(records, kind="reconstruction"):
    (board,) = [b for b in boards_of(records, no_claims) if b.setting.kind == kind]
    return board


@pytest.fixture(scope="module")
def records(fabricate):
    """Both controls, three defenses, all kinds of attacks, a diverged and a failed cell."""
    results = []
    for defense, db, share in (("none", 35.0, 1.0), ("full_noise", 6.0, 0.1)):
        results.append(fabricate(defense, None, "dlg", "reconstruction", db))
        results += [fabricate(defense, None, kind, kind, share) for kind in ("label", "tracing")]
        results.append(fabricate(defense, None, "mia_loss", "membership", max(share, 0.5)))
    for value, db in ((0.01, 24.0), (0.1, 18.0), (0.5, 15.0)):
        spn, dp = partial(fabricate, "spn", value, control="alpha2"), partial(fabricate, "dp", value, control="sigma")
        results += [spn("dlg", "reconstruction", db), spn("adaptive_spn", "reconstruction", 30.0, adaptive=True)]
        results.append(spn("label", "label", 1.0))
        if value < 0.5:
            results += [dp("dlg", "reconstruction", db), dp("adaptive_dp", "reconstruction", db - 0.5, adaptive=True)]
            results.append(dp("mia_loss", "membership", 0.6))
    results.append(fabricate("dp", 0.5, "dlg", "reconstruction", control="sigma", status="diverged", accuracy=None))
    results.append(fabricate("ppdl", 0.3, "dlg", "reconstruction", 15.0, control="theta"))
    return [*results, fabricate("ppdl", 0.3, "idlg", "reconstruction", control="theta", status="failed")]


def test_csv_has_a_row_for_every_cell_whatever_their_order_and_no_times(records):
    whole = csv_text(records)
    table = list(csv.reader(io.StringIO(whole)))
    assert len(table) == 1 + len(records) and {len(row) for row in table} == {len(table[0])}
    assert not any("second" in name or "time" in name for name in table[0])
    assert csv_text(records[::-1]) == whole


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1+1"])
def test_csv_neutralizes_formulas_of_spreadsheets_and_nothing_else(fabricate, name):
    assert (
        csv_field(-0.5) == "-0.5"
        and csv_field("dp_sgd") == "dp_sgd"
        and csv_field(True) == "true"
        and csv_field(None) == ""
    )
    assert csv_field(name).startswith("'")
    row = next(csv.DictReader(io.StringIO(csv_text([fabricate(name, 1.0, "dlg", "reconstruction")]), newline="")))
    assert row["defense"] == f"'{name}".replace("\r", " ") and row["control"] == "kappa"


def test_csv_has_outputs_errors_and_costs_over_those_of_the_undefended(fabricate):
    none = fabricate("none", None, "dlg", "reconstruction", bytes_up=2000.0)
    mine = fabricate("pbpfl", 10.0, "unmask", "extraction", 0.1, error=3.0, bytes_up=500.0)
    table = csv.DictReader(io.StringIO(csv_text([costly(none, 400), costly(mine, 100)])))
    row = next(row for row in table if row["defense"] == "pbpfl")
    assert (row["agreement"], row["output_error"], row["mse"]) == ("0.1", "3", "")
    assert float(row["agreement_low"]) < 0.1 < float(row["agreement_high"])
    assert (row["distance"], row["distance_value"]) == ("output/1", "0.9")
    costs = ("bytes_up", "up_ratio", "down_ratio", "memory_peak", "memory_ratio")
    assert [row[name] for name in costs] == ["500", "0.25", "1", "100", "0.25"]
    (row,) = csv.DictReader(io.StringIO(csv_text([costly(mine, None)])))
    assert [row[name] for name in costs] == ["500", "", "", "", ""]


def costly(record, memory):
    return record.model_copy(update={"cost": record.cost.model_copy(update={"memory_peak": memory})})


def test_ranks_go_by_the_worst_case_and_overlapping_intervals_share_them(records):
    board = board_of(records)
    result = ranks(board)
    assert result["dp sigma = 0.1"] == "1" and result["dp sigma = 0.01"] == "2"
    assert {result[f"spn alpha2 = {value}"] for value in (0.01, 0.1, 0.5)} == {"3-5"}
    spn = next(e for e in board.entries if e.defense.id == "spn")
    assert spn.worst.config.attack.id == "adaptive_spn" and spn.plain.config.attack.id == "dlg"
    assert result["none"] == result["full_noise"] == result["dp sigma = 0.5"] == ""
    ppdl = next(e for e in board.entries if e.defense.id == "ppdl")  # without an adaptive attack, with a failed one
    assert ppdl.rank == "" and {"plain attacks only", "failed"} <= {badge.text for badge in ppdl.badges}
    failed = next(r for r in records if r.status == "failed")
    blind = failed.model_copy(update={"reason": "attack 'x': nothing in the view of server/1 can be read"})
    assert "failed" not in {b.text for b in badges_of([blind], Knowledge())}, "others of its row may have read"


@pytest.mark.parametrize("broken", ["no control", "attacks too weak", "noise leaks"])
def test_nothing_is_ranked_where_a_control_fails(records, fabricate, broken):
    some = [r for r in records if r.config.defense.id not in ("none", "full_noise")]
    if broken != "no control":
        some.append(fabricate("none", None, "dlg", "reconstruction", 9.0 if broken == "attacks too weak" else 35.0))
        some.append(fabricate("full_noise", None, "dlg", "reconstruction", 35.0 if broken == "noise leaks" else 6.0))
    board = board_of(some)
    assert not board.reliable and set(ranks(board).values()) == {""}


def records_of(make, stage="iterate", **more):
    """Return both controls, a masked defense that is read and one that is not, asked for members and outputs."""
    results = []
    answers = ("none", None, 1.0), ("full_noise", None, 1.0), ("bad", 1.0, 1.0), ("good", 1.0, 0.1)
    for defense, value, right in answers:
        knows, made = value is not None, partial(make, defense, value, **dict(stage=stage) | more)
        error = 0.01 if right == 1.0 else 3.0
        results.append(made("query", "extraction", 0.1 if knows else 1.0, error=99.0 if knows else 0.0))
        results.append(made("extract_regression", "extraction", right, error=error, adaptive=knows))
        share = {"none": 0.71, "bad": 0.71}.get(defense, 0.5)
        results.append(made("unmask_regression", "membership", share, adaptive=knows))
    return results


ORDER = {"none": "", "full_noise": "", "good kappa = 1": "1", "bad kappa = 1": "2"}


def test_what_clients_train_on_is_ranked_and_what_is_delivered_is_not_for_answering(fabricate):
    records = records_of(fabricate) + records_of(fabricate, "final")
    results = {(b.setting.kind, b.setting.stage): b for b in boards_of(records, no_claims)}
    assert list(results) == [(k, s) for k in ("membership", "extraction") for s in ("iterate", "final")]
    for key in (("membership", "iterate"), ("membership", "final"), ("extraction", "iterate")):
        assert results[key].reliable and ranks(results[key]) == ORDER, key
    assert set(ranks(results["extraction", "final"]).values()) == {""}
    assert {b.headline for b in results.values()} == {"auc", "agreement"}
    assert [len(b.checks) for b in results.values()] == [2, 2, 1, 1], "noise hides no model from who is sent it"
    worst = {e.defense.id: (e.plain, e.worst) for e in results["extraction", "iterate"].entries}["bad"]
    assert [r.config.attack.id for r in worst] == ["query", "extract_regression"]


def test_extraction_is_ranked_where_the_undefended_model_is_read_and_attacks_know_the_defense_or_by_error(fabricate):
    rest = [r for r in records_of(fabricate) if r.config.defense.id != "none"]
    for share, known in ((1.0, True), (0.1, False)):
        none = fabricate("none", None, "query", "extraction", share, stage="iterate")
        assert board_of([*rest, none], "extraction").reliable is known
    bare = [r for r in records_of(fabricate) if not (r.config.attack.adaptive and r.config.defense.id == "good")]
    result = ranks(board_of(bare, "extraction"))
    assert (result["good kappa = 1"], result["bad kappa = 1"]) == ("", "1")
    board = board_of(records_of(fabricate, classes=1, shape=(16,), accuracy=None, mse=0.06), "extraction")
    assert board.headline == "output_error" and board.reliable and ranks(board) == ORDER


@pytest.mark.parametrize(("none", "reliable"), [(0.01, True), (0.2, False)])
def test_rows_of_tables_are_ranked_by_error_and_never_by_decibels(fabricate, none, reliable):
    """45 dB of a row say nothing where its error is larger; nor does an undefended row at 50 dB, a fifth off."""
    some = [("none", None, none, 50.0, False), ("full_noise", None, 0.9, 8.0, False)]
    some += [("bad", 1.0, 0.05, 34.0, True), ("good", 1.0, 0.8, 36.0, True), ("good", 1.0, 0.9, 45.0, False)]
    row = partial(fabricate, kind="reconstruction", shape=(16,))
    (board,) = boards_of(
        [row(d, v, ("dlg", "adaptive_dp")[k], share=db, error=e, adaptive=k) for d, v, e, db, k in some], no_claims
    )
    assert (board.headline, board.reliable, board.images) == ("rmse_mean", reliable, False)
    assert next(e for e in board.entries if e.defense.id == "good").worst.attack == "adaptive_dp"
    assert ranks(board) == (ORDER if reliable else dict.fromkeys(ranks(board), ""))


def test_evaluations_of_other_networks_and_other_data_are_kept_apart(fabricate):
    def of(defense, value, db):
        made = partial(fabricate, defense, value, "dlg", "reconstruction", db)
        return [made(options={"layers": n}, clients=clients) for n, clients in ((3, 5), (5, 5), (3, 10))]

    records = of("dp", 0.1, 9.0)
    groups = frame_of([*records, records[0]]).by(EVALUATION)
    assert [len(some) for some in groups.values()] == [2, 1, 1]
    heads = [evaluation_words(key) for key in groups]
    assert heads[0] == "digits, 1000 examples, mlp (layers=3), 5 clients, 20 rounds, seed 0" and len(set(heads)) == 3
    judgment = judged_evaluations([*records, *of("none", None, 35.0), *of("full_noise", None, 6.0)])
    checks, verdict = checks_of(judgment), standalone_sentences(defense_sentences(judgment))
    for words in (verdict, [check.sentence for check in checks]):
        assert all(any(sentence.startswith(f"[{head}] ") for sentence in words) for head in heads)


def test_a_claim_stands_beside_the_cells_that_it_is_about(fabricate, monkeypatch):
    asr = Claim("asr", 0.503, "digits", "mlp", None, "Table 4", when=(("kappa", 3.0),))
    cap = Claim("cap_extraction", 0.7, "digits", "mlp", 1, "Table 5")
    bare = Claim("agreement", None, "digits", "mlp", None, "Lemma 3")
    monkeypatch.setattr("ppbench.claims.check.claims_of", lambda name: (bare, asr, cap))
    members = partial(fabricate, "pbpfl", 3.0, "mia_loss", "membership", 0.5)
    assert claimed(members(stage="iterate")) == "ASR 50.3% (Table 4)"
    assert claimed(members(stage="final")) == claimed(members(stage="iterate", dataset="mnist")) == ""
    assert claimed(fabricate("pbpfl", 1.0, "mia_loss", "membership", 0.5, stage="iterate")) == ""
    outputs = partial(fabricate, "pbpfl", 3.0, "query", "extraction", 0.5, stage="iterate")
    assert (claimed(outputs()), claimed(outputs(batch=2))) == ("CAP 0.70 (Table 5)", "")


def test_figures_of_boards_that_are_gone_leave_and_a_board_is_up_to_date_while_both_tables_are(tmp_path, fabricate):
    store = Store(tmp_path / "out")
    store.save(fabricate("none", None, "mia_loss", "membership", 0.9))
    store.save(fabricate("none", None, "dlg", "reconstruction", 35.0))
    folder = store.out / "figures"
    folder.mkdir()
    for name in ("ppc-old.svg", "ppc-old.png", "notes.txt", "holiday.png"):
        (folder / name).write_text("x")
    (folder / FIGURE_LIST).write_text('["ppc-old.svg", "ppc-old.png"]')
    drawn = {path.name for path in write_board(store, PAPER_CLAIMS) if path.parent == folder}
    assert {path.name for path in folder.iterdir()} == drawn | {"notes.txt", "holiday.png", FIGURE_LIST}
    assert up_to_date(store, PAPER_CLAIMS)
    worst = store.out / "worst_case.csv"
    worst.write_text(worst.read_text().replace("35", "36"))
    assert not up_to_date(store, PAPER_CLAIMS)
    worst.unlink()
    assert not up_to_date(store, PAPER_CLAIMS)
