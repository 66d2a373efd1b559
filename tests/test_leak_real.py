"""Two settings that were once said to hide images, attacked as a user would: what is said of them now."""

import os
import re
from pathlib import Path

import pytest

from ppbench.base import registry
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import leak_of
from ppbench.report.verdict import sentences
from ppbench.run.evaluation import evaluate

pytestmark = pytest.mark.nightly

DATA = Path(os.environ.get("PPBENCH_TEST_DATA", "")) / "mnist"
TUTORIAL = Path(__file__).resolve().parent.parent / "docs" / "tutorial-defense.md"
SMALL = {
    **{"attack_batch": (1,), "stages": ("init",), "victims": 10, "tuning": 0, "train": 300, "clients": 3, "rounds": 2},
    "workers": 1,
}


def judged(records, defense):
    """Return how far the one setting of a defense leaks beside the undefended model, and all that is said of it."""
    mine, none = ([r for r in records if r.config.defense.id == name] for name in (defense, "none"))
    known = Knowledge.of(records)
    beside = leak_of(none, vouched=True)
    assert beside.level == "rebuilt"
    return leak_of(mine, vouched=known.vouches(mine), none=beside), sentences(defense, records)


def hiding(message):
    return [sentence for sentence in message if re.search(r"\bhid(es|den|ing)?\b", sentence)]


@pytest.mark.skipif(not DATA.is_dir(), reason="PPBENCH_TEST_DATA names no folder with mnist/")
def test_ppdl_on_mnist_leaves_digits_that_everybody_can_read(tmp_path):
    """theta .3, sigma .01: 17.4 dB, below a cut at 20 dB; eight of ten are found among 1,000, all ten are read."""
    options = dict(
        defense="ppdl", dataset=f"parquet:{DATA}", grid=(0.01,), attacks=("dlg", "adaptive_ppdl"), budget=300
    )
    records = evaluate(**options, **SMALL, out=tmp_path / "out").records
    (theta,) = {r.config.defense.parameters["theta"] for r in records if r.config.defense.id == "ppdl"}
    leak, verdict = judged(records, "ppdl")
    assert theta == 0.3 and leak.worst.metric("psnr_median").value < 20
    assert leak.level in ("recognizable", "rebuilt") and leak.falls and not hiding(verdict)
    assert verdict[0].startswith("ppdl at sigma=0.01: images are recognizable (") or leak.level == "rebuilt"
    noise = leak_of([r for r in records if r.config.defense.id == "full_noise"], vouched=True)
    assert noise.level != "recognizable" and not noise.falls, "who looks at noise finds nothing"


@pytest.fixture
def rounding(tmp_path, monkeypatch):
    """Install the tutorial's defense as its two files do, for this test."""
    text = TUTORIAL.read_text()
    module = next(
        part for part in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if "class Rounding(" in part
    )
    (tmp_path / "my_rounding.py").write_text(module)
    about = tmp_path / "my_rounding-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-rounding\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[ppbench.defenses]\nrounding = my_rounding:Rounding\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.plugins.cache_clear()
    yield
    monkeypatch.undo()
    registry.plugins.cache_clear()


@pytest.mark.skipif(not TUTORIAL.is_file(), reason="the documents are not here")
@pytest.mark.parametrize(("attacks", "falls"), [(("dlg",), False), (("dlg", "ig_masked"), True)])
def test_rounding_of_the_tutorial_is_never_said_to_hide_images(rounding, attacks, falls, tmp_path):
    """No attack that knows it: either images come out, or it is said that none was tried."""
    options = SMALL | dict(defense="rounding", grid=(0.1,), attacks=attacks, budget=200, victims=12)
    leak, verdict = judged(evaluate(**options, out=tmp_path / "out").records, "rounding")
    clause = "no attack here is shown to know the defense"
    untested = [one.words for one in leak.qualifiers if one.code == "untested"]
    assert (leak.falls, untested, f"; {clause}; " in verdict[0]) == (falls, [] if falls else [clause], not falls)
    assert verdict[0].startswith(f"rounding at step=0.1: {'images are rebuilt' if falls else ''}") and not hiding(
        verdict
    )
