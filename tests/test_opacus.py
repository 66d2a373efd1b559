"""Opacus's private training as a client's: its arithmetic against plain arithmetic, its epsilon against another's.

Run with Opacus beside ppbench (`.ci/run` does so with the oldest and the newest version): PYTHONPATH=FOLDER pytest
tests/test_opacus.py, where pip install --no-deps --target FOLDER 'opacus==1.6.*' opt_einsum has made FOLDER.
"""

from __future__ import annotations

import importlib
import random
import re
import runpy
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import chi2
from torch.func import grad, vmap

import ppbench
from ppbench.base import registry
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.registry import load
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, leaves
from ppbench.cli import main
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.messages import Model
from ppbench.federation.optim import Layout, Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import initial, net_spec

pytest.importorskip("opacus")

LR, CLIENTS = 0.5, 3
SPEC = net_spec("mlp", (1, 8, 8), 10, {"hidden": "16"})
PLAN = Plan(SPEC, CLIENTS, Local("delta", 1, 8, Opt("sgd", LR)))
STOCK = [one.stock for one in importlib.import_module("ppbench.adapters.opacus.stock").OPACUS_STOCK]
SURE = 1e-6
"""How rarely a right noise is taken for a wrong one."""


def data(count: int, seed: int) -> Data:
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=draws)
    return Data(torch.rand(count, 1, 8, 8, generator=draws), torch.nn.functional.one_hot(labels, 10).float())


def shards(sizes: tuple[int, ...] = (20, 24, 28)) -> dict[int, Data]:
    return {client: data(size, client) for client, size in enumerate(sizes)}


def federation(
    name: str, plan: Plan = PLAN, held: Mapping[int, Data] | None = None, seed: int = 0, **parameters: Any
) -> Federation:
    """Return a started federation whose clients have unequally many examples."""
    registry.admit(name)
    made = Federation(load("defenses", name)(**parameters), plan, held or shards(), Seeds(seed))
    made.start(initial(plan.spec, 0))
    return made


def trained(name: str, plan: Plan = PLAN, rounds: int = 2, **parameters: Any) -> Params:
    run = federation(name, plan, **parameters)
    assert run.run(rounds)
    return run.parties.server.params  # type: ignore[no-any-return]


def apart(one: Params, other: Params) -> float:
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def victims(count: int = 1) -> dict[Slot, Data]:
    return {Slot(0, client): data(count, 50 + client) for client in range(CLIENTS)}


def seen(run: Federation, count: int = 1) -> View:
    return run.probe(victims(count)).view("server/1")


def gradients(run: Federation, count: int = 1) -> dict[int, torch.Tensor]:
    """Return what each probed client sent, taken for a gradient, [P] by client."""
    view = seen(run, count)
    layout = Layout.of(run.parties.server.params)
    return {e.unit[0].client: layout.pack(e.observed).double() for e in run.defense.evidence(view)}


def each(params: Params, batch: Data, plan: Plan = PLAN) -> Params:
    """Return every example's gradient, float64, by the bench's own function of the network."""

    def loss(p: Params, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return plan.example_loss(plan.net(p, x[None]), y[None])[0]

    double = {name: value.double() for name, value in params.items()}
    return vmap(grad(loss), in_dims=(None, 0, 0))(double, batch.x.double(), batch.y.double())  # type: ignore[no-any-return]


def clipped(found: Params, clip: float, per_layer: bool = False) -> torch.Tensor:
    """Return the sum of gradients clipped by plain arithmetic, [P]."""
    norms = torch.stack([value.flatten(1).norm(dim=1) for value in found.values()], 1)
    if per_layer:
        factors = (clip / len(found) ** 0.5 / norms).clamp(max=1.0)
    else:
        factors = (clip / norms.norm(dim=1, keepdim=True)).clamp(max=1.0).expand_as(norms)
    return torch.cat([torch.tensordot(f, v, 1).flatten() for f, v in zip(factors.T, found.values(), strict=True)])


# -- the arithmetic ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("count", [1, 5])
def test_without_noise_a_probe_is_the_clipped_mean_gradient(name: str, count: int) -> None:
    """To 1e-6, of clips that are above, among and below the examples' norms; by arithmetic of our own, in float64."""
    for clip in (0.1, 2.6, 1e3):
        run = federation(f"opacus:stock/{name}", noise_multiplier=0.0, max_grad_norm=clip)
        start = run.parties.server.params
        for client, found in gradients(run, count).items():
            exact = each(start, victims(count)[Slot(0, client)])
            right = clipped(exact, clip, name == "dp_sgd_per_layer") / count
            assert float((found - right).abs().max()) < 1e-6 * max(1.0, float(right.abs().max()))
            longest = max(
                float(Layout.of(start).pack({n: v[i] for n, v in exact.items()}).norm()) for i in range(count)
            )
            assert (float(right.norm()) < 0.11) if clip == 0.1 else longest > 1


@pytest.mark.parametrize("epochs", [1, 3])
def test_without_noise_and_clipping_a_round_is_ours_without_a_defense(epochs: int) -> None:
    """One batch an epoch, whose Poisson sample of rate 1 is all of it; unequally many examples, two rounds."""
    plan = replace(PLAN, local=Local("delta", epochs, 40, Opt("sgd", LR)))
    theirs = trained("opacus:stock/dp_sgd", plan, noise_multiplier=0.0, max_grad_norm=1e6)
    assert apart(theirs, trained("none", plan)) < 1e-6 < 1e-2 < apart(theirs, initial(SPEC, 0))


def test_networks_as_somebody_has_them_are_trained() -> None:
    for net in ("plain_net", "grouped_net"):
        plan = Plan(net_spec(f"opacus_apps:{net}", (1, 8, 8), 10, {}), CLIENTS, Local("delta", 2, 40, Opt("sgd", LR)))
        theirs = trained("opacus:stock/dp_sgd", plan, noise_multiplier=0.0, max_grad_norm=1e6)
        assert apart(theirs, trained("none", plan)) < 1e-5 < 1e-2 < apart(theirs, initial(plan.spec, 0))
        if len(STOCK) == 3:  # before 1.5 ModuleValidator.fix asks of torch what torch no longer does
            fixed = trained("opacus:opacus_apps:fixed", plan, sigma=0.0, clip=1e6)  # a clone, and its layers by name
            assert apart(fixed, theirs) == 0


def test_the_last_smaller_batch_is_divided_by_the_expected_size() -> None:
    """Ten examples in batches of 4, not sampled: 4, 4 and 2, each over int(10 / 3) = 3, as Opacus documents it."""
    plan = replace(PLAN, local=Local("delta", 1, 4, Opt("sgd", 1e-3)))
    run = federation(
        "opacus:stock/dp_sgd",
        plan,
        shards((10, 10, 10)),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        poisson_sampling=False,
    )
    start, run.wire.keep = run.parties.server.params, True
    assert run.run(1)
    layout = Layout.of(start)
    for mail in (m for m in run.wire.mail if m.receiver == SERVER and m.round == 1):
        sent = layout.pack(mail.message.params).double() / 1e-3
        right = clipped(each(start, run.shards[mail.sender]), 0.5) / 3
        assert float((sent - right).norm() / right.norm()) < 0.01


@pytest.mark.parametrize("name", ["virtual", "summed"])
def test_virtual_batches_and_sums_are_the_same_gradients(name: str) -> None:
    whole = gradients(federation("opacus:opacus_apps:mine", sigma=0.0), 5)
    factor = 5 if name == "summed" else 1
    for client, found in gradients(federation(f"opacus:opacus_apps:{name}", sigma=0.0), 5).items():
        assert float((found - factor * whole[client]).abs().max()) < 1e-6


def test_empty_samples_are_steps_like_others() -> None:
    """Three examples at rate 1/3: every fourth sample is empty; noise is added, and counted, all the same."""
    plan = replace(PLAN, local=Local("delta", 8, 1, Opt("sgd", LR)))
    run = federation("opacus:stock/dp_sgd", plan, shards((3, 3, 3)), noise_multiplier=1.0)
    assert run.run(2)
    assert all(bool(leaf.isfinite().all()) for leaf in leaves(run.parties.server.params))
    assert [state.history.tolist() for state in run.parties.clients] == [[[1.0, 1 / 3, 48.0]]] * 3


# -- noise ------------------------------------------------------------------------------------------------------------
def within(draws: torch.Tensor, std: float) -> bool:
    """Return whether Gaussian draws may have this standard deviation: the sum of squares between chi-square ends."""
    square, count = float((draws / std).square().sum()), draws.numel()
    return bool(chi2.ppf(SURE / 2, count) < square < chi2.ppf(1 - SURE / 2, count))


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("count", [1, 4])
def test_noise_has_the_law_that_attackers_are_told(name: str, count: int) -> None:
    """multiplier times norm over the (expected) batch size, which in a probe is the victim's."""
    sigma, clip = 0.5, 2.0
    run, clean = (federation(f"opacus:stock/{name}", noise_multiplier=s, max_grad_norm=clip) for s in (sigma, 0.0))
    without = gradients(clean, count)
    rest = torch.cat([found - without[client] for client, found in gradients(run, count).items()])
    law = run.defense.noise(seen(run, count).plan)
    if name == "dp_sgd_adaptive":  # a part of the budget goes to the count
        sigma = (sigma**-2 - 20.0**-2) ** -0.5
    assert law is not None and law.law == "gaussian" and law.std == pytest.approx(sigma * clip / count, rel=1e-6)
    assert within(rest, law.std) and not within(rest, 1.1 * law.std) and not within(rest, law.std / 1.1)
    assert clean.defense.noise(seen(clean).plan) is None


def test_noise_of_training_is_over_the_expected_size() -> None:
    """20 examples in batches of 8 are three steps at rate 1/3, each over int(20 / 3) = 6: nothing but noise is seen."""
    run = federation("opacus:stock/dp_sgd", held=shards((20, 20, 20)), noise_multiplier=1e5, max_grad_norm=1e-5)
    start, run.wire.keep = run.parties.server.params, True
    assert run.run(1)
    sent = [m.message.params for m in run.wire.mail if m.receiver == SERVER and m.round == 1]
    draws = torch.cat([Layout.of(start).pack(one).double() for one in sent]) / LR
    assert within(draws, 3**0.5 / 6) and not within(draws, 3**0.5 / 8) and not within(draws, 3**0.5 / 6.5)


def test_noise_of_several_epochs_is_told() -> None:
    plan = replace(PLAN, local=Local("delta", 4, 1, Opt("sgd", 0.1)))
    run = federation("opacus:stock/dp_sgd", plan, noise_multiplier=1e4, max_grad_norm=1e-4)
    view = run.probe(victims(), kind="local").view("server/1")
    law = run.defense.noise(view.plan)
    drawn = torch.cat([v.flatten() for e in run.defense.evidence(view) for v in e.observed.values()]).double()
    assert law is not None and law.std == pytest.approx(0.5) and within(drawn, law.std)
    momentum = replace(plan, local=replace(plan.local, opt=Opt("sgd", 0.1, momentum=0.9)))
    assert run.defense.noise(momentum) is None


def test_a_mechanism_that_adds_less_than_it_says_is_seen_through() -> None:
    """Its attributes and its accountant say one noise; what is sent has a tenth of it."""
    run = federation("opacus:opacus_apps:weakened", sigma=1.0)
    without = gradients(federation("opacus:opacus_apps:mine", sigma=0.0))
    rest = torch.cat([found - without[client] for client, found in gradients(run).items()])
    law = run.defense.noise(seen(run).plan)
    assert law is not None and law.std == 1.0 and not within(rest, 1.0) and within(rest, 0.1)


# -- epsilon ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sigma", "count", "batch", "rounds"), [(0.6, 24, 8, 2), (1.0, 400, 8, 10), (3.0, 32, 32, 5)])
def test_epsilon_is_that_of_another_accountant(sigma: float, count: int, batch: int, rounds: int) -> None:
    """Opacus's RDP and dp_accounting's: within 1e-9 at the same whole orders, within 2 % at each one's own.

    At orders between whole ones dp_accounting's is a bound or none, and Opacus's the divergence itself: see below. Its
    numerical accountant, and dp_accounting's of privacy loss distributions: within .03; neither is above RDP's bound.
    """
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant
    from opacus.accountants import RDPAccountant

    plan = replace(PLAN, local=Local("delta", 1, batch, Opt("sgd", LR)))
    run = federation("opacus:stock/dp_sgd", plan, shards((count,) * 3), noise_multiplier=sigma)
    ours = load("defenses", "dp_sgd")(noise_multiplier=sigma)
    found, delta = run.defense.guarantee(plan, count, rounds)
    right, same = ours.guarantee(plan, count, rounds)
    assert delta == same == 1 / count and found == pytest.approx(right, rel=0.02)
    steps, orders = rounds * count // batch, [2, 3, 4, 6, 8, 12, 20, 32, 48]
    event = PoissonSampledDpEvent(batch / count, GaussianDpEvent(sigma))
    theirs, other, tight = RDPAccountant(), RdpAccountant(orders), PLDAccountant()
    theirs.history = [(sigma, batch / count, steps)]
    for accountant in (other, tight):
        accountant.compose(event, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert theirs.get_epsilon(delta, alphas=orders) == pytest.approx(other.get_epsilon(delta), rel=1e-9)
        assert theirs.get_epsilon(delta) == pytest.approx(found, rel=1e-12)
    numerical, _ = replace(run.defense, accountant="prv").guarantee(plan, count, rounds)
    assert tight.get_epsilon(delta) - 1e-3 < numerical < min(found, tight.get_epsilon(delta) + 0.03)


@pytest.mark.parametrize(("sigma", "rate"), [(0.6, 1 / 3), (1.0, 0.02), (1.0, 0.25)])
def test_its_divergences_are_those_of_their_definition(sigma: float, rate: float) -> None:
    """log E[((1 - q) + q exp((2 x - 1) / 2 sigma^2))^a] / (a - 1) under x ~ N(0, sigma^2), summed over a fine grid."""
    from opacus.accountants.analysis.rdp import compute_rdp

    x = np.linspace(-60, 100, 400_001)
    ratio = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * x - 1) / 2 / sigma**2)
    density = -(x**2) / 2 / sigma**2 - np.log(sigma * np.sqrt(2 * np.pi))
    for order in (1.5, 2.0, 4.3, 7.7):
        found = logsumexp(density + order * ratio) + np.log(x[1] - x[0])
        told = compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=[order])[0]
        assert told == pytest.approx(found / (order - 1), rel=1e-6)


def test_epsilon_is_of_what_was_run() -> None:
    """What clients' accountants noted in three rounds gives the very epsilon that is told of three rounds."""
    from opacus.accountants import RDPAccountant

    plan = replace(PLAN, local=replace(PLAN.local, epochs=2))
    run = federation("opacus:opacus_apps:mine", plan, sigma=0.8)
    assert run.run(3)
    before = [state.history.clone() for state in run.parties.clients]
    seen(run)
    for client, state in enumerate(run.parties.clients):
        assert torch.equal(state.history, before[client])  # probes are no rounds of training
        noted, count = RDPAccountant(), len(run.shards[client].x)
        noted.history = [(noise, rate, int(steps)) for noise, rate, steps in state.history.tolist()]
        assert noted.history == [(0.8, 1 / -(-count // 8), 3 * 2 * -(-count // 8))]
        assert run.defense.guarantee(plan, count, 3) == (noted.get_epsilon(1 / count), 1 / count)


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("opacus_apps:unhooked", {}, "its engine's accountant counts 0 of the 4 steps of a round"),
        ("opacus_apps:seeded", {}, "its noise is the same whenever it is run"),
        ("opacus_apps:generator", {}, "its noise is the same whenever it is run"),
        ("stock/dp_sgd", {"poisson_sampling": False}, "no Poisson samples"),
        ("stock/dp_sgd", {"noise_multiplier": 0.0}, "its noise multiplier is 0"),
    ],
)
def test_what_an_engine_does_not_know_gives_no_epsilon(name: str, parameters: dict[str, Any], words: str) -> None:
    registry.admit(f"opacus:{name}")
    made = load("defenses", f"opacus:{name}")(**parameters)
    assert made.guarantee(PLAN, 24, 2) is None and words in made.why_no_epsilon(PLAN)


def test_other_rates_than_are_counted_give_no_epsilon() -> None:
    registry.admit("opacus:opacus_apps:oversampled")
    made = load("defenses", "opacus:opacus_apps:oversampled")()
    assert made.guarantee(PLAN, 24, 2) is None and made.guarantee(PLAN, 8, 2) is not None  # of one batch: at rate 1
    assert made.why_no_epsilon(PLAN) == "examples are sampled at rate 0.5, and its accountant counts 0.25"


def test_little_noise_is_told_by_its_bound_and_in_no_time() -> None:
    """The numerical accountant would take gigabytes, or end at 709.79, where doubles do."""
    made = load("defenses", "opacus:stock/dp_sgd")(noise_multiplier=0.01, accountant="prv")
    assert made.guarantee(PLAN, 24, 10)[0] > 5000
    assert made.guarantee(PLAN, 1, 1) == (0.0, 1.0)


def test_an_adaptive_norm_is_accounted_for_or_no_epsilon_is_told() -> None:
    from ppbench.adapters.opacus.ledger import ADJUSTS

    if "dp_sgd_adaptive" not in STOCK:
        pytest.skip("this version has none that can be reached")
    made = load("defenses", "opacus:stock/dp_sgd_adaptive")(noise_multiplier=1.0, count_std=0.6)
    plain = load("defenses", "opacus:stock/dp_sgd")(noise_multiplier=1.0)
    if ADJUSTS:
        assert made.guarantee(PLAN, 24, 2) == plain.guarantee(PLAN, 24, 2)
    else:
        assert made.guarantee(PLAN, 24, 2) is None and "before Opacus 1.6" in made.why_no_epsilon(PLAN)


# -- probes, states ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", STOCK)
def test_a_probe_moves_nothing(name: str) -> None:
    """Training goes on as if nobody had asked; nobody's generators move; another probe of it is equal."""
    alone = trained(f"opacus:stock/{name}")
    run = federation(f"opacus:stock/{name}")
    assert run.run(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()  # type: ignore[index]
    first, again = gradients(run, 2), gradients(run, 2)
    now = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()  # type: ignore[index]
    assert before[:2] == now[:2] and torch.equal(before[2], now[2])
    assert all(torch.equal(first[client], again[client]) for client in first)
    assert run.run(2) and apart(run.parties.server.params, alone) == 0
    assert apart(alone, trained(f"opacus:stock/{name}", seed=1)) > 1e-3


def test_evidence_is_exact_without_noise_and_at_the_noise_with_it() -> None:
    open_, noisy = (federation("opacus:stock/dp_sgd", noise_multiplier=s, max_grad_norm=100.0) for s in (0.0, 0.01))
    for run, low, high in ((open_, 0.0, 1e-9), (noisy, 0.01, 1e9)):
        for one in run.defense.evidence(seen(run, 2)):
            truth = victims(2)[one.unit[0]]
            assert low <= at_truth(one, truth.x[None], truth.y[None]) < high


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run = federation("opacus:stock/dp_sgd")
    assert run.run(1)
    run.save(tmp_path)
    again = Federation(run.defense, PLAN, shards(), Seeds(0))
    again.restore(tmp_path, initial(SPEC, 0))
    assert run.run(3) and again.run(3) and apart(run.parties.server.params, again.parties.server.params) == 0
    assert all(
        torch.equal(a.history, b.history) for a, b in zip(run.parties.clients, again.parties.clients, strict=True)
    )


def test_a_view_is_kept_and_read_again(tmp_path: Path) -> None:
    view = seen(federation("opacus:stock/dp_sgd"))
    view.save(tmp_path)
    again = View.load(tmp_path)
    assert again.defense == view.defense
    assert isinstance(next(m.message for m in again.mail if m.sender == SERVER), Model)


# -- what is no mechanism ---------------------------------------------------------------------------------------------
def test_a_function_of_ones_own_is_a_defense() -> None:
    registry.admit("opacus:opacus_apps:mine")
    made = load("defenses", "opacus:opacus_apps:mine")
    assert (made.control, made.grids["quick"], made.__doc__, made.kin) == ("sigma", (0.5,), "DP-SGD as mine.", "dp_sgd")
    assert asdict(made()) == {"sigma": 0.5, "clip": 1.0}
    theirs = trained("opacus:opacus_apps:mine", sigma=0.2, clip=0.3)
    assert apart(theirs, trained("opacus:stock/dp_sgd", noise_multiplier=0.2, max_grad_norm=0.3)) == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("opacus_apps:no_engine", "gave a tuple of 3; it must give (engine, model, optimizer, loader)"),
        ("opacus_apps:nothing", "gave a NoneType; it must give (engine, model, optimizer, loader)"),
        ("opacus_apps:other_engine", "gave a NoneType where a PrivacyEngine must be"),
        ("opacus_apps:not_private", "gave a SGD where a DPOptimizer must be"),
        ("opacus_apps:other_weights", "gave an optimizer of other weights than its model's"),
        ("opacus_apps:other_network", "trains a network of other parameters than it was given"),
        ("opacus_apps:adam", "trains by Adam at rate 0.1"),
        ("opacus_apps:faster", "trains by SGD at rate 0.7; it must keep the plan's rate 0.5"),
        ("opacus_apps:steps", "took 4 steps of torch.optim in 1 epochs"),
        ("opacus_apps:raises", "raised KeyError: 'no such key'"),
        ("opacus_apps:no_default", "has the parameter sigma without a default"),
        ("opacus_apps:shadow", "has the parameter 'noise'"),
        ("opacus_apps:number", "is 3; it must be a function"),
        ("opacus_apps:absent", "has no attribute 'absent'"),
        ("stock/dp_sdg", "did you mean 'stock/dp_sgd'"),
        ("nothing", "is no name behind opacus:; give stock/NAME, or MODULE:OBJECT of yours"),
    ],
)
def test_what_is_no_mechanism_is_refused(name: str, words: str) -> None:
    registry.admit(f"opacus:{name}")
    with pytest.raises(UsageError) as error:
        load("defenses", f"opacus:{name}")().check(PLAN)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("norms", ["batch", "running"])
def test_batch_norm_is_refused_with_what_to_do(norms: str) -> None:
    plan = replace(PLAN, spec=net_spec("opacus_apps:batch_normed_net", (1, 8, 8), 10, {"norms": norms}))
    with pytest.raises(UsageError, match=r"batch norm in model 'opacus_apps:batch_normed_net' .* ModuleValidator.fix"):
        load("defenses", "opacus:stock/dp_sgd")().check(plan)


def test_a_layer_that_is_never_used_is_refused() -> None:
    plan = replace(PLAN, spec=net_spec("opacus_apps:Idle", (1, 8, 8), 10, {}))
    with pytest.raises(UsageError, match="raised ValueError: Per sample gradient is not initialized"):
        load("defenses", "opacus:stock/dp_sgd")().check(plan)


def test_a_layer_without_a_rule_is_clipped_as_others_are() -> None:
    """Opacus asks torch.func for its examples' gradients."""
    plan = replace(PLAN, spec=net_spec("opacus_apps:scaled_net", (1, 8, 8), 10, {}))
    run = federation("opacus:stock/dp_sgd", plan, noise_multiplier=0.0, max_grad_norm=0.5)
    for client, found in gradients(run, 4).items():
        exact = each(run.parties.server.params, victims(4)[Slot(0, client)], plan)
        assert float((found - clipped(exact, 0.5) / 4).abs().max()) < 1e-6


def test_what_breaks_a_round_is_told_in_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"raised ValueError: too many examples"):
        federation("opacus:opacus_apps:raises_late")
    run = federation("opacus:opacus_apps:raises_late", held=shards((1, 1, 1)))
    run.shards = shards((1, 1, 2))
    with pytest.raises(ProtocolError, match=r"The training of client 2 raised ValueError: too many examples"):
        run.run(1)


def test_a_number_of_examples_that_opacus_divides_by_nought_is_refused() -> None:
    plan = replace(PLAN, local=replace(PLAN.local, batch=1))
    with pytest.raises(UsageError, match=r"Of 49 examples in batches of 1, Opacus expects int\(49 \* \(1 / 49\)\) = 0"):
        federation("opacus:stock/dp_sgd", plan, shards((20, 49, 20)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adam"}, "needs --optimizer sgd"),
        ({"upload": "gradient"}, "needs --upload delta"),
        ({"grid": (-1.0,)}, "it must be 0 or from 1e-12 to 1e"),
    ],
)
def test_federations_that_no_attack_reads_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ppbench.evaluate(defense="opacus:stock/dp_sgd", out=tmp_path / "out", **options)


def test_names_are_those_of_opacus_and_all_that_ships_has_one() -> None:
    """A name of an optimizer stands for the mechanism that trains by it."""
    import opacus.optimizers

    from ppbench.adapters import opacus as adapter
    from ppbench.adapters.opacus import private, stock

    assert {one.stock for one in stock.OPACUS_STOCK} <= {*adapter.STOCK_NAMES}
    for one in stock.OPACUS_STOCK:
        handed = private.public_training(PLAN, initial(SPEC, 0), data(20, 0), LR)
        optimizer = type(one().parts(handed)[2])
        names = adapter.STOCK_NAMES[one.stock]
        assert all(load("defenses", f"opacus:stock/{name}") is one for name in names)
        assert optimizer.__name__ in names and hasattr(opacus.optimizers, optimizer.__name__)


def test_the_command_ends_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (("stock/dp_sdg", "did you mean"), ("opacus_apps:no_engine", "gave a tuple of 3")):
        out = str(tmp_path / "out")
        monkeypatch.setattr(sys, "argv", ["ppbench", "evaluate", "--defense", f"opacus:{name}", "--out", out])
        with pytest.raises(SystemExit) as end:
            main()
        told = capsys.readouterr().err
        assert end.value.code == 2 and words in " ".join(told.split()), told


def test_records_do_not_choose_what_is_imported() -> None:
    assert registry.find("defenses", "opacus:this:c") is None and "this" not in sys.modules
    with pytest.raises(UsageError, match="There is no defense named 'opacus:this:c'"):
        load("defenses", "opacus:this:c")
    assert registry.find("defenses", "opacus:stock/dp_sgd") is not None


PRIVATE_TASK = """
import torch
from opacus import PrivacyEngine
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.out = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.conv(x))).flatten(1))


def load_data(partition_id, num_partitions, batch_size):
    raise RuntimeError("the app's own data are not to be touched")


def train(net, loader, config, lr):
    engine = PrivacyEngine(accountant="rdp")
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    model, optimizer, loader = engine.make_private(
        module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=config["noise"], max_grad_norm=100.0
    )
    model.train()
    for _ in range(config["local-epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return 0.0
"""


def test_a_flower_app_whose_clients_train_by_it_is_run_as_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flower:FOLDER of an app that makes its training private: what is seen is the gradient and that noise."""
    pytest.importorskip("flwr")
    place = tmp_path / "app"
    shutil.copytree(Path(__file__).parent / "flower_app", place, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.move(place / "quick_app", place / "private_app")
    for file in place.rglob("*.*"):
        file.write_text(file.read_text().replace("quick_app", "private_app").replace("noise = 0.0", "noise = 0.5"))
    client, settings = place / "private_app" / "client_app.py", place / "pyproject.toml"
    client.write_text(client.read_text().replace('float(config["noise"])', "0.0"))
    settings.write_text(settings.read_text().replace('batch = ["img", "label"]', ""))
    (place / "private_app" / "task.py").write_text(PRIVATE_TASK)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = net_spec("private_app.task:Net", (1, 8, 8), 10, {})
    plan = replace(PLAN, spec=spec, local=Local("delta", 1, 8, Opt("sgd", 0.1)))
    run = federation(f"flower:{place}", plan)
    assert run.run(2)
    for found in run.defense.evidence(seen(run, 2)):
        truth = victims(2)[found.unit[0]]
        exact = found.simulate(truth.x[None].double(), truth.y[None].double())
        rest = torch.cat([(found.observed[n] - v.detach()).flatten() for n, v in exact.items()])
        assert within(rest, 0.5 * 100 / 2)


# -- what was found ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("seeded_noise", r"seed 42 taken off: \d.\de-06 from .* image at 1\d\d.\d dB.*seed 43 taken off: .*e\+02"),
        ("rounds", r"rounds 1 and 20: 3.79, 3.79.*all 20 rounds: 12.45"),
        ("expected_size", r"\n49 examples in batches of 1: expected 0, .* finite: False\n98 .* of 2: expected 1,"),
        ("copies", r"at delta 1e-05: 1.01.*epsilon at least [2-4]\."),
        ("adaptive", r"a sample of 0 examples: cannot reshape.*100 on the count: epsilon 4.73.*: epsilon (4.73|2.42)"),
    ],
)
def test_what_was_found_still_holds(script: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    if script == "adaptive" and "dp_sgd_adaptive" not in STOCK:
        pytest.skip("this version has none that can be reached")
    path = Path(__file__).parents[1] / "examples" / "findings" / f"opacus_{script}.py"
    with warnings.catch_warnings(), torch.random.fork_rng():
        runpy.run_path(str(path), run_name="__main__")
    assert re.search(words, capsys.readouterr().out, re.DOTALL)


def test_an_evaluation_from_end_to_end(tmp_path: Path) -> None:
    """Without noise and clipping the image falls; with much noise it does not; both by one command, controls hold."""
    common = {
        "defense": "opacus:stock/dp_sgd", "model": "mlp", "clients": 2, "rounds": 4, "victims": 4, "candidates": 8,
        "tuning": 0, "stages": ("init",), "attack_batch": (1,), "budget": 200, "workers": 1,
        "attacks": ("analytic", "adaptive_server", "label_recovery"), "settings": {"max_grad_norm": 1e3}, "lr": 0.2,
    }  # fmt: skip
    open_ = ppbench.evaluate(grid=(0.0,), out=tmp_path / "a", **common)
    shut = ppbench.evaluate(grid=(1e-3,), out=tmp_path / "b", **common)
    assert "falls: images rebuilt" in open_.answer.headline.words and "falls" not in shut.answer.headline.words
    assert open_.answer.trust.state == shut.answer.trust.state == "holds"
