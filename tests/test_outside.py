"""Attacks from outside: the examples run without ppbench, one without torch, and their guesses are scored."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ppbench.ledger.form import BookEntry, add_entry
from ppbench.ledger.publish import compute_views, publish
from ppbench.ledger.score import score
from ppbench.ledger.site import build_site
from ppbench.ledger.transcript import load_transcript
from ppbench.records.store import Store

pytestmark = pytest.mark.nightly

EXAMPLES = Path(__file__).parent.parent / "examples" / "outside"
PAGE = Path(__file__).parent.parent / "docs" / "ledger.md"
SUITE = """
schema = "ppbench.run.suite/1"
id = "outside"
version = 1
title = "what outsiders attack"
[task]
dataset = "digits"
clients = 4
train = 200
[federation]
rounds = 1
[questions]
attacks = ["label_recovery", "dlg"]
attack_batch = [1]
victims = 4
tuning = 0
stages = ["init"]
[attack.dlg]
restarts = 0
[[defense]]
id = "dp"
grid = [0.1]
"""
BARRED = """
import sys
class Barred:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ImportError(name + " is barred")
sys.meta_path.insert(0, Barred())
sys.path.insert(0, {folder!r})
import runpy
sys.argv = ["x", {transcript!r}, {name!r}]
runpy.run_path({script!r}, run_name="__main__")
"""

FILES = ("transcript.json", "view.safetensors", "gradients.safetensors")
HISTORY = json.dumps(
    {
        "day": "2026-11-25", "transcript": "ID", "scene": "none", "kind": "reconstruction", "attack": "external:x",
        "version": "1", "reference": "<script>alert(1)</script>", "guesses": "0" * 64, "cell": "0" * 32, "tries": 1,
        "level": 0.01, "p": 0.001, "metric": "psnr_median", "before": 10.0, "after": 20.0, "holder": "dlg",
        "moved": True, "reason": "",
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return the folder of the undefended transcript, and the organizer's."""
    home = tmp_path_factory.mktemp("outside")
    (home / "suite.toml").write_text(SUITE)
    compute_views(str(home / "suite.toml"), home / "truth", workers=1)
    made = publish(home / "truth", home / "out")
    none = next(about for about in made.transcripts if about.defense.id == "none")
    return home / "out" / none.id, home / "truth"


def answered(script, transcript, name, barred):
    """Run an example in a process of its own in which some packages cannot be imported."""
    code = BARRED.format(
        names=barred, folder=str(EXAMPLES), transcript=str(transcript), name=str(name), script=str(EXAMPLES / script)
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def ours(truth, attack):
    """Return the ordinary cell of one of our attacks on the undefended."""
    records = Store(truth).load_all()
    return next(r for r in records if r.config.attack.id == attack and r.config.defense.id == "none")


def test_labels_are_read_with_numpy_alone(published, tmp_path):
    transcript, truth = published
    answered("labels.py", transcript, tmp_path / "mine", ("torch", "ppbench", "safetensors", "pandas", "scipy"))
    scores = score(load_transcript(transcript), tmp_path / "mine.json", truth)
    assert scores.record.metrics == ours(truth, "label_recovery").metrics
    assert scores.record.metric("label_accuracy").value == 1.0 and not scores.decision.moved


def test_what_the_page_for_users_shows_can_be_typed(published, tmp_path, monkeypatch):
    """The first block of docs/ledger.md, literally but for the transcript's id; its file is scored."""
    transcript, truth = published
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(transcript.parent, tmp_path / "transcripts")
    assert "transcripts/ID" in block
    exec(compile(block.replace("transcripts/ID", f"transcripts/{transcript.name}"), PAGE, "exec"), {})
    with open(tmp_path / "my-attack.json", encoding="utf-8") as file:
        assert json.load(file)["transcript"] == transcript.name
    scores = score(load_transcript(transcript), "my-attack.json", truth)
    assert scores.record.metric("psnr_median").value > 40


def test_images_are_rebuilt_with_plain_torch(published, tmp_path):
    transcript, truth = published
    answered("dlg.py", transcript, tmp_path / "mine", ("ppbench", "safetensors"))
    scores = score(load_transcript(transcript), tmp_path / "mine", truth)
    assert scores.record.metric("psnr_median").value > 40 and scores.record.metric("label_accuracy").value == 1.0
    assert json.loads((truth / "ledger.jsonl").read_text().splitlines()[-1])["attack"] == "external:plain-dlg"


@pytest.mark.parametrize("script", ["labels.py", "dlg.py"])
def test_examples_are_short(script):
    assert len(EXAMPLES.joinpath(script).read_text().splitlines()) <= 75


def test_the_site_holds_no_truth_and_its_rows_can_be_fetched(published, tmp_path):
    """What the workflow of examples/ci draws: links that stay, files as they were published, nothing of a victim."""
    transcript, truth = published
    shutil.copytree(transcript.parent, tmp_path / "transcripts")
    planted = BookEntry.model_validate_json(HISTORY.replace("ID", transcript.name))
    book = truth / "ledger.jsonl"
    before = book.read_bytes() if book.exists() else b""
    try:
        add_entry(truth, planted)
        result = build_site(tmp_path / "transcripts", truth, tmp_path / "site")
    finally:
        book.write_bytes(before)
    page = (tmp_path / "site" / "index.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page and 'id="' + transcript.name in page
    assert result[0].level == "rebuilt" and result[0].defense == "none"
    for row in result:
        home = tmp_path / "site" / "transcripts" / row.id
        assert load_transcript(home).about.id == row.id and all(f'transcripts/{row.id}/{f}"' in page for f in FILES)
    images = load_file(truth / "truth" / f"{transcript.name}.safetensors")["x"].numpy()
    whole = b"".join(path.read_bytes() for path in (tmp_path / "site").rglob("*") if path.is_file())
    assert not any(image.tobytes() in whole for unit in images for image in unit)
    psnr = ours(truth, "dlg").victims[0].psnr
    assert str(psnr) not in page and str(psnr) not in (tmp_path / "site" / "ledger.json").read_text()
