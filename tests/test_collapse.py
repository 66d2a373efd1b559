"""A training at chance is told apart from a defense's utility: retried, counted, and judged by no claim."""

import json
from types import SimpleNamespace

import pytest
import torch

from ppbench.claims.check import Unchecked, check_claims
from ppbench.claims.claim import Claim
from ppbench.federation.plan import Data
from ppbench.metrics.intervals import clopper_pearson
from ppbench.records.schema import TRAININGS, Utility
from ppbench.report.cap import STRAY_MARK, caps
from ppbench.report.entries import COLLAPSED
from ppbench.report.knowing import Knowledge
from ppbench.report.page.boards import boards_of, table_rows
from ppbench.report.page.curves import ppcs
from ppbench.run import train as training
from ppbench.run.config import configure
from ppbench.run.experiment import resolve
from ppbench.run.train import (
    MIN_EVALUATIONS,
    at_chance,
    attempt_number,
    constant_answer,
    ends_above_chance,
    task_of_attempt,
    train,
)


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
    top = clopper_pearson(*constant_answer(task)).high
    assert constant_answer(task)[0] / n > 0.1, "digits' classes are not of one size"
    assert at_chance(utility([top] * MIN_EVALUATIONS), task)
    assert not at_chance(utility([top, top + 1 / n, top]), task), "it had learnt before it fell"
    assert not at_chance(utility([top] * (MIN_EVALUATIONS - 1)), task), "too short to tell"
    assert not at_chance(utility([0.9] * MIN_EVALUATIONS), task)
    gone = utility([top] * MIN_EVALUATIONS).model_copy(update={"accuracy": None})
    assert not at_chance(gone, task), "what diverged has a status of its own"


def test_other_seeds_change_the_training_and_nothing_that_is_attacked():
    task = experiment().task
    assert task_of_attempt(task, 0) is task
    tries = [task_of_attempt(task, i) for i in range(TRAININGS)]
    assert len({one.seeds.master for one in tries}) == TRAININGS
    assert len({float(sum(p.double().sum() for p in one.params.values())) for one in tries}) == TRAININGS
    assert all(one.shards is task.shards and one.test is task.test for one in tries)
    assert task_of_attempt(task, 1).seeds == task_of_attempt(task, 1).seeds


def test_a_planted_collapse_is_tried_three_times_and_says_so(tmp_path):
    one = experiment(lr=1e6, optimizer="sgd")  # saturated at once: one class, always
    _, result = train(one, point_of(one, "dp"), tmp_path / "cache")
    assert result.utility.collapsed == TRAININGS and result.utility.retrained is None
    assert result.utility.is_collapsed and result.utility.collapse == "collapsed in 3 of 3 trainings"
    fed, again = train(one, point_of(one, "dp"), tmp_path / "cache")
    assert again == result and fed.seeds == one.task.seeds, "it is found, not trained once more"


@pytest.mark.parametrize(("defense", "lr", "times"), [("none", 1e6, 1), ("full_noise", 1e6, 1), ("dp", 5e-3, 1)])
def test_controls_and_healthy_trainings_are_never_retried(tmp_path, monkeypatch, defense, lr, times):
    calls, own = [], training._train_once
    monkeypatch.setattr(training, "_train_once", lambda *words: calls.append(words[2]) or own(*words))
    one = experiment(lr=lr, rounds=4 if lr > 1 else 8, optimizer="sgd" if lr > 1 else "adam")
    _, result = train(one, point_of(one, defense), tmp_path / "cache")
    assert len(calls) == times
    fields = result.utility.model_dump(mode="json")
    assert "collapsed" not in fields and "retrained" not in fields, "records that stay as they were"


def test_one_that_learns_with_another_seed_stands_with_that_seed(tmp_path, monkeypatch):
    one, own = experiment(rounds=8, lr=5e-3), training.at_chance
    values = iter([True, False])
    monkeypatch.setattr(training, "at_chance", lambda *_: next(values))
    fed, result = train(one, point_of(one, "dp"), tmp_path / "cache")
    seeds = task_of_attempt(one.task, 1).seeds
    assert (result.utility.collapsed, result.utility.retrained) == (1, seeds.master) and fed.seeds == seeds
    assert result.utility.collapse == "collapsed in 1 of 2 trainings" and not result.utility.is_collapsed
    monkeypatch.setattr(training, "at_chance", own)
    kept, same = train(one, point_of(one, "dp"), tmp_path / "cache")
    assert same == result and attempt_number(result.utility) == 1
    assert kept.seeds == seeds and kept.accuracy(one.task.test) == result.utility.accuracy
    assert Utility.model_validate_json(json.dumps(result.utility.model_dump(mode="json"))) == result.utility


def test_claims_judge_nothing_from_a_training_that_collapsed(fabricate):
    none = fabricate("none", None, "dlg", "reconstruction", 30.0)
    mine = fabricate("dp", 0.1, "dlg", "reconstruction", 20.0)
    low = {"accuracy": 0.1, "low": 0.05, "high": 0.15}
    bad = mine.model_copy(update={"utility": mine.utility.model_copy(update=low)})
    marked = bad.model_copy(update={"utility": bad.utility.model_copy(update={"collapsed": TRAININGS})})
    claim = Claim("accuracy", 0.95, "", "", None, "Table 1", undefended=0.95)
    [before], [after] = (check_claims({"dp": (claim,)}, [none, record], []) for record in (bad, marked))
    assert before.finding.verdict == "falls"
    assert after.finding.verdict == "outside the premise"
    assert "the training collapsed" in after.finding.reason


def test_a_constant_answer_of_the_commonest_class_is_at_chance_whatever_one_over_classes_is():
    """MNIST: 11.35 % of the test part are ones."""
    others = torch.tensor([0, 2, 3, 4, 5, 6, 7, 8, 9])[torch.arange(8865) % 9]
    labels = torch.eye(10)[torch.cat([torch.ones(1135).long(), others])]
    task = SimpleNamespace(
        test=Data(torch.zeros(10_000, 1), labels), classified=True, segmented=False, predicts_tokens=False
    )
    assert constant_answer(task) == (1135, 10_000)
    assert at_chance(utility([0.1135] * MIN_EVALUATIONS, n=10_000), task)
    assert not at_chance(utility([0.13] * MIN_EVALUATIONS, n=10_000), task)


def test_jumping_weights_replace_no_training_unless_they_end_above_chance(tmp_path, monkeypatch):
    one, task = experiment(lr=1e6), experiment().task
    top = clopper_pearson(*constant_answer(task)).high
    jumped = utility([0.1, top + 0.1, 0.1, 0.1])
    assert not at_chance(jumped, task) and not ends_above_chance(jumped, task)
    first = utility([0.1] * MIN_EVALUATIONS)
    calls = []

    def trained(experiment, point, attempt, *more):
        fed, result = own(experiment, point, attempt, *more)
        calls.append(attempt)
        return fed, result.model_copy(update={"utility": jumped if attempt else first})

    own = training._train_once
    monkeypatch.setattr(training, "_train_once", trained)
    _, outcome = train(one, point_of(one, "dp"), tmp_path / "cache")
    assert calls == [0, 1, 2] and outcome.utility.is_collapsed and outcome.utility.curve == first.curve


def marked(record, **changes):
    return record.model_copy(update={"utility": record.utility.model_copy(update=changes)})


def test_a_claim_of_chance_is_judged_where_training_stays_there(fabricate):
    none = fabricate("none", None, "dlg", "reconstruction", 30.0)
    low = {"accuracy": 0.1, "low": 0.05, "high": 0.15, "collapsed": TRAININGS}
    mine = marked(fabricate("dp", 0.1, "dlg", "reconstruction", 20.0), **low)
    chance, learnt = (Claim("accuracy", value, "", "", None, "Table 1", undefended=0.95) for value in (0.1, 0.9))
    [one], [other] = (check_claims({"dp": (claim,)}, [none, mine], []) for claim in (chance, learnt))
    assert one.finding.verdict != "outside the premise" == other.finding.verdict


def test_boards_mark_what_never_learnt_and_what_learnt_with_another_seed(fabricate):
    none = fabricate("none", None, "dlg", "reconstruction", 30.0)
    mine = [fabricate("dp", sigma, "dlg", "reconstruction", 20.0) for sigma in (0.1, 0.2, 0.3)]
    mine = [mine[0], marked(mine[1], collapsed=1, retrained=77), marked(mine[2], collapsed=TRAININGS)]
    [board] = boards_of([none, *mine], lambda _: "")
    badges = {e.key.value: [b.text for b in e.badges] for e in board.entries}
    assert COLLAPSED in badges[0.3] and "trained again" in badges[0.2]
    assert not {COLLAPSED, "trained again"} & {*badges[0.1]}
    assert next(e for e in board.entries if e.key.value == 0.3).rank == ""
    cap = caps([none, *mine])[mine[0].cell_id]
    assert (cap.n, cap.collapsed) == (3, 1)
    fields = {row["control_value"]: row for row in table_rows([none, *mine], lambda _: "", [board])}
    assert [fields[v]["collapsed"] for v in (0.1, 0.2, 0.3)] == [0, 1, 3]
    assert fields[0.2]["retrained"] == 77 and fields[0.1]["cap_collapsed"] == 1


def test_a_seed_far_from_all_others_is_marked_and_two_seeds_are_too_few(fabricate):
    def one(seed, accuracy):
        record = fabricate("dp", 0.1, "dlg", "reconstruction", 20.0, seed=seed)
        return marked(record, accuracy=accuracy, low=accuracy - 0.02, high=accuracy + 0.02)

    def far(*accuracies):
        [board] = boards_of([one(seed, accuracy) for seed, accuracy in enumerate(accuracies)], lambda _: "")
        return {e.key.seed for e in board.entries if STRAY_MARK in [b.text for b in e.badges]}

    assert far(0.1, 0.95, 0.96) == {0}
    assert far(0.9, 0.95, 0.96) == set() and far(0.1, 0.95) == set() and far(0.82, 0.95, 0.96) == set()
    assert far(0.1, 0.5, 0.95) == {0, 1, 2}


def test_a_cap_marks_the_training_that_strays_and_a_claim_is_judged_by_the_other_seeds(fabricate):
    """No training of one seed in three makes a claim fall, nor is one done again until all agree."""
    claim = Claim("cap_reconstruction", 0.4, "digits", "mlp", 1, "Table 8", grid=(0.1, 0.2))

    def seed(number, accuracy):
        verdict = [fabricate("none", None, "dlg", "reconstruction", 60.0, error=0.01, seed=number)]
        verdict.append(fabricate("full_noise", None, "dlg", "reconstruction", 5.0, error=0.9, seed=number))
        for sigma in (0.1, 0.2):
            learnt = accuracy if sigma == 0.1 else 0.95
            for attack in ("dlg", "strong"):
                made = fabricate("dp", sigma, attack, "reconstruction", 8.0, error=0.5, seed=number, accuracy=learnt,
                                 adaptive=attack == "strong")  # fmt: skip
                verdict.append(made)
        return verdict

    records = [record for number, accuracy in enumerate((0.94, 0.3, 0.95)) for record in seed(number, accuracy)]
    mine = [r for r in records if r.config.defense.id == "dp"]
    assert {caps(records)[r.cell_id].strays for r in mine if r.config.seed == 1} == {1}
    assert {caps(records)[r.cell_id].strays for r in mine if r.config.seed != 1} == {0}
    [board] = boards_of(records, lambda _: "")
    marks = {(e.key.seed, e.key.value) for e in board.entries if STRAY_MARK in [b.text for b in e.badges]}
    assert marks == {(1, 0.1)}
    [ppc] = [one for one in ppcs(board, Knowledge.of(records)) if one.defense == "dp"]
    assert [point.accuracy for point in ppc.points if point.mark == STRAY_MARK] == [0.3, 0.3], "of each attack's line"
    for order in (records, records[::-1]):  # the line is of one seed, the mark of whichever strays
        [drawn] = [one for one in ppcs(boards_of(order, lambda _: "")[0], Knowledge.of(order)) if one.defense == "dp"]
        [mark] = [line for line in drawn.draw().axes[0].lines if line.get_label() == STRAY_MARK]
        assert list(mark.get_ydata()) == [0.3]
    [alone] = check_claims({"dp": (claim,)}, seed(0, 0.3), [])
    assert alone.finding.verdict == "falls", "one seed says nothing of others"
    [verdict] = check_claims({"dp": (claim,)}, records, [])
    assert (verdict.finding.verdict, verdict.evaluations) == ("holds", 2)


def test_top5_is_the_share_of_the_five_likeliest_and_kept_of_more_than_ten_classes():
    scores = torch.stack([torch.arange(20.0)] * 4)  # the five likeliest: 15 to 19
    fed = SimpleNamespace(answers=lambda x: [scores, scores])
    task = SimpleNamespace(test=Data(torch.zeros(4, 1), torch.eye(20)[[19, 15, 14, 0]]))
    share, ends = training._top5(fed, task)
    assert share == 0.5 and (ends.low, ends.high) == (clopper_pearson(2, 4).low, clopper_pearson(2, 4).high)
    plain = utility([0.9])
    assert "accuracy_top5" not in plain.model_dump(mode="json"), "records of ten classes stay as they were"
    result = plain.model_copy(update={"accuracy_top5": 0.5, "accuracy_top5_low": 0.1, "accuracy_top5_high": 0.9})
    assert Utility.model_validate_json(json.dumps(result.model_dump(mode="json"))) == result
    assert result.figure("accuracy_top5") == (0.5, 0.1, 0.9)


def test_a_claim_of_top5_is_judged_by_top5(fabricate):
    none, mine = (fabricate(*words, "dlg", "reconstruction", 20.0) for words in (("none", None), ("dp", 0.1)))
    five = {"accuracy_top5": 0.9, "accuracy_top5_low": 0.88, "accuracy_top5_high": 0.92}
    worse = {"accuracy_top5": 0.5, "accuracy_top5_low": 0.48, "accuracy_top5_high": 0.52}
    claim = Claim("accuracy_top5", 0.9, "", "", None, "Table 1", undefended=0.9)

    def judged(values):
        return check_claims({"dp": (claim,)}, [marked(none, **five), marked(mine, **values)], [])[0]

    assert judged(worse).finding.verdict == "falls" != judged(five).finding.verdict
    assert isinstance(judged({}), Unchecked), "a record of before says nothing of five"
