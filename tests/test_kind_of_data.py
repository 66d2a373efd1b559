"""A new kind of data is one new file: sequences of integers, with their data set, go through the whole program."""

import csv
import re
from pathlib import Path

import pytest

from ppbench.base import registry
from ppbench.base.errors import UsageError
from ppbench.commands.terminal import glance
from ppbench.metrics import modality as modalities
from ppbench.metrics.modality import TABLE_ROW, modality_from, modality_of
from ppbench.report.compare.outcome import compare
from ppbench.report.controls import rebuilt_share
from ppbench.report.page.headline import answer_of
from ppbench.report.verdict import sentences
from ppbench.run.config import configure
from ppbench.run.evaluation import evaluate
from ppbench.task.user_data import open_dataset
from ppbench.verification.recheck import full_findings

FILE = Path(__file__).with_name("sequences_plugin.py").read_text()
ENTRIES = (
    "[ppbench.datasets]\nintegers = integer_kind:integers\n[ppbench.modalities]\nsequence = integer_kind:Sequences\n"
)
OTHERS = re.compile(r"\b(images?|rows?|columns?|table rows?|dB|pixels|PSNR)\b", re.IGNORECASE)


def forget():
    registry.plugins.cache_clear()
    modalities._installed.cache_clear()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "integer_kind.py").write_text(FILE)
    about = folder / "integer_kind-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: integer-kind\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        forget()
        yield folder
    forget()


def run(out):
    return evaluate(
        defense="dp", dataset="integers", rounds=3, grid=(0.001, 100.0), clients=2, victims=8,
        candidates=8, attacks=("analytic", "dlg", "adaptive_dp"), attack_batch=(1,), stages=("init",), budget=20,
        out=out, device="cpu", workers=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def evaluation(site, tmp_path_factory):
    return run(tmp_path_factory.mktemp("out"))


def test_the_data_set_names_its_kind_and_nobody_elses_rows_become_sequences(evaluation):
    kind = open_dataset("integers", seed=0).modality
    assert kind.name == "sequence" and modality_from((16,), "classification") is TABLE_ROW
    assert {record.config.data.modality for record in evaluation.records} == {"sequence"}
    assert all(modality_of(record.config) is kind and record.config.data.code for record in evaluation.records)


def test_the_kind_says_the_network_where_none_is_named(evaluation):
    assert {record.config.model.id for record in evaluation.records} == {"mlp"}
    assert [configure("paper", defense="dp", dataset=name).model for name in ("integers", "digits")] == ["mlp", "dlnet"]
    assert configure(defense="dp", dataset="integers", model="dlnet").model == "dlnet"


def test_sequences_are_scored_by_right_places_beside_their_own_blind_guess(evaluation):
    cells = [record for record in evaluation.records if record.config.attack.kind == "reconstruction"]
    assert len(cells) > 6 and not any(record.artifacts for record in cells)
    assert all(score.blind_accuracy is not None for record in cells for score in record.victims)
    rebuilt = {
        (r.config.defense.id, r.config.defense.control and r.config.defense.control.value): rebuilt_share(r)
        for r in cells
        if r.config.attack.id == "analytic"
    }
    assert rebuilt["none", None].value == 1.0 and rebuilt["dp", 100.0].value == 0.0
    flags = [flag for record in cells for flag in record.flags]
    blind = [flag.detail for flag in flags if flag.code == "blind_as_good"]
    assert blind and all(re.fullmatch(r"median share of places right 0\.\d\d, a blind guess .*", one) for one in blind)
    assert not {"budget_hurts", "oracle_gap"} & {flag.code for flag in flags}


def test_sentences_terminal_and_page_speak_of_sequences(evaluation):
    answer = answer_of(evaluation.records, None)
    texts = [*sentences("dp", evaluation.records), answer.headline.words, *map(str, evaluation.verdict)]
    at = "dp at sigma=0.001: sequences of integers are rebuilt, share of right places 1.00"
    assert any(one.startswith(at) for one in texts), texts
    assert not any(OTHERS.search(one) for one in texts), texts
    assert all(glance(table, 200).columns for table in answer.tables)
    page = (evaluation.out / "leaderboard.html").read_text()
    assert "Places right" in page and "data:image/png" not in page
    assert not re.search(r"Columns right|Parts right|<th(?=[ >])[^<]*(PSNR|dB)|\d dB<", page)
    assert not re.search(r'"title":\s*"[^"]*(PSNR|dB)', page)


def test_the_pages_glossary_and_the_table_of_worst_cases_are_of_sequences(evaluation):
    page = (evaluation.out / "leaderboard.html").read_text()
    how = page[page.index('<section id="how">') :]
    how = re.sub("<[^>]+>", " ", how[: how.index("</section>")])
    assert "at least half of the victims come out right" in how and not re.search(
        r"\b(images?|PSNR|dB|SSIM|pixels)\b", how
    ), re.findall(r".{40}\b(?:images?|PSNR|dB|SSIM|pixels)\b.{40}", how)
    rows = list(csv.DictReader((evaluation.out / "worst_case.csv").open()))
    assert rows and {"plain_reconstruction_accuracy", "worst_reconstruction_accuracy"} <= set(rows[0])
    assert not [name for name in rows[0] if "psnr" in name or "rmse" in name]
    assert {row["worst_reconstruction_accuracy"] for row in rows if row["defense"] == "none"} == {"1.0"}


def test_verify_computes_again_what_can_be_and_says_what_cannot(evaluation):
    results = full_findings(evaluation.out)
    assert not results.problems
    texts = "; ".join(results.unchecked)
    assert "scores of sequences of integers in" in texts and "(the sequences are not kept)" in texts
    assert "not at hand" not in texts and "rows" not in texts


def test_compare_judges_right_places(evaluation, site, tmp_path):
    outcome = compare(evaluation.out, evaluation.out)
    judged = {row.metric for row in outcome.rows}
    assert "reconstruction_accuracy" in judged and not judged & {"psnr_median", "rmse_mean", "share_above_20db"}


def test_without_the_plugin_results_are_refused_and_not_judged_as_rows(evaluation, monkeypatch):
    monkeypatch.setattr(modalities, "_installed", tuple)
    with pytest.raises(UsageError, match="no modality named 'sequence'; known are"):
        sentences("dp", evaluation.records)
