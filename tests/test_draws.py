"""Noise that is drawn a step at a time: the numbers of one draw for all steps, in the memory of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from ppbench.base import machine
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree, leaves, nbytes
from ppbench.defenses.dp import DP
from ppbench.federation import draws
from ppbench.federation.contract import Context, Defense
from ppbench.federation.drive import Backend
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.nets.net import initial, net_spec
from ppbench.run.config import configure
from ppbench.run.cost import first_steps, measured_client, peak_bytes
from ppbench.run.evaluation import check_experiment
from ppbench.run.experiment import make_defense, resolve
from ppbench.run.task import check_clients

CPU = torch.device("cpu")
NOISY = {
    "dp": {},
    "dp laplace": {"law": "laplace"},
    "ppdl": {"sigma": 0.01},
    "dp_sgd": {},
    "full_noise": {},
}


def noisy(name: str) -> Defense:
    return make_defense(name.split()[0], NOISY[name])


def all_steps(result: Tree, steps: int) -> Tensor:
    return torch.stack([draws.at_step(result, t) for t in range(steps)])


@settings(max_examples=150, deadline=None)
@given(
    law=st.sampled_from(["gaussian", "laplace"]),
    steps=st.integers(1, 9),
    count=st.one_of(st.integers(16, 70), st.integers(16, 3000), st.integers(1, 200).map(lambda n: 16 * n)),
    seed=st.integers(0, 2**32),
    before=st.integers(0, 40),
)
def test_numbers_are_those_of_one_draw_and_so_is_what_is_drawn_next(
    law: Any, steps: int, count: int, seed: int, before: int
) -> None:
    at_once, later = Generator().manual_seed(seed), Generator().manual_seed(seed)
    for generator in (at_once, later):
        torch.randn(before, generator=generator)
    right = draws.drawn_at_once(at_once, (steps, count), law)
    states, last = draws._skip_all(later, steps, count, law)
    result = draws.DeferredNoise(states, last, steps, (count,), law)
    assert torch.equal(all_steps(result, steps), right)
    assert torch.equal(torch.randn(33, generator=at_once), torch.randn(33, generator=later))
    part = draws.DeferredNoise(
        states[: steps // 2], last[: steps // 2], steps, (count,), law
    )  # of the first steps alone
    assert all(torch.equal(part.at(t), right[t]) for t in range(steps // 2))


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_this_torch_draws_so_and_small_parameters_are_drawn_at_once(law: Any) -> None:
    assert draws.draws_by_steps(law)
    assert isinstance(draws.noise(Generator(), 3, (draws.EAGER_NUMBERS - 1,), law), Tensor)
    result = draws.noise(Generator().manual_seed(1), 3, (2, draws.EAGER_NUMBERS), law)
    assert isinstance(result, draws.DeferredNoise)
    assert torch.equal(
        all_steps(result, 3), draws.drawn_at_once(Generator().manual_seed(1), (3, 2, draws.EAGER_NUMBERS), law)
    )


def test_the_default_type_changes_no_number() -> None:
    right = draws.drawn_at_once(Generator().manual_seed(1), (5,), "gaussian")
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(draws.drawn_at_once(Generator().manual_seed(1), (5,), "gaussian"), right)
    finally:
        torch.set_default_dtype(torch.float32)


def federation(
    digits: Data,
    defense: Defense,
    backend: Backend = "vmap",
    hidden: str = "64",
    upload: Any = "delta",
    epochs: int = 1,
) -> Federation:
    """Return a federation of four clients with seven steps an epoch, of which the last batch is padded."""
    spec = net_spec("mlp", (1, 8, 8), 10, {"hidden": hidden})
    plan = Plan(spec, 4, Local(upload, epochs, 5, Opt("sgd", 0.1)))
    shards = {k: Data(digits.x[k * 33 : k * 33 + 33].clone(), digits.y[k * 33 : k * 33 + 33].clone()) for k in range(4)}
    fed = Federation(defense, plan, shards, Seeds(3), backend=backend)
    fed.start(initial(spec, 0))
    return fed


@pytest.mark.parametrize(
    ("name", "backend", "upload"),
    [
        pytest.param(name, backend, upload, marks=pytest.mark.battery(name, backend, upload))
        for name in NOISY
        for backend in ("loop", "vmap")
        for upload in ("delta", "gradient")
    ],
)
def test_results_are_those_of_noise_drawn_at_once(
    name: str, backend: Backend, upload: str, digits: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for few in (draws.NORMAL_BLOCK, 10**9):
        monkeypatch.setattr(draws, "EAGER_NUMBERS", few)
        fed = federation(digits, noisy(name), backend, upload=upload)
        fed.run(2)
        results.append(leaves(fed.parties.server.params))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_a_torch_that_draws_otherwise_draws_at_once(digits: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "draws_by_steps", lambda law: False)
    assert isinstance(draws.noise(Generator(), 3, (draws.EAGER_NUMBERS,)), Tensor)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("dp", "loop"),
        ("dp_sgd", "vmap"),
        *(pytest.param(*late, marks=pytest.mark.nightly) for late in [("dp", "vmap"), ("dp_sgd", "loop")]),
    ],
)
def test_more_steps_take_no_more_memory_for_noise(name: str, backend: Backend, digits: Data) -> None:
    """Another 21 steps took as many models a client, and as many again to stack them for vmap."""
    hidden, clients = "512", 4 if backend == "vmap" else 1
    model = nbytes(initial(net_spec("mlp", (1, 8, 8), 10, {"hidden": hidden}), 0))
    peaks = []
    for epochs in (1, 4):
        fed = federation(digits, noisy(name), backend, hidden, epochs=epochs)
        peaks.append(peak_bytes(lambda fed=fed: fed.run(1), CPU))  # type: ignore[misc]
    assert peaks[1] - peaks[0] < 10 * clients * model  # the largest sample of `dp_sgd` grows too


def test_a_job_is_cut_to_its_first_steps(digits: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "EAGER_NUMBERS", draws.NORMAL_BLOCK)
    client = measured_client(federation(digits, noisy("dp")))
    job = next(iter(client.jobs()))
    right, part = draws.at_step(job.noise, 1), draws.at_step(first_steps(job, 2).noise, 1)
    assert all(torch.equal(right[name], part[name]) for name in right)


def room(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr("ppbench.base.device.memory", lambda: gib * machine.GIB)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_clients_that_compute_at_once_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def question(defense: str, **options: Any) -> None:
        config = configure(defense=defense, model="mlp", model_options={"hidden": "64"}, **options)
        plan = resolve(configure(**{**config.model_dump(), "clients": 2})).task.plan
        wide = replace(plan, spec=net_spec("mlp", (1, 8, 8), 10, {"hidden": "4096,2048"}), clients=config.clients)
        check_clients(make_defense(defense), wide, config, 32)

    room(monkeypatch, 1.4)
    at_once = {"schedule": "parallel", "clients": 8, "backend": "vmap", "train": 64, "upload": "delta"}
    question("none", **at_once)  # 8.7 million parameters, 8 clients, weights, a gradient twice, two moments: 1.3 GiB
    message = refusal(lambda: question("dp", **at_once))
    assert message.startswith("8 clients of defense 'dp' with model 'mlp' that compute at once would need 1.6 GiB")
    assert "--schedule round_robin" in message
    question("dp", **{**at_once, "schedule": "round_robin"})
    question("dp", **{**at_once, "backend": "loop"})
    assert refusal(lambda: question("dp_sgd", **at_once)).startswith("8 clients of defense 'dp_sgd'")
    for handed_on in ("phong", "central", "full_noise"):  # who computes one after the other, or nothing
        question(handed_on, **{**at_once, "clients": 40})
    question("dp_sgd", **{**at_once, "backend": "loop"})  # one client with a gradient an example: 0.7 GiB
    room(monkeypatch, 0.5)
    assert refusal(lambda: question("dp_sgd", **{**at_once, "backend": "loop"})).startswith(
        "A client of defense 'dp_sgd'"
    )


def test_an_evaluation_asks_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = resolve(configure(defense="dp", schedule="parallel", train=100))
    check_experiment(experiment)
    room(monkeypatch, 1e-4)
    assert "defense 'none'" in refusal(lambda: check_experiment(experiment)) or "defense 'dp'" in refusal(
        lambda: check_experiment(experiment)
    )


@dataclass(frozen=True)
class AtOnce(DP):
    """A plugin that draws the noise of all steps itself."""

    name: ClassVar[str] = "at_once"

    def draw(self, ctx: Context, params: Params, steps: int) -> Tree:
        return {name: torch.randn(steps, *value.shape, generator=ctx.generator) for name, value in params.items()}


def test_what_a_plugin_draws_at_once_is_counted_by_its_first_client(
    digits: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = federation(digits, AtOnce(), hidden="512")
    fed.run(1)
    room(monkeypatch, 0.005)
    message = refusal(lambda: fed.run(2))
    assert message.startswith("What 4 clients draw for a round at once, batches and noise, would need 0.0 GiB")
    one_by_one = federation(digits, AtOnce(), "loop", hidden="512")
    one_by_one.run(1)
    drawn_later = federation(digits, DP(), hidden="512")
    drawn_later.run(1)
