"""CONTRIBUTING's table "Which file to add or touch": one of each is added by its row, to a copy, and shows up."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

METRIC = '''"""A metric of a stranger."""

import numpy as np
from numpy.typing import NDArray

from ppbench.metrics.intervals import Estimate, proportion


def missed(units: list[NDArray[np.bool_]]) -> Estimate:
    """Return the share of wrong labels."""
    return proportion([~unit for unit in units])
'''
REPORTED = """
        misses = record_metric("labels_missed", missed(units), True)
        return [record_metric("label_accuracy", label_accuracy(units, terms.classes), False), misses]
"""
CHART = '''"""A chart of a stranger."""

from dataclasses import dataclass

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Counts:
    """How many rows a board has."""

    title: str
    rows: int

    @property
    def label(self) -> str:
        """What is read to who cannot see it."""
        return f"planted: {self.rows} rows"

    def draw(self) -> Figure:
        """Return the figure."""
        figure = Figure(figsize=(2, 2))
        figure.subplots().bar([0], [self.rows])
        return figure
'''
CLAIMS = """citation = "Bernstein et al., signSGD, ICML 2018"

[[table]]
defense = "sign_sgd"
source = "Table 99"
metric = "cap_label"
dataset = "rows.csv"
model = "mlp"
value = 0.5
"""
RUN = """
import json, sys
import ppbench, ppbench.run.cost as cost
cost.BUDGET_S = cost.ENOUGH_S = 0.0  # a single pair is timed
from ppbench.base.registry import PLUGIN_GROUPS, plugins
found = ppbench.evaluate(
    defense="sign_sgd", grid=(5,), dataset=f"csv:{sys.argv[1]}?target=ill", model="mlp", out=sys.argv[2], workers=1,
    attacks=("row_ratio", "value_search", "label_recovery"), clients=2, rounds=1, victims=4, attack_batch=(1,),
    stages=("init",), threats=("server/1",),
)
print(json.dumps({
    "where": ppbench.__file__,
    "listed": {group: {name: p.distribution for name, p in plugins(group).items()} for group in PLUGIN_GROUPS},
    "cells": [[r.config.defense.id, r.config.attack.id, r.config.attack.kind, r.status] for r in found.records],
    "metrics": sorted({m.name for r in found.records for m in r.metrics}),
    "sentences": list(found.verdict),
}))
"""


def recipe(what: str) -> tuple[list[str], list[str]]:
    """Return the words in code of a row: of the file to add, and of what else is touched."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (row,) = re.findall(rf"^\| {what} \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    first, second = (re.findall(r"`([^`]+)`", cell) for cell in row)
    return first, second


def only(words: list[str], pattern: str) -> str:
    """Return the one word that fits."""
    (word,) = [word for word in words if re.fullmatch(pattern, word)]
    return word


def replaced(path: Path, old: str, new: str) -> None:
    """Change the one place of a file that reads `old`."""
    text = path.read_text()
    assert text.count(old) == 1, f"{path.name} reads {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new))


def entered(tree: Path, words: list[str], line: str) -> None:
    """Add a line of entry point under the group that a row names."""
    group = only(words, r"ppbench\.\w+")
    head = f'[project.entry-points."{group}"]\n'
    replaced(tree / only(words, r"pyproject\.toml"), head, f"{head}{line}\n")


def add_defense(tree: Path) -> None:
    (file,), more = recipe("a defense")
    target = tree / file.replace("x.py", "sign_sgd.py")
    shutil.copy(EXAMPLES / "my_defense/src/sign_sgd/__init__.py", target)
    claimed = '    claimed: ClassVar[tuple[Claim, ...]] = paper("bernstein2018").claims("sign_sgd")\n'
    imports = "from ppbench.defenses.claims import paper\n"
    replaced(target, "    paper: ClassVar", f"{claimed}    paper: ClassVar")
    replaced(target, "from ppbench.api import Context,", f"{imports}from ppbench.api import Claim, Context,")
    entered(tree, more, 'sign_sgd = "ppbench.defenses.sign_sgd:SignSGD"')
    (tree / only(more, r".*claims/x\.toml").replace("x.toml", "bernstein2018.toml")).write_text(CLAIMS)


def add_attack(tree: Path) -> None:
    files, more = recipe("an attack")
    shutil.copy(EXAMPLES / "my_attack/src/row_ratio/__init__.py", tree / files[0].replace("x.py", "row_ratio.py"))
    entered(tree, more, 'row_ratio = "ppbench.attacks.reconstruction.row_ratio:RowRatio"')


def add_question(tree: Path) -> None:
    """Add a question, and with it, as an attack, who answers it."""
    files, more = recipe("a question")
    target = tree / only(files, r".*/x\.py").replace("x.py", "attribute.py")
    shutil.copy(EXAMPLES / "my_question/src/column_guess/__init__.py", target)
    assert (ROOT / only(more, "examples/.*")).is_dir()
    entered(tree, more, 'attribute = "ppbench.questions.attribute:Attribute"')
    entered(tree, recipe("an attack")[1], 'value_search = "ppbench.questions.attribute:ValueSearch"')


def add_metric(tree: Path) -> None:
    files, more = recipe("a metric")
    (tree / only(files, r".*/x\.py").replace("x.py", "missed.py")).write_text(METRIC)
    question = tree / only(more, r".*\.py")
    assert f"def {only(more, 'metrics')}(" in question.read_text()
    head = "from ppbench.questions.base import"
    replaced(question, head, f"from ppbench.metrics.missed import missed\n{head}")
    alone = '\n        return [record_metric("label_accuracy", label_accuracy(units, terms.classes), False)]\n'
    replaced(question, alone, REPORTED)


def add_column(tree: Path) -> None:
    files, more = recipe("a column")
    meaning = '    "labels_missed": (SHARE, "Share of labels that are wrong."),\n'
    appended(
        tree / only(files, r".*\.py"),
        f"{only(files, '[A-Z]+')}: Final[dict[str, tuple[str, str]]] = {{\n",
        "}",
        meaning,
    )
    values = only(more, r"\*_values\(.*\)").replace("x", "labels_missed")
    appended(tree / only(more, r"ppbench.*\.py"), f"{only(more, '[A-Z]+')}: Final = (\n", ")", f"    {values},\n")


def appended(path: Path, head: str, end: str, line: str) -> None:
    """Add a line at the end of a literal that begins with `head`."""
    before, rest = re.split(rf"^{re.escape(head)}", path.read_text(), flags=re.MULTILINE)
    inner, after = rest.split(f"\n{end}\n", 1)
    path.write_text(f"{before}{head}{inner}\n{line}{end}\n{after}")


def add_chart(tree: Path) -> None:
    files, more = recipe("a chart")
    new = tree / only(files, r".*/x\.py").replace("x.py", "counts.py")
    assert f"class {only(files, 'Plot')}(" in (new.parent / only(files, r"\w+\.py")).read_text()
    new.write_text(CHART)
    import_ = "from ppbench.report.page.curves import"
    own = "from ppbench.report.page.counts import Counts\n" + import_
    page, folder = (tree / word for word in more if word.endswith(".py"))
    for path, function in zip((page, folder), (word for word in more if word.startswith("_")), strict=True):
        assert f"def {function}(" in path.read_text()
        replaced(path, import_, own)
    drawn = "tuple(drawings.chart(curve) for curve in curves(board, board_target(board.setting)))"
    replaced(page, drawn, f'(*{drawn}, drawings.chart(Counts("planted", len(board.entries))))')
    named = "    for ppc in ppcs(board, known):\n        yield f"
    own = '    yield f"planted {board.setting.kind}", Counts("planted", len(board.entries))\n'
    replaced(folder, named, own + named)


ADDED = (add_defense, add_attack, add_question, add_metric, add_column, add_chart)


def described(tree: Path) -> None:
    """Write what an installer writes: which entry points pyproject.toml names."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *map(" = ".join, entries.items())]
    (tree / "ppbench_fl.egg-info").mkdir()
    (tree / "ppbench_fl.egg-info/entry_points.txt").write_text("\n".join(lines))
    (tree / "ppbench_fl.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: ppbench-fl\nVersion: 0.0\n")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return what an evaluation with all six says, by a copy of the package; `page`, `table` and `tree` beside it."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("out") / "results"
    shutil.copytree(ROOT / "ppbench", tree / "ppbench", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    for add in ADDED:
        add(tree)
    described(tree)
    rows = tree / "rows.csv"
    rows.write_text("age,habit,ill\n" + "".join(f"{i * 37 % 61},{i % 3},{int(i % 5 > 2)}\n" for i in range(120)))
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(rows), str(out)], capture_output=True, text=True, env=env, cwd=tree, check=False
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout.splitlines()[-1])
    assert content["where"].startswith(str(tree))
    return {
        **content,
        "page": (out / "leaderboard.html").read_text(),
        "figures": sorted(path.name for path in (out / "figures").iterdir()),
        "table": list(csv.DictReader((out / "leaderboard.csv").open())),
    }


def test_every_file_and_group_that_the_table_names_is_there() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for what in ("a defense", "an attack", "a question", "a metric", "a column", "a chart"):
        for word in (word for cell in recipe(what) for word in cell if "/" in word or word.startswith("ppbench.")):
            place = ROOT / word
            known = place.parent.is_dir() if place.name.startswith("x.") else place.exists()
            assert known or word in groups, f"{what}: {word}"


def test_a_defense_is_listed_evaluated_and_its_claim_stands_beside_its_cells(outputs: dict) -> None:
    assert outputs["listed"]["defenses"]["sign_sgd"] == "ppbench-fl"
    mine = [row for row in outputs["table"] if row["defense"] == "sign_sgd"]
    assert {row["control_value"] for row in mine} == {"5"} and {row["status"] for row in mine} == {"complete"}
    assert {row["claimed"] for row in mine if row["attack"] == "label_recovery"} == {"CAP 0.50 (Table 99)"}


def test_an_attack_is_listed_and_has_cells(outputs: dict) -> None:
    assert outputs["listed"]["attacks"]["row_ratio"] == "ppbench-fl"
    assert ["sign_sgd", "row_ratio", "reconstruction", "complete"] in outputs["cells"]


def test_a_question_has_cells_columns_a_board_and_a_sentence(outputs: dict) -> None:
    assert outputs["listed"]["questions"]["attribute"] == "ppbench-fl"
    assert ["sign_sgd", "value_search", "attribute", "complete"] in outputs["cells"]
    assert "Attribute inference" in outputs["page"] and "Values guessed" in outputs["page"]
    assert any(sentence.startswith("Attribute inference [server/1") for sentence in outputs["sentences"])
    assert all(row["attribute_accuracy"] for row in outputs["table"] if row["attack"] == "value_search")


def test_a_metric_is_in_the_records_and_a_column_in_the_table(outputs: dict) -> None:
    assert "labels_missed" in outputs["metrics"]
    columns = list(outputs["table"][0])
    assert columns[-4:] == ["labels_missed", "attribute_accuracy", "attribute_accuracy_low", "attribute_accuracy_high"]
    for row in outputs["table"]:
        if row["attack"] == "label_recovery":
            assert float(row["labels_missed"]) == pytest.approx(1 - float(row["label_accuracy"]))


def test_a_chart_is_on_the_page_and_among_the_files(outputs: dict) -> None:
    assert 'aria-label="planted: 1 rows"' in outputs["page"] or 'aria-label="planted: 3 rows"' in outputs["page"]
    assert {"planted-reconstruction.svg", "planted-reconstruction.png"} <= set(outputs["figures"])
