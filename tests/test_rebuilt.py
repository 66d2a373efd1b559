"""What "rebuilt" means is declared once: with another metric or number there, every judgment changes."""

import ast
from pathlib import Path

import pytest

from ppbench.metrics.modality import IMAGE, Image, Threshold
from ppbench.questions.base import question_of
from ppbench.records.store import Store
from ppbench.report.controls import check_controls, rebuilding, rebuilt_share
from ppbench.report.knowing import breaks
from ppbench.report.leak import leak_of
from ppbench.report.page.boards import boards_of, no_claims, worst_csv
from ppbench.report.worst import worst_case
from ppbench.run.evaluation import SUBJECTS, share_broken
from ppbench.verification import verify

ROOT = Path(__file__).parent.parent
GAIN = Threshold(lambda score: score.gain, "gain_median", 10.0, "10 dB beyond the best blind guess")
SSIM = Threshold(lambda score: 0.0 if score.psnr is None else score.ssim, "ssim_median", 0.8, "an SSIM of 0.8")
DECIBELS = Threshold(lambda score: score.decibels, "psnr_median", 25.0, "25 dB")


def images(make, defense, decibels, ssim, attack="dlg"):
    """Return the cell of an attack on twelve images, with these figures of each; nothing is recognized."""
    one = dict(kind="image", client=0, index=0, psnr=decibels, rmse=0.5, rmse_raw=0.5, ssim=ssim, mse=0.1, blind=11.0)
    one |= dict.fromkeys(("label", "confidence", "at_truth")) | dict(evaluations=1, oracle=decibels)
    scores = [one | dict(probe=probe) for probe in range(12)]
    value = None if defense == "none" else 0.1
    return make(defense, value, attack, "reconstruction", scores=scores, control="sigma")


@pytest.mark.parametrize(
    ("rule", "decibels", "ssim", "expected"),
    [
        (GAIN, 15.0, 0.9, False),
        (GAIN, 24.0, 0.5, True),
        (SSIM, 15.0, 0.9, True),
        (SSIM, 40.0, 0.5, False),
        (DECIBELS, 24.0, 0.9, False),
        (DECIBELS, 26.0, 0.5, True),
    ],
)
def test_another_rule_is_one_line(fabricate, monkeypatch, rule, decibels, ssim, expected):
    monkeypatch.setattr(Image, "thresholds", (rule,))
    none, dp = (images(fabricate, name, decibels, ssim) for name in ("none", "dp"))
    assert rebuilt_share(dp).value == float(expected) and breaks(dp) is expected
    leak = leak_of([dp], vouched=True, none=leak_of([none], vouched=True))
    assert (leak.level == "rebuilt") is expected
    assert check_controls([none])[0].ok is expected
    assert question_of("reconstruction").blind(dp.victims, dp.config)[0] == float(expected)


def test_a_victim_counts_by_an_attack_that_rebuilds_it_if_there_is_one(fabricate, monkeypatch):
    loud, sharp = images(fabricate, "dp", 30.0, 0.5, "dlg"), images(fabricate, "dp", 26.0, 0.9, "ig")
    for rule, attack in ((GAIN, "dlg"), (SSIM, "ig")):
        monkeypatch.setattr(Image, "thresholds", (rule,))
        assert worst_case([loud, sharp], rebuilding(loud)).attack == attack


def test_a_setting_is_rebuilt_where_its_median_passes_with_the_whole_interval(fabricate, monkeypatch):
    monkeypatch.setattr(Image, "thresholds", (SSIM,))
    sure = images(fabricate, "dp", 15.0, 0.9)
    victims = [v.model_copy(update={"ssim": 0.7 if i < 5 else 0.9}) for i, v in enumerate(sure.victims)]
    unsure = sure.model_copy(update={"victims": victims})
    assert rebuilt_share(unsure).value > 0.5
    levels = [leak_of([record], vouched=True).level for record in (sure, unsure)]
    assert levels == ["rebuilt", "undecided"]


def test_without_its_figures_older_records_have_thresholds_of_their_own(fabricate, monkeypatch):
    monkeypatch.setattr(Image, "thresholds", (SSIM,))
    for decibels, expected in ((21.0, 1.0), (19.0, 0.0)):
        older = images(fabricate, "dp", decibels, None)
        assert rebuilt_share(older).value == expected
        assert (leak_of([older], vouched=True).level == "rebuilt") is bool(expected)


def test_the_self_test_asks_it_too(monkeypatch):
    algebra = next(subject for subject in SUBJECTS if subject.attack == "analytic")
    assert share_broken(algebra) == 1.0
    monkeypatch.setattr(Image, "thresholds", (Threshold(DECIBELS.figure, DECIBELS.median, 100.0, "nothing"),))
    assert share_broken(algebra) == 0.0


def test_tables_that_were_judged_by_another_rule_are_named(fabricate, monkeypatch, tmp_path):
    monkeypatch.setattr(Image, "thresholds", (GAIN,))
    store = Store(tmp_path)
    for defense, decibels in (("none", 24.0), ("dp", 24.0), ("spn", 15.0)):
        store.save(images(fabricate, defense, decibels, 0.9))
    (tmp_path / "worst_case.csv").write_text(worst_csv(boards_of(store.load_all(), no_claims)))
    assert verify(tmp_path) == []
    monkeypatch.setattr(Image, "thresholds", (DECIBELS,))
    problems = verify(tmp_path)
    assert any("level is 'rebuilt', the records give 'undecided'" in problem for problem in problems), problems


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the documents are not here")
def test_the_page_on_levels_says_it():
    page = " ".join((ROOT / "docs" / "levels.md").read_text().split())
    for threshold in (*IMAGE.thresholds, *IMAGE.unmeasured_thresholds):
        assert threshold.words in page and f"{threshold.level:g}" in threshold.words


FIGURES = {"psnr", "decibels", "gain", "ssim"}


def bounds(path):
    """Yield the numbers and constants that code compares a victim's figures with."""
    for node in ast.walk(ast.parse(path.read_text())):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else ()
        if any(isinstance(side, ast.Attribute) and side.attr in FIGURES for side in sides):
            names = {side.id for side in sides if isinstance(side, ast.Name) and side.id.isupper()}
            yield from names | {side.value for side in sides if isinstance(side, ast.Constant) and side.value}


def test_nobody_else_compares_a_figure_of_a_victim_with_a_level_of_their_own():
    rooms = ("questions", "report", "claims", "run", "commands", "records", "verification", "ledger")
    files = [path for room in rooms for path in sorted((ROOT / "ppbench" / room).rglob("*.py"))]
    own = {path.name: levels for path in files if (levels := set(bounds(path)))}
    assert own == {"image_metrics.py": {"ABOVE_DB"}}, "the metric whose name says 20 dB"
