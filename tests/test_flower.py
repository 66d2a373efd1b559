"""Flower's strategies and mods as defenses: rounds as without Flower, views of what passed, refusals in a sentence.

Run with Flower beside ppbench (`.ci/run` does so with the oldest and the newest version): PYTHONPATH=FOLDER pytest
tests/test_flower.py, where pip install --target FOLDER 'flwr==1.42.*' has made FOLDER.
"""

from __future__ import annotations

import math
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats

import ppbench
from ppbench.base import registry
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.registry import load
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.optim import Layout, Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Slot
from ppbench.metrics.audit import gdp_epsilon
from ppbench.nets.net import initial, net_spec

pytest.importorskip("flwr")

from ppbench.adapters.flower.inside import running_flower  # it needs Flower

LR, CLIENTS = 0.1, 3
NORMAL = NormalDist()
PLAN = Plan(net_spec("mlp", (1, 8, 8), 10, {"hidden": "16"}), CLIENTS, Local("delta", 1, 8, Opt("sgd", LR)))
STOCK = (
    *("fedavg", "dp_server_fixed", "dp_client_fixed", "dp_server_adaptive", "dp_client_adaptive", "local_dp"),
    *("fedmedian", "krum", "fedadam", "fedprox"),
)


def data(count: int, seed: int) -> Data:
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=draws)
    return Data(torch.rand(count, 1, 8, 8, generator=draws), torch.nn.functional.one_hot(labels, 10).float())


def federation(name: str, plan: Plan = PLAN, **parameters: Any) -> Federation:
    """Return a started federation whose clients have unequally many examples."""
    shards = {client: data(20 + 4 * client, client) for client in range(CLIENTS)}
    registry.admit(name)
    made = Federation(load("defenses", name)(**parameters), plan, shards, Seeds(0))
    made.start(initial(plan.spec, 0))
    return made


def trained(name: str, rounds: int = 3, **parameters: Any) -> Params:
    run = federation(name, **parameters)
    assert run.run(rounds)
    return run.parties.server.params  # type: ignore[no-any-return]


def apart(one: Params, other: Params) -> float:
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def victims() -> Mapping[Slot, Data]:
    return {Slot(0, client): data(1, 50 + client) for client in range(CLIENTS)}


def seen(run: Federation) -> View:
    return run.probe(victims()).view("server/1")


def test_federated_averaging_is_ours_to_rounding() -> None:
    """Same data, same seeds, unequal shards, three rounds of several steps; and weights do move."""
    ours = trained("none")
    assert apart(trained("flower:stock/fedavg"), ours) < 1e-6
    assert apart(ours, initial(PLAN.spec, 0)) > 1e-2


def uploads(run: Federation) -> Mapping[int, torch.Tensor]:
    """Train one round, and return what each client changed, [P], by client; equal seeds give equal batches."""
    start, run.wire.keep = run.parties.server.params, True
    assert run.run(1)
    sent = {m.sender: m.message for m in run.wire.mail if m.receiver == SERVER and m.round == 1}
    return {c: Layout.of(start).pack(run.defense.decode(message, start)).float() for c, message in sent.items()}


@pytest.mark.parametrize("name", ["dp_client_fixed", "dp_server_fixed"])
def test_clipping_is_that_of_plain_arithmetic(name: str) -> None:
    """Without noise: each of our own clients' updates, at most 0.05 long, and the mean of these by examples."""
    clip, run = 0.05, federation(f"flower:stock/{name}", noise_multiplier=0.0, clipping_norm=0.05)
    start, ours, theirs = run.parties.server.params, uploads(federation("none")), uploads(run)
    assert min(float(update.norm()) for update in ours.values()) > 2 * clip
    clipped = {c: update * min(1.0, clip / float(update.norm())) for c, update in ours.items()}
    for client, update in theirs.items():  # where the server clips, it is sent all of it
        expected = (clipped if name == "dp_client_fixed" else ours)[client]
        torch.testing.assert_close(update, expected, rtol=1e-3, atol=1e-6)
    mean = sum(((20 + 4 * c) / 72 * update for c, update in clipped.items()), torch.zeros(()))
    layout = Layout.of(start)
    moved = layout.pack(start) - layout.pack(run.parties.server.params)
    torch.testing.assert_close(moved, mean, rtol=1e-3, atol=1e-6)
    assert float(mean.norm()) > clip / 4


def test_noise_of_clients_has_the_law_that_attackers_are_told() -> None:
    run = federation("flower:stock/local_dp", noise_multiplier=0.5, clipping_norm=2.0)
    view = seen(run)
    law = run.defense.noise(view.plan)
    clean = {
        e.unit: e
        for e in seen(federation("flower:stock/fedavg")).defense.evidence(seen(federation("flower:stock/fedavg")))
    }
    assert law is not None and law.std == pytest.approx(1.0 / LR)
    rest = torch.cat(
        [(e.observed[n] - clean[e.unit].observed[n]).flatten() for e in run.defense.evidence(view) for n in e.observed]
    )
    assert float(rest.std()) == pytest.approx(law.std, rel=0.05) and abs(float(rest.mean())) < 0.2 * law.std
    assert run.defense.clipping(view.plan) == pytest.approx(2.0 / LR)


def test_epsilon_is_of_what_the_noise_hides() -> None:
    """Of two updates 2 C apart under N(0, (z C)^2), by their exact law; and no less than what the mod was given."""
    for z, rounds in ((2.0, 1), (8.0, 5)):
        made = load("defenses", "flower:stock/local_dp")(noise_multiplier=z, clipping_norm=0.3)
        epsilon, delta = made.guarantee(PLAN, 20, rounds)
        away = 2 / z * math.sqrt(rounds)  # of the two means, in standard deviations
        exact = NORMAL.cdf(away / 2 - epsilon / away) - math.exp(epsilon) * NORMAL.cdf(-away / 2 - epsilon / away)
        assert exact <= delta == 1e-5 and made.clipping(PLAN) == pytest.approx(0.3 / LR)
        nearer = 0.7 * epsilon
        assert NORMAL.cdf(away / 2 - nearer / away) - math.exp(nearer) * NORMAL.cdf(-away / 2 - nearer / away) > delta
        assert epsilon > made.claimed_epsilon * math.sqrt(rounds) / 2


@pytest.mark.parametrize("name", STOCK)
def test_a_probe_moves_nothing_and_tells_a_gradient(name: str) -> None:
    """Training goes on as if nobody had asked; nobody's generators move; what is sent is rate times a gradient."""
    alone = trained(f"flower:stock/{name}", 2)
    run = federation(f"flower:stock/{name}")
    assert run.run(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()  # type: ignore[index]
    view = seen(run)
    now = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state()  # type: ignore[index]
    assert before[:2] == now[:2] and torch.equal(before[2], now[2])
    assert run.run(2) and apart(run.parties.server.params, alone) == 0
    found = run.defense.evidence(view)
    assert [e.unit[0].client for e in found] == [0, 1, 2]
    truth = victims()
    if "client" in name:  # clipped, if it is long: the direction is told
        found = [replace(e, measure="cosine") for e in found]
    apart_ = [at_truth(e, truth[e.unit[0]].x[None], truth[e.unit[0]].y[None]) for e in found]
    assert min(apart_) > 0.01 if name == "local_dp" else max(apart_) < 1e-6


def test_state_is_read_off_and_put_back(tmp_path: Path) -> None:
    """A strategy's moments, and what a client's context keeps, outlive a checkpoint; a fork has its own copy."""
    for name in ("flower:flower_apps:adam", "flower:flower_apps:counting"):
        run = federation(name)
        assert run.run(2)
        folder = tmp_path / name.rpartition(":")[2]
        folder.mkdir()
        run.save(folder)
        again = Federation(run.defense, PLAN, {c: data(20 + 4 * c, c) for c in range(CLIENTS)}, Seeds(0))
        again.restore(folder, initial(PLAN.spec, 0))
        assert run.run(3) and again.run(3)
        assert apart(run.parties.server.params, again.parties.server.params) == 0
    calls = [int(state.state.metrics["seen"]["n"]) for state in again.parties.clients]
    view = seen(again)
    told = [m.message.rest.metrics["metrics"]["calls"].item() for m in view.mail if m.receiver == SERVER]
    assert calls == [3, 3, 3] and told == [4, 4, 4]
    assert [int(state.state.metrics["seen"]["n"]) for state in again.parties.clients] == calls


def test_a_view_holds_what_was_sent_besides_weights(tmp_path: Path) -> None:
    """Numbers of examples, bits of clipping, settings; and it can be kept and read again."""
    view = seen(federation("flower:stock/dp_client_adaptive"))
    view.save(tmp_path)
    again = View.load(tmp_path)
    for one in (view, again):
        sent = [m.message for m in one.mail if m.receiver == SERVER]
        assert [int(s.rest.metrics["metrics"]["num-examples"]) for s in sent] == [1, 1, 1]
        assert {int(s.rest.metrics["metrics"]["norm_bit"]) for s in sent} <= {0, 1}
        asked = next(m.message for m in one.mail if m.sender == SERVER)
        assert float(asked.rest.configs["config"]["clipping_norm"]) == pytest.approx(0.1)
    assert again.defense == view.defense


def test_mods_may_change_what_is_trained_from() -> None:
    run, whole = federation("flower:flower_apps:halving"), federation("flower:stock/fedavg")
    halved = next(m.message for m in seen(run).mail if m.sender == SERVER)
    assert apart(halved.params, whole.parties.server.params) == 0
    sent = {m.sender: m.message.params for m in seen(run).mail if m.receiver == SERVER}
    half = {name: value / 2 for name, value in run.parties.server.params.items()}
    for client, params in sent.items():
        held = victims()[Slot(0, client)]
        from ppbench.base.autodiff import gradient

        step = gradient(lambda p, h=held: PLAN.objective(p, h.x, h.y, torch.ones(1)), half)  # type: ignore[misc]
        assert apart(params, {n: half[n] - LR * step[n] for n in half}) < 1e-6


def test_a_function_of_ones_own_is_a_defense() -> None:
    registry.admit("flower:flower_apps:mine")
    made = load("defenses", "flower:flower_apps:mine")
    assert (made.control, made.grids["quick"], made.__doc__) == ("multiplier", (0.1,), "Central DP whose clients clip.")
    assert asdict(made(multiplier=0.5)) == {"multiplier": 0.5, "clip": 1.0}
    theirs = trained("flower:flower_apps:mine", multiplier=0.2, clip=0.3)
    assert apart(theirs, trained("flower:stock/dp_client_fixed", noise_multiplier=0.2, clipping_norm=0.3)) == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("samples", "The strategy leaves out client"),
        ("waits", "The strategy waits for more clients than the 3 that there are"),
        ("nobody", "The strategy asks nobody to train in round 1"),
        ("raises", "The app of client 0 raised KeyError: 'no such key'"),
        ("errs", "Client 0 answers by an error: out of memory"),
        ("shapes", "What client 0 sends holds {'arrays': 4}; it must hold the model's 4 arrays, in their shapes"),
        ("no_arrays", "What client 0 sends holds no arrays"),
        ("aggregates_nothing", "The strategy raised"),
    ],
)
def test_what_breaks_a_round_is_told_in_a_sentence(name: str, words: str) -> None:
    with pytest.raises(ProtocolError) as error:
        federation(f"flower:flower_apps:{name}").run(1)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("flower_apps:not_a_strategy", "gave object; it must give (strategy, list of client mods)"),
        ("flower_apps:alone", "raised TypeError"),
        ("flower_apps:no_default", "has the parameter scale without a default"),
        ("flower_apps:refuses", "raised ValueError: The noise multiplier should be a non-negative value"),
        ("flower_apps:number", "is 3; it must be a function"),
        ("flower_apps:absent", "has no attribute 'absent'"),
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("stock/local_pd", "did you mean 'stock/local_dp'"),
        ("nothing", "is no name behind flower:; give stock/NAME, MODULE:OBJECT of yours, or an app"),
    ],
)
def test_what_is_no_mechanism_is_refused(name: str, words: str) -> None:
    registry.admit(f"flower:{name}")
    with pytest.raises(UsageError) as error:
        load("defenses", f"flower:{name}")().check(PLAN)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_records_do_not_choose_what_is_imported() -> None:
    """Defenses at an address are loaded for who asks for them; a record that names one, anybody's, imports nothing."""
    assert registry.find("defenses", "flower:this:c") is None and "this" not in sys.modules
    with pytest.raises(UsageError, match="There is no defense named 'flower:this:c'"):
        load("defenses", "flower:this:c")
    with pytest.raises(UsageError, match="'flower:this:c' is"):  # asked for: imported, and no function
        ppbench.evaluate(defense="flower:this:c")
    assert registry.find("defenses", "flower:stock/krum") is not None


def test_what_a_probe_can_have_no_copy_of_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"the strategy.draws is a Generator, of which no probe can have a copy"):
        federation("flower:flower_apps:uncopied")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adam"}, "needs --optimizer sgd"),
        ({"schedule": "round_robin"}, "needs --schedule parallel"),
        ({"upload": "gradient"}, "needs --upload delta"),
    ],
)
def test_federations_that_are_not_flowers_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ppbench.evaluate(defense="flower:stock/fedavg", out=tmp_path / "out", **options)


def test_names_are_those_of_flower_and_all_that_ships_has_one() -> None:
    """Each of Flower's names is imported from where its users import it; those of one of ours make that one."""
    import flwr.clientapp.mod
    import flwr.server.workflow
    import flwr.serverapp.strategy

    from ppbench.adapters import flower
    from ppbench.adapters.flower import stock

    homes = (flwr.clientapp.mod, flwr.client.mod, flwr.serverapp.strategy, flwr.server.workflow)
    assert [one.stock for one in stock.FLOWER_STOCK] == [*flower.STOCK_NAMES]
    for one in stock.FLOWER_STOCK:
        for name in flower.STOCK_NAMES[one.stock]:
            theirs = next(getattr(home, name) for home in homes if hasattr(home, name))
            assert load("defenses", f"flower:stock/{name}") is one
            if issubclass(one, stock.FlowerStock) and not name.endswith("_mod"):
                strategy, mods = one().parts(3)
                assert any(type(part) is theirs for part in (strategy, *mods)), name


# -- what was found ----------------------------------------------------------------------------------------------------
FINDINGS = Path(__file__).parents[1] / "examples" / "findings"


def found_by(script: str, *options: str) -> str:
    """Return what a finding's script prints."""
    done = subprocess.run(
        [sys.executable, str(FINDINGS / f"{script}.py"), *options],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def unequal() -> Any:
    return SimpleNamespace(**runpy.run_path(str(FINDINGS / "flower_unequal_counts.py")))


@pytest.mark.parametrize("side", ["SERVER", "CLIENT"])
def test_a_client_moves_the_aggregate_by_its_share_of_examples(unequal: Any, side: str) -> None:
    """Without noise: by w C, whatever its update's length; noise is z C / n all the same, unless weights are equal."""
    wrapper = getattr(unequal, side)
    with running_flower("The finding", 0), mock.patch.dict(unequal.wrapped.__globals__, MULTIPLIER=0.0):
        for counts, key, share in (
            (unequal.EQUAL, "num-examples", 1 / 10),
            (unequal.UNEQUAL, "num-examples", 10 / 19),
            (unequal.UNEQUAL, "one", 1 / 10),
        ):
            moved = unequal.released(unequal.wrapped(wrapper, key), counts, 10 * unequal.CLIP)
            assert moved == pytest.approx(share * unequal.CLIP, rel=1e-6)
    with running_flower("The finding", 1):
        noisy = [unequal.released(unequal.wrapped(wrapper), unequal.UNEQUAL, 1e-9) for _ in range(100)]
    assert np.std(noisy) == pytest.approx(2.0 * unequal.CLIP / 10, rel=0.25)


def test_unequal_counts_exceed_the_epsilon_of_the_multiplier_and_equal_ones_do_not(unequal: Any) -> None:
    asked_for = gdp_epsilon(1 / 2.0)
    assert unequal.gaussian(1 / 2.0) == pytest.approx(asked_for, rel=1e-6) and 1.9 < asked_for < 2.1
    with running_flower("The finding", 2):
        shares, law, _ = unequal.measured(unequal.wrapped(unequal.SERVER), unequal.UNEQUAL, 200)
        assert shares > asked_for and law > 4 * asked_for
        assert law < gdp_epsilon(10 / 19 * 10 / 2.0)
        shares, law, _ = unequal.measured(unequal.wrapped(unequal.SERVER), unequal.EQUAL, 80)
        assert shares < law < asked_for


def test_the_bounds_on_epsilon_hold_for_gaussians(unequal: Any) -> None:
    """Of 200 pairs of samples whose epsilon is known, either bound exceeds it in about 5 % at most."""
    draws, exact = np.random.default_rng(0), gdp_epsilon(1.0)
    pairs = [(draws.normal(1, 1, 400), draws.normal(0, 1, 400)) for _ in range(200)]
    assert sum(unequal.least(*pair, 1.5) > exact for pair in pairs) <= 10
    assert sum(unequal.least_gaussian(*pair) > exact for pair in pairs) <= 10
    inside, outside = np.arange(20.0), np.arange(20.0) - 13  # beyond 6.5: 13 of 20, and none
    low, high = stats.binomtest(13, 20).proportion_ci(0.95).low, stats.binomtest(0, 20).proportion_ci(0.95).high
    assert unequal.least(inside, outside, 6.5) == pytest.approx(math.log((low - 1e-5) / high))
    assert unequal.least(outside, inside, 30.0) == -math.inf


def test_what_was_found_of_unequal_counts_is_told() -> None:
    told = found_by("flower_unequal_counts", "--runs", "5")
    assert "epsilon 1.99" in told and told.count("would be 14.09") == 2 and told.count("would be 1.99") == 3
    version = tuple(map(int, metadata.version("flwr").split(".")[:2]))
    wanted = "refused, Accounted aggregation requires equal client weights" if version >= (1, 42) else "cannot be asked"
    assert f"with an accountant: {wanted}" in told


def test_what_was_found_of_updates_of_zeros_is_told() -> None:
    told = found_by("flower_zero_update")
    assert len(re.findall(r"server clips.* of 0: the server raises ZeroDivisionError.*new model: \[1\]\n", told)) == 2
    assert len(re.findall(r"clients clip.* of 0: client 1 raises ZeroDivisionError.* \[1, 3\]\n", told)) == 2
    assert re.search(r"LocalDpMod, an update of 0: client 1 raises ZeroDivisionError.* \[1, 2, 3\]\n", told)
    assert len(re.findall(r"of 1e-09: rounds with a new model: \[1, 2, 3\]\n", told)) == 5


def test_an_evaluation_from_end_to_end(tmp_path: Path) -> None:
    """Undefended Flower gives the image; noise of a client's own takes it; both by one command, controls hold."""
    common = {
        "model": "mlp", "clients": 2, "rounds": 1, "victims": 4, "candidates": 8, "tuning": 0, "stages": ("init",),
        "attack_batch": (1,), "attacks": ("analytic", "adaptive_server", "adaptive_dp", "label_recovery"),
        "budget": 200,
    }  # fmt: skip
    plain = {**common, "attacks": ("analytic", "adaptive_server", "label_recovery")}
    open_ = ppbench.evaluate(defense="flower:stock/fedavg", out=tmp_path / "a", workers=1, **plain)
    shut = ppbench.evaluate(defense="flower:stock/local_dp", grid=(0.1,), out=tmp_path / "b", workers=1, **common)
    assert "falls: images rebuilt" in open_.answer.headline.words and "falls" not in shut.answer.headline.words
    assert open_.answer.trust.state == shut.answer.trust.state == "holds"
    cells = sorted((tmp_path / "b").rglob("*.json"))
    again = ppbench.evaluate(defense="flower:stock/LocalDpMod", grid=(0.1,), out=tmp_path / "b", workers=1, **common)
    assert again.records == shut.records and sorted((tmp_path / "b").rglob("*.json")) == cells
