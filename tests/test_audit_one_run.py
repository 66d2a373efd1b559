"""The one-run audit: the bound against the paper's formula by brute force, and the attack that feeds it."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppbench.metrics.audit import audited, epsilon_lower, p_value


def brute_p(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Theorem 5.2 by sums of exact binomial terms."""
    q = 1 / (1 + math.exp(-epsilon))
    pmf = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
    beta = sum(pmf[v:])
    alpha = max((sum(pmf[v - i : v]) / i for i in range(1, v + 1)), default=0.0)
    return min(1.0, beta + 2 * m * delta * alpha)


@given(st.data(), st.integers(1, 40), st.floats(0, 6), st.sampled_from([0.0, 1e-5, 1e-2]))
@settings(max_examples=80, deadline=None)
def test_p_value_is_the_papers(data: st.DataObject, r: int, epsilon: float, delta: float) -> None:
    v, extra = data.draw(st.integers(0, r)), data.draw(st.integers(0, 30))
    expected = brute_p(r + extra, r, v, epsilon, delta)
    assert p_value(r + extra, r, v, epsilon, delta) == pytest.approx(expected, rel=1e-9, abs=1e-14)


@given(st.integers(1, 60), st.data(), st.sampled_from([0.0, 1e-5, 1e-3]))
@settings(max_examples=60, deadline=None)
def test_the_bound_is_where_the_p_value_crosses(r: int, data: st.DataObject, delta: float) -> None:
    v = data.draw(st.integers(0, r))
    bound = epsilon_lower(r, r, v, delta)
    assert brute_p(r, r, v, bound + 1e-6, delta) >= 0.05
    if bound > 0:
        assert brute_p(r, r, v, bound - 1e-6, delta) < 0.05


def test_known_values() -> None:
    """All of r right, delta 0: e^eps / (1 + e^eps) = .05^(1/r). r = 100: 3.4930."""
    for r in (10, 100, 1000):
        q = 0.05 ** (1 / r)
        assert epsilon_lower(r, r, r, delta=0) == pytest.approx(math.log(q / (1 - q)), abs=1e-9)
    assert epsilon_lower(100, 100, 100, delta=0) == pytest.approx(3.4930, abs=1e-4)
    assert epsilon_lower(100, 100, 50) == 0
    assert epsilon_lower(100, 100, 0) == 0
    assert epsilon_lower(7, 0, 0) == 0


def test_the_bound_grows_with_hits_and_falls_with_delta_and_confidence() -> None:
    by_hits = [epsilon_lower(200, 100, v) for v in range(50, 101)]
    assert all(a <= b for a, b in pairwise(by_hits))
    assert by_hits[-1] > by_hits[20] > by_hits[0] == 0
    by_delta = [epsilon_lower(200, 100, 90, delta) for delta in (0, 1e-6, 1e-4, 1e-3, 1e-2)]
    assert all(a >= b for a, b in pairwise(by_delta))
    assert by_delta[0] > by_delta[-1]
    assert epsilon_lower(200, 100, 80, confidence=0.9) > epsilon_lower(200, 100, 80, confidence=0.99)


def test_randomized_response_is_bounded_below_its_epsilon_in_nineteen_of_twenty_runs() -> None:
    """The auditor of randomized response at epsilon 1 guesses what it was told: the bound must hold, and come near."""
    g, epsilon, m = np.random.default_rng(0), 1.0, 2000
    rate = 1 / (1 + math.exp(-epsilon))
    bounds = []
    for _ in range(200):
        member = g.random(m) < 0.5
        told = np.where(g.random(m) < rate, member, ~member)
        figure = audited(member, told, np.ones(m, dtype=bool), delta=0)
        bounds.append(figure.value)
    assert np.mean(np.array(bounds) > epsilon) < 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5
    assert 0.8 < float(np.median(bounds)) < 1.0


def test_only_guesses_count() -> None:
    member = np.arange(100) % 2 == 0
    guessed = np.arange(100) < 40
    decision = np.where(guessed, member, ~member)
    figure = audited(member, decision, guessed)
    assert figure.value == figure.interval.low == epsilon_lower(100, 40, 40)
    assert figure.interval.high is None
    assert "40 guesses" in figure.interval.method
    assert figure.n == 100
    nothing = audited(member, decision, np.zeros(100, dtype=bool))
    assert nothing.value is None
    assert nothing.reason == "the auditor guessed on no example"


@pytest.mark.parametrize("bad", [(5, 6, 1), (5, 5, 6), (5, 5, -1)])
def test_impossible_counts_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        epsilon_lower(*bad)
    with pytest.raises(ValueError, match="confidence"):
        epsilon_lower(5, 5, 5, confidence=1.0)
