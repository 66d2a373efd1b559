"""Columns of the tables: declared once, explained, and those of worst_case.csv tell all rows apart."""

import csv
import io
import json
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from daily import boards
from hypothesis import strategies as st

from ppbench.commands.terminal import evaluation_json
from ppbench.metrics.modality import modalities
from ppbench.questions.base import question_for, questions
from ppbench.records.archive import files_of, pack_archive, unpack_archive
from ppbench.records.schema import MODEL_METRICS, AuditInfo, CellConfig, ProbeInfo, Utility
from ppbench.records.store import Store, open_results
from ppbench.report import columns
from ppbench.report.columns import CELLS, KEY, LOADED_CELLS, LOADED_VICTIMS, LOADED_WORST, METRICS, WORST
from ppbench.report.controls import Check
from ppbench.report.frame import ROW, frame_of, key_of
from ppbench.report.page.boards import boards_of, csv_text, no_claims, read_column, worst_csv, worst_rows
from ppbench.report.page.headline import answer_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "leaderboards" / "results"
WORSTS = sorted(RESULTS.rglob("worst_case.csv"))
PARTS = sorted([*RESULTS.glob("*/records.zip"), *RESULTS.glob("*/baseline")])
KEYS = [column.name for column in KEY]


def table(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.fixture(scope="module")
def dictionary(script):
    return script(ROOT / "docs" / "make_columns.py")


def explained():
    """Return the names in the first column of docs/columns.md."""
    lines = [line for line in (ROOT / "docs" / "columns.md").read_text().splitlines() if line.startswith("| `")]
    return {name for line in lines for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])}


def test_the_dictionary_is_what_the_code_declares(dictionary, monkeypatch):
    assert dictionary.PAGE.read_text() == dictionary.page(), "docs/columns.md is old; run: python docs/make_columns.py"
    more = (*CELLS, columns.Column("planted", "", "A column that nobody explained."))
    monkeypatch.setattr(dictionary, "CELLS", more)
    assert "| `planted` |" in dictionary.page()
    assert all(c.meaning.endswith(".") for c in (*CELLS, *WORST, *LOADED_CELLS, *LOADED_VICTIMS, *LOADED_WORST))


@pytest.mark.parametrize("some", [CELLS, WORST, LOADED_CELLS, LOADED_VICTIMS, LOADED_WORST], ids=len)
def test_a_table_has_each_name_once_and_all_are_explained(some):
    names = [column.name for column in some]
    assert len(names) == len(set(names)) and not set(names) - explained()


def test_every_figure_that_a_board_of_ours_shows_has_a_column_and_every_metric_is_explained():
    own = {"share_rebuilt", "tpr_at_0.1pct_fpr"}  # a share that the page counts; a rate of which few records have one
    names = {column.name for column in CELLS}
    for question in questions().values():
        headlines = [kind.headline for kind in modalities()] if question.inputs else [s.name for s in question.specs]
        figures = {name for headline in headlines for name, _ in question.columns(headline)}
        assert figures - own <= (names if question.chapter else set(METRICS)), question.name
        assert {spec.name for spec in question.specs} <= set(METRICS), question.name
        assert all(spec.title and spec.meaning.endswith(".") for spec in question.specs), question.name


def test_a_metric_of_the_model_names_fields_of_its_record_and_every_declared_column_is_there_once():
    fields = set(Utility.model_fields)
    for name, spec in MODEL_METRICS.items():
        assert {spec.name, spec.low, spec.high, *spec.constant} <= fields and name == spec.name
        assert not spec.unless or spec.unless in MODEL_METRICS
    names = [column.name for column in CELLS]
    for spec in columns.COLUMN_METRICS.values():
        assert all(names.count(f"{spec.name}{ending}") == 1 for ending in spec.columns), spec.name


@pytest.mark.skipif(not PARTS, reason="the committed boards are not here")
@pytest.mark.parametrize("part", boards(PARTS), ids=lambda path: path.parent.name)
def test_every_column_and_metric_of_a_committed_board_is_explained(part):
    files = files_of(part)
    for name in ("leaderboard.csv", "worst_case.csv"):
        head = next(csv.reader(io.StringIO(files.read(name).decode())))
        assert head and not set(head) - explained(), name
    values = {metric.name for record in open_results(part).load_all() for metric in record.metrics}
    assert not {name for name in values if not name.startswith("auc_")} - set(METRICS)


@pytest.mark.skipif(not WORSTS, reason="the committed boards are not here")
@pytest.mark.parametrize("path", boards(WORSTS), ids=lambda path: path.parts[-2])
def test_rows_of_a_committed_worst_case_differ_in_the_key_and_no_column_is_empty(path):
    rows = table(path.read_text())
    if not rows:  # a board that asks about models alone
        assert not [r for r in Store(path.parent / "records.zip").load_all() if question_for(r).inputs]
        return
    shown = [name for name in rows[0] if name in KEYS]
    assert len({tuple(row[name] for name in shown) for row in rows}) == len(rows) > 1
    assert not [name for name in rows[0] if not any(row[name] for row in rows)], "a column without any value"
    ranks = [(row.get("rank_low", ""), row.get("rank_high", "")) for row in rows]
    assert all(low == high == "" or 1 <= int(low) <= int(high) <= len(rows) for low, high in ranks)
    dates = re.compile(r"\d{1,4}[-/.]\d{1,2}([-/.]\d{1,4})?")  # what a spreadsheet takes for one, numbers aside
    texts = {c.name for c in WORST if c.dtype == "string"}
    assert not [v for row in rows for name, v in row.items() if name in texts and dates.fullmatch(v)]


@pytest.mark.nightly
@pytest.mark.skipif(not WORSTS, reason="the committed boards are not here")
def test_a_board_is_derived_again_from_its_records_alone(script, tmp_path, monkeypatch):
    again = script(ROOT / "benchmarks" / "rederive_boards.py")
    monkeypatch.setattr(again, "RESULTS", tmp_path)
    board = Path(shutil.copytree(RESULTS / "bank-marketing-two-cores", tmp_path / "bank"))
    assert again.main([]) == 0, "it may have been written before a column was there"
    derived = {path.name: path.read_bytes() for path in board.iterdir()}
    assert set(derived) == {"manifest.toml", "records.zip", "worst_case.csv"}
    unpack_archive(board / "records.zip", tmp_path / "old")
    (tmp_path / "old" / "worst_case.csv").write_text("dataset,rank\ndigits,1-5\n")
    (board / "records.zip").unlink()
    pack_archive(tmp_path / "old", board / "records.zip")
    assert again.main(["bank"]) == 0, "healed, digest and all"
    assert {path.name: path.read_bytes() for path in board.iterdir()} == derived


PARTS = {"probing": ProbeInfo, "audit": AuditInfo}
FACTS = [
    path for name in ROW for path in ([f"{name}.{f}" for f in PARTS[name].model_fields] if name in PARTS else [name])
]
"""Paths of the single facts of a row's key, those of its parts, too."""


def altered(config, names):
    """Return a configuration with another value in some of the fields that tell rows apart."""
    changes = {
        "suite": {"suite": "other/1"}, "suite_digest": {"suite_digest": "ab"}, "digest": {"data": {"sha256": "1" * 64}},
        "train": {"data": {"train": 7}}, "test": {"data": {"test": 7}}, "public": {"data": {"public": 7}},
        "architecture": {"model": {"options": {"hidden": 7}}}, "federation": {"federation": {"lr": 0.7}},
        "seed": {"seed": 7}, "defense": {"defense": {"id": "spn"}}, "version": {"defense": {"version": "7"}},
        "parameters": {"defense": {"parameters": {"sigma": 0.1, "theta": 0.7}}},
        "control": {"defense": {"control": {"name": "theta", "value": 0.1}}},
        "value": {"defense": {"control": {"value": 0.7}, "parameters": {"sigma": 0.7}}},
        "threat": {"threat_model": {"id": "client/1"}}, "auxiliary": {"threat_model": {"auxiliary": "more"}},
        "stage": {"stage": "final"}, "batch": {"batch_size": 7},
        **{f"probing.{name}": {name: "local" if name == "probe" else 7} for name in ProbeInfo.model_fields},
        **{f"audit.{name}": {"audit": {name: 7}} for name in AuditInfo.model_fields},
        "role": {"role": "pilot"}, "kind": {"attack": {"kind": "membership"}},
    }  # fmt: skip
    assert set(changes) == set(FACTS), "a field of the key that no column is asked about"
    result = config.model_dump(by_alias=True)
    for name in names:
        for field, value in changes[name].items():
            result[field] = merged(result.get(field), value)
    return CellConfig.model_validate(result)


def merged(old, new):
    if not isinstance(new, dict):
        return new
    return {**(old or {}), **{name: merged((old or {}).get(name), value) for name, value in new.items()}}


def keys_of(records):
    """Return the key columns of the boards' rows as they are written, those of every question."""
    ranked = boards_of(records, no_claims)
    rows = [row for board in ranked for row in worst_rows([board])]
    return [tuple(json.dumps(row[name]) for name in KEYS) for row in rows]


@pytest.fixture(scope="module")
def one(fabricate):
    record = fabricate("dp", 0.1, "dlg", "reconstruction", control="sigma", parameters={"theta": 0.3})
    audit = record.config.model_copy(update={"audit": AuditInfo(references=2, canaries=80, canary_clients=5)})
    return of(record, CellConfig.model_validate(audit.model_dump(by_alias=True, warnings=False)))


def of(record, config):
    return record.model_copy(update={"config": config, "cell_id": config.cell_id()})


FIELDS = st.sampled_from(sorted(set(FACTS) - {"kind"}))


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.sets(FIELDS, max_size=4), st.lists(FIELDS, min_size=1, max_size=6))
def test_no_two_rows_have_equal_key_columns(one, shared, each):
    """Rows that share some changes, and differ from the first of them in one field each."""
    records = [of(one, altered(one.config, names)) for names in (shared, *(shared ^ {name} for name in each))]
    records = [*{record.cell_id: record for record in records}.values()]
    rows = frame_of(records).by(ROW)
    result = keys_of(records)
    assert len(result) == len(rows) == len(set(result))


@pytest.mark.parametrize("name", FACTS)
def test_every_field_of_a_rows_key_is_read_off_its_columns(one, name):
    other = altered(one.config, [name])
    assert key_of(other).only(ROW) != key_of(one.config).only(ROW)
    parameters = {"parameters", "value", "control"}  # all in one column, beside two of the control parameter
    paths = {column.path.removeprefix("key.") for column in KEY}
    assert name in paths or name in parameters
    if name != "kind":  # another question has no row in this file
        assert len(set(keys_of([one, of(one, other)]))) == 2


def test_a_column_is_empty_at_the_value_that_records_do_not_write():
    column = columns.Column("more", "key.more", "Later.", dtype="Int64", unwritten=1)
    assert [read_column({"key": SimpleNamespace(more=value)}, column) for value in (1, 2, None)] == [None, 2, None]
    assert all(c.unwritten is None for c in (*CELLS, *columns._LISTED)), "zeros of older columns stay"


def test_two_thetas_read_apart_and_ranks_are_whole_numbers(fabricate):
    make = partial(fabricate, attack="adaptive_ppdl", kind="reconstruction", adaptive=True, control="sigma")
    records = [fabricate(n, None, "dlg", "reconstruction", db) for n, db in (("none", 35.0), ("full_noise", 6.0))]
    records += [
        make("ppdl", 0.1, share=db, parameters={"theta": t}) for t, db in ((0.3, 12.0), (0.5, 12.0), (0.7, 19.0))
    ]
    ranked = boards_of(records, no_claims)
    rows = [row for row in table(worst_csv(ranked)) if row["defense"] == "ppdl"]
    assert {(row["control"], row["control_value"]) for row in rows} == {("sigma", "0.1")}
    ranks = {json.loads(row["parameters"])["theta"]: (row["rank_low"], row["rank_high"]) for row in rows}
    assert ranks == {0.3: ("1", "2"), 0.5: ("1", "2"), 0.7: ("3", "3")}
    cells = {row["cell_id"]: row for row in table(csv_text(records, no_claims, ranked))}
    for record in records:
        row, own = cells[record.cell_id], record.config.defense.parameters
        assert json.loads(row["parameters"]) == own and row["kind"] == "reconstruction"
        assert (row["rank_low"], row["rank_high"]) == ranks.get(own.get("theta"), ("", ""))
    assert {row["rank_low"] for row in table(csv_text(records))} == {""}, "without boards nothing is ranked"
    harness = Check("harness", True, "")
    about = dict(records=records, reliable=True, verdict=(), verdicts=(), notes=(), computed=0, out="")
    result = SimpleNamespace(**about, answer=answer_of(records, harness))
    for cell in evaluation_json(result)["cells"]:
        row = cells[cell["cell_id"]]
        values = [row[name] for name in ("kind", "dataset", "role", "probe", "stage")]
        assert [cell[name] for name in ("kind", "dataset", "role", "probe", "stage")] == values
        assert cell["parameters"] == json.loads(row["parameters"])
        assert ["" if cell[end] is None else str(cell[end]) for end in ("rank_low", "rank_high")] == [
            row["rank_low"],
            row["rank_high"],
        ]
    result.answer = answer_of(records, Check("harness", False, "the self-test failed"))
    assert {cell["rank_low"] for cell in evaluation_json(result)["cells"]} == {None}


def test_columns_that_would_be_empty_are_left_out_and_a_table_without_rows_has_all(fabricate):
    ranked = boards_of([fabricate("dp", 0.1, "dlg", "reconstruction", control="sigma")], no_claims)
    (row,) = table(worst_csv(ranked))
    assert {"role", "references", "worst_lpips_mean", "rank_low"} & set(row) == set() and row["reliable"] == "false"
    assert next(csv.reader(io.StringIO(worst_csv([])))) == [column.name for column in WORST]
    full = fabricate("dp", 0.1, "dlg", "reconstruction", control="sigma", role="pilot")
    assert table(worst_csv(boards_of([full], no_claims)))[0]["role"] == "pilot"
