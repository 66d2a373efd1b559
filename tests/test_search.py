"""The searches: the Adam loop against torch's, the batched L-BFGS against scipy, rows that fail, budgets."""

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import seeded
from torch import Tensor

from ppbench.attacks.reconstruction.search.descent import DescentSchedule, descend
from ppbench.attacks.reconstruction.search.lbfgs import LBFGSSettings, Memory, minimize
from ppbench.attacks.reconstruction.search.problem import RowValue
from ppbench.federation.evidence import inverse_root

GOAL = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
STEEP = torch.tensor([1.0, 10.0, 0.1])


def bowl(z: Tensor, index: Tensor) -> RowValue:
    """A quadratic of its own for each row."""
    away = z - GOAL[index]
    loss = (STEEP * away**2).sum(1)
    return RowValue(loss, 2 * STEEP * away, loss)


@pytest.mark.parametrize("by", ["slope", "sign", "soft"])
def test_steps_are_those_of_torch_adam(by):
    """Signs for a few steps only: where a slope is about 0, rounding turns them."""
    steps = 50 if by == "slope" else 8
    z = torch.zeros(2, 3).requires_grad_()
    optimizer = torch.optim.Adam([z], lr=0.09)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        slope = bowl(z.detach(), torch.arange(2)).gradient
        z.grad = {"slope": slope, "sign": slope.sign(), "soft": (slope / slope.abs().mean(1, keepdim=True)).tanh()}[by]
        optimizer.step()
        schedule.step()
    solution = descend(bowl, torch.zeros(2, 3), DescentSchedule(steps, 0.09, by=by))
    assert torch.allclose(solution.end, z.detach(), atol=1e-5)


def test_a_warm_schedule_climbs_for_a_twentieth_and_falls_over_the_last_three_quarters():
    schedule = DescentSchedule(1000, shape="warm")
    factors = [schedule.factor(step) for step in range(1000)]
    assert 0 < factors[0] < 0.05
    assert factors[24] == pytest.approx(0.5, abs=0.01)
    assert all(f == pytest.approx(1.0) for f in factors[50:250])
    assert factors[625] == pytest.approx(0.5, abs=0.01)
    assert factors[-1] < 1e-4
    assert factors[250:] == sorted(factors[250:], reverse=True)


def test_the_best_iterate_by_score_is_kept_and_marks_say_what_was_best_until_then():
    """The score asks for something else than the loss: where the first row passes 0.5."""

    def passing(z: Tensor, index: Tensor) -> RowValue:
        value = bowl(z, index)
        return value._replace(score=(z[:, 0] - 0.5).abs())

    solution = descend(passing, torch.zeros(2, 3), DescentSchedule(40, 0.1), marks=[1, 3, 40])
    assert solution.score[0] < 0.06
    assert abs(float(solution.z[0, 0]) - 0.5) == pytest.approx(float(solution.score[0]), abs=1e-6)
    assert abs(float(solution.end[0, 0]) - 0.5) > 0.2
    assert [mark.evaluations for mark in solution.trail] == [1, 3, 40]
    assert torch.equal(solution.trail[0].z, torch.zeros(2, 3))
    assert torch.equal(solution.trail[-1].z, solution.z)
    assert all((a.score >= b.score).all() for a, b in zip(solution.trail, solution.trail[1:], strict=False))
    assert solution.evaluations.tolist() == [40, 40]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_row_that_fails_stops_where_it_was_best_and_harms_no_other(broken):
    seen: list[int] = []

    def failing(z: Tensor, index: Tensor) -> RowValue:
        seen.append(len(z))
        value = bowl(z, index)
        bad = (index == 0) & (torch.tensor(len(seen)) >= 5)
        return RowValue(torch.where(bad, broken, value.loss), value.gradient, torch.where(bad, broken, value.score))

    solution, alone = (descend(f, torch.zeros(2, 3), DescentSchedule(30, 0.1)) for f in (failing, bowl))
    assert solution.evaluations.tolist() == [5, 30]
    assert torch.equal(solution.z[1], alone.z[1])
    assert solution.score.isfinite().all()
    assert seen == [2] * 5 + [1] * 25


def test_rows_are_projected_after_every_step_each_by_its_index():
    limits = torch.tensor([0.3, 0.7])
    seen: list[Tensor] = []

    def watched(z: Tensor, index: Tensor) -> RowValue:
        seen.append(z)
        return bowl(z, index)

    def box(z: Tensor, index: Tensor) -> Tensor:
        return z.clamp(-limits[index][:, None], limits[index][:, None])

    solution = descend(watched, torch.zeros(2, 3), DescentSchedule(60, 0.1), project=box)
    assert all((z.abs() <= limits[:, None]).all() for z in [*seen, solution.end])
    assert torch.allclose(solution.end[0], torch.tensor([0.3, -0.3, 0.3]), atol=1e-3)


def quadratics(victims: int, size: int, condition: float = 1e3):
    """Convex quadratics with minima at `centers` and value `floor` there."""
    generator = seeded(victims * 1000 + size)
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
    budgets, stops = torch.full((len(starts),), budget), torch.full((len(starts),), stop, dtype=torch.float64)
    return minimize(function, starts, budget=budgets, stop=stops, settings=LBFGSSettings(**options))


@settings(max_examples=15)
@given(victims=st.integers(1, 7), size=st.integers(1, 12), slots=st.integers(1, 4), history=st.integers(1, 20))
def test_finds_the_minimum_of_every_quadratic(victims, size, slots, history):
    function, centers = quadratics(victims, size, 10.0)
    guesses = run(function, torch.zeros(victims, size, dtype=torch.float64), slots=slots, history=history)
    assert set(guesses.reasons) == {"converged"}
    assert torch.allclose(guesses.z, centers, atol=1e-4)


def test_rosenbrock_takes_about_as_many_evaluations_as_scipy():
    starts = torch.full((1, 10), -1.2, dtype=torch.float64)
    guesses = run(rosenbrock, starts, stop=1e-14)

    def plain(z: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = rosenbrock(torch.tensor(z)[None], torch.zeros(1, dtype=torch.int64))
        return float(loss), gradient[0].numpy()

    theirs = scipy.optimize.minimize(plain, starts[0].numpy(), jac=True, method="L-BFGS-B", options={"maxcor": 100})
    assert guesses.reasons == ("converged",)
    assert int(guesses.evaluations) <= 2 * theirs.nfev


def test_compact_form_equals_the_two_loop_recursion_also_when_pairs_are_replaced():
    generator = seeded(0)
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
    generator = seeded(3)
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
    solution = minimize(rosenbrock, starts, budget=budget, stop=stop, settings=LBFGSSettings())
    assert solution.evaluations.tolist() == budget.tolist()
    assert solution.reasons == ("budget",) * 3
    assert torch.equal(solution.z[0], starts[0])
    loss, _ = rosenbrock(solution.z, torch.arange(3))
    assert torch.allclose(loss, solution.loss)
    assert solution.loss[0] > solution.loss[1] > solution.loss[2]


def test_a_floor_above_the_stop_ends_as_stalled_long_before_the_budget():
    function, _ = quadratics(2, 6)

    def raised(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        loss, gradient = function(z, index)
        return loss + 1.0, gradient

    guesses = run(raised, torch.zeros(2, 6, dtype=torch.float64), budget=5000, patience=30)
    assert set(guesses.reasons) <= {"stalled", "line search"}
    assert int(guesses.evaluations.max()) < 500


def test_a_mismatch_whose_square_overflows_is_searched_as_any_other():
    """As where a model fits its batch: the gradient at the start is 1e11 times the observed one. Values are float32."""

    def times(factor: float):
        def scaled(z: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            value = bowl(z, index)
            return factor * value.loss, factor * value.gradient

        return minimize(scaled, torch.zeros(2, 3), budget=torch.tensor([60, 60]), stop=torch.zeros(2))

    small, large = times(1.0), times(1e22)
    assert torch.allclose(large.z, GOAL, atol=1e-4) and torch.allclose(small.z, GOAL, atol=1e-4)
    assert bool((large.loss <= 1e22 * 1e-6).all()) and bool((large.evaluations < 60).all())
    first = minimize(lambda z, i: (1e22 * bowl(z, i).loss, 1e22 * bowl(z, i).gradient), torch.zeros(2, 3),
                     budget=torch.tensor([1, 1]), stop=torch.zeros(2))  # fmt: skip
    assert first.loss.tolist() == pytest.approx((1e22 * bowl(torch.zeros(2, 3), torch.arange(2)).loss).tolist())


def test_a_start_that_is_not_finite_ends_alone():
    function, centers = quadratics(3, 4, 5.0)

    def broken(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        loss, gradient = function(z, index)
        return torch.where(index == 1, torch.nan, loss), gradient

    guesses = run(broken, torch.zeros(3, 4, dtype=torch.float64))
    assert guesses.reasons == ("converged", "not finite", "converged")
    assert guesses.loss[1] == torch.inf
    assert torch.equal(guesses.z[1], torch.zeros(4, dtype=torch.float64))
    assert torch.allclose(guesses.z[2], centers[2], atol=1e-4)


def test_a_region_without_finite_values_is_backed_out_of():
    def barrier(z: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return (z - z.log()).sum(1) - z.shape[1], 1 - 1 / z

    guesses = run(barrier, torch.full((1, 3), 20.0, dtype=torch.float64), stop=1e-9)
    assert guesses.reasons == ("converged",)
    assert torch.allclose(guesses.z, torch.ones(1, 3, dtype=torch.float64), atol=1e-4)


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-30, 1e-28, 1e-26, 1e-25, 1e-20, 1.0])
def test_a_tiny_tensor_has_a_finite_slope_in_the_distance_of_directions(size):
    value = torch.tensor(size, requires_grad=True)
    root = inverse_root(value)
    (slope,) = torch.autograd.grad(root, value)
    assert bool(root.isfinite()) and bool(slope.isfinite())
    assert size < 1e-25 or root.item() == pytest.approx(size**-0.5, rel=1e-5)
