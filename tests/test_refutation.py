"""An epsilon that the run itself refutes: what a guarantee allows, what attacks show, and what is said then."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppbench.defenses.dp import DP
from ppbench.defenses.dp_sgd import DPSGD
from ppbench.federation.plan import Local
from ppbench.metrics.epsilon import epsilon_words, success_bound
from ppbench.records.schema import Privacy
from ppbench.report.controls import Check
from ppbench.report.findings import refutation_of
from ppbench.report.page.headline import answer_of
from ppbench.report.verdict import sentences
from ppbench.run.train import with_probe_guarantee

HOLDS = Check("harness", True, "The harness passes.")


@given(st.floats(0.0, 5.0), st.integers(2, 40), st.floats(0.0, 0.2))
def test_no_attacker_exceeds_the_bound_on_randomized_response(epsilon, candidates, delta):
    """Randomized response over N values is the mechanism that leaks most: it meets the bound of replacement exactly."""
    truth = math.exp(epsilon) / (math.exp(epsilon) + candidates - 1)
    success = delta + (1 - delta) * truth  # with probability delta all is told
    assert success <= success_bound(1 / candidates, epsilon, delta) + 1e-12
    assert success_bound(1 / candidates, epsilon / 2, 0.0) == pytest.approx(truth)


def test_no_guarantee_bounds_nothing_and_a_perfect_one_leaves_chance():
    assert success_bound(0.01, 0.0, 0.0) == pytest.approx(0.01)
    assert success_bound(0.5, 0.0, 1.0) == 1.0 and success_bound(0.5, 1e6, 0.0) == 1.0
    assert success_bound(1 / 361, 0.5, 1e-5) < 0.01


@pytest.mark.parametrize(
    ("epsilon", "words"),
    [(0.5, "0.5"), (9.8765, "9.88"), (10.0, "10"), (10.04, "no guarantee (epsilon 10)"),
     (49.9, "no guarantee (epsilon 50)"), (999.0, "no guarantee (epsilon 999)"),
     (42_187.0, "no guarantee (epsilon 4e4)"), (6.28e6, "no guarantee (epsilon 6e6)"),
     (1e12, "no guarantee (epsilon 1e12)")],
)  # fmt: skip
def test_a_large_epsilon_is_no_guarantee(epsilon, words):
    assert epsilon_words(epsilon) == words


def stated(record, epsilon, delta=1e-5):
    privacy = record.privacy.model_copy(update={"probe_epsilon": epsilon, "probe_delta": delta})
    return record.model_copy(update={"privacy": privacy})


def evaluation(make, decibels, epsilon, of_probe):
    about = dict(control="sigma", accuracy=0.94, n=40, epsilon=epsilon)
    none = [
        make("none", None, "dlg", "reconstruction", 35.0),
        make("none", None, "adaptive_dp", "reconstruction", 35.0, adaptive=True),
        make("full_noise", None, "dlg", "reconstruction", 6.0),
    ]
    mine = [
        make("dp", 0.1, "dlg", "reconstruction", decibels - 1, **about),
        make("dp", 0.1, "adaptive_dp", "reconstruction", decibels, adaptive=True, **about),
    ]
    return [*none, *(stated(record, of_probe) for record in mine)]


def test_images_that_are_found_more_often_than_epsilon_allows_refute_it_and_take_the_guarantee(fabricate):
    records = evaluation(fabricate, 34.0, 0.5, 0.5)
    answer = answer_of(records, HOLDS)
    assert answer.headline.words.endswith("; its epsilon is refuted.")
    (setting,) = answer.as_dict()["settings"]
    assert setting["epsilon"] == "refuted (0.5)"
    assert answer.tables[0].compared[0].verdict == "rebuilt by adaptive_dp, epsilon refuted by attack"
    text = " ".join(sentences("dp", records))
    assert "The stated epsilon 0.5 at sigma=0.1 is refuted: " in text and "Formal guarantee" not in text
    assert "images among" in text and "epsilon 0.5 allows" in text


@pytest.mark.parametrize(("decibels", "of_probe"), [(34.0, 12.0), (34.0, None), (8.0, 0.5)])
def test_what_the_guarantee_of_the_upload_allows_refutes_nothing(fabricate, decibels, of_probe):
    """A step in which an example certainly takes part has a larger epsilon than one that samples it seldom."""
    records = evaluation(fabricate, decibels, 0.5, of_probe)
    assert answer_of(records, HOLDS).as_dict()["settings"][0]["epsilon"] == "0.5"
    assert "Formal guarantee over the whole training: epsilon 0.5" in " ".join(sentences("dp", records))


def test_members_of_the_delivered_model_are_held_against_the_epsilon_of_the_whole_training(fabricate):
    about = dict(control="sigma", accuracy=0.94, n=400)
    sure = fabricate("dp", 0.1, "mia_loss", "membership", 0.95, epsilon=0.5, **about)
    assert "members" in refutation_of([sure]).words
    assert refutation_of([fabricate("dp", 0.1, "mia_loss", "membership", 0.95, epsilon=3.0, **about)]) is None
    assert refutation_of([fabricate("dp", 0.1, "mia_loss", "membership", 0.55, epsilon=0.1, **about)]) is None
    assert refutation_of([fabricate("dp", 0.1, "mia_loss", "membership", 0.95, **about)]) is None, "nothing is stated"


def test_guessing_the_commonest_label_refutes_nothing(fabricate):
    """Labels of which 80% are of one class are guessed without any upload."""
    record = fabricate("dp", 0.1, "label_recovery", "label", 0.8, control="sigma", n=400, epsilon=0.1)
    use = record.utility.model_copy(update={"constant": 0.8})
    common = stated(record.model_copy(update={"utility": use}), 0.1)
    assert refutation_of([common]) is None and refutation_of([stated(record, 0.1)]) is not None


def test_an_honest_mechanism_is_seldom_refuted():
    """Randomized response at its very epsilon: a bound at 97.5% errs in one run of forty, here of 1,000 runs."""
    from ppbench.metrics.intervals import lower_bound

    rng, epsilon, candidates, n = np.random.default_rng(0), 1.0, 100, 60
    truth = math.exp(2 * epsilon) / (math.exp(2 * epsilon) + candidates - 1)
    runs = rng.random((1000, n)) < truth
    bound = success_bound(1 / candidates, epsilon, 0.0)
    assert np.mean([lower_bound([np.array([hit]) for hit in run]) > bound for run in runs]) <= 0.035


@dataclass(frozen=True)
class Boasting(DP):
    """Noise that hides nothing, with an epsilon that nobody computed."""

    name: ClassVar[str] = "boasting"

    def guarantee(self, plan, examples, rounds):
        return 0.5, 1 / examples


def of(fed, kind="gradient", rounds=1):
    privacy = Privacy(epsilon=0.5, delta=0.01)
    outcome = with_probe_guarantee(privacy, fed, kind, rounds)
    return outcome.probe_epsilon, outcome.probe_delta


def test_a_probed_upload_has_the_guarantee_of_a_step_that_every_example_takes_part_in(federate, shards):
    """Sampling amplifies the guarantee of a training; who is certainly in the batch has none of that."""
    fed, count = federate(DPSGD(2.0)), len(next(iter(shards.values())).x)
    whole = DPSGD(2.0).guarantee(replace(fed.plan, local=Local("gradient", batch=count)), count, 1)
    assert of(fed) == pytest.approx(whole) and whole[1] == 1 / count
    sampled = DPSGD(2.0).guarantee(replace(fed.plan, local=Local("gradient", batch=16)), count, 1)
    assert whole[0] > 2 * sampled[0]
    assert of(fed, rounds=2)[0] > whole[0] and of(fed, "local")[0] >= whole[0]
    assert of(federate(Boasting(0.003))) == (0.5, 1 / min(len(shard.x) for shard in shards.values()))
    assert (
        with_probe_guarantee(Privacy(epsilon=None, delta=None, reason="none"), fed, "gradient", 1).probe_epsilon is None
    )
