"""Accounting of MP-DP: printed figures, independent derivations, properties, client graphs, what R gives away."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ppbench.defenses.mpdp.accounting import (
    calibrate,
    delta_given_scales,
    epsilon_of,
    exact_theta,
    gaussian_epsilon,
    pairwise_factor,
    theta_max,
    violations,
)
from ppbench.defenses.mpdp.laws import scale_alone, uniform_noise
from ppbench.defenses.mpdp.protocol import n_out
from ppbench.federation.secagg import complete

DELTA = 1e-5
EPSILONS = st.floats(1e-4, 50)
DELTAS = st.floats(1e-12, 0.9)
SIGMAS = st.floats(0.01, 100)
few = settings(deadline=None, max_examples=40)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def printed(value: float, text: str) -> bool:
    """Whether a value is what was printed: within half a unit of the last digit."""
    digits = len(text.partition(".")[2])
    return abs(value - float(text)) <= 0.5 * 10**-digits * (1 + 1e-9)


def gaussian_delta(theta: float, epsilon: float) -> float:
    """Balle and Wang 2018, Theorem 8, at squared signal-to-noise ratio theta."""
    mu = math.sqrt(theta)
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)


def theorem10(clients: int, sigma_eta: float, sigma_delta: float) -> float:
    return (sigma_eta**-2 + sigma_delta**-2) / clients


# -- Eq. [23] and the exact Gaussian -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "epsilon, theta, exact",
    [
        (0.1, ".00044", ".062"),
        (0.5, ".01084", ".356"),
        (1, ".04244", ".749"),
        (3, ".35314", "2.42"),
        (5, ".91422", "4.16"),
        (10, "3.14586", "8.63"),
    ],
)
def test_theta_and_exact_epsilon_are_the_printed_ones(epsilon, theta, exact):
    value = theta_max(epsilon, DELTA)
    assert printed(value, theta) and printed(gaussian_epsilon(value, DELTA), exact)


@few
@given(EPSILONS, DELTAS)
def test_eq_23_is_inverted_and_both_its_inequalities_hold_with_equality_in_one(epsilon, delta):
    theta = theta_max(epsilon, delta)
    assert epsilon_of(theta, delta) == pytest.approx(epsilon, rel=1e-9)
    first = epsilon - theta / 2 - math.sqrt(theta)
    second = (epsilon - theta / 2) ** 2 - 2 * math.log(2 / (delta * math.sqrt(2 * math.pi))) * theta
    slack = 1e-9 * (1 + epsilon**2)
    assert first >= -slack and second >= -slack and min(first, second) <= slack


@few
@given(st.floats(1e-6, 100), st.floats(1.001, 5), DELTAS)
def test_epsilon_rises_with_theta_and_falls_with_delta_and_eq_23_is_never_below_the_exact(theta, factor, delta):
    for function in (epsilon_of, gaussian_epsilon):
        assert function(theta * factor, delta) >= function(theta, delta)
        assert function(theta, delta / factor) >= function(theta, delta)
    assert epsilon_of(theta * factor, delta) > epsilon_of(theta, delta) > gaussian_epsilon(theta, delta)


@few
@given(st.floats(1e-3, 100), st.floats(1e-10, 1e-2))
def test_exact_epsilon_solves_the_analytic_gaussian_mechanism(theta, delta):
    epsilon = gaussian_epsilon(theta, delta)
    if epsilon > 0:
        # In float64 the reference itself cancels: two terms of a size around delta.
        assert gaussian_delta(theta, epsilon) == pytest.approx(delta, rel=1e-6)
    else:
        assert gaussian_delta(theta, 1e-12) <= delta


def test_composition_over_rounds():
    theta = theta_max(3, DELTA)
    assert printed(gaussian_epsilon(theta, DELTA, 10), "9.3")
    # The notes print 42.3; 60-digit arithmetic gives 42.2493.
    assert gaussian_epsilon(theta, DELTA, 100) == pytest.approx(42.2493, abs=1e-3)
    assert gaussian_epsilon(theta, DELTA, 0) == 0 == gaussian_epsilon(0.0, DELTA)
    assert gaussian_epsilon(math.inf, DELTA) == math.inf


# -- theta of a graph --------------------------------------------------------------------------------------------
@few
@given(st.integers(2, 40), SIGMAS, SIGMAS)
def test_theta_of_the_complete_graph_has_its_closed_form_below_theorem_10(clients, sigma_eta, sigma_delta):
    theta = exact_theta(complete(clients), sigma_eta, sigma_delta)
    closed = 1 / (clients * sigma_eta**2) + (1 - 1 / clients) / (sigma_eta**2 + clients * sigma_delta**2)
    assert theta == pytest.approx(closed, rel=1e-9)
    assert theta <= theorem10(clients, sigma_eta, sigma_delta) * (1 + 1e-12)


def test_covariance_is_that_of_noise_drawn_from_the_laws():
    # A path of four clients; unconditional on R, whose own draw is fresh for every coordinate.
    edges, sigma_eta, sigma_delta, draws = [(0, 1), (1, 2), (2, 3)], 0.8, 1.3, 400_000
    rng = generator(7)
    r = scale_alone((draws,), rng)
    noise = [r * uniform_noise(sigma_eta, (draws,), rng) for _ in range(4)]
    adjacency = torch.zeros(4, 4, dtype=torch.bool)
    for k, v in edges:
        shared = r * uniform_noise(sigma_delta, (draws,), rng)
        noise[k], noise[v] = noise[k] + shared, noise[v] - shared
        adjacency[k, v] = adjacency[v, k] = True
    precision = torch.linalg.inv(torch.cov(torch.stack(noise)))
    assert float(precision.diagonal().max()) == pytest.approx(exact_theta(adjacency, sigma_eta, sigma_delta), rel=0.02)


@settings(deadline=None, max_examples=30)
@given(st.integers(3, 15), st.integers(0, 1000), SIGMAS, SIGMAS, st.data())
def test_more_edges_never_raise_theta(clients, seed, sigma_eta, sigma_delta, data):
    n = data.draw(st.integers(1, clients - 1))
    graph = n_out(clients, n, generator(seed))
    theta = exact_theta(graph, sigma_eta, sigma_delta)
    more = graph | n_out(clients, n, generator(seed + 1))
    assert exact_theta(more, sigma_eta, sigma_delta) <= theta * (1 + 1e-9)
    assert 1 / (clients * sigma_eta**2) <= theta * (1 + 1e-9) and theta <= (1 + 1e-9) / sigma_eta**2


def test_theta_at_the_ends():
    assert exact_theta(complete(5), 0.7, 0.0) == pytest.approx(1 / 0.49)
    assert exact_theta(complete(5), 0.0, 1.0) == math.inf
    # Very large pairwise noise leaves the sum: no rounding error of the Laplacian's zero is multiplied by it.
    assert exact_theta(complete(50), 1.0, 1e9) == pytest.approx(1 / 50, rel=1e-9)


def test_theta_of_drawn_graphs_with_the_sigmas_of_the_complete_one():
    s, five = calibrate(3, DELTA, 100), calibrate(3, DELTA, 5)
    assert printed(exact_theta(complete(5), five.eta, five.delta), ".3455")
    assert printed(exact_theta(complete(100), s.eta, s.delta), ".353")
    drawn = {n: [exact_theta(n_out(100, n, generator(i)), s.eta, s.delta) for i in range(40)] for n in (5, 20, 70)}
    for n, value in ((5, 0.958), (20, 0.443), (70, 0.359)):  # each was one draw
        assert min(drawn[n]) <= value <= max(drawn[n])
    # Five neighbors spend more than twice the theta of the complete graph, in each graph drawn.
    assert min(drawn[5]) > 2 * theta_max(3, DELTA) and max(drawn[70]) < 1.05 * theta_max(3, DELTA)


# -- calibration -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "clients, epsilon, eta, delta, std, norm",
    [
        (5, 1, "2.288", "6.865", "1.023", "530"),
        (5, 3, ".793", "2.380", ".355", "184"),
        (5, 5, ".493", "1.479", ".220", "114"),  # the notes print .221; it is .22049
        (100, 1, ".512", "1.535", ".0512", "26.5"),
        (100, 3, ".177", ".532", ".0177", "9.2"),
        (100, 5, ".110", ".331", ".0110", "5.7"),
    ],
)
def test_sigmas_of_the_complete_graph_are_the_printed_ones(clients, epsilon, eta, delta, std, norm):
    s = calibrate(epsilon, DELTA, clients)
    assert printed(s.eta, eta) and printed(s.delta, delta)
    assert printed(s.eta / math.sqrt(clients), std)
    assert printed(s.eta / math.sqrt(clients) * math.sqrt(268_346), norm)
    assert s.violated == ()
    assert epsilon_of(theorem10(clients, s.eta, s.delta), DELTA) == pytest.approx(epsilon)


@pytest.mark.parametrize("n, pairwise", [(5, math.inf), (7, "6.55"), (20, "4.28"), (50, "3.77"), (70, "3.69")])
def test_pairwise_noise_of_the_n_out_graph(n, pairwise):
    sigma = math.sqrt(pairwise_factor(100, n) / (0.1 * theta_max(3, DELTA / 3)))
    assert sigma == pairwise if n == 5 else printed(sigma, pairwise)
    assert all(pairwise_factor(100, below) == math.inf for below in range(1, 7))


def test_n_out_inside_the_theorem_is_calibrated_at_a_third_of_delta():
    s = calibrate(3, DELTA, 100, "n_out", 70)
    assert printed(s.eta, ".185") and printed(s.delta, "3.69") and s.violated == ()
    theorem11 = 1 / (100 * s.eta**2) + pairwise_factor(100, 70) / s.delta**2
    assert theorem11 == pytest.approx(theta_max(3, DELTA / 3))
    assert all(exact_theta(n_out(100, 70, generator(i)), s.eta, s.delta) < theorem11 for i in range(3))


def test_the_papers_settings_are_outside_its_theorem_and_get_the_complete_graphs_sigmas():
    formulas = ("K >= 81", "n <= K - 1", "n >= 4 ln(2K/(3 delta))", "n >= 6 ln(K/3)", "n >= 3/2 + (9/4) ln(2e/delta)")
    for clients, missed in ((5, (0, 1, 2, 4)), (100, (2, 3, 4))):
        found = violations(clients, 5, DELTA / 3)
        assert all(f"needs {formulas[i]}" in one for i, one in zip(missed, found, strict=True))
    s, whole = calibrate(3, DELTA, 100, "n_out", 5), calibrate(3, DELTA, 100)
    assert (s.eta, s.delta, s.violated) == (whole.eta, whole.delta, found) and whole.violated == ()
    assert all(sentence.endswith("but K = 100 and n = 5") for sentence in found)


@few
@given(EPSILONS, st.floats(1e-10, 1e-2), st.integers(2, 200), st.floats(0.05, 0.95), st.floats(1.01, 3))
def test_more_privacy_takes_more_noise_and_the_budget_is_spent_exactly(epsilon, delta, clients, frac, factor):
    s, looser = calibrate(epsilon, delta, clients, frac=frac), calibrate(epsilon * factor, delta, clients, frac=frac)
    assert looser.eta < s.eta and looser.delta < s.delta
    assert theorem10(clients, s.eta, s.delta) == pytest.approx(theta_max(epsilon, delta))
    assert 1 / (clients * s.eta**2) == pytest.approx(frac * theta_max(epsilon, delta))


# -- the client graph --------------------------------------------------------------------------------------------
@few
@given(st.integers(2, 40), st.data())
def test_n_out_graphs_are_symmetric_without_loops_and_of_degree_n_or_more(clients, data):
    n, seed = data.draw(st.integers(1, clients - 1)), data.draw(st.integers(0, 10_000))
    graph = n_out(clients, n, generator(seed))
    assert graph.dtype == torch.bool and graph.shape == (clients, clients)
    assert torch.equal(graph, graph.T) and not bool(graph.diagonal().any())
    assert int(graph.sum(1).min()) >= n and int(graph.sum()) <= 2 * n * clients
    assert torch.equal(graph, n_out(clients, n, generator(seed)))


def test_picks_are_uniform():
    graphs = torch.stack([n_out(8, 3, generator(i)) for i in range(4000)]).double().mean(0)
    expected = 1 - (1 - 3 / 7) ** 2
    assert float((graphs[complete(8)] - expected).abs().max()) < 0.035  # 4.5 standard deviations
    assert not torch.equal(n_out(8, 3, generator(0)), n_out(8, 3, generator(1)))
    assert torch.equal(complete(4), n_out(4, 3, generator())) and int(complete(4).sum()) == 12


# -- what R gives away -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("epsilon, told", [(1, 0.0820), (3, 0.2336)])
def test_who_knows_the_scale_tells_a_shift_as_often_as_its_support_alone_does(epsilon, told):
    """By Monte Carlo over R and noise, at epsilon = 0 as at any other: the densities are equal or one of them is 0."""
    sigma, draws, rng = 1 / math.sqrt(theta_max(epsilon, DELTA)), 400_000, generator(11)
    scale = scale_alone((draws,), rng)
    half = math.sqrt(2) * sigma * scale
    noise = scale * uniform_noise(sigma, (draws,), rng)
    assert bool((noise.abs() <= half).all())
    caught = float(((noise - 1).abs() > half).double().mean())
    exact = delta_given_scales(sigma)
    assert caught == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / draws))
    assert exact == pytest.approx(gaussian_delta(sigma**-2, 0.0)) == pytest.approx(told, rel=0.01)


@pytest.mark.parametrize("clients, kurtosis, distance", [(5, 4.6, 0.040), (100, 5.0, 0.044)])
def test_aggregate_noise_is_not_gaussian_because_all_clients_share_the_scale(clients, kurtosis, distance):
    assert 5 - 2 / clients == pytest.approx(kurtosis, abs=0.05)
    draws, rng = 100_000, generator(16)
    mean = torch.zeros(2, draws, dtype=torch.float64)
    for _ in range(clients):
        mean = mean + uniform_noise(1.0, (2, draws), rng) / math.sqrt(clients)
    noise = scale_alone((draws,), rng) * mean
    assert float(noise.square().mean()) == pytest.approx(1, abs=0.02)
    assert float((noise**4).mean() / noise.square().mean() ** 2) == pytest.approx(5 - 2 / clients, rel=0.06)
    assert stats.kstest(noise[0].numpy(), stats.norm.cdf).statistic == pytest.approx(distance, abs=0.006)
    # Two weights of one row: their noise is uncorrelated, its size is not.
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.02
    assert 0.17 < float(torch.corrcoef(noise.abs())[0, 1]) < 0.23
