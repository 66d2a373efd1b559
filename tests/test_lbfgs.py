"""The batched L-BFGS: against scipy and known minima, independence of victims, budgets, bad starts."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppbench.attacks.reconstruction.search.lbfgs import Memory, Settings, minimize


def quadratics(victims: int, size: int, condition: float = 1e3):
    """Convex quadratics with minima at `centers` and value `floor` there."""
    generator = torch.Generator().manual_seed(victims * 1000 + size)
    basis = torch.linalg.qr(torch.randn(victims, size, size, generator=generator, dtype=torch.float64))[0]
    scales = torch.logspace(0, np.log10(condition), size, dtype=torch.float64)
    matrices = basis @ (scales[:, None] * basis.transpose(1, 2))
    centers = torch.randn(victims, size, generator=generator, dtype=torch.float64)

    def function(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        gap = z - centers[index]
        force = torch.einsum("sij,sj->si", matrices[index], gap)
        return 0.5 * (gap * force).sum(1), force

    return function, centers


def rosenbrock(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        loss = (100 * (z[:, 1:] - z[:, :-1] ** 2) ** 2 + (1 - z[:, :-1]) ** 2).sum(1)
        (gradient,) = torch.autograd.grad(loss.sum(), z)
    return loss.detach(), gradient


def run(function, starts: Tensor, budget: int = 1000, stop: float = 1e-12, **options):
    victims = len(starts)
    return minimize(
        function,
        starts,
        budget=torch.full((victims,), budget),
        stop=torch.full((victims,), stop, dtype=torch.float64),
        settings=Settings(**options),
    )


@settings(max_examples=15, deadline=None)
@given(victims=st.integers(1, 7), size=st.integers(1, 12), slots=st.integers(1, 4), history=st.integers(1, 20))
def test_finds_the_minimum_of_every_quadratic(victims, size, slots, history):
    function, centers = quadratics(victims, size, 10.0)
    found = run(function, torch.zeros(victims, size, dtype=torch.float64), slots=slots, history=history)
    assert set(found.reasons) == {"converged"}
    assert torch.allclose(found.z, centers, atol=1e-4)


def test_rosenbrock_takes_about_as_many_evaluations_as_scipy():
    starts = torch.full((1, 10), -1.2, dtype=torch.float64)
    found = run(rosenbrock, starts, stop=1e-14)

    def plain(z: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = rosenbrock(torch.tensor(z)[None], torch.zeros(1, dtype=torch.int64))
        return float(loss), gradient[0].numpy()

    theirs = scipy.optimize.minimize(plain, starts[0].numpy(), jac=True, method="L-BFGS-B", options={"maxcor": 100})
    assert found.reasons == ("converged",)
    assert int(found.evaluations) <= 2 * theirs.nfev


def test_compact_form_equals_the_two_loop_recursion_also_when_pairs_are_replaced():
    generator = torch.Generator().manual_seed(0)
    size, history = 9, 4
    memory = Memory(1, history, torch.zeros(1, size, dtype=torch.float64))
    curvature = torch.diag(torch.linspace(1, 5, size, dtype=torch.float64))
    old, pairs = torch.randn(1, size, generator=generator, dtype=torch.float64), []
    memory.dots = memory.project(old)
    for _ in range(11):
        s = torch.randn(1, size, generator=generator, dtype=torch.float64)
        new = old + s @ curvature
        dots = memory.project(new)
        memory.add(torch.tensor([0]), s, new - old, new, dots)
        memory.dots, old = dots, new
        pairs = [*pairs, (s[0], (s @ curvature)[0])][-history:]
        assert torch.allclose(memory.direction(new, dots)[0], -two_loop(new[0], pairs), rtol=1e-9)


def two_loop(g: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Nocedal and Wright, Algorithm 7.4."""
    q, alphas = g.clone(), []
    for s, y in reversed(pairs):
        alphas.append(s @ q / (s @ y))
        q = q - alphas[-1] * y
    s, y = pairs[-1]
    q = q * (s @ y) / (y @ y)
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        q = q + (alpha - y @ q / (s @ y)) * s
    return q


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_victim_does_not_depend_on_its_neighbors(slots):
    generator = torch.Generator().manual_seed(3)
    starts = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    together = run(rosenbrock, starts, budget=40, slots=slots)
    for v in range(5):
        alone = run(rosenbrock, starts[v : v + 1], budget=40)
        assert torch.allclose(alone.z[0], together.z[v], rtol=1e-6, atol=1e-9)
        assert int(alone.evaluations) == int(together.evaluations[v])


def test_budget_is_kept_victim_by_victim_and_the_best_point_returned():
    starts = torch.full((3, 8), -1.2, dtype=torch.float64)
    budget = torch.tensor([1, 7, 30])
    stop = torch.zeros(3, dtype=torch.float64)
    found = minimize(rosenbrock, starts, budget=budget, stop=stop, settings=Settings())
    assert found.evaluations.tolist() == budget.tolist()
    assert found.reasons == ("budget",) * 3
    assert torch.equal(found.z[0], starts[0])
    loss, _ = rosenbrock(found.z, torch.arange(3))
    assert torch.allclose(loss, found.loss)
    assert found.loss[0] > found.loss[1] > found.loss[2]


def test_a_floor_above_the_stop_ends_as_stalled_long_before_the_budget():
    function, _ = quadratics(2, 6)

    def raised(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        loss, gradient = function(z, index)
        return loss + 1.0, gradient

    found = run(raised, torch.zeros(2, 6, dtype=torch.float64), budget=5000, patience=30)
    assert set(found.reasons) <= {"stalled", "line search"}
    assert int(found.evaluations.max()) < 500


def test_a_start_that_is_not_finite_ends_alone():
    function, centers = quadratics(3, 4, 5.0)

    def broken(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        loss, gradient = function(z, index)
        return torch.where(index == 1, torch.nan, loss), gradient

    found = run(broken, torch.zeros(3, 4, dtype=torch.float64))
    assert found.reasons == ("converged", "not finite", "converged")
    assert found.loss[1] == torch.inf
    assert torch.equal(found.z[1], torch.zeros(4, dtype=torch.float64))
    assert torch.allclose(found.z[2], centers[2], atol=1e-4)


def test_a_region_without_finite_values_is_backed_out_of():
    def barrier(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return (z - z.log()).sum(1) - z.shape[1], 1 - 1 / z

    found = run(barrier, torch.full((1, 3), 20.0, dtype=torch.float64), stop=1e-9)
    assert found.reasons == ("converged",)
    assert torch.allclose(found.z, torch.ones(1, 3, dtype=torch.float64), atol=1e-4)
