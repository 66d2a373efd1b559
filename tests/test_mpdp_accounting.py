"""MP-DP's random laws and accounts: products are Gaussian, noise is as told, printed figures, independent oracles."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import secret, seeded
from scipy import integrate, special, stats

from ppbench.base.secret_draws import SecretDraws
from ppbench.defenses.mpdp.accounting import (
    calibrate,
    composed_epsilon,
    delta_given_scales,
    epsilon_of,
    exact_theta,
    pairwise_factor,
    theta_max,
    violations,
)
from ppbench.defenses.mpdp.expansion import SECOND_MOMENT, expanded, scale_alone, scale_of_two, uniform_noise
from ppbench.defenses.mpdp.model_perturbation import ModelPerturbation, ServerSecrets
from ppbench.defenses.mpdp.protocol import MPDP, MPDPH, MPDPNaive, n_out
from ppbench.defenses.pbpfl.perturbation import Surrogates
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Server
from ppbench.federation.plan import Local, Plan
from ppbench.federation.secagg import complete_graph
from ppbench.federation.wire import SERVER
from ppbench.nets.net import initial, net_spec

DRAWS = 200_000
PLAN = Plan(net_spec("mlp", (4,), 2, {"hidden": "3,3", "bias": False}), 4, Local("gradient"), loss="squared")
DELTA = 1e-5
EPSILONS = st.floats(1e-4, 50)
DELTAS = st.floats(1e-12, 0.9)
SIGMAS = st.floats(0.01, 100)
few = settings(max_examples=40)


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
    [(0.1, ".00044", ".062"), (0.5, ".01084", ".356"), (1, ".04244", ".749"), (3, ".35314", "2.42"),
     (5, ".91422", "4.16"), (10, "3.14586", "8.63")],
)  # fmt: skip
def test_theta_and_exact_epsilon_are_the_printed_ones(epsilon, theta, exact):
    value = theta_max(epsilon, DELTA)
    assert printed(value, theta) and printed(composed_epsilon(value, DELTA), exact)


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
@given(st.floats(1e-3, 100), st.floats(1e-10, 1e-2))
def test_exact_epsilon_solves_the_analytic_gaussian_mechanism(theta, delta):
    epsilon = composed_epsilon(theta, delta)
    assert epsilon < epsilon_of(theta, delta), "Eq. [23] is never below the exact"
    if epsilon > 0:
        # In float64 the reference itself cancels: two terms of a size around delta.
        assert gaussian_delta(theta, epsilon) == pytest.approx(delta, rel=1e-6)
    else:
        assert gaussian_delta(theta, 1e-12) <= delta


def test_composition_over_rounds():
    theta = theta_max(3, DELTA)
    assert printed(composed_epsilon(theta, DELTA, 10), "9.3")
    # The notes print 42.3; 60-digit arithmetic gives 42.2493.
    assert composed_epsilon(theta, DELTA, 100) == pytest.approx(42.2493, abs=1e-3)
    assert composed_epsilon(theta, DELTA, 0) == 0 == composed_epsilon(0.0, DELTA)
    assert composed_epsilon(math.inf, DELTA) == math.inf


# -- theta of a graph --------------------------------------------------------------------------------------------
@few
@given(st.integers(2, 40), SIGMAS, SIGMAS)
def test_theta_of_the_complete_graph_has_its_closed_form_below_theorem_10(clients, sigma_eta, sigma_delta):
    theta = exact_theta(complete_graph(clients), sigma_eta, sigma_delta)
    closed = 1 / (clients * sigma_eta**2) + (1 - 1 / clients) / (sigma_eta**2 + clients * sigma_delta**2)
    assert theta == pytest.approx(closed, rel=1e-9)
    assert theta <= theorem10(clients, sigma_eta, sigma_delta) * (1 + 1e-12)


def test_covariance_is_that_of_noise_drawn_from_the_laws():
    # A path of four clients; unconditional on R, whose own draw is fresh for every coordinate.
    edges, sigma_eta, sigma_delta, draws = [(0, 1), (1, 2), (2, 3)], 0.8, 1.3, 400_000
    rng = secret(7)
    r = scale_alone((draws,), rng)
    noise = [r * uniform_noise(sigma_eta, (draws,), rng) for _ in range(4)]
    adjacency = torch.zeros(4, 4, dtype=torch.bool)
    for k, v in edges:
        shared = r * uniform_noise(sigma_delta, (draws,), rng)
        noise[k], noise[v] = noise[k] + shared, noise[v] - shared
        adjacency[k, v] = adjacency[v, k] = True
    precision = torch.linalg.inv(torch.cov(torch.stack(noise)))
    assert float(precision.diagonal().max()) == pytest.approx(exact_theta(adjacency, sigma_eta, sigma_delta), rel=0.02)


def test_theta_at_the_ends():
    assert exact_theta(complete_graph(5), 0.7, 0.0) == pytest.approx(1 / 0.49)
    assert exact_theta(complete_graph(5), 0.0, 1.0) == math.inf
    # Very large pairwise noise leaves the sum: no rounding error of the Laplacian's zero is multiplied by it.
    assert exact_theta(complete_graph(50), 1.0, 1e9) == pytest.approx(1 / 50, rel=1e-9)


def test_theta_of_drawn_graphs_with_the_sigmas_of_the_complete_one():
    s, five = calibrate(3, DELTA, 100), calibrate(3, DELTA, 5)
    assert printed(exact_theta(complete_graph(5), five.eta, five.delta), ".3455")
    assert printed(exact_theta(complete_graph(100), s.eta, s.delta), ".353")
    drawn = {n: [exact_theta(n_out(100, n, seeded(i)), s.eta, s.delta) for i in range(40)] for n in (5, 20, 70)}
    for n, value in ((5, 0.958), (20, 0.443), (70, 0.359)):  # each was one draw
        assert min(drawn[n]) <= value <= max(drawn[n])
    # Five neighbors spend more than twice the theta of the complete graph, in each graph drawn.
    assert min(drawn[5]) > 2 * theta_max(3, DELTA) and max(drawn[70]) < 1.05 * theta_max(3, DELTA)


# -- calibration -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "clients, epsilon, eta, delta",
    [(5, 1, "2.288", "6.865"), (5, 3, ".793", "2.380"), (5, 5, ".493", "1.479"), (100, 1, ".512", "1.535"),
     (100, 3, ".177", ".532"), (100, 5, ".110", ".331")],
)  # fmt: skip
def test_sigmas_of_the_complete_graph_are_the_printed_ones(clients, epsilon, eta, delta):
    s = calibrate(epsilon, DELTA, clients)
    assert printed(s.eta, eta) and printed(s.delta, delta)
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
    assert all(exact_theta(n_out(100, 70, seeded(i)), s.eta, s.delta) < theorem11 for i in range(3))


def test_the_papers_settings_are_outside_its_theorem_and_get_the_complete_graphs_sigmas():
    formulas = ("K >= 81", "n <= K - 1", "n >= 4 ln(2K/(3 delta))", "n >= 6 ln(K/3)", "n >= 3/2 + (9/4) ln(2e/delta)")
    for clients, missed in ((5, (0, 1, 2, 4)), (100, (2, 3, 4))):
        failures = violations(clients, 5, DELTA / 3)
        assert all(f"needs {formulas[i]}" in one for i, one in zip(missed, failures, strict=True))
    s, whole = calibrate(3, DELTA, 100, "n_out", 5), calibrate(3, DELTA, 100)
    assert (s.eta, s.delta, s.violated) == (whole.eta, whole.delta, failures) and whole.violated == ()
    assert all(sentence.endswith("but K = 100 and n = 5") for sentence in failures)


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
    graph = n_out(clients, n, seeded(seed))
    assert graph.dtype == torch.bool and graph.shape == (clients, clients)
    assert torch.equal(graph, graph.T) and not bool(graph.diagonal().any())
    assert int(graph.sum(1).min()) >= n and int(graph.sum()) <= 2 * n * clients
    assert torch.equal(graph, n_out(clients, n, seeded(seed)))


def test_picks_are_uniform():
    graphs = torch.stack([n_out(8, 3, seeded(i)) for i in range(4000)]).double().mean(0)
    expected = 1 - (1 - 3 / 7) ** 2
    assert float((graphs[complete_graph(8)] - expected).abs().max()) < 0.035  # 4.5 standard deviations
    assert not torch.equal(n_out(8, 3, seeded(0)), n_out(8, 3, seeded(1)))
    assert torch.equal(complete_graph(4), n_out(4, 3, seeded())) and int(complete_graph(4).sum()) == 12


# -- what R gives away -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("epsilon, advantage", [(1, 0.0820), (3, 0.2336)])
def test_who_knows_the_scale_tells_a_shift_as_often_as_its_support_alone_does(epsilon, advantage):
    """By Monte Carlo over R and noise, at epsilon = 0 as at any other: the densities are equal or one of them is 0."""
    sigma, draws, rng = 1 / math.sqrt(theta_max(epsilon, DELTA)), 400_000, secret(11)
    scale = scale_alone((draws,), rng)
    half = math.sqrt(2) * sigma * scale
    noise = scale * uniform_noise(sigma, (draws,), rng)
    assert bool((noise.abs() <= half).all())
    caught = float(((noise - 1).abs() > half).double().mean())
    exact = delta_given_scales(sigma)
    assert caught == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / draws))
    assert exact == pytest.approx(gaussian_delta(sigma**-2, 0.0)) == pytest.approx(advantage, rel=0.01)


# -- the laws --------------------------------------------------------------------------------------------------------
def distance(draws: torch.Tensor, law) -> float:
    return float(stats.kstest(draws.flatten().numpy(), law).statistic)


def law_of_half(x: float) -> float:
    """Distribution function of |DN*(2)|, from the root of the Mellin transform (Gil-Pelaez on its logarithm)."""

    def integrand(t: float) -> float:
        transform = np.exp((special.loggamma((3 + 1j * t) / 2) - special.loggamma(1.5)) / 2)
        return (np.exp(-1j * t * math.log(x)) * transform).imag / t

    return 0.5 - integrate.quad(integrand, 0, 120, limit=500)[0] / math.pi


@pytest.mark.parametrize("m", [1, 2])
def test_products_are_gaussian(m):
    rng, sigma = secret(10 * m + 1), 1.7
    result = uniform_noise(sigma, (DRAWS,), rng)
    for draw in [scale_alone] if m == 1 else [scale_of_two] * 2:
        result = result * draw((DRAWS,), rng)
    assert distance(result, stats.norm(0, sigma).cdf) < 0.005
    assert result.square().mean().item() == pytest.approx(sigma**2, rel=0.02)
    assert (result**4).mean().item() == pytest.approx(3 * sigma**4, rel=0.06)


def test_noise_without_its_sign_or_with_the_wrong_law_is_seen_by_the_same_test():
    rng = secret()
    r, eta = scale_alone((DRAWS,), rng), uniform_noise(1.0, (DRAWS,), rng)
    assert distance(r * eta.abs(), stats.norm.cdf) == pytest.approx(0.5, abs=0.01)
    assert distance(scale_of_two((DRAWS,), rng) * eta, stats.norm.cdf) > 0.01


def test_scale_has_the_exact_law_and_its_moments():
    r = scale_alone((DRAWS,), secret(1))
    assert distance(r, lambda x: special.gammainc(1.5, x**2)) < 0.005  # the square is Gamma(3/2, 1)
    assert r.square().mean().item() == pytest.approx(SECOND_MOMENT, abs=0.01)
    assert (1 / r).mean().item() == pytest.approx(2 / math.sqrt(math.pi), rel=0.01)


def test_half_scale_has_the_law_of_the_root_of_the_transform():
    r = scale_of_two((DRAWS,), secret(2))
    for x in (0.3, 0.6, 0.9, 1.1, 1.3, 1.6, 1.9):
        assert (r < x).double().mean().item() == pytest.approx(law_of_half(x), abs=0.004)


@pytest.mark.parametrize("terms", [1, 30])
def test_the_gaussian_rest_has_the_mean_and_variance_of_the_terms_left_out(terms):
    log = scale_of_two((4 * DRAWS,), secret(8), terms).log()
    assert log.mean().item() == pytest.approx(special.digamma(1.5) / 4, abs=0.0015)
    assert log.var().item() == pytest.approx(special.polygamma(1, 1.5) / 8, rel=0.01)


@pytest.mark.parametrize("sigma", [0.0, 2.288, math.sqrt(0.5), 1e-300])
def test_extreme_draws_stay_inside_and_mirror_each_other(monkeypatch, sigma):
    extremes = torch.tensor([2.0**-53, 0.5 - 2.0**-53, 0.5 + 2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    monkeypatch.setattr(SecretDraws, "uniform", lambda *_: extremes)
    low, minus, plus, high = uniform_noise(sigma, (4,), secret()).tolist()
    if sigma:
        assert -math.sqrt(2) * sigma < low < minus < 0 < plus < high < math.sqrt(2) * sigma
    assert low == -high and minus == -plus


# -- as defenses use them ----------------------------------------------------------------------------------------
def recovered_noise(defense: ModelPerturbation, rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (one client's, the mean's) recovered noise [rounds, P], without that of pairs, fresh scales every round.

    A gradient of zero is uploaded, so that what is recovered is noise alone.
    """
    zero = {n: torch.zeros_like(v).double() for n, v in initial(PLAN.spec, 1).items()}
    nothing = Surrogates(zero, {n: v[None] for n, v in zero.items()}, zero)
    empty, ones, means, rng = torch.zeros(1, dtype=torch.float64), [], [], secret()
    alone = secagg.Keys(empty, empty, torch.zeros(4, 4, dtype=torch.bool), empty)
    for number in range(rounds):
        ctx = Context(PLAN, number, "real", SERVER, seeded(), rng)
        server = Server(zero, (), empty, ServerSecrets(defense.scales(ctx), empty, empty, torch.zeros(0, 0)))
        uploads = [defense.upload(replace(ctx, party=c), alone, nothing) for c in range(PLAN.clients)]
        for value, kept in ((uploads[0], ones), (defense.mean(uploads), means)):
            kept.append(torch.cat([v.flatten() for v in defense.recover(PLAN, server, value).values()]))
    return torch.stack(ones), torch.stack(means)


@pytest.mark.nightly
def test_recovered_noise_is_gaussian_coordinate_by_coordinate_and_its_mean_has_a_kth_of_the_variance():
    """U5 with 800 draws of R; Theorem 5 with K-S; S4: the mean's tails are heavier than a Gaussian's."""
    defense = MPDP(gamma="scalar", bound=1.5)
    std = 1.5 * defense.sigmas(PLAN).eta
    one, mean = recovered_noise(defense, 800)
    assert 0.95 < float(mean.square().mean()) * PLAN.clients / std**2 < 1.05
    for column in (0, 5, 14, 20, 22, 26):  # first layer, hidden layer, head
        assert stats.kstest(one[:, column].numpy(), "norm", args=(0, std)).pvalue > 1e-3
    assert 4.0 < float((mean**4).mean() / mean.square().mean() ** 2) < 5.2  # 5 - 2/K = 4.5, Gaussian 3
    assert float(one.square().mean()) == pytest.approx(std**2, rel=0.07)
    law = defense.noise(PLAN)
    assert law is not None and law.std**2 == pytest.approx(std**2 + 3 * (1.5 * defense.sigmas(PLAN).delta) ** 2)


@pytest.mark.nightly
def test_naive_noise_has_another_variance_in_every_layer():
    defense = MPDPNaive(gamma="scalar")
    one, mean = recovered_noise(defense, 1600)  # with 600 the second layer is off by a tenth for one seed in 20
    layers = [v / defense.sigma() ** 2 for v in one.square().split([12, 9, 6], dim=1)]
    # E r^2 = 7/4 and E r^-2 = 1 for U(.5, 2): rows, rows over columns, columns.
    for value, expected in zip(layers, (1.75, 1.75, 1.0), strict=True):
        assert float(value.mean()) == pytest.approx(expected, rel=0.1)
    assert float(mean.square().mean() / one.square().mean()) == pytest.approx(1 / PLAN.clients, rel=0.1)


@pytest.mark.nightly
def test_noise_of_the_hardened_variant_has_a_floor():
    ctx = Context(PLAN, 1, "real", SERVER, seeded(), secret())
    scales, free = (torch.cat([d.scales(ctx) for _ in range(200)]) for d in (MPDPH(floor=0.5), MPDP()))
    inverse = torch.from_numpy(expanded(PLAN.spec).laws.inverse).repeat(200)
    assert float(scales[~inverse].min()) == 0.5 and float(scales[inverse].max()) == 2.0
    assert float(free[~inverse].min()) < 0.4
