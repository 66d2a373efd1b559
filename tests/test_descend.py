"""The Adam loop: against torch's own, its schedules, its bookkeeping, rows that fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ppbench.attacks.reconstruction.search.descent import Schedule, descend
from ppbench.attacks.reconstruction.search.problem import Value

GOAL = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
STEEP = torch.tensor([1.0, 10.0, 0.1])


def bowl(z: Tensor, index: Tensor) -> Value:
    """A quadratic of its own for each row."""
    away = z - GOAL[index]
    loss = (STEEP * away**2).sum(1)
    return Value(loss, 2 * STEEP * away, loss)


@pytest.mark.parametrize("signed", [False, True])
def test_steps_are_those_of_torch_adam(signed):
    """Signs for a few steps only: where a slope is about 0, rounding turns them."""
    steps = 8 if signed else 50
    z = torch.zeros(2, 3).requires_grad_()
    optimizer = torch.optim.Adam([z], lr=0.09)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        slope = bowl(z.detach(), torch.arange(2)).gradient
        z.grad = slope.sign() if signed else slope
        optimizer.step()
        schedule.step()
    found = descend(bowl, torch.zeros(2, 3), Schedule(steps, 0.09, signed=signed))
    assert torch.allclose(found.end, z.detach(), atol=1e-5)


def test_a_warm_schedule_climbs_for_a_twentieth_and_falls_over_the_last_three_quarters():
    schedule = Schedule(1000, shape="warm")
    factors = [schedule.factor(step) for step in range(1000)]
    assert 0 < factors[0] < 0.05
    assert factors[24] == pytest.approx(0.5, abs=0.01)
    assert all(f == pytest.approx(1.0) for f in factors[50:250])
    assert factors[625] == pytest.approx(0.5, abs=0.01)
    assert factors[-1] < 1e-4
    assert factors[250:] == sorted(factors[250:], reverse=True)


def test_the_best_iterate_by_score_is_kept_and_marks_say_what_was_best_until_then():
    """The score asks for something else than the loss: where the first row passes 0.5."""

    def passing(z: Tensor, index: Tensor) -> Value:
        value = bowl(z, index)
        return value._replace(score=(z[:, 0] - 0.5).abs())

    found = descend(passing, torch.zeros(2, 3), Schedule(40, 0.1), marks=[1, 3, 40])
    assert found.score[0] < 0.06
    assert abs(float(found.z[0, 0]) - 0.5) == pytest.approx(float(found.score[0]), abs=1e-6)
    assert abs(float(found.end[0, 0]) - 0.5) > 0.2
    assert [mark.evaluations for mark in found.trail] == [1, 3, 40]
    assert torch.equal(found.trail[0].z, torch.zeros(2, 3))
    assert torch.equal(found.trail[-1].z, found.z)
    assert all((a.score >= b.score).all() for a, b in zip(found.trail, found.trail[1:], strict=False))
    assert found.evaluations.tolist() == [40, 40]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_row_that_fails_stops_where_it_was_best_and_harms_no_other(broken):
    seen: list[int] = []

    def failing(z: Tensor, index: Tensor) -> Value:
        seen.append(len(z))
        value = bowl(z, index)
        bad = (index == 0) & (torch.tensor(len(seen)) >= 5)
        return Value(torch.where(bad, broken, value.loss), value.gradient, torch.where(bad, broken, value.score))

    found, alone = (descend(f, torch.zeros(2, 3), Schedule(30, 0.1)) for f in (failing, bowl))
    assert found.evaluations.tolist() == [5, 30]
    assert torch.equal(found.z[1], alone.z[1])
    assert found.score.isfinite().all()
    assert seen == [2] * 5 + [1] * 25


def test_rows_are_projected_after_every_step_each_by_its_index():
    limits = torch.tensor([0.3, 0.7])
    seen: list[Tensor] = []

    def watched(z: Tensor, index: Tensor) -> Value:
        seen.append(z)
        return bowl(z, index)

    def box(z: Tensor, index: Tensor) -> Tensor:
        return z.clamp(-limits[index][:, None], limits[index][:, None])

    found = descend(watched, torch.zeros(2, 3), Schedule(60, 0.1), project=box)
    assert all((z.abs() <= limits[:, None]).all() for z in [*seen, found.end])
    assert torch.allclose(found.end[0], torch.tensor([0.3, -0.3, 0.3]), atol=1e-3)
