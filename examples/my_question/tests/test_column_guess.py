"""A planted leak, a null, manners, and everything that a question gets: a board, columns, sentences, comparisons."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from column_guess import ValueSearch

import ppbench
from ppbench.report.compare.outcome import compare
from ppbench.run.evaluation import Evaluation
from ppbench.testing import check_attack


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a table: two numbers, a habit (0 to 2) and whether somebody is ill."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "rows.csv"
    age, weight, habit = rng.normal(50, 9, 300), rng.normal(70, 9, 300), rng.choice(3, 300, p=[0.5, 0.3, 0.2])
    ill = (age / 50 + habit + rng.normal(0, 0.3, 300) > 2).astype(int)
    lines = [f"{a:.3f},{w:.3f},{h},{i}" for a, w, h, i in zip(age, weight, habit, ill, strict=True)]
    path.write_text("\n".join(["age,weight,habit,ill", *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def result(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """Evaluate dp, nearly off and nearly all noise, on the table."""
    options = {"rounds": 1, "clients": 4, "victims": 40, "attack_batch": (1,), "stages": ("init",), "workers": 1}
    task = {"defense": "dp", "grid": (1e-6, 1e3), "dataset": f"csv:{rows}?target=ill", "model": "mlp"}
    out = tmp_path_factory.mktemp("out") / "first"
    return ppbench.evaluate(**task, attacks=("value_search",), threats=("server/1",), out=out, **options)


def test_undefended_rows_give_their_values_and_noise_gives_the_most_frequent_at_best(result) -> None:
    """A planted leak and two nulls."""
    shares = {}
    for record in result.records:
        defense = record.config.defense
        shares[defense.id, defense.control and defense.control.value] = record.metric("attribute_accuracy")
    assert shares["none", None].value == 1.0 and shares["dp", 1e-6].value == 1.0
    for key in (("full_noise", None), ("dp", 1e3)):
        assert shares[key].low < shares[key].chance < 0.7, key
    assert {r.status for r in result.records} == {"complete"} and result.reliable


def test_the_question_has_a_board_columns_and_sentences(result) -> None:
    """Nothing of ppbench names the question, and it is shown."""
    page = (result.out / "leaderboard.html").read_text()
    assert "Attribute inference" in page and "Values guessed" in page
    table = list(csv.DictReader((result.out / "leaderboard.csv").open()))
    assert list(table[0])[-3:] == ["attribute_accuracy", "attribute_accuracy_low", "attribute_accuracy_high"]
    assert '"title":"Values guessed"' in page, "in the table of all cells"
    assert {row["distance"] for row in table} == {"attribute/1"}
    (sentence,) = [s for s in result.verdict if s.startswith("Attribute inference")]
    assert "Values guessed at most 1" in sentence and "sigma=1e-06" in sentence and "undefended 1" in sentence


def test_results_are_compared_by_it(result) -> None:
    """Equal cells are equal rows."""
    judged = [row for row in compare(result.out, result.out).rows if row.metric == "attribute_accuracy"]
    assert {row.where.defense for row in judged} == {"none", "dp", "full_noise"}
    assert all(row.status == "ok" and row.headline and row.change.worse == 0 for row in judged)


def test_the_attack_has_manners() -> None:
    """Form, seeds, poison and missing mail are the battery's."""
    check_attack(ValueSearch)
