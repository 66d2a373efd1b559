"""Image, label, membership and tracing figures: invariants, planted leaks, nulls, failures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from ppbench.metrics.image import (
    PSNR_CAP,
    RMSE_RAW_CAP,
    image_figures,
    match,
    psnr,
)
from ppbench.metrics.intervals import statistic
from ppbench.metrics.labels import multiset_chance, multiset_hits
from ppbench.metrics.membership import Half, asr, auc, operating_point, roc, together, tpr_at
from ppbench.metrics.tracing import tracing_accuracy


def image(seed: int = 0, shape: tuple[int, ...] = (3, 16, 16)) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def test_figures_of_known_cases() -> None:
    """An exact image, one far too bright, one unlike, a black one, a huge one."""
    x, white, black = image(), torch.ones(1, 8, 8), torch.zeros(1, 8, 8)
    found = image_figures(x, x)
    assert (found.psnr, found.rmse, found.rmse_raw) == (PSNR_CAP, 0, 0) and found.ssim == pytest.approx(1)
    assert image_figures(x + 0.05 * image(1), x).ssim > 0.9 > 0.3 > image_figures(image(2), x).ssim
    bright = image_figures(10 * white, white)
    assert bright.psnr == PSNR_CAP and bright.rmse == 0 and bright.rmse_raw == pytest.approx(9)
    assert image_figures(black, black).rmse == 0 and image_figures(black + 1 / 255, black).rmse == pytest.approx(1)
    assert image_figures(torch.full_like(x.double(), 1e300), x.double()).rmse_raw == RMSE_RAW_CAP


@given(st.floats(1e-3, 0.4), st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_psnr_follows_the_size_of_the_error(size: float, seed: int) -> None:
    x = image(seed) * 0.2 + 0.4
    sign = torch.where(image(seed + 1) < 0.5, -1.0, 1.0)
    assert psnr(x + size * sign, x) == pytest.approx(-20 * np.log10(size), abs=1e-3)
    assert psnr(2 * (x + size * sign), 2 * x, (0.0, 2.0)) == pytest.approx(-20 * np.log10(size), abs=1e-3)


@given(st.integers(0, 100), st.floats(0.01, 1e6))
@settings(max_examples=30, deadline=None)
def test_figures_stay_in_their_bounds(seed: int, scale: float) -> None:
    x = image(seed)
    found = image_figures(scale * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)), x)
    assert 0 <= found.psnr <= PSNR_CAP and -1 <= found.ssim <= 1
    assert 0 <= found.rmse <= found.rmse_raw + 1e-12


@given(st.integers(0, 50), st.floats(0.01, 5))
@settings(max_examples=20, deadline=None)
def test_the_squared_error_is_that_of_the_clipped_image_in_units_of_the_range(seed: int, scale: float) -> None:
    x, guess = image(seed), scale * (image(seed + 1) - 0.3)
    found = image_figures(guess, x)
    assert found.mse == pytest.approx(float((guess.clamp(0, 1).double() - x.double()).square().mean()))
    wide = image_figures(6 * guess - 3, 6 * x - 3, (-3.0, 3.0))
    assert wide.mse == pytest.approx(found.mse, rel=1e-4) and wide.psnr == pytest.approx(found.psnr, rel=1e-4)
    assert psnr(guess, x) == found.psnr


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_reconstruction_that_is_not_finite_has_no_figures(bad: float) -> None:
    x, guess = image(), image(1)
    guess[0, 0, 0] = bad
    found = image_figures(guess, x)
    assert (found.psnr, found.rmse, found.rmse_raw, found.ssim) == (None,) * 4


@pytest.mark.parametrize(("shape", "known"), [((1, 8, 8), True), ((3, 7, 7), True), ((1, 6, 9), False), ((12,), False)])
def test_ssim_is_null_below_its_window(shape: tuple[int, ...], known: bool) -> None:
    assert (image_figures(image(1, shape), image(0, shape)).ssim is not None) is known


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        image_figures(image(0, (1, 8, 8)), image(0, (3, 8, 8)))
    with pytest.raises(ValueError, match="shape"):
        match(image(0, (2, 1, 8, 8)), image(0, (3, 1, 8, 8)))


@given(st.permutations(range(6)), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_match_undoes_any_permutation(order: list[int], seed: int) -> None:
    truth = image(seed, (6, 1, 8, 8))
    guess = truth[order] + 0.05 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed))
    found = match(guess, truth)
    assert [order[index] for index in found] == list(range(6))


@given(st.permutations(range(5)), st.sets(st.integers(0, 4), max_size=5))
@settings(max_examples=30, deadline=None)
def test_match_gives_failed_reconstructions_what_is_left(order: list[int], failed: set[int]) -> None:
    truth = image(3, (5, 1, 8, 8))
    guess = truth[order].clone()
    for index in failed:
        guess[index] = torch.nan
    found = match(guess, truth)
    assert sorted(found) == list(range(5))
    assert all(order[index] == place for place, index in enumerate(found) if index not in failed)


def test_match_clips_before_it_compares() -> None:
    truth = torch.stack([torch.ones(1, 4, 4), torch.full((1, 4, 4), 0.6)])
    guess = torch.stack([torch.full((1, 4, 4), 0.7), torch.full((1, 4, 4), 1e20)])
    assert match(guess, truth) == [1, 0]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.randoms())
def test_multiset_hits_do_not_depend_on_order(truth: list[int], random: object) -> None:
    assert multiset_hits([1, 1, 2], [1, 2, 3]) == [True, True, False] and multiset_hits([], [4]) == [False]
    guess = [(v + random.randint(0, 1)) % 4 for v in truth]
    shuffled = random.sample(guess, len(guess))
    assert sum(multiset_hits(guess, truth)) == sum(multiset_hits(shuffled, truth[::-1]))


@pytest.mark.parametrize(("classes", "batch"), [(10, 1), (10, 8), (3, 4)])
def test_multiset_chance_is_what_blind_guessing_gets(classes: int, batch: int) -> None:
    rng = np.random.default_rng(0)
    got = [
        np.mean(multiset_hits(rng.integers(0, classes, batch).tolist(), rng.integers(0, classes, batch).tolist()))
        for _ in range(3000)
    ]
    assert multiset_chance(classes, batch) == pytest.approx(np.mean(got), abs=0.02)
    assert batch > 1 or multiset_chance(classes, batch) == pytest.approx(1 / classes)


def half(score: np.ndarray, member: np.ndarray, cut: float = 0.5) -> Half:
    return Half(member.astype(bool), score.astype(np.float64), score > cut)


def member(n: int) -> np.ndarray:
    return np.arange(n) % 2 == 1


def test_random_binary_scores_give_chance_though_all_are_tied_and_a_planted_leak_is_found() -> None:
    rng = np.random.default_rng(0)
    halves = [half(rng.integers(0, 2, 2000), member(2000)) for _ in range(2)]
    found = auc(halves, 0)
    assert found.value == pytest.approx(0.5, abs=0.03) and found.interval.low < 0.5 < found.interval.high
    assert asr(halves, 0).value == pytest.approx(0.5, abs=0.03)
    leak = [half(member(200).astype(float), member(200)) for _ in range(2)]
    assert auc(leak, 0).value == asr(leak, 0).value == tpr_at(leak, 0.01).value == 1


@given(st.integers(0, 1000), st.floats(0.1, 50), st.floats(-50, 50))
@settings(max_examples=25, deadline=None)
def test_auc_is_scikit_learns_and_ignores_monotone_scales(seed: int, scale: float, shift: float) -> None:
    rng = np.random.default_rng(seed)
    score, truth = rng.integers(0, 9, 80).astype(float), member(80)
    found = auc([half(score, truth)], 0).value
    assert found == pytest.approx(roc_auc_score(truth, score))
    assert auc([half(np.round(scale * 8) * score + np.round(shift), truth)], 0).value == pytest.approx(found)
    assert auc([half(-score, truth)], 0).value == pytest.approx(1 - found)


def test_tpr_is_refused_where_not_one_false_positive_fits() -> None:
    halves = [half(np.arange(198.0), member(198))] * 2
    found = tpr_at(halves, 0.01)
    assert found.value is None and "99 non-members" in found.reason and "100" in found.reason
    enough = tpr_at([half(np.arange(200.0), member(200))] * 2, 0.01)
    assert enough.value is not None and enough.realized_fpr <= 0.01


def test_tpr_never_counts_more_false_positives_than_allowed_and_says_how_many() -> None:
    score = np.r_[np.zeros(50), np.ones(50), np.ones(100)]
    truth = np.r_[np.zeros(100), np.ones(100)]
    found = tpr_at([half(score, truth)], 0.1)
    assert found.value == 0 and found.realized_fpr == 0  # the only cut gives FPR 0.5


def test_one_threshold_for_both_halves_where_each_is_too_small_and_the_method_says_so() -> None:
    small = [half(np.arange(104.0) + 0.5 * (np.arange(104) % 2), member(104)) for _ in range(2)]
    alone = tpr_at(small, 0.01)
    assert alone.value is None and "52 non-members a half" in alone.reason
    found = tpr_at(small, 0.01, pooled=True)
    whole = half(np.concatenate([h.score for h in small]), np.concatenate([h.member for h in small]))
    assert (found.value, found.realized_fpr) == operating_point(whole, 0.01)
    assert together(small).decision.tolist() == [d for h in small for d in h.decision]
    assert "one threshold for both halves" in found.interval.method and found.n == 208
    assert "104 non-members in both halves" in tpr_at(small, 0.001, pooled=True).reason
    large = [half(np.arange(200.0), member(200))] * 2
    assert tpr_at(large, 0.01, pooled=True) == tpr_at(large, 0.01), "halves that suffice keep their thresholds"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), min_size=2, max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_roc_curve_has_the_points_of_every_threshold_and_no_others(pairs: list[tuple[bool, int]]) -> None:
    truth, score = np.array([m for m, _ in pairs]), np.array([float(s) for _, s in pairs])
    found = roc(half(score, truth))
    if truth.all() or not truth.any():
        assert found is None
        return
    cuts = [np.inf, *sorted(set(score), reverse=True)]
    brute = [(np.mean(score[~truth] >= cut), np.mean(score[truth] >= cut)) for cut in cuts]
    assert np.stack([found.fpr, found.tpr], axis=1) == pytest.approx(np.array(brute))
    assert (found.members, found.others) == (truth.sum(), (~truth).sum())


@given(st.lists(st.floats(-50, 100), min_size=1, max_size=45), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_the_worst_decile_is_the_mean_of_the_largest_tenth(values: list[float], padding: int) -> None:
    count = -(-len(values) // 10)
    expected = np.mean(sorted(values)[-count:])
    padded = np.array([*values, *[np.nan] * padding])
    assert statistic(padded, "worst_decile") == pytest.approx(expected, abs=1e-9)
    rows = statistic(np.stack([padded, padded[::-1]]), "worst_decile")
    assert rows == pytest.approx([expected] * 2, abs=1e-9)
    assert expected >= statistic(padded, "p95") - 1e-9 or count > 1


def test_one_class_gives_null_with_the_reason() -> None:
    lonely = half(np.arange(10.0), np.ones(10))
    for found in (auc([lonely], 0), asr([lonely], 0), tpr_at([lonely], 0.5), auc([], 0)):
        assert found.value is None and "no members or no non-members" in found.reason


def test_tracing_perfect_and_chance() -> None:
    owners = [i % 10 for i in range(200)]
    assert tracing_accuracy(owners, owners).value == 1
    guess = np.random.default_rng(0).integers(0, 10, 200).tolist()
    found = tracing_accuracy(owners, guess)
    assert found.interval.low < 0.1 == found.chance < found.interval.high
    assert tracing_accuracy([3, 3, 5], [3, 5, 5]).chance == 0.5, "the owners among the queries, not all clients"
    assert tracing_accuracy(owners, [-1] * 200).value == 0
    assert tracing_accuracy([], []).value is None
