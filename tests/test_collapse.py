"""A training at chance is told apart from a defense's utility: retried, counted, and judged by no claim."""

import json

import pytest

from ppbench.federation.claim import Claim
from ppbench.metrics.intervals import clopper_pearson
from ppbench.records.outcome import TRAININGS, Utility
from ppbench.report.claims import check
from ppbench.run import train as training
from ppbench.run.collapse import LOOKS, at_chance, attempt_in, attempt_of, commonest
from ppbench.run.config import configure
from ppbench.run.experiment import resolve
from ppbench.run.train import train


def experiment(defense="dp", **other):
    small = dict(dataset="digits", clients=2, train=200, rounds=4, grid=(1e-6,), seed=3, attacks=("label_recovery",))
    return resolve(configure(defense=defense, **{**small, **other}))


def point_of(one, name):
    return next(point for point in one.points if point.defense.name == name)


def utility(curve, n=100):
    hits = curve[-1]
    return Utility(accuracy=hits, low=0.0, high=1.0, n=n, chance=0.1, curve=list(enumerate(curve, 1)))


def test_only_what_never_rose_above_the_commonest_class_is_at_chance():
    task = experiment().task
    n = len(task.test.x)
    top = clopper_pearson(commonest(task), n).high
    assert commonest(task) / n > 0.1, "digits' classes are not of one size"
    assert at_chance(utility([top] * LOOKS), task)
    assert not at_chance(utility([top, top + 1 / n, top]), task), "it had learnt before it fell"
    assert not at_chance(utility([top] * (LOOKS - 1)), task), "too short to tell"
    assert not at_chance(utility([0.9] * LOOKS), task)
    gone = utility([top] * LOOKS).model_copy(update={"accuracy": None})
    assert not at_chance(gone, task), "what diverged has a status of its own"


def test_other_seeds_change_the_training_and_nothing_that_is_attacked():
    task = experiment().task
    assert attempt_of(task, 0) is task
    tries = [attempt_of(task, i) for i in range(TRAININGS)]
    assert len({one.seeds.master for one in tries}) == TRAININGS
    assert len({float(sum(p.double().sum() for p in one.params.values())) for one in tries}) == TRAININGS
    assert all(one.shards is task.shards and one.test is task.test for one in tries)
    assert attempt_of(task, 1).seeds == attempt_of(task, 1).seeds


def test_a_planted_collapse_is_tried_three_times_and_says_so(tmp_path):
    one = experiment(lr=1e6, optimizer="sgd")  # saturated at once: one class, always
    _, found = train(one, point_of(one, "dp"), tmp_path / "cache")
    assert found.utility.collapsed == TRAININGS and found.utility.retrained is None
    assert found.utility.is_collapsed and found.utility.collapse == "collapsed in 3 of 3 trainings"
    fed, again = train(one, point_of(one, "dp"), tmp_path / "cache")
    assert again == found and fed.seeds == one.task.seeds, "it is found, not trained once more"


@pytest.mark.parametrize(("defense", "lr", "times"), [("none", 1e6, 1), ("full_noise", 1e6, 1), ("dp", 5e-3, 1)])
def test_controls_and_healthy_trainings_are_never_retried(tmp_path, monkeypatch, defense, lr, times):
    asked, own = [], training._trained
    monkeypatch.setattr(training, "_trained", lambda *words: asked.append(words[2]) or own(*words))
    one = experiment(lr=lr, rounds=4 if lr > 1 else 8, optimizer="sgd" if lr > 1 else "adam")
    _, found = train(one, point_of(one, defense), tmp_path / "cache")
    assert len(asked) == times
    told = found.utility.model_dump(mode="json")
    assert "collapsed" not in told and "retrained" not in told, "records that stay as they were"


def test_one_that_learns_with_another_seed_stands_with_that_seed(tmp_path, monkeypatch):
    one, own = experiment(rounds=8, lr=5e-3), training.at_chance
    told = iter([True, False])
    monkeypatch.setattr(training, "at_chance", lambda *_: next(told))
    fed, found = train(one, point_of(one, "dp"), tmp_path / "cache")
    seeds = attempt_of(one.task, 1).seeds
    assert (found.utility.collapsed, found.utility.retrained) == (1, seeds.master) and fed.seeds == seeds
    assert found.utility.collapse == "collapsed in 1 of 2 trainings" and not found.utility.is_collapsed
    monkeypatch.setattr(training, "at_chance", own)
    kept, same = train(one, point_of(one, "dp"), tmp_path / "cache")
    assert same == found and attempt_in(found.utility) == 1
    assert kept.seeds == seeds and kept.accuracy(one.task.test) == found.utility.accuracy
    assert Utility.model_validate_json(json.dumps(found.utility.model_dump(mode="json"))) == found.utility


def test_claims_judge_nothing_from_a_training_that_collapsed(fabricate):
    none = fabricate("none", None, "dlg", "reconstruction", 30.0)
    mine = fabricate("dp", 0.1, "dlg", "reconstruction", 20.0)
    low = {"accuracy": 0.1, "low": 0.05, "high": 0.15}
    bad = mine.model_copy(update={"utility": mine.utility.model_copy(update=low)})
    marked = bad.model_copy(update={"utility": bad.utility.model_copy(update={"collapsed": TRAININGS})})
    claim = Claim("accuracy", 0.95, "", "", None, "Table 1", undefended=0.95)
    [before], [after] = (check({"dp": (claim,)}, [none, record], []) for record in (bad, marked))
    assert before.finding.verdict == "falls"
    assert after.finding.verdict == "outside the premise"
    assert "the training collapsed" in after.finding.reason
