"""Opacus's private training as a client's: arithmetic, noise and epsilon. What adapters share: test_adapters.py."""

from __future__ import annotations

import importlib
import re
import runpy
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapted import Setting, data
from scipy.special import logsumexp
from scipy.stats import chi2
from torch.func import grad, vmap

from ppbench.base import registry
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.registry import load_plugin
from ppbench.base.tree import Params, leaves
from ppbench.commands import main
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Data, Layout, Local, Opt, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Model, Slot
from ppbench.nets.net import initial, net_spec
from ppbench.testing.small_federation import largest_difference

pytest.importorskip("opacus")

SETTING = Setting(lr=0.5)
PLAN, LR, SPEC = SETTING.plan, SETTING.lr, SETTING.plan.spec
federation, trained, shards = SETTING.federation, SETTING.trained, SETTING.shards
victims, seen = SETTING.victims, SETTING.seen

LR, CLIENTS = 0.5, 3
STOCK = [
    one.name.partition("stock/")[2] for one in importlib.import_module("ppbench.adapters.opacus.mechanism").OPACUS_STOCK
]
SURE = 1e-6
"""How rarely a right noise is taken for a wrong one."""


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


def clipped(result: Params, clip: float, per_layer: bool = False) -> torch.Tensor:
    """Return the sum of gradients clipped by plain arithmetic, [P]."""
    norms = torch.stack([value.flatten(1).norm(dim=1) for value in result.values()], 1)
    if per_layer:
        factors = (clip / len(result) ** 0.5 / norms).clamp(max=1.0)
    else:
        factors = (clip / norms.norm(dim=1, keepdim=True)).clamp(max=1.0).expand_as(norms)
    return torch.cat([torch.tensordot(f, v, 1).flatten() for f, v in zip(factors.T, result.values(), strict=True)])


# -- the arithmetic ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("count", [1, 5])
def test_without_noise_a_probe_is_the_clipped_mean_gradient(name: str, count: int) -> None:
    """To 1e-6, of clips that are above, among and below the examples' norms; by arithmetic of our own, in float64."""
    for clip in (0.1, 2.6, 1e3):
        run = federation(f"opacus:stock/{name}", noise_multiplier=0.0, max_grad_norm=clip)
        start = run.parties.server.params
        for client, value in gradients(run, count).items():
            exact = each(start, victims(count)[Slot(0, client)])
            right = clipped(exact, clip, name == "dp_sgd_per_layer") / count
            assert float((value - right).abs().max()) < 1e-6 * max(1.0, float(right.abs().max()))
            longest = max(
                float(Layout.of(start).pack({n: v[i] for n, v in exact.items()}).norm()) for i in range(count)
            )
            assert (float(right.norm()) < 0.11) if clip == 0.1 else longest > 1


@pytest.mark.parametrize("epochs", [1, 3])
def test_without_noise_and_clipping_a_round_is_ours_without_a_defense(epochs: int) -> None:
    """One batch an epoch, whose Poisson sample of rate 1 is all of it; unequally many examples, two rounds."""
    plan = replace(PLAN, local=Local("delta", epochs, 40, Opt("sgd", LR)))
    theirs = trained("opacus:stock/dp_sgd", plan, noise_multiplier=0.0, max_grad_norm=1e6)
    assert (
        largest_difference(theirs, trained("none", plan)) < 1e-6 < 1e-2 < largest_difference(theirs, initial(SPEC, 0))
    )


def test_networks_as_somebody_has_them_are_trained() -> None:
    for net in ("plain_net", "grouped_net"):
        plan = Plan(net_spec(f"opacus_apps:{net}", (1, 8, 8), 10, {}), 3, Local("delta", 2, 40, Opt("sgd", LR)))
        theirs = trained("opacus:stock/dp_sgd", plan, noise_multiplier=0.0, max_grad_norm=1e6)
        assert (
            largest_difference(theirs, trained("none", plan))
            < 1e-5
            < 1e-2
            < largest_difference(theirs, initial(plan.spec, 0))
        )
        if len(STOCK) == 3:  # before 1.5 ModuleValidator.fix asks of torch what torch no longer does
            fixed = trained("opacus:opacus_apps:fixed", plan, sigma=0.0, clip=1e6)  # a clone, and its layers by name
            assert largest_difference(fixed, theirs) == 0


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
    for client, value in gradients(federation(f"opacus:opacus_apps:{name}", sigma=0.0), 5).items():
        assert float((value - factor * whole[client]).abs().max()) < 1e-6


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
    rest = torch.cat([value - without[client] for client, value in gradients(run, count).items()])
    law = run.defense.noise(seen(run, count).plan)
    if name == "dp_sgd_adaptive":  # a part of the budget goes to the count
        sigma = (sigma**-2 - 20.0**-2) ** -0.5
    assert law is not None and law.law == "gaussian" and law.std == pytest.approx(sigma * clip / count, rel=1e-6)
    assert within(rest, law.std) and not within(rest, 1.1 * law.std) and not within(rest, law.std / 1.1)
    assert clean.defense.noise(seen(clean).plan) is None


def test_noise_of_training_is_over_the_expected_size() -> None:
    """20 examples in batches of 8 are three steps at rate 1/3, each over int(20 / 3) = 6: nothing but noise is seen."""
    run = federation("opacus:stock/dp_sgd", shards=shards((20, 20, 20)), noise_multiplier=1e5, max_grad_norm=1e-5)
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
    rest = torch.cat([value - without[client] for client, value in gradients(run).items()])
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
    ours = load_plugin("defenses", "dp_sgd")(noise_multiplier=sigma)
    result, delta = run.defense.guarantee(plan, count, rounds)
    right, same = ours.guarantee(plan, count, rounds)
    assert delta == same == 1 / count and result == pytest.approx(right, rel=0.02)
    steps, orders = rounds * count // batch, [2, 3, 4, 6, 8, 12, 20, 32, 48]
    event = PoissonSampledDpEvent(batch / count, GaussianDpEvent(sigma))
    theirs, other, tight = RDPAccountant(), RdpAccountant(orders), PLDAccountant()
    theirs.history = [(sigma, batch / count, steps)]
    for accountant in (other, tight):
        accountant.compose(event, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert theirs.get_epsilon(delta, alphas=orders) == pytest.approx(other.get_epsilon(delta), rel=1e-9)
        assert theirs.get_epsilon(delta) == pytest.approx(result, rel=1e-12)
    numerical, _ = replace(run.defense, accountant="prv").guarantee(plan, count, rounds)
    assert tight.get_epsilon(delta) - 1e-3 < numerical < min(result, tight.get_epsilon(delta) + 0.03)


@pytest.mark.parametrize(("sigma", "rate"), [(0.6, 1 / 3), (1.0, 0.02), (1.0, 0.25)])
def test_its_divergences_are_those_of_their_definition(sigma: float, rate: float) -> None:
    """log E[((1 - q) + q exp((2 x - 1) / 2 sigma^2))^a] / (a - 1) under x ~ N(0, sigma^2), summed over a fine grid."""
    from opacus.accountants.analysis.rdp import compute_rdp

    x = np.linspace(-60, 100, 400_001)
    ratio = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * x - 1) / 2 / sigma**2)
    density = -(x**2) / 2 / sigma**2 - np.log(sigma * np.sqrt(2 * np.pi))
    for order in (1.5, 2.0, 4.3, 7.7):
        result = logsumexp(density + order * ratio) + np.log(x[1] - x[0])
        outcome = compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=[order])[0]
        assert outcome == pytest.approx(result / (order - 1), rel=1e-6)


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
    made = load_plugin("defenses", f"opacus:{name}")(**parameters)
    assert made.guarantee(PLAN, 24, 2) is None and words in made.why_no_epsilon(PLAN)


def test_other_rates_than_are_counted_give_no_epsilon() -> None:
    registry.admit("opacus:opacus_apps:oversampled")
    made = load_plugin("defenses", "opacus:opacus_apps:oversampled")()
    assert made.guarantee(PLAN, 24, 2) is None and made.guarantee(PLAN, 8, 2) is not None  # of one batch: at rate 1
    assert made.why_no_epsilon(PLAN) == "examples are sampled at rate 0.5, and its accountant counts 0.25"


def test_little_noise_is_told_by_its_bound_and_in_no_time() -> None:
    """The numerical accountant would take gigabytes, or end at 709.79, where doubles do."""
    made = load_plugin("defenses", "opacus:stock/dp_sgd")(noise_multiplier=0.01, accountant="prv")
    assert made.guarantee(PLAN, 24, 10)[0] > 5000
    assert made.guarantee(PLAN, 1, 1) == (0.0, 1.0)


def test_an_adaptive_norm_is_accounted_for_or_no_epsilon_is_told() -> None:
    from ppbench.adapters.opacus.mechanism import ADJUSTS

    if "dp_sgd_adaptive" not in STOCK:
        pytest.skip("this version has none that can be reached")
    made = load_plugin("defenses", "opacus:stock/dp_sgd_adaptive")(noise_multiplier=1.0, count_std=0.6)
    plain = load_plugin("defenses", "opacus:stock/dp_sgd")(noise_multiplier=1.0)
    if ADJUSTS:
        assert made.guarantee(PLAN, 24, 2) == plain.guarantee(PLAN, 24, 2)
    else:
        assert made.guarantee(PLAN, 24, 2) is None and "before Opacus 1.6" in made.why_no_epsilon(PLAN)


# -- probes, states ---------------------------------------------------------------------------------------------------


def test_evidence_is_exact_without_noise_and_at_the_noise_with_it() -> None:
    open_, noisy = (federation("opacus:stock/dp_sgd", noise_multiplier=s, max_grad_norm=100.0) for s in (0.0, 0.01))
    for run, low, high in ((open_, 0.0, 1e-9), (noisy, 0.01, 1e9)):
        for one in run.defense.evidence(seen(run, 2)):
            truth = victims(2)[one.unit[0]]
            assert low <= at_truth(one, truth.x[None], truth.y[None]) < high


def test_a_view_is_kept_and_read_again(tmp_path: Path) -> None:
    view = seen(federation("opacus:stock/dp_sgd"))
    view.save(tmp_path)
    again = View.load(tmp_path)
    assert again.defense == view.defense
    assert isinstance(next(m.message for m in again.mail if m.sender == SERVER), Model)


# -- what is no mechanism ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norms", ["batch", "running"])
def test_batch_norm_is_refused_with_what_to_do(norms: str) -> None:
    plan = replace(PLAN, spec=net_spec("opacus_apps:batch_normed_net", (1, 8, 8), 10, {"norms": norms}))
    with pytest.raises(UsageError, match=r"batch norm in model 'opacus_apps:batch_normed_net' .* ModuleValidator.fix"):
        load_plugin("defenses", "opacus:stock/dp_sgd")().check(plan)


def test_a_layer_that_is_never_used_is_refused() -> None:
    plan = replace(PLAN, spec=net_spec("opacus_apps:Idle", (1, 8, 8), 10, {}))
    with pytest.raises(UsageError, match="raised ValueError: Per sample gradient is not initialized"):
        load_plugin("defenses", "opacus:stock/dp_sgd")().check(plan)


def test_a_layer_without_a_rule_is_clipped_as_others_are() -> None:
    """Opacus asks torch.func for its examples' gradients."""
    plan = replace(PLAN, spec=net_spec("opacus_apps:scaled_net", (1, 8, 8), 10, {}))
    run = federation("opacus:stock/dp_sgd", plan, noise_multiplier=0.0, max_grad_norm=0.5)
    for client, value in gradients(run, 4).items():
        exact = each(run.parties.server.params, victims(4)[Slot(0, client)], plan)
        assert float((value - clipped(exact, 0.5) / 4).abs().max()) < 1e-6


def test_what_breaks_a_round_is_told_in_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"raised ValueError: too many examples"):
        federation("opacus:opacus_apps:raises_late")
    run = federation("opacus:opacus_apps:raises_late", shards=shards((1, 1, 1)))
    run.shards = shards((1, 1, 2))
    with pytest.raises(ProtocolError, match=r"The training of client 2 raised ValueError: too many examples"):
        run.run(1)


def test_a_number_of_examples_that_opacus_divides_by_nought_is_refused() -> None:
    plan = replace(PLAN, local=replace(PLAN.local, batch=1))
    with pytest.raises(UsageError, match=r"Of 49 examples in batches of 1, Opacus expects int\(49 \* \(1 / 49\)\) = 0"):
        federation("opacus:stock/dp_sgd", plan, shards((20, 49, 20)))


def test_names_are_those_of_opacus_and_all_that_ships_has_one() -> None:
    """A name of an optimizer stands for the mechanism that trains by it."""
    import opacus.optimizers

    from ppbench.adapters import opacus as adapter
    from ppbench.adapters.opacus import mechanism as stock

    assert {*STOCK} <= {*adapter.STOCK_NAMES}
    for own, one in zip(STOCK, stock.OPACUS_STOCK, strict=True):
        handed = stock.public_training(PLAN, initial(SPEC, 0), data(20, 0), LR)
        optimizer = type(one().parts(handed)[2])
        names = adapter.STOCK_NAMES[own]
        assert all(load_plugin("defenses", f"opacus:stock/{name}") is one for name in names)
        assert optimizer.__name__ in names and hasattr(opacus.optimizers, optimizer.__name__)


def test_the_command_ends_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (("stock/dp_sdg", "did you mean"), ("opacus_apps:no_engine", "gave a tuple of 3")):
        out = str(tmp_path / "out")
        monkeypatch.setattr(sys, "argv", ["ppbench", "evaluate", "--defense", f"opacus:{name}", "--out", out])
        with pytest.raises(SystemExit) as end:
            main()
        message = capsys.readouterr().err
        assert end.value.code == 2 and words in " ".join(message.split()), message


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
    for evidence in run.defense.evidence(seen(run, 2)):
        truth = victims(2)[evidence.unit[0]]
        exact = evidence.simulate(truth.x[None].double(), truth.y[None].double())
        rest = torch.cat([(evidence.observed[n] - v.detach()).flatten() for n, v in exact.items()])
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
