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

DRAWN = True

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

METRIC = """LABELS_MISSED = MetricSpec(
    "labels_missed",
    "Missed",
    SHARE,
    "Share of labels that are wrong.",
    higher_is_safer=True,
    judgment=Judgment("decision", 0.02, 0.05),
)
"""
REPORTED = """
        missed = proportion([~unit for unit in units])
        found = record_metric(LABEL_ACCURACY, label_accuracy(units, terms.classes))
        return [found, record_metric(LABELS_MISSED, missed)]
"""
PIXELS = """
def close_pixels(guess: Tensor, truth: Tensor) -> float:
    return float(((guess - truth).abs() < 0.05).double().mean())


def score_figures("""
PIXEL_METRIC = """    ImageMetric(
        MetricSpec(
            "close_pixels_mean",
            "Close pixels",
            SHARE,
            "Share of pixels that are close.",
            judgment=Judgment("mean", 0.02, 0.05),
        ),
        _over_all(lambda s: s.close_pixels, "mean", OLD_REASON),
        needs=lambda s: s.close_pixels is not None,
        judged=lambda s: s.close_pixels or 0.0,
        kinds=lambda kind: kind.drawn,
    ),
)
"""
MODEL_METRIC = """CLASS_ERROR = ModelMetric(
    "class_error",
    "Class error",
    SHARE,
    "Share of test examples whose class is wrong.",
    judgment=_JUDGED,
    low="class_error_low",
    high="class_error_high",
)
"""
MODEL_FIELDS = """    class_error: Share | None = None
    class_error_low: Share | None = None
    class_error_high: Share | None = None
"""
MODEL_VALUES = """        class_error=None if accuracy is None else 1 - accuracy,
        class_error_low=interval and 1 - interval.high,
        class_error_high=interval and 1 - interval.low,
"""
OPTION = """    probe_again: Annotated[int, Option("Times that it is made; the last is kept.", ge=1, le=9)] = 1
"""
OPTION_FIELD = """    probe_again: AtLeastOne = Field(default=1, description="Times that it was made.")
    LATER: ClassVar[Mapping[str, Any]] = {"probe_again": 1}
"""
OPTION_USE = """    for _ in range(config.probe_again - 1):
        fed.probe(victims.data, config.probe, config.probe_rounds, acting)
"""
CHART = '''"""A chart of a third party."""

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
IMAGES = """
import dataclasses, json, sys
from pathlib import Path
import ppbench, ppbench.run.cost as cost
cost.BUDGET_S = cost.ENOUGH_S = 0.0  # a single pair is timed
from ppbench.records.figure import aggregate
from ppbench.records.store import Store
from ppbench.report.compare.outcome import compare
from ppbench.verification import verify
out, old, forged = (Path(sys.argv[1]) / name for name in ("images", "old", "forged"))
ppbench.evaluate(
    defense="dp", grid=(0.1,), model="mlp", attacks=("analytic",), attack_batch=(1,), stages=("init",), rounds=1,
    victims=4, workers=1, out=str(out),
)
for record in Store(out).load_all():
    tensors = {n: v for n, v in dataclasses.asdict(Store(out).images(record)).items() if v is not None}
    about = dict(classes=10, seed=record.config.seed)
    lacking = dict.fromkeys(("class_error", "class_error_low", "class_error_high"))
    victims = [v.model_copy(update={"close_pixels": None}) for v in record.victims]
    utility = record.utility.model_copy(update=lacking)
    parts = dict(utility=utility, victims=victims, metrics=aggregate(victims, **about))
    Store(old).save(record.model_copy(update=parts), tensors=tensors)
    victims = [v.model_copy(update={"close_pixels": 0.123}) for v in record.victims]
    parts = dict(victims=victims, metrics=aggregate(victims, **about))
    Store(forged).save(record.model_copy(update=parts), tensors=tensors)
rows = {name: compare(base, out).rows for name, base in (("itself", out), ("old", old))}
print(json.dumps({
    "compared": {name: [[r.metric, r.status, r.change.method] for r in some] for name, some in rows.items()},
    "verified": {name: list(verify(folder)) for name, folder in (("itself", out), ("old", old), ("forged", forged))},
    "scores": sorted({v.close_pixels for r in Store(out).load_all() for v in r.victims}),
}))
"""
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
import json, runpy, sys
from pathlib import Path
import ppbench, ppbench.run.cost as cost
cost.BUDGET_S = cost.ENOUGH_S = 0.0  # a single pair is timed
from ppbench.base.registry import PLUGIN_GROUPS, plugins
from ppbench.commands.running import OPTIONS
from ppbench.report.compare.join import equal_facts
from ppbench.report.compare.outcome import compare
from ppbench.run.cells import find_cell
from ppbench.run.suite import QuestionsPart
out = Path(sys.argv[2])
found = ppbench.evaluate(
    defense="sign_sgd", grid=(5,), dataset=f"csv:{sys.argv[1]}?target=ill", model="mlp", out=sys.argv[2], workers=1,
    attacks=("row_ratio", "value_search", "label_recovery"), clients=2, rounds=1, victims=4, attack_batch=(1,),
    stages=("init",), threats=("server/1",), probe_again=2,
)
print(json.dumps({
    "where": ppbench.__file__,
    "listed": {group: {name: p.distribution for name, p in plugins(group).items()} for group in PLUGIN_GROUPS},
    "cells": [[r.config.defense.id, r.config.attack.id, r.config.attack.kind, r.status] for r in found.records],
    "metrics": sorted({m.name for r in found.records for m in r.metrics}),
    "sentences": list(found.verdict),
    "columns": runpy.run_path("docs/make_columns.py")["page"](),
    "option": {
        "help": OPTIONS["probe_again"][1],
        "suite": QuestionsPart(probe_again=2).model_dump(exclude_unset=True),
        "facts": sorted({dict(equal_facts(r.config))["probe_again"] for r in found.records}),
        "cells": [r.cell_id for r in found.records],
        "made again": [find_cell(r.config, f"csv:{sys.argv[1]}?target=ill")[2].id for r in found.records],
        "written": [r.config.model_dump().get("probe_again") for r in found.records],
    },
    "compared": [[row.metric, row.tolerance, row.change.worse] for row in compare(out, out).rows],
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
    entered(tree, more, 'sign_sgd = "ppbench.defenses.sign_sgd:SignSGD"')
    (tree / only(more, r".*papers/x\.toml").replace("x.toml", "bernstein2018.toml")).write_text(CLAIMS)


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
    """Add a metric of victims, in one file."""
    files, _ = recipe("a metric of labels, members or another question")
    question = tree / only(files, r".*\.py")
    assert f"def {only(files, 'metrics')}(" in question.read_text()
    replaced(question, "LABEL_DISTANCE = DistanceLaw(", f"{METRIC}LABEL_DISTANCE = DistanceLaw(")
    specs = only(files, "specs")
    replaced(question, f"    {specs} = (LABEL_ACCURACY,)\n", f"    {specs} = (LABEL_ACCURACY, LABELS_MISSED)\n")
    replaced(
        question, "\n        return [record_metric(LABEL_ACCURACY, label_accuracy(units, terms.classes))]\n", REPORTED
    )
    judged = "        return {LABEL_ACCURACY.name: float(score.label)}[metric]\n"
    own = "        if metric == LABELS_MISSED.name:\n            return float(not score.label)\n"
    assert f"def {only(files, 'judged')}(" in question.read_text()
    replaced(question, judged, f"{own}{judged}")


def add_image_metric(tree: Path) -> None:
    """Add a metric of reconstructions, in one file."""
    files, _ = recipe("a metric of reconstructions")
    metrics = tree / only(files, r".*\.py")
    assert files[1:] == ["ImageScore", "LATER", "score_figures", "ImageMetric", "IMAGE_METRICS"]
    field = "    layers: list[LayerScore] = Field(default_factory=list)\n"
    replaced(metrics, field, f"    close_pixels: Share | None = None\n{field}")
    replaced(metrics, '"blind_accuracy", "recognition", ', '"blind_accuracy", "recognition", "close_pixels", ')
    replaced(metrics, "\ndef score_figures(", PIXELS)
    made = "    return asdict(image_figures(guess, truth, data_range))\n"
    own = '    own = {"close_pixels": close_pixels(guess, truth)} if kind.drawn else {}\n'
    replaced(metrics, made, f"{own}    return asdict(image_figures(guess, truth, data_range)) | own\n")
    replaced(metrics, "    GAIN_MEDIAN,\n)\n", f"    GAIN_MEDIAN,\n{PIXEL_METRIC}")


def add_model_metric(tree: Path) -> None:
    """Add a metric of the delivered model, in two files."""
    files, more = recipe("a metric of the model")
    schema, declared = tree / only(files, r".*\.py"), only(files, "[A-Z_]+")
    training = tree / only(more, r"ppbench/.*")
    replaced(schema, f"{declared}: Final", f"{MODEL_METRIC}{declared}: Final")
    replaced(schema, "DICE, MSE)}", "DICE, MSE, CLASS_ERROR)}")
    constant = "    constant_mse: Amount | None = None\n"
    replaced(schema, constant, constant + MODEL_FIELDS)
    later = '**dict.fromkeys(("constant", "constant_mse"'
    fields = re.findall(r"\w+(?=: )", MODEL_FIELDS)
    replaced(schema, later, f"**dict.fromkeys({fields}), {later}")
    replaced(training, "        mse_high=mse_high,\n", f"        mse_high=mse_high,\n{MODEL_VALUES}")


def add_option(tree: Path) -> None:
    """Add an option of the probe, in three files."""
    files, _ = recipe("an option")
    options, schema = (tree / word for word in files if word.endswith(".py"))
    assert {"ProbeInfo", "LATER"} < set(files)
    replaced(options, "    victims: Annotated[", f"{OPTION}    victims: Annotated[")
    after = "    @property\n    def probing(self)"
    replaced(schema, after, f"{OPTION_FIELD}\n{after}")
    acts = "    transcript = fed.probe(victims.data"
    replaced(tree / "ppbench/run/scene.py", acts, f"{OPTION_USE}{acts}")


def add_column(tree: Path) -> None:
    files, _ = recipe("a column")
    columns = tree / only(files, r".*\.py")
    assert f"{only(files, '[A-Z_]+')}: Final = (" in columns.read_text()
    end = ')\n"""The columns of leaderboard.csv that have their place.'
    replaced(columns, end, f'    _text("upload", "config.federation.upload", "What clients upload."),\n{end}')


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
    replaced(page, import_, own)
    drawn = "tuple(drawings.chart(curve) for curve in curves(board, board_target(board.setting)))"
    replaced(page, drawn, f'(*{drawn}, drawings.chart(Counts("planted", len(board.entries))))')
    named = "    for ppc in ppcs(board, known):\n        yield f"
    own = '    yield f"planted {board.setting.kind}", Counts("planted", len(board.entries))\n'
    replaced(folder, named, own + named)


ADDED = (
    *(add_defense, add_attack, add_question, add_metric, add_image_metric, add_model_metric),
    *(add_option, add_column, add_chart),
)


def described(tree: Path) -> None:
    """Write what an installer writes: which entry points pyproject.toml names."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *map(" = ".join, entries.items())]
    (tree / "ppbench_fl.egg-info").mkdir()
    (tree / "ppbench_fl.egg-info/entry_points.txt").write_text("\n".join(lines))
    (tree / "ppbench_fl.egg-info/PKG-INFO").write_text("Metadata-Version: 2.1\nName: ppbench-fl\nVersion: 0.0\n")


def printed(program: str, tree: Path, *paths: Path) -> dict:
    """Return the JSON that a program prints last; it imports the copy of the package in `tree`."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tree, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the package in which every recipe was followed."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "ppbench", tree / "ppbench", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tree / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "make_columns.py", tree / "docs")
    for add in ADDED:
        add(tree)
    described(tree)
    return tree


@pytest.fixture(scope="module")
def outputs(followed: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return what an evaluation with all nine says, by a copy of the package; `page` and `table` beside it."""
    tree, out = followed, tmp_path_factory.mktemp("out") / "results"
    rows = tree / "rows.csv"
    rows.write_text("age,habit,ill\n" + "".join(f"{i * 37 % 61},{i % 3},{int(i % 5 > 2)}\n" for i in range(120)))
    content, images = printed(RUN, tree, rows, out), printed(IMAGES, tree, out.parent)
    assert content["where"].startswith(str(tree))
    return {
        **content,
        "images": images,
        "image page": (out.with_name("images") / "leaderboard.html").read_text(),
        "image table": list(csv.DictReader((out.with_name("images") / "leaderboard.csv").open())),
        "page": (out / "leaderboard.html").read_text(),
        "figures": sorted(path.name for path in (out / "figures").iterdir()),
        "worst": (out / "worst_case.csv").read_text(),
        "table": list(csv.DictReader((out / "leaderboard.csv").open())),
    }


def test_every_file_and_group_that_the_table_names_is_there() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    metrics = (
        "a metric of labels, members or another question",
        "a metric of reconstructions",
        "a metric of the model",
    )
    rows = (*metrics, "an option", "a column", "a chart")
    for what in ("a defense", "an attack", "a question", *rows):
        for word in (word for cell in recipe(what) for word in cell if "/" in word or word.startswith("ppbench.")):
            place = ROOT / word
            known = place.parent.is_dir() if place.name.startswith("x.") else place.exists()
            assert known or word in groups, f"{what}: {word}"


def test_every_recipe_can_be_followed_and_gives_modules_that_compile(followed: Path) -> None:
    """The tests below run them, by night."""
    texts = {path: path.read_text() for path in followed.rglob("*.py")}
    changed = [
        p
        for p, text in texts.items()
        if not (same := ROOT / p.relative_to(followed)).exists() or same.read_text() != text
    ]
    assert len(changed) > len(ADDED)
    for path in changed:
        compile(texts[path], path, "exec")


@pytest.mark.nightly
def test_a_defense_is_listed_evaluated_and_its_claim_stands_beside_its_cells(outputs: dict) -> None:
    assert outputs["listed"]["defenses"]["sign_sgd"] == "ppbench-fl"
    mine = [row for row in outputs["table"] if row["defense"] == "sign_sgd"]
    assert {row["control_value"] for row in mine} == {"5"} and {row["status"] for row in mine} == {"complete"}
    assert {row["claimed"] for row in mine if row["attack"] == "label_recovery"} == {"CAP 0.50 (Table 99)"}


@pytest.mark.nightly
def test_an_attack_is_listed_and_has_cells(outputs: dict) -> None:
    assert outputs["listed"]["attacks"]["row_ratio"] == "ppbench-fl"
    assert ["sign_sgd", "row_ratio", "reconstruction", "complete"] in outputs["cells"]


@pytest.mark.nightly
def test_a_question_has_cells_columns_a_board_and_a_sentence(outputs: dict) -> None:
    assert outputs["listed"]["questions"]["attribute"] == "ppbench-fl"
    assert ["sign_sgd", "value_search", "attribute", "complete"] in outputs["cells"]
    assert "Attribute inference" in outputs["page"] and "Values guessed" in outputs["page"]
    assert any(sentence.startswith("Attribute inference [server/1") for sentence in outputs["sentences"])
    assert all(row["attribute_accuracy"] for row in outputs["table"] if row["attack"] == "value_search")


@pytest.mark.nightly
def test_a_metric_of_victims_takes_one_file_and_is_in_records_columns_documents_page_and_comparisons(
    outputs: dict,
) -> None:
    assert "labels_missed" in outputs["metrics"]
    own = ["labels_missed", "labels_missed_low", "labels_missed_high"]
    foreign = ["attribute_accuracy", "attribute_accuracy_low", "attribute_accuracy_high"]
    assert list(outputs["table"][0])[-6:] == own + foreign
    for row in outputs["table"]:
        if row["attack"] == "label_recovery":
            assert float(row["labels_missed"]) == pytest.approx(1 - float(row["label_accuracy"]))
    line = "| `labels_missed`, `labels_missed_low`, `labels_missed_high` | L | number | share | "
    assert f"{line}Share of labels that are wrong. |" in outputs["columns"]
    assert '"title":"Missed"' in outputs["page"]
    assert ["labels_missed", 0.02, 0.0] in outputs["compared"]


@pytest.mark.nightly
def test_a_metric_of_reconstructions_takes_one_file_and_is_scored_shown_compared_and_verified(outputs: dict) -> None:
    images = outputs["images"]
    assert len(images["scores"]) > 2 and all(0 <= share <= 1 for share in images["scores"])
    for row in outputs["image table"]:
        assert float(row["close_pixels_mean_low"]) <= float(row["close_pixels_mean"]) <= 1
    assert "| `close_pixels_mean`, `close_pixels_mean_low`, `close_pixels_mean_high` | L |" in outputs["columns"]
    assert '"title":"Close pixels"' in outputs["image page"]
    assert ["close_pixels_mean", "ok", "equal scores, victim by victim"] in images["compared"]["itself"]
    assert "close_pixels_mean" not in {metric for metric, _, _ in outputs["compared"]}, "not of rows of a table"
    assert not images["verified"]["itself"]
    assert any("close_pixels of victim" in problem for problem in images["verified"]["forged"])


@pytest.mark.nightly
def test_records_without_a_metric_that_was_added_later_agree_with_those_that_have_it(outputs: dict) -> None:
    itself, old = (outputs["images"]["compared"][name] for name in ("itself", "old"))
    added = {"close_pixels_mean", "class_error"}
    assert added < {metric for metric, _, _ in itself}
    assert old == [row for row in itself if row[0] not in added], "what both have is equal"
    assert not [problem for problem in outputs["images"]["verified"]["old"] if "close_pixels" in problem]


@pytest.mark.nightly
def test_a_metric_of_the_model_takes_two_files_and_is_in_columns_documents_page_and_comparisons(
    outputs: dict,
) -> None:
    for row in outputs["table"]:
        assert float(row["class_error"]) == pytest.approx(1 - float(row["accuracy"]))
        assert float(row["class_error_low"]) == pytest.approx(1 - float(row["accuracy_high"]))
    line = "| `class_error`, `class_error_low`, `class_error_high` | L c | number | share | "
    assert f"{line}Share of test examples whose class is wrong. |" in outputs["columns"]
    assert '"title":"Class error"' in outputs["page"]
    assert ["class_error", 0.01, 0.0] in outputs["compared"]


@pytest.mark.nightly
def test_an_option_takes_three_files_and_is_in_help_suites_cells_columns_and_comparisons(outputs: dict) -> None:
    option = outputs["option"]
    assert option["help"] == "Times that it is made; the last is kept." and option["suite"] == {"probe_again": 2}
    assert option["made again"] == option["cells"], "a record gives the options that made it"
    assert option["facts"] == ["2"] and set(option["written"]) == {2}
    assert "| `probe_again` | W c w | whole number |  | Times that it was made. |" in outputs["columns"]
    worst = list(csv.DictReader(outputs["worst"].splitlines()))
    assert worst and {row["probe_again"] for row in worst} == {"2"}


@pytest.mark.nightly
def test_a_column_is_in_the_table(outputs: dict) -> None:
    assert {row["upload"] for row in outputs["table"]} == {"delta"}
    assert "| `upload` |" in outputs["columns"]


@pytest.mark.nightly
def test_a_chart_is_on_the_page_and_among_the_files(outputs: dict) -> None:
    assert 'aria-label="planted: 1 rows"' in outputs["page"] or 'aria-label="planted: 3 rows"' in outputs["page"]
    assert {"planted-reconstruction.svg", "planted-reconstruction.png"} <= set(outputs["figures"])
