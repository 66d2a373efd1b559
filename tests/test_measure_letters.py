"""The benchmark of letters under noise: its suite asks what the file keeps, and the law scales as it must."""

from pathlib import Path

import pytest

from ppbench.base.registry import load_plugin
from ppbench.questions.image_metrics import IMAGE_METRICS
from ppbench.questions.membership import Membership
from ppbench.run.suite import load_suite

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "measure_letters.py"


@pytest.fixture(scope="module")
def letters(script):
    return script(SCRIPT)


def test_the_suite_asks_every_attack_at_every_sigma_with_default_canaries(letters, tmp_path):
    file = tmp_path / "letters.toml"
    file.write_text(letters.SUITE)
    configs = load_suite(file).configs
    assert {config.defense: config.grid for config in configs if config.defense != "none"} == {
        "dp": letters.SIGMAS, "dp_sgd": letters.SIGMAS,
    }  # fmt: skip
    for config in configs:
        alone = config.defense == "dp_sgd"
        assert config.attacks == (*letters.READERS, *(letters.ALONE if alone else letters.MEMBERSHIP))
        assert (config.canaries, config.references, config.rounds) == (80, 0 if alone else 4, 40)


def test_every_metric_that_is_kept_exists(letters):
    known = {metric.spec.name for metric in IMAGE_METRICS} | {spec.name for spec in Membership.specs}
    kept = {name for names in letters.KEPT.values() for name in names}
    assert {name for name in kept - known} == {"auc_mislabelled", "auc_planted", "auc_out_of_distribution"}
    kinds = {load_plugin("attacks", name).kind for name in (*letters.READERS, *letters.MEMBERSHIP)}
    assert kinds == set(letters.KEPT)


def test_rows_are_predicted_to_stop_telling_earlier_where_gradients_are_clipped(letters):
    by_defense = letters.predicted()
    assert len(by_defense["dp"]) == letters.VICTIMS and all(1e-4 < sigma < 1e-3 for sigma in by_defense["dp"])
    assert all(0 < two < one / 5 for one, two in zip(*by_defense.values(), strict=True))  # norms are 12 to 14
