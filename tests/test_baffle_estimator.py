"""BAFFLE's estimator: one stream of directions, exact differences, forward passes alone; and its figures' networks."""

import math
from dataclasses import replace

import pytest
import torch
from protocols import central_bare
from torch import Tensor

from ppbench.base.autodiff import gradient
from ppbench.base.tree import Params
from ppbench.claims.claim import claims_of
from ppbench.defenses.baffle import (
    SLICE_EXAMPLES,
    STACK,
    STACK_BYTES,
    chunks,
    loss_differences,
    mean_loss,
    slice_size,
    slope,
    stack_size,
    stein,
    stein_directions,
    step_seeds,
)
from ppbench.federation.contract import Job
from ppbench.federation.plan import Batch, Layout, Local, Plan
from ppbench.nets.net import Net, build, initial, net_spec
from ppbench.run.cost import peak_bytes
from ppbench.run.experiment import make_defense

SEED = 20_231


def plan_of(model="mlp", shape=(1, 8, 8), loss="cross_entropy", **options):
    return Plan(net_spec(model, shape, 10, options), 4, Local("gradient"), loss)  # type: ignore[arg-type]


MLP = plan_of(hidden="32", activation="hardswish")
LENET = plan_of("lenet_baffle", (1, 28, 28))


def batch_of(plan: Plan, size: int = 14, dtype: torch.dtype = torch.float32) -> Batch:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(size, *plan.spec.shape, generator=g).to(dtype)
    return Batch(x, torch.eye(10, dtype=dtype)[torch.arange(size) % 10], torch.ones(size, dtype=dtype))


def weights_of(plan: Plan, dtype: torch.dtype = torch.float32) -> Params:
    return {n: p.to(dtype) for n, p in initial(plan.spec, 1).items()}


def flat_gradient(plan: Plan, params: Params, batch: Batch) -> Tensor:
    with torch.no_grad():
        gradients = gradient(lambda p: plan.objective(p, batch.x, batch.y, batch.w), params)
    return Layout.of(params).pack(gradients).double()


# -- directions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("entries", [5, 1001])  # torch draws fewer than 16 numbers by another path
@pytest.mark.parametrize("size", [3, 64])
def test_every_chunking_gives_the_same_directions_bit_for_bit(entries, size):
    whole = torch.stack(list(stein_directions(SEED, entries, 13)))
    stacks = list(chunks(SEED, entries, 13, size))
    assert torch.equal(torch.cat(stacks), whole) and whole.dtype == torch.float32
    assert [len(s) for s in stacks[:-1]] == [size] * (len(stacks) - 1) and len(stacks[-1]) <= size
    assert torch.equal(torch.stack(list(stein_directions(SEED, entries, 4))), whole[:4])


def test_directions_are_standard_normal_and_move_no_other_draw():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    z = torch.stack(list(stein_directions(SEED, 5000, 40)))
    assert torch.equal(torch.rand(4), expected)
    assert float(z.mean()) == pytest.approx(0, abs=4 / math.sqrt(z.numel()))
    assert float(z.var()) == pytest.approx(1, abs=4 * math.sqrt(2 / z.numel()))
    assert float((z @ z.T).fill_diagonal_(0).abs().max()) < 5.5 * math.sqrt(5000)


def test_seeds_of_steps_are_public_distinct_and_begin_with_the_rounds():
    seeds = step_seeds(SEED, 50)
    assert int(seeds[0]) == SEED and torch.equal(step_seeds(SEED, 50), seeds)
    assert len(set(seeds.tolist())) == 50 and int(seeds.min()) >= 0 and int(seeds.max()) < 2**31
    assert not set(step_seeds(SEED + 1, 50).tolist()) & set(seeds.tolist())


# -- differences -------------------------------------------------------------------------------------------------------
def test_of_a_quadratic_loss_central_differences_are_exact_and_forward_ones_are_not():
    plan = plan_of(loss="squared", hidden="")
    params, batch = weights_of(plan, torch.float64), batch_of(plan, dtype=torch.float64)
    z = torch.stack(list(stein_directions(SEED, 650, 20))).double()
    truth = z @ flat_gradient(plan, params, batch)
    sigma = 1e-2
    central = slope(loss_differences(plan, params, batch, SEED, 20, sigma, "central", 1), sigma, "central")
    forward = slope(loss_differences(plan, params, batch, SEED, 20, sigma, "twice", 1), sigma, "twice")
    assert float((central - truth).abs().max() / truth.norm()) < 1e-10
    assert float((forward - truth).abs().max() / truth.norm()) > 1e-3


@pytest.mark.parametrize("scheme", ["central", "twice"])
def test_stacks_of_models_give_what_a_loop_gives(scheme):
    params, batch = weights_of(LENET), batch_of(LENET, 4)
    loop = loss_differences(LENET, params, batch, SEED, 10, 1e-4, scheme, 1)
    for chunk in (4, 64):
        stacked = loss_differences(LENET, params, batch, SEED, 10, 1e-4, scheme, chunk)
        torch.testing.assert_close(stacked, loop, rtol=0, atol=5e-7)
    assert float(loop.abs().mean()) > 20 * 5e-7


def test_a_few_examples_at_a_time_give_the_same_and_take_less_memory():
    params, batch = weights_of(LENET), batch_of(LENET, 32)

    def result(examples):
        with torch.no_grad():
            return loss_differences(LENET, params, batch, SEED, 4, 1e-4, "central", 1, examples)

    torch.testing.assert_close(result(5), result(32), rtol=0, atol=1e-7)
    assert float(result(32).abs().mean()) > 10 * 1e-7
    whole, few, sized = (peak_bytes(lambda n=n: result(n), torch.device("cpu")) for n in (32, 4, 0))
    assert few < whole / 3 and few < sized < whole / 2, "0 sizes to memory"


def test_slices_and_stacks_that_are_sized_to_memory_are_a_cpu_s():
    """Eight images and one model at a time leave an accelerator idle."""
    near = batch_of(LENET, 32)
    far = Batch(*(part.to("meta") for part in (near.x, near.y, near.w)))
    assert (stack_size(0, near, 20_000), slice_size(0, near)) == (1, SLICE_EXAMPLES)
    assert (stack_size(0, far, 20_000), slice_size(0, far)) == (STACK_BYTES // 80_000, 32)
    wide = Batch(torch.empty(32, 3, 1024, 1024, device="meta"), far.y, far.w)
    assert stack_size(0, wide, 20_000) == 1  # a stack's batches are bounded too
    assert [(stack_size(3, batch, 20_000), slice_size(5, batch)) for batch in (near, far)] == [(3, 5)] * 2
    small = Batch(torch.zeros(4, 64), torch.zeros(4, 10), torch.ones(4))
    assert (stack_size(0, small, 650), slice_size(0, small)) == (STACK, 4)


def test_padded_examples_do_not_count():
    params, batch = weights_of(MLP), batch_of(MLP, 6)
    padded = replace(batch, w=torch.tensor([1.0, 1, 1, 1, 0, 0]))
    small = Batch(batch.x[:4], batch.y[:4], batch.w[:4])
    assert float(mean_loss(MLP, params, padded)) == pytest.approx(float(mean_loss(MLP, params, small)), rel=1e-6)
    assert float(mean_loss(MLP, params, padded)) != pytest.approx(float(mean_loss(MLP, params, batch)), rel=1e-3)


# -- estimates ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", ["central", "twice"])
def test_the_estimate_is_unbiased_and_as_noisy_as_theory_says(scheme):
    params, batch, k = weights_of(MLP), batch_of(MLP), 2000
    g = flat_gradient(MLP, params, batch)
    estimate = stein(SEED, slope(loss_differences(MLP, params, batch, SEED, k, 1e-4, scheme, 0), 1e-4, scheme), len(g))
    projection = float(estimate @ g / (g @ g))
    assert abs(projection - 1) <= 4 * math.sqrt(2 / k)
    assert float((estimate - g).norm() / g.norm()) == pytest.approx(math.sqrt((len(g) + 1) / k), rel=0.2)


# -- a client --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("scheme", "passes"), [("central", 14), ("twice", 15)])
def test_forward_passes_are_counted(scheme, passes, monkeypatch):
    calls = []
    real = Net.__call__
    monkeypatch.setattr(Net, "__call__", lambda net, p, x: (calls.append(len(x)), real(net, p, x))[1])
    defense = central_bare(k=7, scheme=scheme, chunk=1)
    result = defense.compute(MLP, job_of(MLP))
    assert calls == [14] * passes and result.shape == (defense.count,) == (7 if scheme == "central" else 14,)


def job_of(plan: Plan, steps: int = 1) -> Job:
    batch = batch_of(plan)
    stacked = Batch(*(torch.stack([part] * steps) for part in (batch.x, batch.y, batch.w)))
    return Job(weights_of(plan), stacked, torch.tensor(0.1), (), step_seeds(SEED, steps))


@pytest.mark.parametrize("level", ["batch", "epoch"])
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_client_makes_no_autograd_graph(level, chunk):
    """Even where weights ask for gradients and grad mode is on: nothing is saved for a backward pass."""
    saved: list[Tensor] = []

    def keep(t):
        saved.append(t)
        return t

    plan = MLP if level == "batch" else replace(MLP, local=Local("delta"))
    job = job_of(plan, steps=1 if level == "batch" else 2)
    job = replace(job, start={n: p.requires_grad_() for n, p in job.start.items()})
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = central_bare(k=5, level=level, chunk=chunk).compute(plan, job)  # type: ignore[arg-type]
        assert saved == []
        batch = batch_of(plan)
        plan.objective(job.start, batch.x, batch.y, batch.w)
        assert len(saved) > 5  # the hooks do see a graph where there is one
    parts = [result] if level == "batch" else list(result.values())
    assert all(p.grad_fn is None and not p.requires_grad for p in parts)


def test_memory_of_an_estimate_does_not_grow_with_the_number_of_directions():
    """Directions are drawn again, not kept: the largest tensor alive has as many entries as the model, not K times."""
    sizes = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                sizes.append(out.numel())
            return out

    batch = batch_of(LENET, 1)
    with Spy():
        s = slope(loss_differences(LENET, weights_of(LENET), batch, SEED, 40, 1e-4, "central", 1), 1e-4, "central")
        stein(SEED, s, LENET.net.parameter_count)
    assert max(sizes) == LENET.net.parameter_count


def test_claims_name_parameters_and_networks_that_exist():
    accuracies = [c for c in claims_of("baffle") if c.metric.startswith("accuracy") and c.value is not None]
    assert len(accuracies) == 6 * 7 + 4 * 3 + 2 * 5  # Tables 1, 2, and 3 with its Top-5
    for claim in claims_of("baffle"):
        make_defense("baffle", {name: value[0] if isinstance(value, tuple) else value for name, value in claim.when})
        if claim.model in ("lenet_baffle", "wrn_10_2"):
            build(net_spec(claim.model, (3, 32, 32), 10, dict(claim.options)))
    assert all(0 < (c.value or 0) < (c.undefended or 0) < 1 for c in accuracies)
