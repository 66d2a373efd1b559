"""A model that learned nothing: nothing is usable, nothing stands, nothing is ranked, and the reader is told why."""

import pytest
from test_batch_members import scores

from ppbench.records.schema import Metric, Utility
from ppbench.report.controls import Check
from ppbench.report.learning import keeps_enough, learning_of
from ppbench.report.page.boards import boards_of, no_claims
from ppbench.report.page.headline import answer_of
from ppbench.report.verdict import verdicts

HOLDS = Check("harness", True, "The harness passes.")


def utility(accuracy, n=1000, classes=10, constant=None, **more):
    from ppbench.metrics.intervals import clopper_pearson

    ends = clopper_pearson(round(accuracy * n), n)
    return Utility(
        accuracy=accuracy, low=ends.low, high=ends.high, n=n, chance=1 / classes, curve=[(1, accuracy)],
        constant=constant, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("use", "state"),
    [
        (utility(0.10), "nothing"),
        (utility(0.25, n=60, classes=4), "nothing"),
        (utility(0.139, n=10_000), "little"),
        (utility(0.4, n=48, classes=4), "little"),
        (utility(0.6, n=48, classes=4), "learned"),
        (utility(0.96), "learned"),
        (utility(0.883, n=4000, classes=2, constant=0.883), "nothing"),
        (utility(0.89, n=40_000, classes=2, constant=0.883), "little"),
        (utility(0.883, n=4000, classes=2), "learned"),  # an older record: chance is all that is known
        (
            Utility(accuracy=None, low=None, high=None, n=9, chance=0.1, curve=[(1, 0.1)], reason="not finite"),
            "nothing",
        ),
        (Utility(accuracy=None, low=None, high=None, n=9, chance=0.1, curve=[], reason="not trained"), "unknown"),
    ],
)
def test_what_a_training_learned_is_judged_against_a_constant_answer(use, state):
    result = learning_of(use)
    assert result.state == state and bool(result.clause) is (state in ("nothing", "little"))


@pytest.mark.parametrize(
    ("error", "constant", "state"), [(0.5, 1.0, "learned"), (0.97, 1.0, "nothing"), (2.0, 1.0, "nothing")]
)
def test_numbers_are_judged_against_the_mean_of_the_targets(error, constant, state):
    about = dict(accuracy=None, low=None, high=None, n=100, chance=1.0, curve=[(1, error)])
    ends = dict(mse=error, mse_low=0.9 * error, mse_high=1.1 * error)
    assert learning_of(Utility(**about, **ends, constant_mse=constant)).state == state
    assert learning_of(Utility(**about, **ends)).state == "unknown"


def test_a_usable_model_keeps_half_of_what_was_learned_and_loses_five_points_at_most():
    assert keeps_enough(0.91, 0.96, 0.1) and not keeps_enough(0.909, 0.96, 0.1)
    assert keeps_enough(0.14, 0.18, 0.1) and not keeps_enough(0.139, 0.18, 0.1)
    assert keeps_enough(None, 0.9, 0.1) is None


def evaluation(make, none, defended, decibels=8.0, undefended=35.0):
    about = dict(control="sigma", accuracy=defended, n=40)
    return [
        make("none", None, "dlg", "reconstruction", undefended, accuracy=none),
        make("none", None, "adaptive_dp", "reconstruction", undefended, adaptive=True, accuracy=none),
        make("full_noise", None, "dlg", "reconstruction", 6.0, accuracy=0.1),
        make("dp", 0.1, "dlg", "reconstruction", decibels - 1, **about),
        make("dp", 0.1, "adaptive_dp", "reconstruction", decibels, adaptive=True, **about),
    ]


@pytest.mark.parametrize(
    ("none", "words"),
    [(0.1, "the undefended model learned nothing that can be shown (accuracy 10% [8.2, 12.0], chance 10%)"),
     (0.139,
      "the undefended model is not shown to be 5 points above chance (accuracy 13.9% [11.8, 16.2], chance 10%)")],
)  # fmt: skip
def test_losing_nothing_of_nothing_is_neither_usable_nor_safe(fabricate, none, words):
    records = evaluation(fabricate, none, none)
    answer = answer_of(records, HOLDS)
    message = answer.as_dict()
    assert answer.headline.words == (
        f"dp: inconclusive, because {words}; no setting can be called usable. Train longer (--rounds, now 20), at "
        "another rate (--lr, now 0.1) or on more examples."
    )
    assert answer.headline.tone == "warning" and not answer.trust.reliable
    assert message["reliability"]["state"] == "unlearned" and words[1:] in message["reliability"]["sentence"]
    (setting,) = message["settings"]
    assert (setting["usable"], setting["fate"], setting["level"]) == (None, "open", "undecided")
    assert setting["verdict"] == "undecided, undefended model learned too little"
    assert not any(entry.rank for board in boards_of(records, no_claims) for entry in board.entries)
    assert setting["points"] is None
    question = [
        fabricate(name, value, "mia_upload", "batch_membership", scores=list(scores(share)), stage="init", **about)
        for name, value, share, about in (("none", None, 1.0, {}), ("dp", 0.1, 0.5, {"control": "sigma"}))
    ]
    assert next(one for one in verdicts("dp", question) if one.question == "members").fate == "stands"
    result = verdicts("dp", [*records, *question])
    assert {one.question for one in result} >= {"pixels", "members", "usability"}
    assert all(one.fate != "stands" for one in result)


def test_what_leaks_of_a_model_that_learned_nothing_leaks_all_the_same(fabricate):
    answer = answer_of(evaluation(fabricate, 0.1, 0.1, decibels=34.0), HOLDS)
    start = "dp falls: images rebuilt at 35 dB (undefended 36, blind 11); the undefended model learned nothing"
    assert answer.headline.words.startswith(start) and answer.headline.tone == "error"
    assert answer.trust.state == "unlearned" and answer.trust.reliable, "that it leaks is concluded"
    assert "usable" not in answer.headline.words


def test_a_model_at_chance_beside_one_that_learned_is_not_usable(fabricate):
    """16% of 10 classes, of which 11.5% are left: less than five points, and most of what was learned."""
    answer = answer_of(evaluation(fabricate, 0.19, 0.145), HOLDS)
    assert answer.trust.reliable
    assert answer.headline.words.startswith("dp has no usable setting")
    gone = answer_of(evaluation(fabricate, 0.96, 0.1), HOLDS).headline.words
    assert gone == "dp has no usable setting: its model learned nothing."


def test_several_defenses_beside_a_model_that_learned_nothing(fabricate):
    other = [
        fabricate("spn", 0.1, a, "reconstruction", d, adaptive=k, control="alpha2", n=40, accuracy=0.1)
        for a, d, k in (("dlg", 7.0, False), ("adaptive_spn", 34.0, True))
    ]
    answer = answer_of([*evaluation(fabricate, 0.1, 0.1), *other], HOLDS)
    assert answer.headline.words == (
        "1 of 2 defenses falls, with no setting known to be usable (spn); 1 inconclusive, as the undefended model "
        "learned too little (dp). The undefended model learned nothing that can be shown (accuracy 10% [8.2,"
        " 12.0], chance 10%). Train longer (--rounds, now 20), at another rate (--lr, now 0.1) or on more examples."
    )


def numbers(make, error, value=None, distance=0.5):
    """Return a cell on numbers, of which the mean of the targets has an error of 1."""
    name = "none" if value is None else "dp"
    attack = "linear" if value is None else "adaptive_dp"
    about = dict(shape=(16,), adaptive=value is not None, accuracy=None, mse=error, control="sigma", n=40)
    record = make(name, value, attack, "reconstruction", 50.0, error=distance, **about)
    use = record.utility.model_copy(update={"constant_mse": 1.0, "curve": [(20, error)]})
    return record.model_copy(update={"utility": use})


def test_numbers_are_usable_by_the_share_of_variance_that_is_explained(fabricate):
    """A model with nine times the undefended error was called usable, as nothing was known of its accuracy."""
    noise = fabricate("full_noise", None, "linear", "reconstruction", 8.0, error=0.9, shape=(16,))
    records = [
        numbers(fabricate, 0.05, distance=0.01),
        noise,
        numbers(fabricate, 0.09, 0.1),
        numbers(fabricate, 0.5, 1.0),
    ]
    settings = {one["value"]: one["usable"] for one in answer_of(records, HOLDS).as_dict()["settings"]}
    assert settings == {0.1: True, 1.0: False}


def test_rows_of_tables_are_told_by_their_relative_error(fabricate):
    noise = fabricate("full_noise", None, "linear", "reconstruction", 8.0, error=0.9, shape=(16,))
    records = [numbers(fabricate, 0.05, distance=0.01), noise, numbers(fabricate, 0.5, 1.0, distance=0.03)]
    assert answer_of(records, HOLDS).headline.words.endswith("; rows are rebuilt within 3%.")
    assert "dB" not in answer_of(records, HOLDS).headline.words


def test_of_settings_that_stand_the_one_that_gives_no_labels_is_told(fabricate):
    about = dict(control="sigma", accuracy=0.94, n=40)
    records = evaluation(fabricate, 0.95, 0.94)
    for attack, adaptive in (("dlg", False), ("adaptive_dp", True)):
        records.append(fabricate("dp", 1.0, attack, "reconstruction", 7.5, adaptive=adaptive, **about))
    records.append(fabricate("dp", 0.1, "label_recovery", "label", 1.0, **about))
    records.append(fabricate("dp", 1.0, "label_recovery", "label", 0.1, **about))
    answer = answer_of(records, HOLDS)
    assert answer.headline.words.startswith("dp stands at sigma=1 ") and answer.headline.tone == "good"
    assert answer.headline.words.endswith("; recovered: 100% of labels at 1 of 2 settings.")
    gives = {one["value"]: one["gives"] for one in answer.as_dict()["settings"]}
    assert gives == {0.1: ["labels"], 1.0: []}


def test_labels_that_leak_are_said_where_nothing_else_is_concluded(fabricate):
    about = dict(control="sigma", accuracy=0.1, n=40)
    records = [*evaluation(fabricate, 0.1, 0.1), fabricate("dp", 0.1, "label_recovery", "label", 1.0, **about)]
    answer = answer_of(records, HOLDS)
    assert "no setting can be called usable; recovered: 100% of labels. Train" in answer.headline.words
    assert answer.trust.reliable, "that labels leak is concluded"


def test_labels_of_which_most_are_of_one_class_are_no_leak(fabricate):
    about = dict(control="sigma", accuracy=0.94, n=40)
    label = fabricate("dp", 0.1, "label_recovery", "label", 0.9, **about)
    common = label.utility.model_copy(update={"constant": 0.9})
    records = [*evaluation(fabricate, 0.97, 0.97), label]
    assert "labels" in answer_of(records, HOLDS).as_dict()["settings"][0]["gives"]
    records = [r.model_copy(update={"utility": common}) if r.config.defense.id == "dp" else r for r in records]
    assert answer_of(records, HOLDS).as_dict()["settings"][0]["gives"] == []


def test_seeds_that_split_the_data_otherwise_are_seeds_of_one_evaluation(fabricate):
    """The parts of a user's file are drawn by the seed, so that their digests differ."""
    records = []
    for seed in range(3):
        for record in evaluation(fabricate, 0.95, 0.94):
            data = record.config.data.model_copy(update={"sha256": f"{seed:064}"})
            config = record.config.model_copy(update={"seed": seed, "data": data})
            records.append(record.model_copy(update={"config": config, "cell_id": config.cell_id()}))
    (table,) = answer_of(records, HOLDS).tables
    assert table.about.endswith(", seeds 0, 1 and 2") and len(table.compared[0].value.values) == 3


def test_columns_of_two_sums_are_too_few_to_be_shown_to_be_right(fabricate):
    """The interval of a mean that is resampled from two units is their least and greatest."""
    from ppbench.report.leak import _ends

    record = fabricate("dp", 0.1, "linear", "reconstruction", 50.0, error=0.5, shape=(16,), n=20)
    mean = Metric(name="reconstruction_accuracy", value=0.41, low=0.4, high=0.42, method="bootstrap", n=20,
                  higher_is_safer=False, chance=0.27)  # fmt: skip
    result = record.model_copy(update={"metrics": [*record.metrics, mean]})
    assert _ends("reconstruction_accuracy", result)[0] == pytest.approx(0.13)
    two = [score.model_copy(update={"probe": place % 2, "cohort": True}) for place, score in enumerate(result.victims)]
    assert len({score.unit for score in two}) == 2
    assert _ends("reconstruction_accuracy", result.model_copy(update={"victims": two})) == (-1.0, 1.0)
