"""The statistics of `ppbench compare`: published figures, brute force, and what few victims can and cannot show."""

import numpy as np
import pytest

from ppbench.questions.labels import LabelScore
from ppbench.questions.membership import MemberScore
from ppbench.report.compare import report
from ppbench.report.compare.join import join, where_of
from ppbench.report.compare.judge import ComparedRow, holm, judged_rows, rows_of
from ppbench.report.compare.paired import (
    ALL_RULES,
    ModelFigure,
    Sample,
    bootstrapped,
    change,
    mcnemar,
    mid_p,
    resampled_statistic,
    resampling_counts,
    rules_for,
    sample_of,
    unchanged,
    unpaired,
    with_luck,
)


def rule(name):
    return next(r for r in ALL_RULES if r.metric == name)


def plain_sample(base, new):
    """Return victims that are a unit each and count the same."""
    units = np.arange(len(base))
    return Sample(base, new, np.full(len(base), 1 / len(base)), units, 0 * units, base > 99, 0 * units, 1e-5)


def test_mcnemar_and_holm_give_the_published_figures():
    """Airway hyper-responsiveness before and after transplantation (Fagerland, Lydersen and Laake 2013, Table 2)."""
    assert mid_p(1, 7) == pytest.approx(0.0391, abs=5e-5) and mid_p(0, 0) == 1 and mid_p(3, 3) == pytest.approx(0.84375)
    base, new = np.zeros(21), np.zeros(21)
    base[:1], new[1:8] = 1, 1
    result, mirrored = (mcnemar(plain_sample(base, new), safer) for safer in (False, True))
    assert (result.worse, result.low, result.high) == (pytest.approx(6 / 21), pytest.approx(0.0134, abs=1e-4),
                                                   pytest.approx(0.5084, abs=1e-4))  # fmt: skip
    assert (mirrored.worse, mirrored.low, mirrored.high) == (-result.worse, -result.high, -result.low)
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


def members(generator, shift, canaries=False, n=600):
    results = []
    for index in range(n):
        member = index % 2 == 0
        score = round(float(generator.normal(shift * member)), 1)  # ties
        family = "blank" if canaries and index % 3 == 0 else "average"
        silent = canaries and abs(score) < 0.5
        half = index // 2 % 2 if index < n - 40 else 0  # halves of unequal size
        decision = None if silent else score > shift / 2
        results.append(
            MemberScore(index=index, half=half, member=member, score=score, decision=decision, family=family)
        )
    return results


@pytest.mark.parametrize("canaries", [False, True])
def test_membership_statistics_are_those_of_the_records(cell, rescored, canaries):
    generator = np.random.default_rng(3)
    shape = cell(kind="membership", share=0.5, n=None)
    base, new = (rescored(shape, victims=members(generator, shift, canaries)) for shift in (0.5, 1.5))
    values = [one for one in rules_for(base) if (m := base.metric(one.metric)) is not None and m.value is not None]
    for one in values:
        outcome = change([base], [new], one, "key")
        levels = [record.metric(one.metric).value for record in (base, new)]
        assert [outcome.base, outcome.new] == pytest.approx(levels), one
        assert outcome.low <= outcome.worse <= outcome.high or outcome.worse == pytest.approx(outcome.high)
    plain, audit = {"asr", "auc", "tpr_at_1pct_fpr"}, {"auc", "tpr_at_1pct_fpr", "canary_auc", "epsilon_lower"}
    assert {one.metric for one in values} - {"canary_tpr_at_1pct_fpr"} == (audit if canaries else plain)


def test_resamples_keep_strata_and_are_those_of_numpy(cell, rescored):
    generator = np.random.default_rng(0)
    record = rescored(cell(kind="membership", share=0.5, n=None), victims=members(generator, 1.0))
    sample = sample_of(record, record, rule("auc"))
    drawn = resampling_counts(sample, 50, np.random.default_rng(1))
    assert (drawn[0] == 1).all() and drawn.shape == (51, 600)
    for stratum in range(4):
        places = sample.stratum == stratum
        assert (drawn[:, places].sum(axis=1) == places.sum()).all()
    values = generator.normal(size=600)
    expected = [np.median(np.repeat(values, row.astype(int))) for row in drawn]
    np.testing.assert_allclose(resampled_statistic(sample, values, "median", drawn), expected)


def test_victims_of_one_batch_are_drawn_together(cell, rescored):
    def labels(hits):
        return [LabelScore(probe=i // 8, client=0, index=i % 8, label=i < hits) for i in range(96)]

    base, new = (rescored(cell(kind="label", share=0.5), victims=labels(hits)) for hits in (16, 48))
    together = change([base], [new], rule("label_accuracy"), "key")
    assert "units" in together.method and together.worse == pytest.approx(1 / 3)
    places = [
        [v.model_copy(update={"probe": v.probe * 8 + v.index, "index": 0}) for v in r.victims] for r in (base, new)
    ]
    alone = [rescored(r, victims=victims) for r, victims in zip((base, new), places, strict=True)]
    apart = change(alone[:1], alone[1:], rule("label_accuracy"), "key")
    assert "McNemar" in apart.method and apart.high - apart.low < 0.6 * (together.high - together.low)


def test_a_row_is_resampled_by_what_it_is_about_alone(cell, rescored):
    generator = np.random.default_rng(5)
    record = cell(n=30)
    moved = [v.model_copy(update={"psnr": v.psnr + float(generator.normal())}) for v in record.victims]
    new = rescored(record, victims=moved)
    one, two, other = (change([record], [new], ALL_RULES[0], key) for key in ("a", "a", "b"))
    assert one == two and one.worse == other.worse and (one.low, one.high) != (other.low, other.high)
    backward = rescored(record, victims=moved[::-1])
    assert change([record], [backward], ALL_RULES[0], "a") == one, "victims are lined up by what they are, not by place"
    other_client = rescored(record, victims=[v.model_copy(update={"client": 3}) for v in record.victims])
    with pytest.raises(ValueError, match="other victims"):
        sample_of(record, other_client, ALL_RULES[0])


def test_few_victims_cannot_be_significant_beyond_an_exact_test(cell, rescored):
    record = cell(n=4)
    new = rescored(record, victims=[v.model_copy(update={"psnr": v.psnr + 9}) for v in record.victims])
    outcome = change([record], [new], ALL_RULES[0], "key")
    assert outcome.worse == outcome.low == outcome.high == 9 and outcome.p == 2.0**-3
    base, new = (cell("none", None, share) for share in (90.0, 61.0))
    assert change([base], [new], ALL_RULES[0], "key").certain, "exact copies are alike whatever their decibels"


def test_independent_intervals_add_in_quadrature():
    base, new = [ModelFigure(0.9, 0.88, 0.92, 500)], [ModelFigure(0.8, 0.77, 0.83, 500)]
    outcome = unpaired(base, new, safer=True)
    low, high = 0.1 - (0.02**2 + 0.03**2) ** 0.5, 0.1 + 1300**0.5 / 1000
    assert [outcome.worse, outcome.low, outcome.high] == pytest.approx([0.1, low, high])
    assert outcome.p < 0.001 and unpaired(base, base, safer=True).p == 1
    assert unpaired(base, new, safer=False).worse == pytest.approx(-0.1)


def test_two_trainings_of_one_defense_differ_too(cell, rescored):
    """What a model's victims share is no evidence about the defense, however many they are; seeds are."""

    def pair(n, stage):
        return [cell(kind="membership", share=share, n=n, stage=stage) for share in (0.55, 0.58)]

    base, new = pair(2000, "final")
    bare = change([base], [new], rule("asr"), "key")
    assert bare.p < 1e-9 and bare.low > 0.02
    one, many = (with_luck(bare, 0.02, seeds) for seeds in (1, 1000))
    assert one.p > 0.2 and one.low < 0 < one.worse == bare.worse and "luck of training" in one.method
    assert bare.p <= many.p < 1e-9 and many.low > 0.02
    assert with_luck(bare, 0.0, 1) == bare and with_luck(unchanged(0.5, 9), 0.02, 1) == unchanged(0.5, 9)
    rows = {}
    for stage in ("final", "init"):
        base, new = pair(400, stage)
        (rows[stage],) = judged_rows([row for row in rows_of(join([base], [new])) if row.metric == "asr"])
    assert (rows["final"].status, rows["final"].needed) == ("inconclusive", None)
    assert "more seeds" in report.row_summary(rows["final"]) and rows["init"].status == "regression"


def test_the_number_that_would_decide_does(cell):
    record, generator = cell(), np.random.default_rng(2)

    def verdict(n):
        base = generator.normal(15, 4, size=n)
        outcome = bootstrapped([plain_sample(base, base + generator.normal(0, 2, size=n))], ALL_RULES[0], "key")
        return judged_rows(
            [ComparedRow(where_of(record.config), "psnr_median", "all", "ok", outcome, 0.5, "", record)]
        )[0]

    few = [verdict(20) for _ in range(20)]
    asking = sorted(row.needed for row in few if row.status == "inconclusive" and row.needed)
    enough = [verdict(4 * asking[len(asking) // 2]).status for _ in range(20)]
    assert enough.count("ok") >= 8 and [row.status for row in few].count("ok") <= 4


@pytest.mark.nightly
def test_a_dozen_victims_decide_headlines_however_many_rows_there_are(cell, gained):
    """With 12 victims no p is below 2^-11, which Holm's correction over more than 102 rows lifts above .05."""
    attacks = ("dlg", "ig", "idlg", "gifd", "analytic")
    base = [cell(value=v / 100, attack=attack, n=12) for v in range(1, 22) for attack in attacks]
    rows = judged_rows(rows_of(join(base, [gained(r, 3.0) for r in base])))
    some = [row for row in rows if row.metric == "psnr_median"]
    worst = [row for row in some if row.where.attack == "worst case of 5 attacks"]
    assert len(worst) == 21 and {row.status for row in worst} == {"regression"} and all(r.headline for r in worst)
    single = [row for row in some if row not in worst]
    assert len(single) == 105 < single[0].family and {row.status for row in single} == {"inconclusive"}
    assert not any(row.blind or row.headline for row in single), "their point's headline stands for them"


def test_headlines_are_worst_cases_and_the_best_attack_of_other_kinds(cell):
    lone = cell(value=0.2)
    pair = [cell(attack=attack, share=share) for attack, share in (("dlg", 10.0), ("ig", 20.0))]
    members = [cell(attack=a, kind="membership", share=s, n=400) for a, s in (("mia_a", 0.55), ("mia_b", 0.6))]
    base = [lone, *pair, *members]
    stronger = cell(attack="mia_a", kind="membership", share=0.9, n=400)
    for new in (base, [*base[:-2], stronger, base[-1]]):
        rows = [row for row in rows_of(join(base, new)) if row.headline]
        images = {"psnr_median", "share_above_20db"}
        assert {(row.where.value, row.where.attack, row.metric) for row in rows} == {
            *((0.2, "dlg", metric) for metric in images),
            *((0.1, "worst case of 2 attacks", metric) for metric in images),
            *((value, "", "accuracy") for value in (0.1, 0.2)),
            (0.1, "mia_b", "asr"),
        }, "NEW has no say in it"
