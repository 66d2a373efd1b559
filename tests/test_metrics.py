"""Figures of images, labels, members and owners, and intervals: invariants, planted leaks, nulls, coverage."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from ppbench.metrics.image import PSNR_CAP, RMSE_RAW_CAP, image_figures, match, psnr
from ppbench.metrics.intervals import auc_interval, balanced_interval, bootstrap, clopper_pearson, proportion, statistic
from ppbench.metrics.labels import multiset_chance, multiset_hits, tracing_accuracy
from ppbench.metrics.membership import Half, asr, auc, merged, operating_point, roc, tpr_at


def image(seed=0, shape=(3, 16, 16)):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_figures_of_known_cases():
    """An exact image, one far too bright, one unlike, a black one, a huge one."""
    x, white, black = image(), torch.ones(1, 8, 8), torch.zeros(1, 8, 8)
    figures = image_figures(x, x)
    assert (figures.psnr, figures.rmse, figures.rmse_raw) == (PSNR_CAP, 0, 0) and figures.ssim == pytest.approx(1)
    assert image_figures(x + 0.05 * image(1), x).ssim > 0.9 > 0.3 > image_figures(image(2), x).ssim
    bright = image_figures(10 * white, white)
    assert bright.psnr == PSNR_CAP and bright.rmse == 0 and bright.rmse_raw == pytest.approx(9)
    assert image_figures(black, black).rmse == 0 and image_figures(black + 1 / 255, black).rmse == pytest.approx(1)
    assert image_figures(torch.full_like(x.double(), 1e300), x.double()).rmse_raw == RMSE_RAW_CAP


@given(st.floats(1e-3, 0.4), st.integers(0, 50))
@settings(max_examples=30)
def test_psnr_follows_the_size_of_the_error(size, seed):
    x = image(seed) * 0.2 + 0.4
    sign = torch.where(image(seed + 1) < 0.5, -1.0, 1.0)
    assert psnr(x + size * sign, x) == pytest.approx(-20 * np.log10(size), abs=1e-3)
    assert psnr(2 * (x + size * sign), 2 * x, (0.0, 2.0)) == pytest.approx(-20 * np.log10(size), abs=1e-3)


@given(st.integers(0, 100), st.floats(0.01, 1e6))
@settings(max_examples=30)
def test_figures_stay_in_their_bounds(seed, scale):
    x = image(seed)
    figures = image_figures(scale * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)), x)
    assert 0 <= figures.psnr <= PSNR_CAP and -1 <= figures.ssim <= 1
    assert 0 <= figures.rmse <= figures.rmse_raw + 1e-12


@given(st.integers(0, 50), st.floats(0.01, 5))
@settings(max_examples=20)
def test_the_squared_error_is_that_of_the_clipped_image_in_units_of_the_range(seed, scale):
    x, guess = image(seed), scale * (image(seed + 1) - 0.3)
    figures = image_figures(guess, x)
    assert figures.mse == pytest.approx(float((guess.clamp(0, 1).double() - x.double()).square().mean()))
    wide = image_figures(6 * guess - 3, 6 * x - 3, (-3.0, 3.0))
    assert wide.mse == pytest.approx(figures.mse, rel=1e-4) and wide.psnr == pytest.approx(figures.psnr, rel=1e-4)
    assert psnr(guess, x) == figures.psnr


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_reconstruction_that_is_not_finite_has_no_figures(bad):
    x, guess = image(), image(1)
    guess[0, 0, 0] = bad
    figures = image_figures(guess, x)
    assert (figures.psnr, figures.rmse, figures.rmse_raw, figures.ssim) == (None,) * 4


@pytest.mark.parametrize(("shape", "known"), [((1, 8, 8), True), ((3, 7, 7), True), ((1, 6, 9), False), ((12,), False)])
def test_ssim_is_null_below_its_window(shape, known):
    assert (image_figures(image(1, shape), image(0, shape)).ssim is not None) is known


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="shape"):
        image_figures(image(0, (1, 8, 8)), image(0, (3, 8, 8)))
    with pytest.raises(ValueError, match="shape"):
        match(image(0, (2, 1, 8, 8)), image(0, (3, 1, 8, 8)))


@given(st.permutations(range(6)), st.integers(0, 20))
@settings(max_examples=30)
def test_match_undoes_any_permutation(order, seed):
    truth = image(seed, (6, 1, 8, 8))
    guess = truth[order] + 0.05 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed))
    matched = match(guess, truth)
    assert [order[index] for index in matched] == list(range(6))


@given(st.permutations(range(5)), st.sets(st.integers(0, 4), max_size=5))
@settings(max_examples=30)
def test_match_gives_failed_reconstructions_what_is_left(order, failed):
    truth = image(3, (5, 1, 8, 8))
    guess = truth[order].clone()
    for index in failed:
        guess[index] = torch.nan
    matched = match(guess, truth)
    assert sorted(matched) == list(range(5))
    assert all(order[index] == place for place, index in enumerate(matched) if index not in failed)


def test_match_clips_before_it_compares():
    truth = torch.stack([torch.ones(1, 4, 4), torch.full((1, 4, 4), 0.6)])
    guess = torch.stack([torch.full((1, 4, 4), 0.7), torch.full((1, 4, 4), 1e20)])
    assert match(guess, truth) == [1, 0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.randoms())
def test_multiset_hits_do_not_depend_on_order(truth, random):
    assert multiset_hits([1, 1, 2], [1, 2, 3]) == [True, True, False] and multiset_hits([], [4]) == [False]
    guess = [(v + random.randint(0, 1)) % 4 for v in truth]
    shuffled = random.sample(guess, len(guess))
    assert sum(multiset_hits(guess, truth)) == sum(multiset_hits(shuffled, truth[::-1]))


@pytest.mark.parametrize(("classes", "batch"), [(10, 1), (10, 8), (3, 4)])
def test_multiset_chance_is_what_blind_guessing_gets(classes, batch):
    rng = np.random.default_rng(0)
    got = [np.mean(multiset_hits(*rng.integers(0, classes, (2, batch)).tolist())) for _ in range(3000)]
    assert multiset_chance(classes, batch) == pytest.approx(np.mean(got), abs=0.02)
    assert batch > 1 or multiset_chance(classes, batch) == pytest.approx(1 / classes)


def half(score, member, cut=0.5):
    return Half(member.astype(bool), score.astype(np.float64), score > cut)


def member(n):
    return np.arange(n) % 2 == 1


def test_random_binary_scores_give_chance_though_all_are_tied_and_a_planted_leak_is_found():
    rng = np.random.default_rng(0)
    halves = [half(rng.integers(0, 2, 2000), member(2000)) for _ in range(2)]
    rate = auc(halves, 0)
    assert rate.value == pytest.approx(0.5, abs=0.03) and rate.interval.low < 0.5 < rate.interval.high
    assert asr(halves, 0).value == pytest.approx(0.5, abs=0.03)
    leak = [half(member(200).astype(float), member(200)) for _ in range(2)]
    assert auc(leak, 0).value == asr(leak, 0).value == tpr_at(leak, 0.01).value == 1


@given(st.integers(0, 1000), st.floats(0.1, 50), st.floats(-50, 50))
@settings(max_examples=25)
def test_auc_is_scikit_learns_and_ignores_monotone_scales(seed, scale, shift):
    rng = np.random.default_rng(seed)
    score, truth = rng.integers(0, 9, 80).astype(float), member(80)
    rate = auc([half(score, truth)], 0).value
    assert rate == pytest.approx(roc_auc_score(truth, score))
    assert auc([half(np.round(scale * 8) * score + np.round(shift), truth)], 0).value == pytest.approx(rate)
    assert auc([half(-score, truth)], 0).value == pytest.approx(1 - rate)


def test_tpr_is_refused_where_not_one_false_positive_fits():
    halves = [half(np.arange(198.0), member(198))] * 2
    rate = tpr_at(halves, 0.01)
    assert rate.value is None and "99 non-members" in rate.reason and "100" in rate.reason
    enough = tpr_at([half(np.arange(200.0), member(200))] * 2, 0.01)
    assert enough.value is not None and enough.realized_fpr <= 0.01


def test_tpr_never_counts_more_false_positives_than_allowed_and_says_how_many():
    score = np.r_[np.zeros(50), np.ones(50), np.ones(100)]
    truth = np.r_[np.zeros(100), np.ones(100)]
    rate = tpr_at([half(score, truth)], 0.1)
    assert rate.value == 0 and rate.realized_fpr == 0  # the only cut gives FPR 0.5


def test_one_threshold_for_both_halves_where_each_is_too_small_and_the_method_says_so():
    small = [half(np.arange(104.0) + 0.5 * (np.arange(104) % 2), member(104)) for _ in range(2)]
    alone = tpr_at(small, 0.01)
    assert alone.value is None and "52 non-members a half" in alone.reason
    rate = tpr_at(small, 0.01, pooled=True)
    whole = half(np.concatenate([h.score for h in small]), np.concatenate([h.member for h in small]))
    assert (rate.value, rate.realized_fpr) == operating_point(whole, 0.01)
    assert merged(small).decision.tolist() == [d for h in small for d in h.decision]
    assert "one threshold for both halves" in rate.interval.method and rate.n == 208
    assert "104 non-members in both halves" in tpr_at(small, 0.001, pooled=True).reason
    large = [half(np.arange(200.0), member(200))] * 2
    assert tpr_at(large, 0.01, pooled=True) == tpr_at(large, 0.01), "halves that suffice keep their thresholds"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), min_size=2, max_size=40))
@settings(max_examples=60)
def test_the_roc_curve_has_the_points_of_every_threshold_and_no_others(pairs):
    truth, score = np.array([m for m, _ in pairs]), np.array([float(s) for _, s in pairs])
    points = roc(half(score, truth))
    if truth.all() or not truth.any():
        assert points is None
        return
    cuts = [np.inf, *sorted(set(score), reverse=True)]
    brute = [(np.mean(score[~truth] >= cut), np.mean(score[truth] >= cut)) for cut in cuts]
    assert np.stack([points.fpr, points.tpr], axis=1) == pytest.approx(np.array(brute))
    assert (points.members, points.others) == (truth.sum(), (~truth).sum())


@given(st.lists(st.floats(-50, 100), min_size=1, max_size=45), st.integers(0, 9))
@settings(max_examples=60)
def test_the_worst_decile_is_the_mean_of_the_largest_tenth(values, padding):
    count = -(-len(values) // 10)
    expected = np.mean(sorted(values)[-count:])
    padded = np.array([*values, *[np.nan] * padding])
    assert statistic(padded, "worst_decile") == pytest.approx(expected, abs=1e-9)
    rows = statistic(np.stack([padded, padded[::-1]]), "worst_decile")
    assert rows == pytest.approx([expected] * 2, abs=1e-9)
    assert expected >= statistic(padded, "p95") - 1e-9 or count > 1


def test_one_class_gives_null_with_the_reason():
    lonely = half(np.arange(10.0), np.ones(10))
    for rate in (auc([lonely], 0), asr([lonely], 0), tpr_at([lonely], 0.5), auc([], 0)):
        assert rate.value is None and "no members or no non-members" in rate.reason


def test_tracing_perfect_and_chance():
    owners = [i % 10 for i in range(200)]
    assert tracing_accuracy(owners, owners).value == 1
    guess = np.random.default_rng(0).integers(0, 10, 200).tolist()
    rate = tracing_accuracy(owners, guess)
    assert rate.interval.low < 0.1 == rate.chance < rate.interval.high
    assert tracing_accuracy([3, 3, 5], [3, 5, 5]).chance == 0.5, "the owners among the queries, not all clients"
    assert tracing_accuracy(owners, [-1] * 200).value == 0
    assert tracing_accuracy([], []).value is None


# -- intervals --------------------------------------------------------------------------------------------------------
def flat(values):
    return [np.array([v]) for v in values]


def test_clopper_pearson_textbook_values():
    interval = clopper_pearson(7, 20)
    assert (interval.low, interval.high) == pytest.approx((0.1539, 0.5922), abs=1e-4)
    assert clopper_pearson(0, 10).low == 0 and clopper_pearson(0, 10).high == pytest.approx(1 - 0.025**0.1)
    assert clopper_pearson(10, 10).high == 1
    for k, n in ((1, 0), (-1, 5), (6, 5)):
        with pytest.raises(ValueError, match="no proportion"):
            clopper_pearson(k, n)


@given(st.integers(1, 300), st.data())
def test_clopper_pearson_holds_the_share_and_shrinks_with_n(n, data):
    k = data.draw(st.integers(0, n))
    one, ten = clopper_pearson(k, n), clopper_pearson(10 * k, 10 * n)
    assert 0 <= one.low <= k / n <= one.high <= 1
    assert ten.high - ten.low < one.high - one.low


def test_clustered_proportion_covers_where_the_naive_interval_does_not():
    rng = np.random.default_rng(1)
    naive = clustered = 0
    for _ in range(200):
        units = [np.full(8, rng.random() < 0.4) for _ in range(15)]
        interval, plain = proportion(units).interval, clopper_pearson(sum(u.sum() for u in units), 120)
        clustered += interval.low <= 0.4 <= interval.high
        naive += plain.low <= 0.4 <= plain.high
    assert clustered / 200 > 0.92 and naive / 200 < 0.75 and "effective" in interval.method


def test_clustered_proportion_of_all_counts_each_batch_once_and_one_batch_not_at_all():
    assert proportion([np.ones(8, bool)] * 10).interval.low == pytest.approx(0.025**0.1)
    alone = proportion([np.array([True, False])])
    assert alone.value == 0.5 and alone.interval.low is None and "one batch" in alone.interval.method


@given(
    st.lists(st.floats(-100, 100), min_size=2, max_size=30), st.sampled_from(["mean", "median", "p95", "worst_decile"])
)
@settings(max_examples=25)
def test_bootstrap_is_bounded_by_the_data_and_repeats(values, name):
    units = flat(np.array(values))
    result = bootstrap(units, name, 3)
    assert result == bootstrap(units, name, 3) and result.n == len(values)
    assert min(values) - 1e-9 <= result.interval.low <= result.interval.high <= max(values) + 1e-9


def test_bootstrap_of_the_mean_agrees_with_theory_and_depends_on_the_seed_alone():
    values = np.random.default_rng(0).normal(5, 2, 400)
    interval = bootstrap(flat(values), "mean", 1).interval
    half = 1.96 * values.std(ddof=1) / 20
    assert (interval.low, interval.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.05)
    assert interval != bootstrap(flat(values), "mean", 2).interval


def test_bootstrap_resamples_batches_not_images():
    rng = np.random.default_rng(0)
    units = [np.full(8, rng.normal()) for _ in range(25)]
    clustered, naive = bootstrap(units, "mean", 0), bootstrap(flat(np.concatenate(units)), "mean", 0)
    ratio = (clustered.interval.high - clustered.interval.low) / (naive.interval.high - naive.interval.low)
    assert 2.2 < ratio < 3.6  # sqrt(8) = 2.8
    assert "batches" in clustered.interval.method and "victims" in naive.interval.method


def test_bootstrap_takes_batches_of_unequal_size():
    units = [np.array([1.0, 2.0, 3.0]), np.array([10.0])]
    result = bootstrap(units, "mean", 0)
    assert result.value == 4 and result.interval.low == 2 and result.interval.high == 10
    padded = np.array([[1.0, 3.0, np.nan]])
    assert statistic(padded, "mean")[0] == 2 and statistic(padded, "median")[0] == 2


def test_auc_bootstrap_is_that_of_scikit_learn_and_handles_ties():
    rng = np.random.default_rng(0)
    members, others = rng.integers(0, 4, 60).astype(float) + 0.5, rng.integers(0, 4, 50).astype(float)
    interval = auc_interval([(members, others)], 0)
    slow, draw = [], np.random.default_rng(5)
    for _ in range(400):
        m, o = draw.choice(members, 60), draw.choice(others, 50)
        slow.append(roc_auc_score(np.r_[np.ones(60), np.zeros(50)], np.r_[m, o]))
    assert (interval.low, interval.high) == pytest.approx(tuple(np.percentile(slow, [2.5, 97.5])), abs=0.02)
    equal = auc_interval([(np.ones(30), np.ones(20))], 0)
    assert equal.low == equal.high == 0.5


def test_balanced_interval_is_exact_for_equal_strata_and_stratified_else():
    equal = balanced_interval([np.array([True] * 8 + [False] * 2), np.array([True] * 5 + [False] * 5)], 0)
    exact = clopper_pearson(13, 20)
    assert (equal.low, equal.high) == (exact.low, exact.high)
    uneven = balanced_interval([np.ones(10, bool), np.arange(40) % 2 == 0], 0)
    assert uneven.low < 0.75 < uneven.high and "stratified" in uneven.method
