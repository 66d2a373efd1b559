"""The examples of other people's packages: installed as packages are, found, evaluated, tested."""

import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from installed_examples import EXAMPLES, lay_out
from tutorials import blocks, lacking
from typer.testing import CliRunner

from ppbench.base import registry
from ppbench.commands import app
from ppbench.questions.base import question_of, questions
from ppbench.records.scores import score_types
from ppbench.run import evaluation
from ppbench.run.suite import load_suite
from ppbench.testing import check_attack, check_defense
from ppbench.testing.defenses import DEFENSE_PROPERTIES

ROOT = Path(__file__).parent.parent
PACKAGES = ("my_defense", "my_attack", "my_question")
MODULES = ("sign_sgd", "row_ratio", "column_guess")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return a folder in which the examples lie as packages that were installed."""
    folder = tmp_path_factory.mktemp("site")
    for name in PACKAGES:
        lay_out(EXAMPLES / name, folder)
    return folder


def forget():
    """Forget which plugins are installed."""
    for cache in (registry.plugins, score_types, question_of, questions):
        cache.cache_clear()


@pytest.fixture
def installed(site, monkeypatch):
    """Let this process find the examples as packages that were installed."""
    monkeypatch.syspath_prepend(site)
    forget()
    yield
    forget()
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("installed")
def test_installed_examples_are_listed_with_their_package():
    listed = CliRunner().invoke(app, ["list"]).stdout
    assert "sign_sgd         [ppbench-sign-sgd] Uploads one sign a parameter" in listed
    assert "row_ratio        [ppbench-row-ratio] Row i of dL/dW over dL/db_i" in listed
    assert "attribute        [ppbench-column-guess] Which value has one column" in listed
    assert "value_search     [ppbench-column-guess] The value whose gradient explains" in listed


@pytest.mark.usefixtures("installed")
def test_an_installed_defense_is_evaluated_with_an_installed_attack(monkeypatch, tmp_path):
    words = "--model mlp --grid 5 --clients 2 --rounds 1 --victims 4 --attack-batch 1 --stage init --workers 1"
    monkeypatch.setattr(evaluation, "write_board", lambda store, claims: [])  # `tests/wheel_test.sh` draws it
    words = ["evaluate", "--defense", "sign_sgd", "--attack", "row_ratio", *words.split()]
    listing = CliRunner().invoke(app, [*words, "--full", "--out", str(tmp_path / "out")])
    assert listing.exit_code == 0 and " ".join(listing.stdout.split()).count(
        "The best attack (row_ratio) breaks the undefended model: 100% of images are rebuilt."
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["my_defense", "my_attack"])
def test_a_readme_shows_what_its_evaluation_prints(name, site, tmp_path):
    (block,) = [one for one in blocks(f"../examples/{name}/README.md") if one.quoted]
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "ppbench", *block.text.split()[1:]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert not (wrong := lacking(block, done.stdout)), "\n".join([*wrong, done.stdout])


def test_a_question_touches_no_file_of_ours():
    """Its own tests, with cells, a board, sentences and rows to compare, are run by `tests/wheel_test.sh`."""
    assert "attribute_accuracy" in (EXAMPLES / "my_question/src/column_guess/__init__.py").read_text()
    for word in ("column_guess", "attribute_accuracy"):
        assert not [p for p in (ROOT / "ppbench").rglob("*.py") if word in p.read_text()]


@pytest.mark.nightly
def test_the_contracts_are_kept_without_being_installed(monkeypatch):
    for name in PACKAGES:
        monkeypatch.syspath_prepend(EXAMPLES / name / "src")
    assert "sign_sgd" not in registry.plugins("defenses") and "row_ratio" not in registry.plugins("attacks")
    result = check_defense(importlib.import_module("sign_sgd").SignSGD)
    assert [one.property for one in result] == list(DEFENSE_PROPERTIES)
    check_attack(importlib.import_module("row_ratio").RowRatio, decibels=60)
    for name in MODULES:
        sys.modules.pop(name, None)


def test_the_examples_suite_is_one(tmp_path):
    source = (EXAMPLES / "my_defense/tests/small.toml").read_text().replace('"sign_sgd"', '"ppdl"')
    (tmp_path / "small.toml").write_text(source)
    assert load_suite(tmp_path / "small.toml").id == "sign-sgd-small"


# -- `benchmarks/gpu.sh`: it refuses a machine without a GPU in one sentence, and keeps its time on any ---------------
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def gpu(script):
    return script(BENCHMARKS / "gpu.py")


@pytest.mark.nightly
def test_without_a_gpu_it_says_so_in_one_sentence_and_leaves_nothing(tmp_path):
    subprocess.run(["bash", "-n", str(BENCHMARKS / "gpu.sh")], check=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    command = ["bash", str(BENCHMARKS / "gpu.sh"), "--out", str(tmp_path / "found")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr == "Device 'cuda' was asked for, but torch finds no GPU; use 'cpu'.\n"
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_does_not_fit_is_stopped_with_its_children_and_said(gpu, tmp_path):
    child = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    long = gpu.run(gpu.Part("long", 1, ["-c", child]), 2, tmp_path)
    assert long.code is None and long.seconds < gpu.GRACE_S and long.word.startswith("did not fit")
    short = gpu.run(gpu.Part("short", 1, ["-c", "print('an end')"]), 60, tmp_path)
    broken = gpu.run(gpu.Part("broken", 1, ["-c", "raise SystemExit(3)"]), 60, tmp_path)
    assert (short.word, broken.word) == ("done", "FAILED with exit status 3")
    text = gpu.page({"device": "a"}, [long, short, broken], tmp_path)
    assert re.search(r"\| short \| \d+ \| done \| an end \|", text)
    assert "| long | 2 | did not fit: stopped after 2 s |" in text


def test_the_page_counts_cells_and_the_archive_holds_records_without_caches(gpu, tmp_path):
    out = tmp_path / "found"
    (out / "suite" / "records").mkdir(parents=True)
    (out / "suite" / "cache").mkdir()
    (out / "suite" / "cache" / "state.safetensors").write_bytes(b"0")
    records = [{"status": "complete", "reason": None}, *[{"status": "failed", "reason": "two devices"}] * 2]
    for place, record in enumerate(records):
        (out / "suite" / "records" / f"{place}.json").write_text(json.dumps(record))
    (out / "bench_a.json").write_text(json.dumps({"benchmarks": [{"name": "t", "extra_info": {"ratio": 2.5}}]}))
    (out / "bench_b.json").write_text("")
    text = gpu.page({}, [], out)
    assert "- 1 cells complete\n- 2 cells failed\n- 2 failed: two devices" in text
    assert "- t: ratio 2.5" in text and "No figure: the part was cut short." in text
    inside = zipfile.ZipFile(gpu.archive(out)).namelist()
    assert "found/suite/records/0.json" in inside and not any("cache" in name for name in inside)


def test_all_parts_together_take_all_the_time(gpu, tmp_path):
    parts = gpu.parts("cuda", tmp_path, None)
    assert sum(part.share for part in parts) == pytest.approx(1, abs=0.05)
    assert len({part.name for part in parts}) == len(parts)
    assert all("cuda" in part.command for part in parts if part.name != "battery")  # it reads PPBENCH_FAR
