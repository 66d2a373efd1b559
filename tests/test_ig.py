"""Inverting gradients: the fast cosine against autograd, and what the attack makes of digits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ppbench.adversary.evidence import Evidence, simulation
from ppbench.attacks.reconstruction.objectives import FastObjective, SimulatedObjective, objective
from ppbench.federation.plan import Plan
from ppbench.federation.tree import Params
from ppbench.federation.wire import Slot
from ppbench.task.net import initial, net_spec

CLASSES = 4


def drawn(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=g, dtype=torch.float64)


def precisions(observed: Params, kind: str, g: torch.Generator) -> Params | None:
    """Return None, a precision of each entry, or one of each tensor, some of them 0."""
    if kind == "none":
        return None
    shaped = {n: drawn(v.shape if kind == "entries" else (), g) for n, v in observed.items()}
    hidden = next(iter(shaped))
    return {n: torch.zeros_like(v) if n == hidden else v for n, v in shaped.items()}


@pytest.mark.parametrize("measure", ["cosine", "squares", "absolute"])
@pytest.mark.parametrize("kind", ["none", "entries", "tensors"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("model", "shape", "options"),
    [
        ("dlnet", (1, 8, 8), {}),
        ("mlp", (7,), {"activation": "leaky_relu"}),
        ("mlp", (1, 4, 4), {"bias": False, "layers": 3, "hidden": 6}),
        ("cnn", (2, 6, 6), {"pool": "avg", "bias": False, "widths": "3", "hidden": 5}),
        ("cnn", (2, 9, 10), {"pool": "max", "widths": "3,4", "activation": "leaky_relu"}),
    ],
)
def test_the_fast_discrepancy_and_its_slopes_are_those_of_autograd(
    model: str, shape: tuple[int, ...], options: dict, batch: int, kind: str, measure: str
) -> None:
    """Random guesses, more rows than victims, in float64: D, dD/dx and dD/dy agree to rounding."""
    plan, g = Plan(net_spec(model, shape, CLASSES, options), 1), torch.Generator().manual_seed(3)
    params = {n: v.double() for n, v in initial(plan.spec, 0).items()}
    simulate, evidence = simulation(plan, params), []
    for victim in range(2):
        y = drawn((1, batch, CLASSES), g).softmax(-1)
        observed = {n: v.detach() for n, v in simulate(drawn((1, batch, *shape), g), y).items()}
        weight = precisions(observed, kind, g)
        evidence.append(Evidence((Slot(victim, 0),), observed, simulate, params, weight, measure=measure))
    fast, slow = objective(evidence, plan, batch, torch.float64), SimulatedObjective(evidence)
    assert isinstance(fast, FastObjective)
    x, y = drawn((3, batch, *shape), g), drawn((3, batch, CLASSES), g).softmax(-1)
    index, none = torch.tensor([1, 0, 0]), x.new_zeros(3, 0)
    for mine, theirs in zip(fast(x, y, none, index), slow(x, y, none, index), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-10)
