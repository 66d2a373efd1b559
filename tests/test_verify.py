"""`verify` must find every figure that was changed by hand, and nothing where nothing was."""

import csv
import io
import json
from dataclasses import asdict

import pytest
import torch

from ppbench.base.errors import UsageError
from ppbench.metrics.image import image_figures
from ppbench.questions.image_metrics import ImageScore
from ppbench.questions.images import blind_decibels
from ppbench.questions.membership import MemberScore
from ppbench.records.run_files import SelftestTrial, Soundness, save_soundness
from ppbench.records.store import Store
from ppbench.report.integrity import implausible
from ppbench.report.page.boards import boards_of, csv_text, no_claims, worst_csv
from ppbench.verification import verify

TRUTH = torch.rand(9, 1, 8, 8, generator=torch.Generator().manual_seed(0))
GUESS = (TRUTH + torch.linspace(-0.1, 0.3, 9)[:, None, None, None]).clamp(0, 1)
BLIND = torch.full((1, 1, 8, 8), 0.4)


@pytest.fixture
def record(fabricate, rescored):
    """Return a maker of records whose scores hold all that a score may hold."""

    def make(sigma):
        scores = [
            ImageScore(probe=i, client=0, index=0, **asdict(image_figures(guess, truth)),
                       label=i % 2 == 0, confidence=0.1, at_truth=0.0, evaluations=10,
                       lpips=0.1 * i, feat_mse=1.0 + i, blind=blind_decibels(BLIND[0], truth, (0, 1)), oracle=100.0,
                       path=[(5, 8.0)])
            for i, (guess, truth) in enumerate(zip(GUESS, TRUTH, strict=True))
        ]  # fmt: skip
        made = fabricate("dp", sigma, "dlg", "reconstruction", control="sigma", accuracy=0.71, seed=1)
        return rescored(made, victims=scores)

    return make


@pytest.fixture
def store(record, tmp_path):
    made = Store(tmp_path / "out")
    tensors = {"guess": GUESS, "truth": TRUTH, "blind": BLIND}
    kept = [made.save(record(sigma), seconds=1.0, tensors=tensors) for sigma in (0.1, 0.2)]
    made.csv_path.write_text(csv_text(kept, lambda _: "=CAP 0.6"))
    return made


def edit(store, change):
    cell = store.ids()[0]
    path = store.folder / f"{cell}.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return cell


def test_an_honest_folder_has_no_problems(store):
    assert verify(store.out) == [] and verify(store.out, lambda _: "=CAP 0.6") == []
    store.csv_path.unlink()
    assert verify(store.out) == []


CHANGES = {
    "psnr_median.value": lambda d: d["metrics"][0].update(value=d["metrics"][0]["value"] - 1e-6),
    "psnr_median.low": lambda d: d["metrics"][0].update(low=0.0),
    "rmse_mean.n": lambda d: d["metrics"][3].update(n=1000),
    "psnr_max.value": lambda d: d["victims"][2].update(psnr=1.0),
    "label_accuracy.value": lambda d: d["victims"][0].update(label=False),
    "blind_median": lambda d: d["victims"][4].update(blind=None),
    "where the scores give": lambda d: [v.update(blind=None) for v in d["victims"]],
    "metrics": lambda d: d["metrics"].pop(),
    "configuration": lambda d: d["config"].update(seed=2),
    "utility.low": lambda d: d["utility"].update(low=0.7),
    "no share": lambda d: d["utility"].update(accuracy=0.7123),
    "null without a reason": lambda d: d["utility"].update(accuracy=None),
    "status": lambda d: d.update(reason="something"),
    "without any victim": lambda d: d.update(victims=[]),
    "one kind": lambda d: d["victims"].append(dict(kind="trace", index=0, owner=0, guess=0)),
    "artifact": lambda d: d["artifacts"][0].update(path="../../secret"),
    "not a whole record": lambda d: d.pop("victims"),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_changed_record_is_found_and_named(store, words):
    cell = edit(store, CHANGES[words])
    problems = verify(store.out)
    assert any(cell in problem and words in problem for problem in problems), problems
    assert not any(store.ids()[1] in problem for problem in problems)


def test_a_mean_over_clients_own_models_is_no_share_but_where_clients_have_such(fabricate, rescored):
    """Standalone's accuracy is the mean of ten shares of a thousand: 0.7123 is one, and is none of one model's."""
    for defense, result in (("standalone", False), ("dp", True), ("not-installed", True)):
        made = fabricate(defense, None, "dlg", "reconstruction", accuracy=0.712)
        utility = made.utility.model_copy(update={"accuracy": 0.7123})
        problems = list(implausible(rescored(made, utility=utility)))
        assert any("utility.accuracy 0.7123 is no share of 1000" in problem for problem in problems) == result


def test_every_metric_is_recomputed(store):
    edit(store, lambda d: [metric.update(method="by hand") for metric in d["metrics"]])
    assert len([problem for problem in verify(store.out) if "by hand" in problem]) == 18


def test_a_replaced_or_missing_artifact_is_found(store):
    first, second = (store.folder / f"{cell}.safetensors" for cell in store.ids())
    first.write_bytes(first.read_bytes()[:-1] + b"\x01")
    second.unlink()
    result = " ".join(verify(store.out))
    assert "SHA-256" in result and "missing" in result


def retyped(path, column, value, keep=None):
    """Write another value into the first row of a table, of which the first `keep` columns stay."""
    with path.open(newline="") as file:
        lines = [line[:keep] for line in csv.reader(file)]
    lines[1][lines[0].index(column)] = value or lines[1][lines[0].index(column)]
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


@pytest.mark.parametrize("column", ["psnr_median", "accuracy", "cap"])
def test_a_changed_table_is_found(store, column):
    retyped(store.csv_path, column, "9.9")
    assert any(f"line 2: {column} is" in problem for problem in verify(store.out))


def test_missing_rows_stale_columns_and_changed_claims_are_found(store):
    text = store.csv_path.read_text()
    store.csv_path.write_text("\n".join(text.split("\n")[:-2]) + "\n")
    assert "1 rows" in verify(store.out)[0]
    store.csv_path.write_text(text.replace("=CAP 0.6", "CAP 0.9"))
    assert verify(store.out) == [] and verify(store.out, lambda _: "=CAP 0.6")
    store.csv_path.write_text(text.replace("cell_id", "cell", 1))
    assert verify(store.out)
    store.csv_path.write_bytes(b"\xff\xfe")
    assert "cannot be read" in verify(store.out)[0]


def test_a_table_of_before_has_fewer_columns_and_is_still_right(store):
    last = store.csv_path.read_text().split(",").index("memory_ratio") + 1
    retyped(store.csv_path, "psnr_median", None, last)
    assert verify(store.out) == []
    retyped(store.csv_path, "psnr_median", "1")
    assert any("psnr_median is '1'" in problem for problem in verify(store.out))


def test_the_bound_on_epsilon_is_recomputed_at_the_claimed_delta(record, rescored, tmp_path):
    store = Store(tmp_path / "out")
    scores = [
        MemberScore(index=i, half=i // 2 % 2, member=i % 2 == 0, score=float(i % 2 == 0), decision=i % 2 == 0,
                    family="blank" if i % 3 else "average")
        if i < 80 else MemberScore(index=i, half=i // 2 % 2, member=i % 2 == 0, score=0.5, decision=None)
        for i in range(200)
    ]  # fmt: skip
    draft = record(0.1)
    kept = rescored(draft, victims=scores, privacy=draft.privacy.model_copy(
        update=dict(epsilon=1.0, delta=1e-3, reason=None)))  # fmt: skip
    store.save(kept)
    assert verify(store.out) == []
    edit(store, lambda d: d["privacy"].update(delta=1e-5))
    assert any("epsilon_lower.value" in problem for problem in verify(store.out))


def test_a_damaged_record_is_named_and_the_rest_is_checked(store):
    """Truncated, of another cell, of a newer schema: each is named, nothing is deleted, and the other is still read."""
    first, second = store.ids()
    path, other = (store.folder / f"{cell}.json" for cell in (first, second))
    before = path.read_text()
    newer = before.replace("ppbench.run/1", "ppbench.run/2").replace('"ppbench": "0.1.0"', '"ppbench": "2.3.1"')
    damages = {
        before[:200]: ("not a whole record", "delete it"),
        other.read_text(): (f"holds cell {second}", "named by its cell"),
        newer: ("'ppbench.run/2'", "install ppbench-fl>=2.3.1"),
        newer.replace("2.3.1", "2; rm -rf /"): ("a newer ppbench wrote it", "in its latest version"),
    }
    texts = path.read_text(), other.read_text()
    path.write_text(texts[1])
    other.write_text(texts[0])
    assert sum("a record is named by its cell" in problem for problem in verify(store.out)) == 2
    other.write_text(texts[1])
    for text, words in damages.items():
        path.write_text(text)
        problems = verify(store.out)
        assert len(problems) == 1 and str(path) in problems[0] and all(word in problems[0] for word in words), problems
        assert path.read_text() == text and [r.cell_id for r in store.readable()[0]] == [second]
    assert "delete it" not in problems[0], "what an upgrade can read is not to be deleted"


def test_a_name_that_no_plugin_can_have_is_named_and_the_rest_is_checked(store, record):
    made = record(0.3)
    defense = made.config.defense.model_copy(update={"id": "<img src=x onerror=alert(1)>\x1b[2J"})
    config = made.config.model_copy(update={"defense": defense})
    tensors = {"guess": GUESS, "truth": TRUTH, "blind": BLIND}
    kept = store.save(made.model_copy(update={"config": config, "cell_id": config.cell_id()}), tensors=tensors)
    store.csv_path.write_text(csv_text(store.load_all(), lambda _: "=CAP 0.6"))
    problems = verify(store.out, lambda _: "=CAP 0.6")
    assert len(problems) == 1 and kept.cell_id in problems[0] and "onerror" in problems[0] and "\x1b" not in problems[0]


def test_a_changed_table_of_worst_cases_is_found(store):
    worst = store.out / "worst_case.csv"
    worst.write_text(worst_csv(boards_of(store.load_all(), no_claims)))
    assert verify(store.out) == []
    retyped(worst, "worst_psnr_median", "1.5")
    problems = verify(store.out)
    assert len(problems) == 1 and "worst_case.csv line 2: worst_psnr_median is '1.5'" in problems[0]
    worst.write_text("".join(worst.read_text().splitlines(keepends=True)[:-1]))
    assert "worst_case.csv has 1 rows, the records give 2" in verify(store.out)[0]
    edit(store, CHANGES["psnr_median.value"])
    problems = verify(store.out)
    assert not any("worst_case" in problem for problem in problems), "it would repeat what is wrong with the record"


@pytest.fixture
def ranked(fabricate, tmp_path):
    """Return a folder with a board whose rows are ranked, its tables written."""
    store = Store(tmp_path / "ranked")
    levels = (("none", None, 35.0), ("full_noise", None, 6.0), ("dp", 0.1, 12.0), ("dp", 0.5, 19.0))
    for name, value, db in levels:
        store.save(
            fabricate(name, value, "adaptive_dp", "reconstruction", db, control="sigma", adaptive=value is not None)
        )
    tables(store)
    return store


def tables(store, sound=True):
    records = store.load_all()
    result = boards_of(records, no_claims, sound)
    store.csv_path.write_text(csv_text(records, boards=result))
    (store.out / "worst_case.csv").write_text(worst_csv(result))


@pytest.mark.parametrize("name", ["leaderboard.csv", "worst_case.csv"])
def test_a_changed_rank_is_found_and_where_the_self_test_fails_there_is_none(ranked, name):
    path = ranked.out / name
    assert verify(ranked.out) == [] and ",rank_low," in path.read_text()
    before = path.read_text()
    retyped(path, "rank_low", "9")
    (problem,) = verify(ranked.out)
    assert f"{name} line 2: rank_low is '9', the records give" in problem
    path.write_text(before)
    trial = SelftestTrial(model="mlp", attack="analytic", share=0.0)
    save_soundness(ranked.out, Soundness(ppbench="0", code="0", torch="0", python="0", trials=[trial]))
    assert any(name in problem for problem in verify(ranked.out)), "nothing may be ranked there"
    tables(ranked, sound=False)
    assert verify(ranked.out) == []


def test_a_table_with_other_columns_is_one_sentence(ranked):
    path = ranked.out / "worst_case.csv"
    text = path.read_text()
    path.write_text(text.replace("rank_low", "rank", 1))
    (problem,) = verify(ranked.out)
    assert problem == "worst_case.csv has other columns than the records give ('rank', 'rank_low'); write it again"
    with path.open("w", newline="") as file:  # a column from the middle is lost
        rows = list(csv.reader(io.StringIO(text, newline="")))
        csv.writer(file).writerows(
            [field for field, name in zip(row, rows[0], strict=True) if name != "stage"] for row in rows
        )
    assert "('stage')" in verify(ranked.out)[0]
    with path.open("w", newline="") as file:  # of before: the last are lacking
        csv.writer(file).writerows(row[:-2] for row in rows)
    assert verify(ranked.out) == []


def test_strays_are_named_and_a_folder_without_results_or_of_a_newer_ppbench_is_refused(store, tmp_path):
    (store.folder / "mine.json").write_text("{}")
    assert any("mine.json" in problem for problem in verify(store.out))
    with pytest.raises(UsageError, match="no ppbench results"):
        verify(tmp_path / "nowhere")
    (store.out / "ppbench.json").write_text(json.dumps({"schema": "ppbench.results/2", "version": "3.0"}))
    with pytest.raises(UsageError, match=r"install ppbench-fl>=3\.0"):
        verify(store.out)
