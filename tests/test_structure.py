"""The house: which package imports which, in no circle, and no one but the questions asks which question it is."""

import ast
import json
import re
import runpy
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppbench.claims.check import PAPER_CLAIMS
from ppbench.federation import threats
from ppbench.federation.threats import THREATS
from ppbench.questions.base import MissingQuestion, missing_sentences, question_for, question_of, questions
from ppbench.records.figure import aggregate
from ppbench.records.schema import Record
from ppbench.records.scores import OtherScore, word_of
from ppbench.records.store import Store, canonical_json
from ppbench.report.cap import record_distance
from ppbench.report.page.board import write_board
from ppbench.report.page.boards import boards_of, no_claims
from ppbench.verification import verify

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ppbench"
LINES = 600
house = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "house.py"), run_name="house"))
MODULES, SOURCES = house.MODULES, sorted(house.MODULES.values())
arrows_between, imports, room = house.arrows_between, house.imports, house.room


def circle(arrows):
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_neither_packages_nor_files_import_one_another_in_a_circle():
    for part in (room, lambda module: module):
        assert not (result := circle(arrows_between(part))), " -> ".join(result)
    planted = arrows_between(room)
    planted["ppbench.federation"] |= {"ppbench.defenses"}  # the contract must not know a defense
    assert "ppbench.defenses" in circle(planted)


def test_the_house_is_small_and_its_picture_is_this_house():
    rooms = arrows_between(room)
    assert len(rooms) <= 21 and sum(map(len, rooms.values())) <= 100 and max(house.floors(rooms).values()) <= 11
    assert house.PICTURE.read_text() == house.picture(), "docs/images/house.svg is old; run: python docs/house.py"


@pytest.mark.parametrize(
    ("part", "closed"),
    [
        ("defenses", ("ppbench.attacks", "ppbench.run", "ppbench.report")),
        ("attacks", ("ppbench.run", "ppbench.report")),
        ("metrics", ("ppbench.records", "ppbench.federation", "ppbench.adversary")),
        ("records", ("ppbench.run", "ppbench.report", "ppbench.questions")),
        ("report", ("ppbench.run", "ppbench.testing")),
    ],
)
def test_what_a_package_must_never_know(part, closed):
    for path in (PACKAGE / part).rglob("*.py"):
        assert not [m for m in imports(path) if m.startswith(closed)], path


def test_only_plugins_know_plugins():
    for module, path in MODULES.items():
        if room(module) not in ("ppbench.attacks", "ppbench.defenses"):
            assert not [m for m in imports(path) if room(m) in ("ppbench.attacks", "ppbench.defenses")], path


def test_only_adapters_know_other_frameworks():
    """Neither a name nor an import of one stands elsewhere; nothing imports an adapter: they are entry points."""
    named = re.compile(r"\b(flwr|flower|nvflare|nvidia flare|opacus)\b", re.IGNORECASE)
    inside = {path for module, path in MODULES.items() if room(module) == "ppbench.adapters"}
    assert any(named.search(path.read_text()) for path in inside)
    for path in {*MODULES.values()} - inside:
        assert not named.search(path.read_text()), path
        assert not [module for module in imports(path) if room(module) == "ppbench.adapters"], path


def test_nobody_imports_through_the_links_at_the_top():
    for path in [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        assert not re.search(r"^\s*from (attacks|defenses)\b", path.read_text(), re.MULTILINE), path


def test_no_module_is_long_or_reads_anything_but_tensors_or_imports_torchvision_or_lpips_past_the_guard():
    loads = re.compile(r"^\s*(from|import) (torchvision|lpips)\b", re.MULTILINE)
    assert loads.search("def f():\n    from torchvision.io import x") and loads.search("import lpips")
    for path in SOURCES:
        text = path.read_text()
        assert len(text.splitlines()) <= LINES and not loads.search(text), path
        assert "import pickle" not in text and text.count("torch.load(") == text.count("weights_only=True)"), path


@cache
def nodes(path):
    """Return all nodes of a file, which must not change."""
    return list(ast.walk(ast.parse(path.read_text())))


FUNCTION_LINES = 40
LONG = {"invert.py: invert": "the public function: eighteen parameters, each with its line of documentation"}
"""Functions that may be longer, each with the reason."""


def long_functions(path):
    """Yield the functions of more than `FUNCTION_LINES` lines, docstrings included, as "module.py: name"."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= FUNCTION_LINES:
            yield f"{path.name}: {node.name}"


def test_no_function_is_long_without_a_reason(tmp_path):
    assert {name for path in SOURCES for name in long_functions(path)} == {*LONG}
    lines = ["    x = 0"] * (FUNCTION_LINES - 1)
    (tmp_path / "module.py").write_text("\n".join(["def short():", *lines, "def long():", *lines, "    return x"]))
    assert [*long_functions(tmp_path / "module.py")] == ["module.py: long"]


# -- questions stand in files of their own: what is not installed is still read ---------------------------------------
NAMES = {*questions(), *(word_of(question.score) for question in questions().values())} - {"image"}  # data are, too


def words(node):
    """Return the strings in a comparison, tuples of them included."""
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def comparisons(path):
    """Yield the lines that compare a `kind` with the name of a question, or ask a score for its class."""
    for node in nodes(path):
        if isinstance(node, ast.Compare):
            called = {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(node)}
            if "kind" in called and words(node) & NAMES:
                yield node.lineno
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            named = {getattr(n, "id", "") for n in ast.walk(node.args[1])}
            if any(name.endswith("Score") for name in named):
                yield node.lineno


def test_nobody_but_the_questions_asks_which_question_it_is(tmp_path):
    files = [p for p in PACKAGE.rglob("*.py") if p.parent.name != "questions"]
    assert not {str(p): result for p in files if (result := list(comparisons(p)))}
    planted = 'attack.kind == "label"', 'kind in ("membership",)', '"tracing" != kind', "isinstance(v, ImageScore | X)"
    (tmp_path / "module.py").write_text("\n".join(planted))
    assert list(comparisons(tmp_path / "module.py")) == [1, 2, 3, 4]


# -- threat models are told apart by their facts, which stand in one file ---------------------------------------------
KINDS_OF_THREAT = {threat.short for threat in THREATS.values()}
OBJECTS = {name for name, value in vars(threats).items() if isinstance(value, threats.ThreatModel)}
TAKEN_APART = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit"}
DECLARED = {"threats", "views"}
"""Attributes that list names of threat models: an attack's, a claim's."""


def names_a_threat(node):
    """Return whether an expression holds the name of a threat model, or the beginning or end of one."""
    parts = [word.partition("/") for word in words(node)]
    return any(slash and head in KINDS_OF_THREAT | {""} and (head or tail == "sybil") for head, slash, tail in parts)


def named(node):
    """Return the last name of an expression: "threat" of `view.threat`."""
    return getattr(node, "attr", getattr(node, "id", ""))


def comparisons_of_threats(path):
    """Yield the lines that ask for the name of a threat model, or keep one under a name of their own to ask later."""
    for node in nodes(path):
        if isinstance(node, ast.Compare):
            known = {named(n) for n in ast.walk(node)} & OBJECTS
            wrong = known or any(names_a_threat(part) for part in (node.left, *node.comparators))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TAKEN_APART:
            wrong = named(node.func.value) == "threat" or any(map(names_a_threat, node.args))
        elif isinstance(node, ast.Dict):
            wrong = any(names_a_threat(key) for key in node.keys if key is not None)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            node.value, ast.Constant | ast.Tuple | ast.Set
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            wrong = names_a_threat(node.value) and not {named(target) for target in targets} <= DECLARED
        else:
            wrong = isinstance(node, ast.MatchValue) and names_a_threat(node)
        if wrong:
            yield node.lineno


def test_nobody_asks_for_the_name_of_a_threat_model(tmp_path):
    files = [p for p in SOURCES if p != Path(threats.__file__)]
    assert not {str(p): lines for p in files if (lines := list(comparisons_of_threats(p)))}
    planted = [
        'view.threat == "client/1"', 'threat in ("server/1", "collusion/1")', 'view.threat.name.startswith("client/")',
        'threat.endswith("/sybil")', "row.key.threat.partition(x)", '{"client/1": 0}.get(threat)', 'ONE = "client/1"',
        "threat is not HONEST_SERVER", "name == HONEST_SERVER.name", "view.threat.split()",
    ]  # fmt: skip
    allowed = [
        'threats: T = ("server/1",)',
        'view("server/1")',
        "r.threat == threat",
        "a / b == c",
        'x = "https://a/b"',
    ]
    (tmp_path / "module.py").write_text("\n".join(planted + allowed))
    assert sorted({*comparisons_of_threats(tmp_path / "module.py")}) == list(range(1, len(planted) + 1))


@pytest.mark.parametrize("name", ["reconstruction", "label", "membership", "tracing", "extraction"])
def test_a_question_says_all_that_is_shown_of_it(name, fabricate):
    question, record = question_of(name), fabricate("none", None, "x", name)
    assert question_for(record) is question and question.name == name
    headline = question.headline(record.config)
    assert record.metric(headline) is not None and record_distance(record) is not None
    rules = question.rules_of(record.config)
    assert rules and all(isinstance(question.judged(v, rule.metric), float) for v in record.victims for rule in rules)
    assert question.board in ("", "reconstruction") and question.title


@pytest.fixture(params=["none", "full_noise"])
def unknown_record(request, fabricate):
    """Return a record of a question that nobody here has, as it lies on disk."""
    data = json.loads(canonical_json(fabricate(request.param, None, "value_search", "label", stage="init")))
    data["config"]["attack"]["kind"] = "attribute"
    data["victims"] = [{"kind": "attribute", "index": i, "value": 0.5, "more": [1, {"a": None}]} for i in range(3)]
    data["metrics"] = [{**data["metrics"][0], "name": "attribute_accuracy"}]
    record = Record.model_validate_json(json.dumps(data))
    return record.model_copy(update={"cell_id": record.config.cell_id()})


def test_scores_of_a_missing_question_are_kept_as_they_are_named_as_such_and_on_no_board(
    unknown_record, fabricate, tmp_path
):
    records, store = [unknown_record, fabricate("none", None, "label_recovery", "label", stage="init")], Store(tmp_path)
    for record in records:
        store.save(record)
    (again,) = [record for record in store.load_all() if record.cell_id == unknown_record.cell_id]
    assert canonical_json(again) == canonical_json(unknown_record) and all(
        isinstance(v, OtherScore) for v in again.victims
    )
    assert again.victims[0].model_dump()["more"] == [1, {"a": None}]
    assert isinstance(question_for(again), MissingQuestion) and "attribute" in question_for(again).title
    assert [b.setting.kind for b in boards_of(records, no_claims)] == ["reconstruction"]
    (sentence,) = missing_sentences(records)
    assert "'attribute'" in sentence and "not installed" in sentence
    with pytest.warns(UserWarning, match="'attribute', which is not installed here"):
        write_board(store, PAPER_CLAIMS)
    assert "attribute" in (tmp_path / "leaderboard.html").read_text()
    assert any("not installed here" in problem for problem in verify(tmp_path))


def test_scores_that_answer_another_question_are_refused(fabricate):
    data = json.loads(canonical_json(fabricate("none", None, "x", "label")))
    data["victims"] = [{"kind": "attribute", "index": 0}]
    with pytest.raises(ValueError, match="do not answer the question 'label'"):
        Record.model_validate_json(json.dumps(data))
    data["victims"] = [{"kind": "label", "index": 0, "probe": 0, "client": 0}]
    with pytest.raises(ValueError, match="label"):
        Record.model_validate_json(json.dumps(data))
    with pytest.raises(Exception, match="not installed"):
        aggregate([OtherScore(kind="attribute", index=0)], classes=2, seed=0)
