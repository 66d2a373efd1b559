"""Where results come from: a command that others can type, and none of the folders of who typed it."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ppbench.base.errors import UsageError
from ppbench.commands import app
from ppbench.records.archive import Archive
from ppbench.records.run_files import ORIGIN, command_of, origin_of, restate, save_origin
from ppbench.records.store import Store

pytestmark = pytest.mark.nightly

RESULTS = sorted((Path(__file__).parents[1] / "leaderboards" / "results").glob("*/records.zip"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep", "s", "--dataset", "parquet:/home/ann/cifar10"], "sweep s --dataset parquet:cifar10"),
        (["sweep", "/home/ann/mine.toml", "--out=/home/ann/out/"], "sweep mine.toml --out=out"),
        (["sweep", "s", "--out", "~/my results"], "sweep s --out 'my results'"),
        (["sweep", "s", "--out", "C:\\Users\\ann\\out", "--only", "seed=0,1"], "sweep s --out out --only seed=0,1"),
        (
            ["evaluate", "--defense", "/home/ann/my.py:make", "--grid", "0.1,1"],
            "evaluate --defense my.py:make --grid 0.1,1",
        ),
        (
            ["sweep", "s", "--dataset", "csv:data/x.csv", "--out", "../out"],
            "sweep s --dataset csv:data/x.csv --out ../out",
        ),
        (
            ["sweep", "s", "--address", "ray://10.0.0.1:6379", "--only=control=1/3"],
            "sweep s --address ray://10.0.0.1:6379 --only=control=1/3",
        ),
        (["sweep", "s", "--out", "/"], "sweep s --out /"),
        (["sweep", "s", "--set", "model.weights=/home/ann/w.pth"], "sweep s --set model.weights=w.pth"),
        (["sweep", "s", "--set=model.weights=/home/ann/w.pth"], "sweep s --set=model.weights=w.pth"),
        (["evaluate", "--attack", "dlg,/home/a/b.py:M,/c/d.py:O"], "evaluate --attack dlg,b.py:M,d.py:O"),
        (
            ["evaluate", "--dataset", "csv:/home/ann/b.csv?target=in/out&sep=/"],
            "evaluate --dataset 'csv:b.csv?target=in/out&sep=/'",
        ),
        (["sweep", "s", "--dataset", "my_data:v2:/home/ann/x"], "sweep s --dataset my_data:v2:x"),
        (["sweep", "s", "--out", "//srv/ann/x//"], "sweep s --out x"),
        (["sweep", "s", "--out", "\\\\srv\\ann\\x"], "sweep s --out x"),
        (["sweep", "s", "--out", "~ann/x", "--weights", "file:///home/ann/w"], "sweep s --out x --weights file:w"),
    ],
)
def test_a_command_names_no_folder_of_this_machine(words, message):
    assert command_of(words) == f"ppbench {message}"


def test_results_say_the_command_without_where_they_lie(tmp_path, monkeypatch):
    out = tmp_path / "made"
    words = ["evaluate", "--defense", "dp", "--grid", "0.1", "--attack", "label_recovery", "--rounds", "1"]
    words += ["--stage", "init", "--victims", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["ppbench", *words])
    assert CliRunner().invoke(app, words).exit_code in (0, 1)
    assert origin_of(Store(out)).command.endswith("--victims 2 --out made")
    files = [p for p in out.rglob("*") if p.is_file() and "cache" not in p.parts]
    assert len(files) > 5 and not [p for p in files if str(tmp_path).encode() in p.read_bytes()]


def test_a_command_that_makes_all_cells_takes_the_place_of_the_last(tmp_path):
    Store(tmp_path).prepare()
    save_origin(tmp_path, "ppbench sweep s --only=seed=2")
    before = origin_of(Store(tmp_path))
    restate(tmp_path, "ppbench sweep s")
    assert origin_of(Store(tmp_path)) == before.model_copy(update={"command": "ppbench sweep s"})
    (tmp_path / ORIGIN).write_text("[]")
    with pytest.raises(UsageError, match="does not say where results come from"):
        restate(tmp_path, "ppbench sweep s")


@pytest.mark.parametrize("path", RESULTS, ids=[path.parent.name for path in RESULTS])
def test_a_committed_board_says_its_manifests_command(path):
    manifest = (path.parent / "manifest.toml").read_text()
    command = json.loads(Archive(path).read(ORIGIN))["command"]
    assert f"command = {json.dumps(command)}" in manifest.splitlines()
