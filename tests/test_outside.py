"""Attacks from outside: the examples run without ppbench, one without torch, and their guesses are scored."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ppbench.ledger.publish import computed, publish
from ppbench.ledger.score import score
from ppbench.ledger.transcript import load_transcript
from ppbench.records.store import Store

EXAMPLES = Path(__file__).parent.parent / "examples" / "outside"
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


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return the folder of the undefended transcript, and the organizer's."""
    home = tmp_path_factory.mktemp("outside")
    (home / "suite.toml").write_text(SUITE)
    computed(str(home / "suite.toml"), home / "truth", workers=1)
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
    found = score(load_transcript(transcript), tmp_path / "mine.json", truth)
    assert found.record.metrics == ours(truth, "label_recovery").metrics
    assert found.record.metric("label_accuracy").value == 1.0 and not found.decision.moved


def test_images_are_rebuilt_with_plain_torch(published, tmp_path):
    transcript, truth = published
    answered("dlg.py", transcript, tmp_path / "mine", ("ppbench", "safetensors"))
    found = score(load_transcript(transcript), tmp_path / "mine", truth)
    assert found.record.metric("psnr_median").value > 40 and found.record.metric("label_accuracy").value == 1.0
    assert json.loads((truth / "ledger.jsonl").read_text().splitlines()[-1])["attack"] == "external:plain-dlg"


@pytest.mark.parametrize("script", ["labels.py", "dlg.py"])
def test_examples_are_short(script):
    assert len(EXAMPLES.joinpath(script).read_text().splitlines()) <= 75
