"""Questions stand in files of their own: nobody else asks which one it is; what is not installed is still read."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppbench.questions.base import Missing, missing, question_for, question_of, questions
from ppbench.records.aggregate import aggregate
from ppbench.records.schema import Record
from ppbench.records.scores import OtherScore, word_of
from ppbench.records.store import Store, canonical
from ppbench.report.cap import record_distance
from ppbench.report.page.board import write_board
from ppbench.report.page.boards import boards
from ppbench.report.page.table import no_claims
from ppbench.report.verify import verify

PACKAGE = Path(__file__).parent.parent / "ppbench"
NAMES = {*questions(), *(word_of(question.score) for question in questions().values())} - {"image"}  # data are, too


def words(node: ast.AST) -> set[str]:
    """Return the strings in a comparison, tuples of them included."""
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def comparisons(path: Path) -> Iterator[int]:
    """Yield the lines that compare a `kind` with the name of a question, or ask a score for its class."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            called = {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(node)}
            if "kind" in called and words(node) & NAMES:
                yield node.lineno
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            named = {getattr(n, "id", "") for n in ast.walk(node.args[1])}
            if any(name.endswith("Score") for name in named):
                yield node.lineno


def everywhere() -> dict[str, list[int]]:
    files = [p for p in PACKAGE.rglob("*.py") if p.parent.name != "questions"]
    return {str(p.relative_to(PACKAGE)): found for p in files if (found := list(comparisons(p)))}


def test_nobody_but_the_questions_asks_which_question_it_is() -> None:
    assert everywhere() == {}


@pytest.mark.parametrize(
    "line", ['attack.kind == "label"', 'kind in ("membership",)', '"tracing" != kind', "isinstance(v, ImageScore | X)"]
)
def test_a_comparison_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "module.py").write_text(f"x = {line}\n")
    assert list(comparisons(tmp_path / "module.py")) == [1]


@pytest.mark.parametrize("name", ["reconstruction", "label", "membership", "tracing", "extraction"])
def test_a_question_says_all_that_is_shown_of_it(name: str, fabricate: Callable[..., Record]) -> None:
    question, record = question_of(name), fabricate("none", None, "x", name)
    assert question_for(record) is question and question.name == name
    headline = question.headline(record.config)
    assert record.metric(headline) is not None and record_distance(record) is not None
    rules = question.rules_of(record.config)
    assert rules and all(isinstance(question.judged(v, rule.metric), float) for v in record.victims for rule in rules)
    assert question.board in ("", "reconstruction") and question.title


# -- a question that is not installed ----------------------------------------------------------------------------------
@pytest.fixture
def stranger(fabricate: Callable[..., Record]) -> Record:
    """Return a record of a question that nobody here has, as it lies on disk."""
    data = json.loads(canonical(fabricate("none", None, "value_search", "label", stage="init")))
    data["config"]["attack"]["kind"] = "attribute"
    data["victims"] = [{"kind": "attribute", "index": i, "value": 0.5, "more": [1, {"a": None}]} for i in range(3)]
    data["metrics"] = [{**data["metrics"][0], "name": "attribute_accuracy"}]
    record = Record.model_validate_json(json.dumps(data))
    return record.model_copy(update={"cell_id": record.config.cell_id()})


def test_scores_of_a_missing_question_are_kept_as_they_are(stranger: Record, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(stranger)
    (again,) = store.load_all()
    assert canonical(again) == canonical(stranger) and all(isinstance(v, OtherScore) for v in again.victims)
    assert again.victims[0].model_dump()["more"] == [1, {"a": None}]
    assert isinstance(question_for(again), Missing) and "attribute" in question_for(again).title


def test_it_is_named_as_such_and_on_no_board(
    stranger: Record, fabricate: Callable[..., Record], tmp_path: Path
) -> None:
    records = [stranger, fabricate("none", None, "label_recovery", "label", stage="init")]
    assert [b.setting.kind for b in boards(records, no_claims)] == ["reconstruction"]
    (sentence,) = missing(records)
    assert "'attribute'" in sentence and "not installed" in sentence
    store = Store(tmp_path)
    for record in records:
        store.save(record)
    with pytest.warns(UserWarning, match="'attribute', which is not installed here"):
        write_board(store)
    assert "attribute" in (tmp_path / "leaderboard.html").read_text()
    assert any("not installed here" in problem for problem in verify(tmp_path))


def test_scores_that_answer_another_question_are_refused(fabricate: Callable[..., Record]) -> None:
    data = json.loads(canonical(fabricate("none", None, "x", "label")))
    data["victims"] = [{"kind": "attribute", "index": 0}]
    with pytest.raises(ValueError, match="do not answer the question 'label'"):
        Record.model_validate_json(json.dumps(data))
    data["victims"] = [{"kind": "label", "index": 0, "probe": 0, "client": 0}]
    with pytest.raises(ValueError, match="label"):
        Record.model_validate_json(json.dumps(data))
    with pytest.raises(Exception, match="not installed"):
        aggregate([OtherScore(kind="attribute", index=0)], classes=2, seed=0)
