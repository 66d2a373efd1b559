"""Noise that is drawn a step at a time, in the memory of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from ppbench.base import machine
from ppbench.base import secret_draws as draws
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree, leaves, nbytes
from ppbench.defenses.dp import DP
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


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_a_large_parameters_noise_is_a_key_a_step_and_what_is_drawn_next_is_other_noise(law: Any) -> None:
    secret, shape = Seeds(1).secret("party"), (2, draws.EAGER_NUMBERS)
    first, second = draws.noise(secret, 3, shape, law), draws.noise(secret, 3, shape, law)
    assert isinstance(first, draws.DeferredNoise) and nbytes(first) == 3 * 32
    again = draws.noise(Seeds(1).secret("party"), 3, shape, law)
    assert torch.equal(all_steps(first, 3), all_steps(again, 3))
    steps = torch.cat([all_steps(first, 3), all_steps(second, 3)])
    assert len(steps.flatten(1).unique(dim=0)) == 6
    part = draws.DeferredNoise(first.keys[:2], first.shape, law)  # of the first steps alone
    assert torch.equal(all_steps(part, 2), all_steps(first, 2))
    assert isinstance(draws.noise(secret, 3, (draws.EAGER_NUMBERS - 1,), law), Tensor)


def test_mapped_over_clients_each_has_its_own_noise() -> None:
    noises = [draws.noise(Seeds(seed).secret("party"), 2, (5, 1000)) for seed in range(3)]
    keys = torch.stack([noise.keys for noise in noises])
    mapped = vmap(lambda own: draws.DeferredNoise(own, (5, 1000), "gaussian").at(1))(keys)
    assert torch.equal(mapped, torch.stack([noise.at(1) for noise in noises]))


def test_the_default_type_changes_no_number() -> None:
    right = draws.drawn(Seeds(1).secret("party"), (5,), "gaussian")
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(draws.drawn(Seeds(1).secret("party"), (5,), "gaussian"), right)
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
    ("name", "upload"),
    [
        pytest.param(name, upload, marks=pytest.mark.battery(name, upload))
        for name in NOISY
        for upload in ("delta", "gradient")
    ],
)
def test_stacked_clients_draw_the_noise_that_they_draw_one_by_one(
    name: str, upload: str, digits: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "EAGER_NUMBERS", 16)
    results = []
    for backend in ("loop", "vmap"):
        fed = federation(digits, noisy(name), backend, upload=upload)
        fed.run(2)
        results.append(leaves(fed.parties.server.params))
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("dp", "loop"),
        *(
            pytest.param(*late, marks=pytest.mark.nightly)
            for late in [("dp", "vmap"), ("dp_sgd", "loop"), ("dp_sgd", "vmap")]
        ),
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
    monkeypatch.setattr(draws, "EAGER_NUMBERS", 16)
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
