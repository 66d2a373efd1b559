"""`ppbench.load` and `ppbench.plot`: typed tidy tables of a folder or an archive, equal to the files, and figures."""

import csv
import io
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import pandas
import pytest
from matplotlib import pyplot

import ppbench
from ppbench.base.errors import UsageError
from ppbench.records.archive import pack_archive
from ppbench.records.run_files import SelftestTrial, Soundness, save_soundness
from ppbench.records.store import Store
from ppbench.report.columns import CELLS, KEY, LOADED_CELLS, LOADED_VICTIMS, LOADED_WORST
from ppbench.report.page.boards import boards_of, csv_text, no_claims, worst_rows

BOARD = Path(__file__).parents[1] / "leaderboards" / "results" / "digits-quick" / "records.zip"
LEVELS = {"cells": LOADED_CELLS, "victims": LOADED_VICTIMS, "worst": LOADED_WORST}


@pytest.fixture(scope="module")
def records(fabricate):
    """Two controls and three defenses: attacks that know them, labels, members, and a failed cell."""
    results = []
    for name, db in (("none", 35.0), ("full_noise", 6.0)):
        results.append(fabricate(name, None, "dlg", "reconstruction", db))
        results.append(fabricate(name, None, "label", "label", 1.0 if name == "none" else 0.1))
        results.append(fabricate(name, None, "mia_loss", "membership", 0.7 if name == "none" else 0.5))
    for value, db in ((0.1, 18.0), (0.5, 12.0)):
        make = partial(fabricate, "dp", value, kind="reconstruction", control="sigma", accuracy=1 - value)
        results += [make("dlg", share=db), make("adaptive_dp", share=db + 2, adaptive=True)]
    results.append(fabricate("ppdl", 0.3, "dlg", "reconstruction", 15.0, control="theta", parameters={"sigma": 0.1}))
    return [*results, fabricate("ppdl", 0.3, "mia_loss", "membership", control="theta", status="failed")]


@pytest.fixture(scope="module")
def folder(records, tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("load") / "out")
    for record in records:
        store.save(record)
    return store.out


@pytest.fixture(scope="module")
def worst(folder):
    return ppbench.load(folder, level="worst")


@pytest.fixture(autouse=True)
def closed():
    """Draw without a screen, and close what was drawn."""
    with matplotlib.rc_context({"backend": "agg"}):
        yield
    pyplot.close("all")


def board(worst):
    return worst[worst["kind"] == "reconstruction"]


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_has_its_columns_in_order_and_their_types_and_an_archive_gives_the_same(folder, level, tmp_path):
    frame = ppbench.load(folder, level)
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {c.name: c.dtype for c in LEVELS[level]}
    assert list(frame.index) == list(range(len(frame))) and not frame.duplicated().any()
    pack_archive(folder, tmp_path / "out.zip")
    pandas.testing.assert_frame_equal(ppbench.load(str(tmp_path / "out.zip"), level=level), frame)
    grouped = frame.groupby(["defense", "control", "role"]).size()
    assert grouped.sum() == len(frame), "text that says nothing is not missing, so that grouping loses no row"


def test_cells_say_what_the_records_and_leaderboard_csv_say(folder, records):
    frame = ppbench.load(folder)
    fields = {
        r["cell_id"]: r
        for r in csv.DictReader(io.StringIO(csv_text(records, no_claims, boards_of(records, no_claims))))
    }
    own = {"reason", "n", "claimed"}  # of a metric in one, of a cell in the other; papers' claims are not loaded
    shared = [c.name for c in CELLS if c.path and c.name not in own] + ["rank_low", "rank_high"]
    for record in records:
        rows = frame[frame["cell_id"] == record.cell_id]
        for metric, (_, row) in zip(record.metrics, rows.iterrows(), strict=bool(record.metrics)):
            assert (row["metric"], row["n"], row["higher_is_safer"]) == (metric.name, metric.n, metric.higher_is_safer)
            for name in ("value", "low", "high", "chance", "reason"):
                told_of = getattr(metric, name)
                assert pandas.isna(row[name]) if told_of is None else row[name] == told_of, (metric.name, name)
        (line,) = rows[shared].drop_duplicates().to_dict("records")
        for name, value in line.items():
            field = fields[record.cell_id][name]
            if pandas.isna(value) or value == "":
                assert field == "", name
            elif isinstance(value, bool | np.bool_):
                assert field == str(value).lower(), name
            else:
                assert field == value if isinstance(value, str) else float(field) == pytest.approx(value), name
    (parameters,) = frame[(frame["defense"] == "ppdl") & (frame["kind"] == "reconstruction")]["parameters"].unique()
    assert json.loads(parameters) == {"sigma": 0.1, "theta": 0.3}
    wide = frame.pivot(index="cell_id", columns="metric", values="value")
    assert len(wide) == len(records), "as the docstring says"


def test_a_failed_cell_has_a_row_that_says_why(folder, records):
    frame = ppbench.load(folder)
    (row,) = frame[frame["status"] == "failed"].to_dict("records")
    assert row["reason"] == "it broke" and pandas.isna(row["metric"]) and pandas.isna(row["value"])
    (row,) = (lambda f: f[f["status"] == "failed"])(ppbench.load(folder, "victims")).to_dict("records")
    assert pandas.isna(row["metric"]) and row["defense"] == "ppdl"


def test_victims_are_the_scores_that_metrics_are_made_of(folder, records):
    frame = ppbench.load(folder, level="victims")
    for record in records:
        rows = frame[frame["cell_id"] == record.cell_id]
        if record.status == "complete":
            assert rows["victim"].nunique() == len(record.victims)
    psnr = frame[frame["metric"] == "psnr"].groupby("cell_id")["value"].median()
    assert {r.cell_id: r.metric("psnr_median").value for r in records if r.metric("psnr_median")} == psnr.to_dict()
    members = frame[(frame["metric"] == "decision") & (frame["attack"] == "mia_loss")]
    assert set(members["value"]) == {0.0, 1.0} and not members["canary"].any()
    assert not {"index", "probe", "client", "kind"} & set(frame["metric"].dropna())


def test_worst_is_what_the_boards_show(worst, records):
    ranked = boards_of(records, no_claims)
    rows = {(row["defense"], row["control_value"]): row for row in worst_rows(ranked)}
    head = worst[worst["headline"].fillna(False) & (worst["kind"] == "reconstruction")]
    for case in ("worst", "plain"):
        for row in head[head["case"] == case].to_dict("records"):
            about = rows[row["defense"], None if pandas.isna(row["control_value"]) else row["control_value"]]
            assert (row["metric"], row["value"]) == ("psnr_median", about[f"{case}_psnr_median"])
            ranks = [None if pandas.isna(row[end]) else row[end] for end in ("rank_low", "rank_high")]
            assert ranks == [about["rank_low"], about["rank_high"]] and row["reliable"] and row["attack"] == about[case]
            assert all(row[c.name] == about[c.name] for c in KEY if c.dtype == "string")
    assert {e.name for b in ranked for e in b.entries} == set(worst["row"])
    labels = worst[(worst["metric"] == "label_accuracy") & (worst["case"] == "worst") & (worst["defense"] == "none")]
    assert [(a, v) for a, v in labels[["attack", "value"]].itertuples(index=False)] == [("label", 1.0)]
    (failed,) = worst[
        (worst["kind"] == "membership") & (worst["defense"] == "ppdl") & (worst["case"] == "worst")
    ].to_dict("records")
    assert pandas.isna(failed["value"]) and "no attack" in failed["reason"]


def test_a_failed_self_test_ranks_nothing(records, tmp_path):
    store = Store(tmp_path / "out")
    for record in records:
        store.save(record)
    assert ppbench.load(store.out, "worst")["rank_low"].notna().any()
    trial = SelftestTrial(model="mlp", attack="analytic", share=0.0)
    save_soundness(store.out, Soundness(ppbench="0", code="0", torch="0", python="0", trials=[trial]))
    assert not ppbench.load(store.out, "worst")["rank_low"].notna().any()
    assert not ppbench.load(store.out)["rank_high"].notna().any()


def test_what_cannot_be_loaded_is_one_sentence(folder, tmp_path):
    for path, words in ((tmp_path / "nowhere", "is no folder and no archive"), (tmp_path, "holds no record")):
        with pytest.raises(UsageError, match=words):
            ppbench.load(path)
    with pytest.raises(UsageError, match="no level 'wide'; give one of cells, victims, worst"):
        ppbench.load(folder, level="wide")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not ppbench's"):
        ppbench.load(tmp_path)


def test_a_record_that_cannot_be_read_is_warned_of_and_the_others_are_there(records, tmp_path):
    store = Store(tmp_path / "out")
    for record in records[:2]:
        store.save(record)
    (store.folder / f"{records[0].cell_id}.json").write_text("{")
    with pytest.warns(UserWarning, match="is not a whole record"):
        frame = ppbench.load(store.out)
    assert set(frame["cell_id"]) == {records[1].cell_id}
    (store.folder / f"{records[1].cell_id}.json").write_text("{")
    with pytest.raises(UsageError, match=r"no record that can be read: .*is not a whole record"):
        ppbench.load(store.out)


def test_ppbench_stays_light_until_a_table_is_asked_for():
    heavy = "{'pandas', 'matplotlib', 'seaborn', 'torch'} & set(sys.modules)"
    code = f"import sys, ppbench; ppbench.__all__; assert not {heavy}; ppbench.load; assert not {heavy} - {{'pandas'}}"
    code += "; import ppbench.plot; ppbench.plot.worst_case"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert ppbench.plot is sys.modules["ppbench.plot"]


# -- figures ---------------------------------------------------------------------------------------------------------
def marks(axes):
    """Return the places of all marks."""
    return {
        (round(float(x), 6), round(float(y), 6)) for line in axes.lines for x, y in zip(*line.get_data(), strict=True)
    }


def test_accuracy_and_leakage_of_every_setting_are_drawn_with_their_values(worst):
    axes = ppbench.plot.accuracy_leakage(board(worst))
    rows = board(worst).query("case == 'worst' and metric == 'psnr_median'")
    expected = {(round(r.accuracy, 6), round(r.value, 6)) for r in rows.itertuples()}
    assert len(expected) == 5 and expected <= marks(axes)
    assert {text.get_text() for text in axes.texts} == {"0.1", "0.5", "0.3"}
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["dp", "full_noise", "none", "ppdl"]
    assert axes.get_ylabel() == "psnr_median (dB)" and not axes.yaxis_inverted()
    assert axes.get_title() == "digits, mlp\nreconstruction, server/1, init, batch 1"
    mine = pyplot.figure().add_subplot()
    assert ppbench.plot.accuracy_leakage(board(worst), metric="rmse_mean", ax=mine) is mine
    assert mine.yaxis_inverted() and "axis reversed" in mine.get_ylabel()


def test_worst_cases_are_drawn_from_the_least_leaking_down_filled_and_hollow(worst):
    axes = ppbench.plot.worst_case(board(worst))
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    order = ["full_noise", "dp sigma = 0.5", "ppdl theta = 0.3", "dp sigma = 0.1", "none"]
    assert labels[::-1] == order, "drawn from below"
    filled = {y: x for x, y in marks_of(axes, hollow=False)}
    hollow = {y: x for x, y in marks_of(axes, hollow=True)}
    assert filled[labels.index("dp sigma = 0.1")] == 21.0 and hollow[labels.index("dp sigma = 0.1")] == 19.0
    members = worst[(worst["kind"] == "membership")]
    axes = ppbench.plot.worst_case(members, metric="asr")
    assert [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [0.5], "chance"


def marks_of(axes, hollow):
    lines = [
        line
        for line in axes.lines
        if (line.get_markerfacecolor() == "none") == hollow and line.get_marker() in "os^Dv<>Ph*"
    ]
    return [(float(x), int(y)) for line in lines for x, y in zip(*line.get_data(), strict=True)]


def test_what_cannot_be_drawn_is_one_sentence_that_says_what_would(worst, folder):
    for draw in (ppbench.plot.accuracy_leakage, ppbench.plot.worst_case):
        with pytest.raises(UsageError, match=r"several boards, which differ in .*kind.*; choose, as frame\[frame\['"):
            draw(worst)
        with pytest.raises(UsageError, match="has no column 'row'; give one of ppbench"):
            draw(ppbench.load(folder))
        with pytest.raises(UsageError, match="'ssim'"):
            draw(board(worst), metric="ssim")
        with pytest.raises(UsageError, match="name a metric"):
            draw(worst[:0])


@pytest.mark.skipif(not BOARD.is_file(), reason="the committed boards are not here")
@pytest.mark.nightly
def test_a_committed_board_is_drawn(worst):
    frame = ppbench.load(BOARD, level="worst")
    chosen = frame[(frame["kind"] == "reconstruction") & (frame["stage"] == "init")]
    axes = ppbench.plot.worst_case(chosen)
    assert len(axes.get_yticks()) == chosen["row"].nunique() == 17
    assert len(axes.figure.axes) == 1 and ppbench.plot.accuracy_leakage(chosen).figure is not axes.figure
