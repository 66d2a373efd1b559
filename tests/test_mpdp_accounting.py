"""Accounting of MP-DP: printed figures, independent derivations, properties, client graphs, what R gives away."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from ppbench.defenses.mpdp.accounting import (
    calibrate,
    epsilon_of,
    exact_theta,
    gaussian_epsilon,
    pairwise_factor,
    theorem10_theta,
    theorem11_conditions,
    theorem11_theta,
    theta_max,
)
from ppbench.defenses.mpdp.known_scales import (
    delta_averaged,
    delta_given_R,
    hockey_stick_uniform,
    theta_cond,
)
from ppbench.defenses.mpdp.laws import abs_dn_star, dn
from ppbench.defenses.mpdp.protocol import complete, n_out

DELTA = 1e-5
EPSILONS = st.floats(1e-4, 50)
DELTAS = st.floats(1e-12, 0.9)
SIGMAS = st.floats(0.01, 100)


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
    assert printed(value, theta)
    assert printed(gaussian_epsilon(value, DELTA), exact)


@settings(deadline=None)
@given(EPSILONS, DELTAS)
def test_eq_23_is_inverted_and_both_its_inequalities_hold_with_equality_in_one(epsilon, delta):
    theta = theta_max(epsilon, delta)
    assert epsilon_of(theta, delta) == pytest.approx(epsilon, rel=1e-9)
    first = epsilon - theta / 2 - math.sqrt(theta)
    second = (epsilon - theta / 2) ** 2 - 2 * math.log(2 / (delta * math.sqrt(2 * math.pi))) * theta
    slack = 1e-9 * (1 + epsilon**2)
    assert first >= -slack and second >= -slack and min(first, second) <= slack


@settings(deadline=None)
@given(st.floats(1e-6, 100), st.floats(1.001, 5), DELTAS)
def test_epsilon_rises_with_theta_and_falls_with_delta_and_eq_23_is_never_below_the_exact(theta, factor, delta):
    for function in (epsilon_of, gaussian_epsilon):
        assert function(theta * factor, delta) >= function(theta, delta)
        assert function(theta, delta / factor) >= function(theta, delta)
    assert epsilon_of(theta * factor, delta) > epsilon_of(theta, delta) > gaussian_epsilon(theta, delta)


@settings(deadline=None)
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
@settings(deadline=None)
@given(st.integers(2, 40), SIGMAS, SIGMAS)
def test_theta_of_the_complete_graph_has_its_closed_form_below_theorem_10(clients, sigma_eta, sigma_delta):
    theta = exact_theta(complete(clients), sigma_eta, sigma_delta)
    closed = 1 / (clients * sigma_eta**2) + (1 - 1 / clients) / (sigma_eta**2 + clients * sigma_delta**2)
    assert theta == pytest.approx(closed, rel=1e-9)
    assert theta <= theorem10_theta(clients, sigma_eta, sigma_delta) * (1 + 1e-12)


def test_theta_of_five_clients_is_the_printed_one():
    s = calibrate(3, DELTA, 5)
    assert printed(exact_theta(complete(5), s.eta, s.delta), ".3455")
    assert printed(s.theta, ".3531") and s.theta == pytest.approx(theorem10_theta(5, s.eta, s.delta))


def test_covariance_is_that_of_noise_drawn_from_the_laws():
    # A path of four clients; unconditional on R, whose own draw is fresh for every coordinate.
    edges, sigma_eta, sigma_delta, draws = [(0, 1), (1, 2), (2, 3)], 0.8, 1.3, 400_000
    rng = generator(7)
    r = abs_dn_star((draws,), 1, rng)
    noise = [r * dn(sigma_eta, (draws,), 1, rng) for _ in range(4)]
    adjacency = torch.zeros(4, 4, dtype=torch.bool)
    for k, v in edges:
        shared = r * dn(sigma_delta, (draws,), 1, rng)
        noise[k], noise[v] = noise[k] + shared, noise[v] - shared
        adjacency = adjacency | torch.zeros(4, 4, dtype=torch.bool).index_put(
            (torch.tensor([k, v]), torch.tensor([v, k])), torch.tensor(True)
        )
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
    s = calibrate(3, DELTA, 100)
    assert printed(exact_theta(complete(100), s.eta, s.delta), ".353")
    drawn = {n: [exact_theta(n_out(100, n, generator(i)), s.eta, s.delta) for i in range(40)] for n in (5, 20, 70)}
    for n, value in ((5, 0.958), (20, 0.443), (70, 0.359)):  # each was one draw
        assert min(drawn[n]) <= value <= max(drawn[n])
    # Five neighbors spend more than twice the theta of the complete graph, in each graph drawn.
    assert all(theta > 2 * s.theta for theta in drawn[5])
    assert all(theta < 1.05 * s.theta for theta in drawn[70])
    assert printed(gaussian_epsilon(0.958, DELTA), "4.27")


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
    assert s.guarantee and s.conditions == ()
    assert epsilon_of(theorem10_theta(clients, s.eta, s.delta), DELTA) == pytest.approx(epsilon)


def test_the_printed_theorem_10_gives_other_noise_than_the_squares():
    theta = theta_max(1, DELTA)
    for clients, literal, squared in ((5, "4.713", "2.171"), (100, ".236", ".485")):
        assert printed(1 / (clients * theta), literal)
        assert printed(1 / math.sqrt(clients * theta), squared)


@pytest.mark.parametrize("n, pairwise", [(5, math.inf), (7, "6.55"), (20, "4.28"), (50, "3.77"), (70, "3.69")])
def test_pairwise_noise_of_the_n_out_graph(n, pairwise):
    sigma = math.sqrt(pairwise_factor(100, n) / (0.1 * theta_max(3, DELTA / 3)))
    assert sigma == pairwise if n == 5 else printed(sigma, pairwise)
    assert all(pairwise_factor(100, few) == math.inf for few in range(1, 7))


def test_n_out_inside_the_theorem_is_calibrated_at_a_third_of_delta():
    s = calibrate(3, DELTA, 100, "n_out", 70)
    assert printed(s.eta, ".185") and printed(s.delta, "3.69") and s.guarantee and s.conditions == ()
    assert theorem11_theta(100, 70, s.eta, s.delta) == pytest.approx(s.theta) == theta_max(3, DELTA / 3)
    graphs = [n_out(100, 70, generator(i)) for i in range(3)]
    assert all(exact_theta(graph, s.eta, s.delta) < s.theta for graph in graphs)


def test_the_papers_settings_are_outside_its_theorem():
    violated = {c.name for c in theorem11_conditions(5, 5, DELTA / 3) if not c.holds}
    assert violated == {"K >= 81", "n <= K - 1", "n >= 4 ln(2K/(3 delta))", "n >= 3/2 + (9/4) ln(2e/delta)"}
    violated = {c.name for c in theorem11_conditions(100, 5, DELTA / 3) if not c.holds}
    assert violated == {"n >= 4 ln(2K/(3 delta))", "n >= 6 ln(K/3)", "n >= 3/2 + (9/4) ln(2e/delta)"}


def test_what_the_theorem_does_not_cover_gets_the_complete_graphs_sigmas_and_no_guarantee():
    s, whole = calibrate(3, DELTA, 100, "n_out", 5), calibrate(3, DELTA, 100)
    assert (s.eta, s.delta, s.theta) == (whole.eta, whole.delta, whole.theta)
    assert not s.guarantee and len(s.conditions) == 3 and all("K = 100 and n = 5" in c for c in s.conditions)


@settings(deadline=None)
@given(EPSILONS, st.floats(1e-10, 1e-2), st.integers(2, 200), st.floats(0.05, 0.95), st.floats(1.01, 3))
def test_more_privacy_takes_more_noise_and_the_budget_is_spent_exactly(epsilon, delta, clients, frac, factor):
    s, looser = calibrate(epsilon, delta, clients, frac=frac), calibrate(epsilon * factor, delta, clients, frac=frac)
    assert looser.eta < s.eta and looser.delta < s.delta
    assert theorem10_theta(clients, s.eta, s.delta) == pytest.approx(s.theta)
    assert 1 / (clients * s.eta**2) == pytest.approx(frac * s.theta)


# -- the client graph --------------------------------------------------------------------------------------------
@settings(deadline=None)
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
    off = graphs[~torch.eye(8, dtype=torch.bool)]
    assert float((off - expected).abs().max()) < 0.035  # 4.5 standard deviations
    assert not torch.equal(n_out(8, 3, generator(0)), n_out(8, 3, generator(1)))


def test_complete_graph_and_the_largest_n():
    assert torch.equal(complete(4), n_out(4, 3, generator())) and int(complete(4).sum()) == 12


# -- what R gives away -------------------------------------------------------------------------------------------
def spread(d: int) -> torch.Tensor:
    return torch.full((d,), 1 / math.sqrt(d), dtype=torch.float64)


def sigma_of(epsilon: float) -> float:
    return 1 / math.sqrt(theta_max(epsilon, DELTA))


@pytest.mark.parametrize("epsilon, deltas", [(1, (".30", ".13", ".067", ".041")), (3, (".88", ".39", ".19", ".12"))])
def test_delta_of_one_coordinate_given_its_scale(epsilon, deltas):
    assert sigma_of(1) == pytest.approx(4.854, abs=1e-3) and sigma_of(3) == pytest.approx(1.683, abs=1e-3)
    values = delta_given_R(torch.ones(4, 1), sigma_of(epsilon), torch.tensor([0.24, 0.54, 1.09, 1.77])[:, None])
    for value, text in zip(values.tolist(), deltas, strict=True):
        assert value == pytest.approx(float(text), abs=10 ** -len(text[1:]))  # the printed R is rounded too


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_delta_of_uniforms_agrees_with_monte_carlo_at_every_epsilon(epsilon):
    sigma, draws = sigma_of(1), 200_000
    rng = generator(11)
    scale = abs_dn_star((10,), 1, rng)
    shift = torch.randn(10, generator=rng, dtype=torch.float64)
    shift = shift / shift.norm()
    half = math.sqrt(2) * sigma * scale
    noise = scale * dn(sigma, (draws, 10), 1, rng)
    assert bool((noise.abs() <= half).all())
    # Density ratio of the law at 0 to the shifted law: 1 inside both supports, infinite off the shifted one.
    loss = torch.where(((noise - shift).abs() <= half).all(1), 0.0, math.inf)
    measured = float((1 - torch.exp(epsilon - loss)).clamp(min=0).mean())
    exact = float(delta_given_R(shift, sigma, scale))
    assert measured == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / draws))


@pytest.mark.parametrize("epsilon", [1, 3])
def test_mean_delta_over_the_scales_is_its_closed_form(epsilon):
    sigma, rng = sigma_of(epsilon), generator(12)
    for d in (1, 10, 100):
        draws = delta_given_R(spread(d), sigma, abs_dn_star((20_000, d), 1, rng))
        error = 4 * float(draws.std()) / math.sqrt(len(draws))
        assert float(draws.mean()) == pytest.approx(delta_averaged(spread(d), sigma), abs=error)
    one = delta_averaged(spread(1), sigma)
    assert one == pytest.approx(gaussian_delta(sigma**-2, 0.0))


@pytest.mark.parametrize(
    "epsilon, row", [(1, (0.048, 0.28, 0.55, 0.93, 0.9997, 1.0)), (3, (0.13, 0.57, 0.92, 0.9995, 1.0, 1.0))]
)
def test_delta_of_a_unit_shift_spread_over_many_coordinates(epsilon, row):
    # The notes' row is one draw of R: exact for many coordinates, and within the spread of draws for few.
    sigma = sigma_of(epsilon)
    for d, value in zip((1, 10, 100, 1000, 10_000, 268_346), row, strict=True):
        mean = delta_averaged(spread(d), sigma)
        if d >= 1000:
            assert mean == pytest.approx(value, abs=0.005)
            continue
        draws = delta_given_R(spread(d), sigma, abs_dn_star((2000, d), 1, generator(d)))
        assert float(draws.quantile(0.01)) < value < float(draws.quantile(0.99))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.01, 5)), min_size=1, max_size=6), st.floats(1, 3))
def test_delta_of_uniforms_rises_with_the_shift_and_falls_with_the_width(pairs, factor):
    shift, half = torch.tensor(pairs, dtype=torch.float64).T
    delta = float(hockey_stick_uniform(shift, half))
    assert 0 <= delta <= 1
    assert float(hockey_stick_uniform(factor * shift, half)) >= delta - 1e-12
    assert float(hockey_stick_uniform(shift, factor * half)) <= delta + 1e-12
    assert delta >= float(hockey_stick_uniform(shift[:1], half[:1])) - 1e-12
    direct = 1 - math.prod(1 - min(1.0, abs(t) / (2 * a)) for t, a in pairs)
    assert delta == pytest.approx(direct, abs=1e-12)


def test_no_noise_hides_nothing_and_no_shift_needs_no_hiding():
    zero, one = torch.zeros(1), torch.ones(1)
    assert float(hockey_stick_uniform(one, zero)) == 1 and float(hockey_stick_uniform(zero, zero)) == 0


def test_conditional_theta_is_at_the_smallest_scale_and_three_times_the_gaussian_one_in_the_mean():
    scale = abs_dn_star((64, 3), 1, generator(14))
    worst = theta_cond(scale, 5, 0.8, 2.0)
    shift = torch.randn(1000, 64, 3, generator=generator(15), dtype=torch.float64)
    shift = 2 * shift / shift.flatten(1).norm(dim=1)[:, None, None]
    ratio = (shift.square() / (5 * 0.8**2 * 2 / 3 * scale**2)).sum((1, 2))
    assert float(ratio.max()) <= worst
    lowest = torch.where(scale == scale.min(), 2.0, 0.0)
    assert float((lowest.square() / (5 * 0.8**2 * 2 / 3 * scale**2)).sum()) == pytest.approx(worst)
    # A grid of quantiles, because 1/R^4 has no mean and a sample mean of 1/R^2 settles slowly.
    levels = (torch.arange(8000, dtype=torch.float64) + 0.5) / 8000
    quantiles = torch.as_tensor(special.gammaincinv(1.5, levels.numpy())).sqrt()
    mean = sum(theta_cond(r, 5, 0.8) for r in quantiles.split(1)) / 8000
    assert mean == pytest.approx(3 / (5 * 0.8**2), rel=0.04)  # the quadrature is 2.4 % low


@pytest.mark.parametrize("clients, kurtosis, distance", [(5, 4.6, 0.040), (100, 5.0, 0.044)])
def test_aggregate_noise_is_not_gaussian_because_all_clients_share_the_scale(clients, kurtosis, distance):
    assert 5 - 2 / clients == pytest.approx(kurtosis, abs=0.05)
    draws, rng = 100_000, generator(16)
    mean = torch.zeros(2, draws, dtype=torch.float64)
    for _ in range(clients):
        mean = mean + dn(1.0, (2, draws), 1, rng) / math.sqrt(clients)
    noise = abs_dn_star((draws,), 1, rng) * mean
    assert float(noise.square().mean()) == pytest.approx(1, abs=0.02)
    assert float((noise**4).mean() / noise.square().mean() ** 2) == pytest.approx(5 - 2 / clients, rel=0.06)
    assert stats.kstest(noise[0].numpy(), stats.norm.cdf).statistic == pytest.approx(distance, abs=0.006)
    # Two weights of one row: their noise is uncorrelated, its size is not.
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.02
    assert 0.17 < float(torch.corrcoef(noise.abs())[0, 1]) < 0.23
