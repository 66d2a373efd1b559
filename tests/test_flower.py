"""Flower's strategies and mods as defenses: clipping, noise and views. What adapters share: test_adapters.py."""

from __future__ import annotations

import math
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from adapted import Setting
from scipy import stats

from ppbench.base.registry import load_plugin
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Layout
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Slot
from ppbench.metrics.epsilon import gdp_epsilon
from ppbench.testing.small_federation import largest_difference

pytest.importorskip("flwr")

from ppbench.adapters.flower.mechanism import running_flower  # it needs Flower

LR, CLIENTS = 0.1, 3
SETTING = Setting()
PLAN, LR, CLIENTS = SETTING.plan, SETTING.lr, len(SETTING.sizes)
federation, victims, seen = SETTING.federation, SETTING.victims, SETTING.seen
NORMAL = NormalDist()
STOCK = (
    *("fedavg", "dp_server_fixed", "dp_client_fixed", "dp_server_adaptive", "dp_client_adaptive", "local_dp"),
    *("fedmedian", "krum", "fedadam", "fedprox"),
)


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
        made = load_plugin("defenses", "flower:stock/local_dp")(noise_multiplier=z, clipping_norm=0.3)
        epsilon, delta = made.guarantee(PLAN, 20, rounds)
        away = 2 / z * math.sqrt(rounds)  # of the two means, in standard deviations
        exact = NORMAL.cdf(away / 2 - epsilon / away) - math.exp(epsilon) * NORMAL.cdf(-away / 2 - epsilon / away)
        assert exact <= delta == 1e-5 and made.clipping(PLAN) == pytest.approx(0.3 / LR)
        nearer = 0.7 * epsilon
        assert NORMAL.cdf(away / 2 - nearer / away) - math.exp(nearer) * NORMAL.cdf(-away / 2 - nearer / away) > delta
        assert epsilon > made.claimed_epsilon * math.sqrt(rounds) / 2


@pytest.mark.parametrize("name", STOCK)
def test_what_a_probe_shows_is_the_rate_times_a_gradient(name: str) -> None:
    run = federation(f"flower:stock/{name}")
    assert run.run(1)
    evidence, truth = run.defense.evidence(seen(run)), victims()
    assert [e.unit[0].client for e in evidence] == [0, 1, 2]
    if "client" in name:  # clipped, if it is long: the direction is told
        evidence = [replace(e, measure="cosine") for e in evidence]
    left = [at_truth(e, truth[e.unit[0]].x[None], truth[e.unit[0]].y[None]) for e in evidence]
    assert min(left) > 0.01 if name == "local_dp" else max(left) < 1e-6


def test_what_a_client_keeps_is_its_contexts_and_a_probe_has_a_copy() -> None:
    run = federation("flower:flower_apps:counting")
    assert run.run(3)
    values = [m.message.rest.metrics["metrics"]["calls"].item() for m in seen(run).mail if m.receiver == SERVER]
    calls = [int(state.state.metrics["seen"]["n"]) for state in run.parties.clients]
    assert calls == [3, 3, 3] and values == [4, 4, 4]


def test_a_view_holds_what_was_sent_besides_weights(tmp_path: Path) -> None:
    """Numbers of examples, bits of clipping, settings; and it can be kept and read again."""
    view = seen(federation("flower:stock/dp_client_adaptive"))
    view.save(tmp_path)
    again = View.load(tmp_path)
    for one in (view, again):
        sent = [m.message for m in one.mail if m.receiver == SERVER]
        assert [int(s.rest.metrics["metrics"]["num-examples"]) for s in sent] == [1, 1, 1]
        assert {int(s.rest.metrics["metrics"]["norm_bit"]) for s in sent} <= {0, 1}
        question = next(m.message for m in one.mail if m.sender == SERVER)
        assert float(question.rest.configs["config"]["clipping_norm"]) == pytest.approx(0.1)
    assert again.defense == view.defense


def test_mods_may_change_what_is_trained_from() -> None:
    run, whole = federation("flower:flower_apps:halving"), federation("flower:stock/fedavg")
    halved = next(m.message for m in seen(run).mail if m.sender == SERVER)
    assert largest_difference(halved.params, whole.parties.server.params) == 0
    sent = {m.sender: m.message.params for m in seen(run).mail if m.receiver == SERVER}
    half = {name: value / 2 for name, value in run.parties.server.params.items()}
    for client, params in sent.items():
        true = victims()[Slot(0, client)]
        from ppbench.base.autodiff import gradient

        step = gradient(lambda p, h=true: PLAN.objective(p, h.x, h.y, torch.ones(1)), half)  # type: ignore[misc]
        assert largest_difference(params, {n: (half[n] - LR * step[n]).detach() for n in half}) < 1e-6


def test_names_are_those_of_flower_and_all_that_ships_has_one() -> None:
    """Each of Flower's names is imported from where its users import it; those of one of ours make that one."""
    import flwr.clientapp.mod
    import flwr.server.workflow
    import flwr.serverapp.strategy

    from ppbench.adapters import flower
    from ppbench.adapters.flower import defenses as stock

    homes = (flwr.clientapp.mod, flwr.client.mod, flwr.serverapp.strategy, flwr.server.workflow)
    assert [one.name for one in stock.FLOWER_STOCK] == [f"flower:stock/{own}" for own in flower.STOCK_NAMES]
    for one, names in zip(stock.FLOWER_STOCK, flower.STOCK_NAMES.values(), strict=True):
        for name in names:
            theirs = next(getattr(home, name) for home in homes if hasattr(home, name))
            assert load_plugin("defenses", f"flower:stock/{name}") is one
            if one is not stock.SecAggPlus and not name.endswith("_mod"):
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
    message = found_by("flower_unequal_counts", "--runs", "5")
    assert "epsilon 1.99" in message and message.count("would be 14.09") == 2 and message.count("would be 1.99") == 3
    version = tuple(map(int, metadata.version("flwr").split(".")[:2]))
    expected = (
        "refused, Accounted aggregation requires equal client weights" if version >= (1, 42) else "cannot be asked"
    )
    assert f"with an accountant: {expected}" in message


def test_what_was_found_of_updates_of_zeros_is_told() -> None:
    message = found_by("flower_zero_update")
    assert (
        len(re.findall(r"server clips.* of 0: the server raises ZeroDivisionError.*new model: \[1\]\n", message)) == 2
    )
    assert len(re.findall(r"clients clip.* of 0: client 1 raises ZeroDivisionError.* \[1, 3\]\n", message)) == 2
    assert re.search(r"LocalDpMod, an update of 0: client 1 raises ZeroDivisionError.* \[1, 2, 3\]\n", message)
    assert len(re.findall(r"of 1e-09: rounds with a new model: \[1, 2, 3\]\n", message)) == 5
