"""The random laws of MP-DP: products are Gaussian, closed forms agree with the series, draws are the generator's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, special, stats

from ppbench.base.errors import UsageError
from ppbench.defenses.mpdp.laws import (
    SECOND_MOMENT,
    abs_dn_star,
    dn,
    gamma,
    series,
)

DRAWS = 200_000
LEVELS = (1e-5, 0.001, 0.01, 0.5, 0.99, 1 - 1e-5)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def distance(draws: torch.Tensor, law) -> float:
    return float(stats.kstest(draws.flatten().numpy(), law).statistic)


def law_of_scale(x):
    """Distribution function of |DN*(1)|: its square is Gamma(3/2, 1)."""
    return special.gammainc(1.5, np.asarray(x) ** 2)


def law_of_half(x: float) -> float:
    """Distribution function of |DN*(2)|, from the root of the Mellin transform (Gil-Pelaez on its logarithm)."""

    def integrand(t: float) -> float:
        transform = np.exp((special.loggamma((3 + 1j * t) / 2) - special.loggamma(1.5)) / 2)
        return (np.exp(-1j * t * math.log(x)) * transform).imag / t

    return 0.5 - integrate.quad(integrand, 0, 120, limit=500)[0] / math.pi


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2])
def test_products_are_gaussian(m, n):
    rng, sigma = generator(10 * m + n), 1.7
    product = torch.ones(DRAWS, dtype=torch.float64)
    for _ in range(m):
        product = product * abs_dn_star((DRAWS,), m, rng)
    for _ in range(n):
        # DN(sigma, n) holds the n-th root of sigma: the product of n of them has sigma once.
        product = product * dn(sigma, (DRAWS,), n, rng)
    assert distance(product, stats.norm(0, sigma).cdf) < 0.005
    assert product.square().mean().item() == pytest.approx(sigma**2, rel=0.02)
    assert (product**4).mean().item() == pytest.approx(3 * sigma**4, rel=0.06)


def test_noise_without_its_sign_or_with_the_wrong_law_is_seen_by_the_same_test():
    rng = generator()
    r, eta = abs_dn_star((DRAWS,), 1, rng), dn(1.0, (DRAWS,), 1, rng)
    assert distance(r * eta.abs(), stats.norm.cdf) == pytest.approx(0.5, abs=0.01)
    assert distance(abs_dn_star((DRAWS,), 2, rng) * eta, stats.norm.cdf) > 0.01


def test_scale_has_the_exact_law_and_its_moments():
    r = abs_dn_star((DRAWS,), 1, generator(1))
    assert distance(r, law_of_scale) < 0.005
    assert r.square().mean().item() == pytest.approx(1.5, abs=0.01)
    assert (1 / r).mean().item() == pytest.approx(2 / math.sqrt(math.pi), rel=0.01)


def test_moments_of_the_scale_are_those_of_its_density():
    def moment(power: float) -> float:
        return integrate.quad(lambda x: 4 / math.sqrt(math.pi) * x ** (2 + power) * math.exp(-x * x), 0, np.inf)[0]

    assert moment(0) == pytest.approx(1)
    for power, value in ((2, SECOND_MOMENT), (4, 15 / 4), (-1, 2 / math.sqrt(math.pi)), (-2, 2.0)):
        assert moment(power) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_two_half_scales_multiply_to_one_scale(seed):
    rng = generator(seed)
    product = abs_dn_star((DRAWS,), 2, rng) * abs_dn_star((DRAWS,), 2, rng)
    assert distance(product, law_of_scale) < 0.005
    assert product.square().mean().item() == pytest.approx(1.5, abs=0.02)


def test_half_scale_has_the_law_of_the_root_of_the_transform():
    r = abs_dn_star((DRAWS,), 2, generator(2))
    for x in (0.3, 0.6, 0.9, 1.1, 1.3, 1.6, 1.9):
        assert (r < x).double().mean().item() == pytest.approx(law_of_half(x), abs=0.004)
    assert r.log().mean().item() == pytest.approx(special.digamma(1.5) / 4, abs=0.004)
    assert r.log().var().item() == pytest.approx(special.polygamma(1, 1.5) / 8, rel=0.02)


@pytest.mark.parametrize("terms", [10, 30])
def test_series_with_its_gaussian_rest_is_the_closed_form(terms):
    assert distance(series((DRAWS,), 1, generator(3), terms), law_of_scale) < 0.005


@pytest.mark.parametrize("m", [1, 2])
def test_the_gaussian_rest_has_the_mean_and_variance_of_the_terms_left_out(m):
    log = series((4 * DRAWS,), m, generator(8), 1).log()
    assert log.mean().item() == pytest.approx(special.digamma(1.5) / (2 * m), abs=0.0015)
    assert log.var().item() == pytest.approx(special.polygamma(1, 1.5) / (4 * m), rel=0.01)


@pytest.mark.parametrize("m", [1, 2])
def test_three_terms_and_the_gaussian_rest_are_enough_for_the_product(m):
    rng = generator(m)
    product = dn(1.0, (DRAWS,), 1, rng)
    for _ in range(m):
        product = product * series((DRAWS,), m, rng, 3)
    assert distance(product, stats.norm.cdf) < 0.005
    assert product.square().mean().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "m, values",
    [(1, (0.026, 0.110, 0.241, 1.088, 2.384, 3.62)), (2, (0.043, 0.164, 0.335, 1.071, 1.741, 2.21))],
)
def test_quantiles_are_those_of_the_exact_law_and_of_the_notes(m, values):
    law = law_of_scale if m == 1 else law_of_half
    exact = [optimize.brentq(lambda x, level=level: law(x) - level, 0.005, 5) for level in LEVELS]
    # The notes' values are of a sample, so the outermost levels rest on a handful of its draws.
    for value, quantile, level in zip(values, exact, LEVELS, strict=True):
        assert value == pytest.approx(quantile, rel=0.12 if level == LEVELS[0] else 0.03)
    draws = abs_dn_star((DRAWS,), m, generator(4)).quantile(torch.tensor(LEVELS[1:5], dtype=torch.float64))
    for measured, quantile in zip(draws.tolist(), exact[1:5], strict=True):
        assert measured == pytest.approx(quantile, rel=0.04)


def test_a_layer_has_an_under_noised_row_in_the_long_run():
    # Smallest of 64 rows in one round, and over 100 rounds, in the median.
    for rows, value in ((64, 0.24), (6400, 0.052)):
        r = abs_dn_star((300, rows), 1, generator(5))
        assert r.amin(1).median().item() == pytest.approx(value, rel=0.1)


@pytest.mark.parametrize("sigma", [1e-3, 1.0, 2.288])
def test_client_noise_is_uniform_and_bounded(sigma):
    eta, half = dn(sigma, (DRAWS,), 1, generator(6)), math.sqrt(2) * sigma
    assert distance(eta, stats.uniform(-half, 2 * half).cdf) < 0.005
    assert eta.abs().max().item() < half and bool((eta != 0).all())
    assert eta.var().item() == pytest.approx(2 / 3 * sigma**2, rel=0.01)


@pytest.mark.parametrize("sigma", [1.0, 2.288, math.sqrt(0.5), 1e-300])
def test_extreme_draws_stay_inside_and_mirror_each_other(monkeypatch, sigma):
    extremes = torch.tensor([0.0, 0.5 - 2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: extremes)
    low, minus, plus, high = dn(sigma, (4,), 1, generator()).tolist()
    assert -math.sqrt(2) * sigma < low < minus < 0 < plus < high < math.sqrt(2) * sigma
    assert low == -high and minus == -plus


def test_noise_of_sigma_zero_is_zero():
    for n in (1, 2, 3):
        assert torch.equal(dn(0.0, (5,), n, generator()), torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_gamma_draws_have_their_law(parts):
    assert distance(gamma((DRAWS,), parts, generator(parts)), stats.gamma(1 / parts).cdf) < 0.005


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(0, 2**31), st.lists(st.integers(0, 4), max_size=3))
def test_draws_are_float64_positive_and_the_generators_alone(m, seed, shape):
    torch.manual_seed(seed)
    first = abs_dn_star(tuple(shape), m, generator(seed)), dn(1.0, tuple(shape), m, generator(seed))
    torch.manual_seed(seed + 1)
    np.random.seed(seed % 1000)
    state = torch.get_rng_state()
    second = abs_dn_star(tuple(shape), m, generator(seed)), dn(1.0, tuple(shape), m, generator(seed))
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.dtype == torch.float64 and tuple(a.shape) == tuple(shape)
    assert bool((first[0] > 0).all()) and bool(torch.isfinite(first[0]).all())


def test_another_seed_gives_other_draws_and_a_generator_moves_on():
    for m in (1, 2, 3):
        rng = generator()
        first, second = abs_dn_star((8,), m, rng), abs_dn_star((8,), m, rng)
        assert not bool((first == second).any())
        assert not bool((first == abs_dn_star((8,), m, generator(1))).any())


def test_bad_numbers_are_refused_with_a_sentence():
    with pytest.raises(UsageError, match="m=0 factors"):
        abs_dn_star((2,), 0, generator())
    with pytest.raises(UsageError, match="n=0 factors"):
        dn(1.0, (2,), 0, generator())
    for sigma in (-1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="must be a finite number >= 0"):
            dn(sigma, (2,), 1, generator())
