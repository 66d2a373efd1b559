"""The f-DP bound of one run: the published implementation's values, and its level on planted mechanisms."""

import math

import numpy as np
import pytest
from scipy import special

from ppbench.metrics.epsilon import (
    epsilon_bound,
    epsilon_gaussian,
    epsilon_lower,
    gaussian_tradeoff,
    gdp_epsilon,
    refutes,
)

PUBLISHED = [
    (1000, 200, 180, 1e-5, 2.8839111328125, 2.90679931640625),
    (1000, 100, 96, 1e-5, 3.5491943359375, 3.583526611328125),
    (240, 120, 100, 1e-5, 2.25677490234375, 2.271270751953125),
    (240, 120, 119, 1e-5, 6.329345703125, 6.433868408203125),
    (100, 50, 49, 1e-6, 5.24444580078125, 5.30853271484375),
    (1000, 500, 300, 1e-5, 0.438690185546875, 0.439453125),
]
"""m, r, v, delta, and what FDPAnalysisNode(m, v, r, delta=delta, target_noise=.05).run_analysis() gives, with epsilon
of the next smaller noise of its grid: it tries noises .01 apart. facebookresearch/PrivacyGuard (Apache 2.0), commit
fb9c26ca70f5de4a145a8d01a36cf0415851ccb9, privacy_guard/analysis/mia/fdp_analysis_node.py, by authors of the paper."""


@pytest.mark.parametrize(("m", "r", "v", "delta", "low", "high"), PUBLISHED)
def test_agrees_with_the_published_implementation_to_its_grid(m, r, v, delta, low, high):
    assert low - 1e-3 <= epsilon_gaussian(m, r, v, delta) <= high + 1e-3


@pytest.mark.parametrize(("m", "r", "v"), [(1000, 200, 180), (240, 120, 100), (240, 120, 75)])
def test_the_same_guesses_say_more_of_a_gaussian_mechanism(m, r, v):
    assert epsilon_gaussian(m, r, v) > 1.5 * epsilon_lower(m, r, v) > 0


@pytest.mark.parametrize(("mu", "delta"), [(0.5, 1e-5), (1.0, 1e-6), (3.0, 1e-2)])
def test_epsilon_of_a_gaussian_mechanism_is_where_the_curves_meet(mu, delta):
    """delta(epsilon) is the largest p - e^epsilon f(p): the least probability of an event whose likelier one is p."""
    epsilon = gdp_epsilon(mu, delta)
    p = special.ndtr(np.linspace(-9, 9, 200_001))
    result = float((p - math.exp(epsilon) * special.ndtr(special.ndtri(p) - mu)).max())
    assert result == pytest.approx(delta, rel=1e-3) and gdp_epsilon(0.0, delta) == 0


def test_guesses_by_chance_refute_nothing_and_bad_counts_are_refused():
    assert epsilon_gaussian(400, 200, 100) == 0 == epsilon_gaussian(400, 200, 0)
    for bad in ((10, 11, 5), (10, 5, 6), (10, 0, 0)):
        with pytest.raises(ValueError, match="out of range"):
            epsilon_gaussian(*bad)


def randomized_response(epsilon):
    """Return its trade-off function."""
    grow = math.exp(epsilon)
    return lambda p: max(0.0, p / grow, 1 - grow * (1 - p))


def test_level_on_randomized_response():
    """Right guesses are Binomial: the true epsilon is refuted in one run of twenty at most, a smaller one mostly."""
    epsilon, m, runs = 1.0, 200, 150
    right = np.random.default_rng(0).binomial(m, special.expit(epsilon), size=runs)
    assert np.mean([refutes(m, m, int(v), randomized_response(epsilon)) for v in right]) <= 0.1
    assert np.mean([refutes(m, m, int(v), randomized_response(0.4)) for v in right]) > 0.8


def test_level_on_a_gaussian_mechanism_with_guesses_on_the_surest():
    """Each coin is told with noise; the auditor guesses on half of them. Five in a hundred may err: sd 1.5 points."""
    mu, m, runs, rng = 1.0, 200, 200, np.random.default_rng(1)
    bounds = []
    for _ in range(runs):
        member = rng.random(m) < 0.5
        order = np.argsort(mu * member + rng.normal(size=m))
        guessed, decision = np.zeros(m, dtype=bool), np.zeros(m, dtype=bool)
        guessed[order[: m // 4]] = guessed[order[-(m // 4) :]] = decision[order[-(m // 4) :]] = True
        bounds.append(int((member == decision)[guessed].sum()))
    refuted = {v: refutes(m, m // 2, v, gaussian_tradeoff(mu)) for v in set(bounds)}
    assert np.mean([refuted[v] for v in bounds]) <= 0.1
    assert epsilon_gaussian(m, m // 2, int(np.median(bounds))) > 0.3 * gdp_epsilon(mu)


def test_figures_of_an_audit_say_which_bound_they_are():
    member = np.arange(100) % 2 == 0
    results = {g: epsilon_bound(member, member, np.ones(100, dtype=bool), 1e-5, g) for g in (False, True)}
    assert results[True].value > results[False].value and "Gaussian" in results[True].interval.method
    assert "Gaussian" not in results[False].interval.method
