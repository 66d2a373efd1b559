"""The random laws of MP-DP: products are Gaussian, the series has the exact law, and so has noise that is recovered."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats

from ppbench.defenses.mpdp.baselines import MPDPNaive
from ppbench.defenses.mpdp.expansion import expanded
from ppbench.defenses.mpdp.hardened import MPDPH
from ppbench.defenses.mpdp.laws import SECOND_MOMENT, scale_alone, scale_of_two, uniform_noise
from ppbench.defenses.mpdp.model_perturbation import ModelPerturbation, Secrets
from ppbench.defenses.mpdp.protocol import MPDP
from ppbench.defenses.pbpfl.perturbation import Surrogates
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Server
from ppbench.federation.plan import Local, Plan
from ppbench.federation.wire import SERVER
from ppbench.nets.net import initial, net_spec

DRAWS = 200_000
LEVELS = (0.001, 0.01, 0.5, 0.99)
PLAN = Plan(net_spec("mlp", (4,), 2, {"hidden": "3,3", "bias": False}), 4, Local("gradient"), loss="squared")


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


def product(m: int, rng: torch.Generator, sigma: float) -> torch.Tensor:
    found = uniform_noise(sigma, (DRAWS,), rng)
    if m == 1:
        return found * scale_alone((DRAWS,), rng)
    return found * scale_of_two((DRAWS,), rng) * scale_of_two((DRAWS,), rng)


@pytest.mark.parametrize("m", [1, 2])
def test_products_are_gaussian(m):
    found, sigma = product(m, generator(10 * m + 1), 1.7), 1.7
    assert distance(found, stats.norm(0, sigma).cdf) < 0.005
    assert found.square().mean().item() == pytest.approx(sigma**2, rel=0.02)
    assert (found**4).mean().item() == pytest.approx(3 * sigma**4, rel=0.06)


def test_noise_without_its_sign_or_with_the_wrong_law_is_seen_by_the_same_test():
    rng = generator()
    r, eta = scale_alone((DRAWS,), rng), uniform_noise(1.0, (DRAWS,), rng)
    assert distance(r * eta.abs(), stats.norm.cdf) == pytest.approx(0.5, abs=0.01)
    assert distance(scale_of_two((DRAWS,), rng) * eta, stats.norm.cdf) > 0.01


def test_scale_has_the_exact_law_and_its_moments():
    r = scale_alone((DRAWS,), generator(1))
    assert distance(r, law_of_scale) < 0.005
    assert r.square().mean().item() == pytest.approx(SECOND_MOMENT, abs=0.01)
    assert (1 / r).mean().item() == pytest.approx(2 / math.sqrt(math.pi), rel=0.01)


@pytest.mark.parametrize("seed", range(2))
def test_two_half_scales_multiply_to_one_scale(seed):
    rng = generator(seed)
    found = scale_of_two((DRAWS,), rng) * scale_of_two((DRAWS,), rng)
    assert distance(found, law_of_scale) < 0.005
    assert found.square().mean().item() == pytest.approx(1.5, abs=0.02)


def test_half_scale_has_the_law_of_the_root_of_the_transform():
    r = scale_of_two((DRAWS,), generator(2))
    for x in (0.3, 0.6, 0.9, 1.1, 1.3, 1.6, 1.9):
        assert (r < x).double().mean().item() == pytest.approx(law_of_half(x), abs=0.004)


@pytest.mark.parametrize("terms", [1, 30])
def test_the_gaussian_rest_has_the_mean_and_variance_of_the_terms_left_out(terms):
    log = scale_of_two((4 * DRAWS,), generator(8), terms).log()
    assert log.mean().item() == pytest.approx(special.digamma(1.5) / 4, abs=0.0015)
    assert log.var().item() == pytest.approx(special.polygamma(1, 1.5) / 8, rel=0.01)


@pytest.mark.parametrize(("m", "values"), [(1, (0.110, 0.241, 1.088, 2.384)), (2, (0.164, 0.335, 1.071, 1.741))])
def test_quantiles_are_those_of_the_exact_law_and_of_the_notes(m, values):
    law = law_of_scale if m == 1 else law_of_half
    exact = [optimize.brentq(lambda x, level=level: law(x) - level, 0.005, 5) for level in LEVELS]
    assert values == pytest.approx(exact, rel=0.03)
    draws = (scale_alone if m == 1 else scale_of_two)((DRAWS,), generator(4))
    assert draws.quantile(torch.tensor(LEVELS, dtype=torch.float64)).tolist() == pytest.approx(exact, rel=0.04)


@pytest.mark.parametrize("sigma", [1e-3, 2.288])
def test_client_noise_is_uniform_and_bounded(sigma):
    eta, half = uniform_noise(sigma, (DRAWS,), generator(6)), math.sqrt(2) * sigma
    assert distance(eta, stats.uniform(-half, 2 * half).cdf) < 0.005
    assert eta.abs().max().item() < half and bool((eta != 0).all())
    assert eta.var().item() == pytest.approx(2 / 3 * sigma**2, rel=0.01)


@pytest.mark.parametrize("sigma", [0.0, 2.288, math.sqrt(0.5), 1e-300])
def test_extreme_draws_stay_inside_and_mirror_each_other(monkeypatch, sigma):
    extremes = torch.tensor([0.0, 0.5 - 2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: extremes)
    low, minus, plus, high = uniform_noise(sigma, (4,), generator()).tolist()
    if sigma:
        assert -math.sqrt(2) * sigma < low < minus < 0 < plus < high < math.sqrt(2) * sigma
    assert low == -high and minus == -plus


@pytest.mark.parametrize("draw", [scale_alone, scale_of_two, lambda shape, rng: uniform_noise(1.0, shape, rng)])
def test_draws_are_float64_and_the_generators_alone(draw):
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        state, rng = torch.get_rng_state(), generator(5)
        found.append(draw((2, 4), rng))
        assert torch.equal(torch.get_rng_state(), state)
        assert not bool((found[-1] == draw((2, 4), rng)).any()), "a generator moves on"
    assert torch.equal(*found) and found[0].dtype == torch.float64 and bool(found[0].isfinite().all())
    assert not bool((found[0] == draw((2, 4), generator(6))).any())


# -- as defenses use them ----------------------------------------------------------------------------------------
def recovered_noise(defense: ModelPerturbation, rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (one client's, the mean's) recovered noise [rounds, P], without that of pairs, fresh scales every round.

    A gradient of zero is uploaded, so that what is recovered is noise alone.
    """
    zero = {n: torch.zeros_like(v).double() for n, v in initial(PLAN.spec, 1).items()}
    nothing = Surrogates(zero, {n: v[None] for n, v in zero.items()}, zero)
    empty, ones, means, rng = torch.zeros(1, dtype=torch.float64), [], [], generator()
    alone = secagg.Keys(empty, empty, torch.zeros(4, 4, dtype=torch.bool), empty)
    for number in range(rounds):
        ctx = Context(PLAN, number, "real", SERVER, rng)
        server = Server(zero, (), empty, Secrets(defense.scales(ctx), empty, empty, torch.zeros(0, 0)))
        uploads = [defense.upload(replace(ctx, party=c), alone, nothing) for c in range(PLAN.clients)]
        for found, kept in ((uploads[0], ones), (defense.mean(uploads), means)):
            kept.append(torch.cat([v.flatten() for v in defense.recover(PLAN, server, found).values()]))
    return torch.stack(ones), torch.stack(means)


def test_recovered_noise_is_gaussian_coordinate_by_coordinate_and_its_mean_has_a_kth_of_the_variance():
    """U5 with 2,000 draws of R; Theorem 5 with K-S; S4: the mean's tails are heavier than a Gaussian's."""
    defense = MPDP(gamma="scalar", bound=1.5)
    std = 1.5 * defense.sigmas(PLAN).eta
    one, mean = recovered_noise(defense, 2000)
    assert 0.95 < float(mean.square().mean()) * PLAN.clients / std**2 < 1.05
    for column in (0, 5, 14, 20, 22, 26):  # first layer, hidden layer, head
        assert stats.kstest(one[:, column].numpy(), "norm", args=(0, std)).pvalue > 1e-3
    assert 4.0 < float((mean**4).mean() / mean.square().mean() ** 2) < 5.2  # 5 - 2/K = 4.5, Gaussian 3
    assert float(one.square().mean()) == pytest.approx(std**2, rel=0.07)
    law = defense.noise(PLAN)
    assert law is not None and law.std**2 == pytest.approx(std**2 + 3 * (1.5 * defense.sigmas(PLAN).delta) ** 2)


def test_naive_noise_has_another_variance_in_every_layer():
    defense = MPDPNaive(gamma="scalar")
    one, mean = recovered_noise(defense, 1000)
    layers = [v / defense.sigma() ** 2 for v in one.square().split([12, 9, 6], dim=1)]
    # E r^2 = 7/4 and E r^-2 = 1 for U(.5, 2): rows, rows over columns, columns.
    for found, expected in zip(layers, (1.75, 1.75, 1.0), strict=True):
        assert float(found.mean()) == pytest.approx(expected, rel=0.1)
    assert float(mean.square().mean() / one.square().mean()) == pytest.approx(1 / PLAN.clients, rel=0.1)


def test_noise_of_the_hardened_variant_has_a_floor():
    ctx = Context(PLAN, 1, "real", SERVER, generator())
    scales, free = (torch.cat([d.scales(ctx) for _ in range(200)]) for d in (MPDPH(floor=0.5), MPDP()))
    inverse = torch.from_numpy(expanded(PLAN.spec).laws.inverse).repeat(200)
    assert float(scales[~inverse].min()) == 0.5 and float(scales[inverse].max()) == 2.0
    assert float(free[~inverse].min()) < 0.4
