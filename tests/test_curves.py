"""Budget and ROC curves, perceptual figures, audits and tuned settings on the board: data, drawings, columns, page."""

import csv
import io

import numpy as np
import pytest

from ppbench.claims.check import PAPER_CLAIMS
from ppbench.questions.image_metrics import ImageScore
from ppbench.questions.membership import MemberScore
from ppbench.records.schema import Flag, Tuned
from ppbench.records.store import Store
from ppbench.report.page.board import write_board
from ppbench.report.page.boards import boards_of, csv_text, no_claims
from ppbench.report.page.curves import (
    BUDGET_MARKS,
    PANELS,
    BudgetLine,
    RocLine,
    Rocs,
    budget_line,
    budgets,
    curves,
    rocs,
)
from ppbench.report.page.html import Page
from ppbench.verification import verify

DRAWN = True


def image(probe, psnr, evaluations, path=()):
    figures = dict.fromkeys(("rmse", "rmse_raw"), None if psnr is None else 0.1)
    return ImageScore(
        probe=probe, client=0, index=0, psnr=psnr, ssim=None, label=None, confidence=None, at_truth=None,
        evaluations=evaluations, path=list(path), blind=9.0, oracle=psnr or 0.0, lpips=0.25, feat_mse=1.5,
        mse=None if psnr is None else 10 ** (-psnr / 10), **figures,
    )  # fmt: skip


def members(gap, seed, canary=None, silent=False):
    """Return 200 average candidates, and 3 x 70 canaries whose members lie `canary` higher."""
    rng, result = np.random.default_rng(seed), []
    families = [("average", gap, 200)] + [(name, canary or 0.0, 70) for name in ("blank", "noise", "wrong") if canary]
    for family, shift, count in families:
        for i in range(count):
            index, member = len(result), i % 2 == 0
            score = float(rng.normal() + shift * member)
            decision = None if silent and abs(score - 1) < 1.2 else score > 1
            outcome = dict(score=score, decision=decision, family=family)
            result.append(MemberScore(index=index, half=i // 2 % 2, member=member, **outcome))
    return result


@pytest.fixture(scope="session")
def searching(fabricate):
    """Return a maker of reconstructions: `searching(defense, value, attack, scores=...)`."""
    return lambda *about, **more: fabricate(*about, "reconstruction", **more)


@pytest.fixture(scope="session")
def audited(fabricate):
    audit = dict(references=4, canaries=70)
    return lambda *about, **more: fabricate(*about, "membership", stage="audit", audit=audit, **more)


@pytest.fixture(scope="module")
def searched(searching):
    """none and full_noise under two attacks, pbpfl at two control values under one."""
    results = []
    for defense, value in (("none", None), ("full_noise", None), ("pbpfl", 10.0), ("pbpfl", 100.0)):
        top, path = (30.0, [(10, 8.0), (100, 22.0)]) if defense == "none" else (10.0, [(10, 8.0)])
        results.append(searching(defense, value, "ig", scores=[image(i, top + i, 500, path) for i in range(4)]))
        if value is None:
            some = [image(i, top, 100 * (i + 1)) for i in range(4)]
            results.append(searching(defense, value, "dlg", scores=some))
    return results


@pytest.fixture(scope="module")
def guessed(audited):
    results = []
    for number, (defense, value) in enumerate((("none", None), ("full_noise", None), ("dp", 1.0), ("dp", 2.0))):
        gap, epsilon = 2.0 if defense == "none" else 0.0, 0.5 if defense == "dp" else None
        by = {
            "mia_loss": members(gap, number, canary=gap + 0.5),
            "mia_lira": members(gap / 2, 9 + number, canary=gap + 3),
            "audit_one_run": members(gap, 20 + number, canary=6.0, silent=True),
        }
        results += [audited(defense, value, a, scores=v, control="sigma", epsilon=epsilon) for a, v in by.items()]
    return results


def only(records, kind):
    (board,) = [board for board in boards_of(records, no_claims) if board.setting.kind == kind]
    return board


def test_a_budget_line_counts_what_would_have_been_answered_after_so_many_evaluations(searching):
    victims = [image(0, 30.0, 200, [(10, 12.0), (50, 21.0)]), image(1, 19.0, 80), image(2, None, 80, [(60, 25.0)])]
    line = budget_line(searching("none", None, "ig", scores=victims))
    assert line == BudgetLine("ig", (10, 50, 60, 80, 200), (0, 1 / 3, 2 / 3, 1 / 3, 1 / 3), (0, 0, 21, 19, 19))
    victims = [image(i, 25.0 if i < 3 else 5.0, 100 * (i + 1)) for i in range(4)]
    line = budget_line(searching("none", None, "dlg", scores=victims))
    assert (line.marks, line.share) == ((100, 200, 300, 400), (0.25, 0.5, 0.75, 0.75)), "without a path: at the end"


def test_closed_forms_and_broken_cells_have_no_curve_and_long_paths_are_thinned(searching):
    assert budget_line(searching("none", None, "analytic", scores=[image(0, 90.0, 0)])) is None
    assert budget_line(searching("none", None, "dlg", status="failed")) is None
    long = [image(0, 40.0, 5000, [(m, m / 200) for m in range(1, 5000)])]
    line = budget_line(searching("none", None, "ig", scores=long))
    assert line is not None and len(line.marks) <= BUDGET_MARKS and (line.marks[0], line.marks[-1]) == (1, 5000)
    assert line.decibels[-1] == 40 and list(line.decibels) == sorted(line.decibels)


def test_a_board_has_the_undefended_first_and_no_panel_of_full_noise(searched, searching):
    (budget,) = budgets(only(searched, "reconstruction"), "server/1")
    titles = [title for title, _ in budget.panels]
    assert titles[0] == "none" and sorted(titles[1:]) == ["pbpfl kappa = 10", "pbpfl kappa = 100"]
    assert [line.attack for line in budget.panels[0][1]] == ["dlg", "ig"] and budget.title == "Budget, server/1"
    values = [searching("pbpfl", float(v), "ig", scores=[image(0, 10.0, 500)]) for v in range(PANELS + 1)]
    result = budgets(only([*searched[:1], *values], "reconstruction"), "x")
    assert [len(b.panels) for b in result] == [PANELS, 2] and result[1].title == "Budget, x, part 2"


def test_rows_of_tables_have_no_decibels_and_no_curves(searching):
    record = searching("none", None, "dlg", shape=(16,), scores=[image(0, 30.0, 500)])
    assert curves(only([record], "reconstruction"), "x") == []


def test_the_roc_of_each_row_is_its_strongest_attacks_by_kind_of_record(guessed):
    (points,) = rocs(only(guessed, "membership"), "client/1")
    names = {line.name.split(":")[0]: line.name.split(": ")[1] for line in points.canaries}
    assert set(names) == {"none", "full_noise", "dp sigma = 1", "dp sigma = 2"}
    assert names["none"] == "audit_one_run", "its canaries lie 6 apart"
    assert {line.members for line in points.average} == {100} and {line.others for line in points.canaries} == {105}
    for line in (*points.average, *points.canaries):
        assert (line.fpr[0], line.tpr[0], line.fpr[-1], line.tpr[-1]) == (0, 0, 1, 1)
        assert list(line.fpr) == sorted(line.fpr) and list(line.tpr) == sorted(line.tpr)


def test_a_board_of_canaries_alone_draws_them_as_canaries(audited, fabricate):
    canaries = [v for v in members(0, 0, canary=2.0) if v.family != "average"]
    (points,) = rocs(only([audited("none", None, "mia_loss", scores=canaries)], "membership"), "x")
    assert not points.average and len(points.canaries) == 1
    plain = fabricate("none", None, "mia_loss", "membership", scores=members(1.0, 0))
    (points,) = rocs(only([plain], "membership"), "x")
    assert not points.canaries and len(points.average) == 1


def test_an_roc_is_drawn_in_steps_and_one_without_false_alarms_from_the_left_edge():
    line = RocLine("a", (0.0, 0.0, 0.5, 1.0), (0.0, 0.4, 0.4, 1.0), 10, 10)
    (axis,) = Rocs("t", (line,), ()).draw().axes
    drawn = axis.lines[0]
    assert drawn.get_drawstyle() == "steps-post" and axis.get_xscale() == axis.get_yscale() == "log"
    assert drawn.get_xdata().tolist() == [0.05, 0.05, 0.5, 1] and drawn.get_ydata().tolist() == [0.05, 0.4, 0.4, 1]
    assert list(axis.lines[1].get_xdata()) == [0.05, 1] == list(axis.lines[1].get_ydata()), "chance"


def test_csv_has_perceptual_figures_flags_tuned_settings_and_audits(searched, guessed):
    flags = [Flag(code=code, severity="info", detail="d") for code in ("oracle_gap", "blind_as_good")]
    tuned = Tuned(variants=[{"lr": 0.1, "tv": 0.0}, {"lr": 0.01, "tv": 0.1}], scores=[1.0, 2.0], chosen=1)
    noted = searched[0].model_copy(update={"flags": flags, "tuned": tuned})
    table = list(csv.DictReader(io.StringIO(csv_text([noted, *guessed]))))
    row = {r["cell_id"]: r for r in table}[noted.cell_id]
    assert (row["lpips_mean"], row["feat_mse_mean"], row["blind_median"]) == ("0.25", "1.5", "9")
    assert row["psnr_worst_decile"] == "33" and float(row["test_mse_mean"]) < 1e-3
    assert (row["flags"], row["tuned"], row["references"]) == ("oracle_gap blind_as_good", "lr=0.01, tv=0.1", "")
    row = {r["cell_id"]: r for r in table}[guessed[2].cell_id]
    assert (row["attack"], row["references"], row["canaries"]) == ("audit_one_run", "4", "70")
    assert float(row["epsilon_lower"]) > 1 and float(row["canary_tpr_at_1pct_fpr"]) > 0.9 and row["asr"] == ""


def test_the_page_shows_canaries_by_their_strongest_attack_and_a_refuted_claim(guessed):
    page = Page(guessed).html()
    for words in ("Canaries, TPR at 1 % FPR", "ε at least", "ROC curves, each row under its strongest attack"):
        assert words in page
    runs = {(r.config.attack.id, r.config.defense.parameters.get("sigma")): r for r in guessed}
    bound = runs["audit_one_run", 1].metric("epsilon_lower").value
    assert f"audit: ε ≥ {bound:.2f}" in page
    assert page.count("refuted: an audit shows") == 2, "both settings of dp; what claims nothing is not refuted"


def test_the_page_shows_budgets_flags_tuning_and_perceptual_figures(searched):
    flags = [Flag(code="oracle_gap", severity="warning", detail="<b>evil</b>")]
    more = [Flag(code="oracle_gap", severity="info", detail="another")]
    tuned = Tuned(variants=[{"layer": "<i>x</i>"}], scores=[1.0], chosen=0)
    first = searched[0].model_copy(update={"flags": flags, "tuned": tuned})
    second = searched[1].model_copy(update={"flags": more})
    page = Page([first, second, *searched[2:]]).html()
    assert "What each attack reaches with how many gradient evaluations" in page
    assert "LPIPS 0.250" in page and "Feat-MSE 1.500" in page and "worst tenth" in page
    assert "oracle gap \u00d72</span>" in page and "layer=&lt;i&gt;x&lt;/i&gt;" in page
    assert "<b>evil</b>" not in page and 'class="badge warning" title="&lt;b&gt;evil' in page


def test_the_folder_holds_the_curves_and_verifies(searched, guessed, tmp_path):
    store = Store(tmp_path / "out")
    for record in [*searched[:2], guessed[0], guessed[2]]:
        store.save(record)
    names = sorted(path.name for path in write_board(store, PAPER_CLAIMS) if path.parent.name == "figures")
    audit = "an-audited-training-70-canaries-4-reference-runs"
    about = "budget-server-1-initial-weights-batch-1-digits-1000-mlp", f"roc-client-1-{audit}-digits-1000-mlp"
    assert names == [f"{name}.{end}" for name in about for end in ("png", "svg")]
    assert verify(store.out, no_claims) == []
