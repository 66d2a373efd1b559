"""Intervals: exact cases, coverage of what they claim, clusters, seeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from ppbench.metrics.intervals import (
    auc_interval,
    balanced_interval,
    bootstrap,
    clopper_pearson,
    proportion,
    statistic,
)


def flat(values: np.ndarray) -> list[np.ndarray]:
    return [np.array([v]) for v in values]


def test_clopper_pearson_textbook_values() -> None:
    interval = clopper_pearson(7, 20)
    assert (interval.low, interval.high) == pytest.approx((0.1539, 0.5922), abs=1e-4)
    assert clopper_pearson(0, 10).low == 0 and clopper_pearson(0, 10).high == pytest.approx(1 - 0.025**0.1)
    assert clopper_pearson(10, 10).high == 1


@pytest.mark.parametrize(("k", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_clopper_pearson_refuses_what_is_no_proportion(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="no proportion"):
        clopper_pearson(k, n)


@given(st.integers(1, 300), st.data())
def test_clopper_pearson_holds_the_share_and_shrinks_with_n(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    one, ten = clopper_pearson(k, n), clopper_pearson(10 * k, 10 * n)
    assert 0 <= one.low <= k / n <= one.high <= 1
    assert ten.high - ten.low < one.high - one.low


def test_clustered_proportion_is_wider_where_victims_of_a_batch_fall_together() -> None:
    rng = np.random.default_rng(0)
    together = [np.full(8, rng.random() < 0.5) for _ in range(20)]
    apart = [rng.random(8) < 0.5 for _ in range(20)]
    wide, narrow = proportion(together).interval, proportion(apart).interval
    assert wide.high - wide.low > 1.8 * (narrow.high - narrow.low)
    assert "effective" in wide.method


def test_clustered_proportion_covers_where_the_naive_interval_does_not() -> None:
    rng = np.random.default_rng(1)
    naive = clustered = 0
    for _ in range(200):
        units = [np.full(8, rng.random() < 0.4) for _ in range(15)]
        found, plain = proportion(units).interval, clopper_pearson(sum(u.sum() for u in units), 120)
        clustered += found.low <= 0.4 <= found.high
        naive += plain.low <= 0.4 <= plain.high
    assert clustered / 200 > 0.92 and naive / 200 < 0.75


def test_clustered_proportion_of_all_counts_each_batch_once_and_one_batch_not_at_all() -> None:
    assert proportion([np.ones(8, bool)] * 10).interval.low == pytest.approx(0.025**0.1)
    alone = proportion([np.array([True, False])])
    assert alone.value == 0.5 and alone.interval.low is None and "one batch" in alone.interval.method


@given(
    st.lists(st.floats(-100, 100), min_size=2, max_size=30), st.sampled_from(["mean", "median", "p95", "worst_decile"])
)
@settings(max_examples=25, deadline=None)
def test_bootstrap_is_bounded_by_the_data_and_repeats(values: list[float], name: str) -> None:
    units = flat(np.array(values))
    found = bootstrap(units, name, 3)
    assert found == bootstrap(units, name, 3) and found.n == len(values)
    assert min(values) - 1e-9 <= found.interval.low <= found.interval.high <= max(values) + 1e-9


def test_bootstrap_of_the_mean_agrees_with_theory_and_depends_on_the_seed_alone() -> None:
    values = np.random.default_rng(0).normal(5, 2, 400)
    interval = bootstrap(flat(values), "mean", 1).interval
    half = 1.96 * values.std(ddof=1) / 20
    assert (interval.low, interval.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.05)
    assert interval != bootstrap(flat(values), "mean", 2).interval


def test_bootstrap_resamples_batches_not_images() -> None:
    rng = np.random.default_rng(0)
    units = [np.full(8, rng.normal()) for _ in range(25)]
    clustered, naive = bootstrap(units, "mean", 0), bootstrap(flat(np.concatenate(units)), "mean", 0)
    ratio = (clustered.interval.high - clustered.interval.low) / (naive.interval.high - naive.interval.low)
    assert 2.2 < ratio < 3.6  # sqrt(8) = 2.8
    assert "batches" in clustered.interval.method and "victims" in naive.interval.method


def test_bootstrap_takes_batches_of_unequal_size() -> None:
    units = [np.array([1.0, 2.0, 3.0]), np.array([10.0])]
    found = bootstrap(units, "mean", 0)
    assert found.value == 4 and found.interval.low == 2 and found.interval.high == 10
    padded = np.array([[1.0, 3.0, np.nan]])
    assert statistic(padded, "mean")[0] == 2 and statistic(padded, "median")[0] == 2


def test_auc_bootstrap_is_that_of_scikit_learn_and_handles_ties() -> None:
    rng = np.random.default_rng(0)
    members, others = rng.integers(0, 4, 60).astype(float) + 0.5, rng.integers(0, 4, 50).astype(float)
    found = auc_interval([(members, others)], 0)
    slow, draw = [], np.random.default_rng(5)
    for _ in range(400):
        m, o = draw.choice(members, 60), draw.choice(others, 50)
        slow.append(roc_auc_score(np.r_[np.ones(60), np.zeros(50)], np.r_[m, o]))
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(slow, [2.5, 97.5])), abs=0.02)
    equal = auc_interval([(np.ones(30), np.ones(20))], 0)
    assert equal.low == equal.high == 0.5


def test_balanced_interval_is_exact_for_equal_strata_and_stratified_else() -> None:
    equal = balanced_interval([np.array([True] * 8 + [False] * 2), np.array([True] * 5 + [False] * 5)], 0)
    exact = clopper_pearson(13, 20)
    assert (equal.low, equal.high) == (exact.low, exact.high)
    uneven = balanced_interval([np.ones(10, bool), np.arange(40) % 2 == 0], 0)
    assert uneven.low < 0.75 < uneven.high and "stratified" in uneven.method
