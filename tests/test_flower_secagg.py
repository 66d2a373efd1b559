"""Flower's SecAgg+ as a defense: the sum is the sum, colluders open what masks of pairs hide; what is in the clear."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import Setting

from ppbench.base.errors import ProtocolError, UsageError
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Plan
from ppbench.federation.view import Transcript
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import initial
from ppbench.testing.small_federation import largest_difference, same_tensors

pytest.importorskip("flwr")

from ppbench.adapters.flower.secure import stage_of  # it needs Flower

NAME = "flower:stock/secaggplus"
SETTING = Setting((20, 24, 28, 32))
PLAN, CLIENTS, victims = SETTING.plan, len(SETTING.sizes), SETTING.victims
STAGES = ["setup", "share_keys", "collect_masked_vectors", "unmask"]


def federation(name: str = NAME, plan: Plan = PLAN, **parameters: Any) -> Federation:
    shards = SETTING.shards(SETTING.sizes[: plan.clients])
    return SETTING.federation(name, plan, shards, **parameters)


def seen(run: Federation) -> Transcript:
    return run.probe(victims())


@pytest.mark.parametrize("shares", [0, 3])
def test_the_sum_of_masked_weights_is_federated_averaging_to_the_rounding(shares: int) -> None:
    """Unequal shards, a batch each, two rounds; steps of 3.8e-6 on 20 to 32 thousandths of weights are some 1e-4."""
    plan = replace(PLAN, local=replace(PLAN.local, batch=32))
    ours, run = federation("none", plan), federation(plan=plan, num_shares=shares)
    assert ours.run(2) and run.run(2)
    assert 0 < largest_difference(run.parties.server.params, ours.parties.server.params) < 5e-4
    assert largest_difference(run.parties.server.params, initial(PLAN.spec, 0)) > 1e-2
    assert run.parties.server.counts.tolist() == [20, 24, 28, 32]


def test_masks_are_new_in_every_run_and_cancel() -> None:
    runs = [seen(federation()) for _ in range(2)]
    first, second = (next(m.message for m in run.mail if m.sender == 0 and m.step == 2) for run in runs)
    assert not same_tensors(first, second)
    assert largest_difference(*(run.mail[-1].message.params for run in runs)) == 0


def test_the_workflow_runs_its_four_stages_in_order() -> None:
    mail = seen(federation()).mail
    exchanges = [*seen(federation()).view("server/1").exchanges()]
    assert [{stage_of(e) for e in exchanges if e.step == step} for step in range(4)] == [{s} for s in STAGES]
    assert [sum(m.step == step and m.sender != SERVER for m in mail) for step in range(4)] == [CLIENTS] * 4


def test_numbers_of_examples_and_no_weights_are_readable() -> None:
    sent = [m.message for m in seen(federation()).mail if m.sender != SERVER and m.step == 2]
    assert [int(s.rest.metrics["fitres.num_examples"]["num_examples"]) for s in sent] == [1] * CLIENTS
    assert all(not arrays for s in sent for arrays in s.rest.arrays.values())


def test_the_server_knows_the_mean_and_colluders_the_target() -> None:
    """At the truth nothing is left but rounding; a ratio of 1 rounds least."""
    for threat, units in (("server/1", [tuple(victims())]), ("collusion/1", [(Slot(0, 0),)])):
        run = federation(max_weight=1.0)
        evidence = seen(run).view(threat).defense.evidence(seen(run).view(threat))
        assert [piece.unit for piece in evidence] == units
        x = torch.stack([victims()[slot].x for slot in evidence[0].unit])
        y = torch.stack([victims()[slot].y for slot in evidence[0].unit])
        assert at_truth(evidence[0], x, y) < 1e-4
        assert at_truth(evidence[0], x.roll(1, -1), y) > 1e-2


@pytest.mark.parametrize("threat", ["server/1", "collusion/1"])
def test_the_rounding_has_the_law_that_is_told(threat: str) -> None:
    """Its variance over all weights, measured at the truth, is within a tenth of the told one."""
    run = federation()
    (piece,) = run.defense.evidence(seen(run).view(threat))
    x, y = (torch.stack([getattr(victims()[slot], k) for slot in piece.unit]).double() for k in ("x", "y"))
    truth = piece.simulate(x, y)
    error = torch.cat([(piece.observed[n] - truth[n]).detach().flatten() for n in truth])
    assert piece.noise is not None
    assert float(error.square().mean()) == pytest.approx(piece.noise.std**2, rel=0.1)


def test_colluders_open_it_among_few_neighbours_too() -> None:
    run = federation(num_shares=3, max_weight=1.0)
    (piece,) = run.defense.evidence(seen(run).view("collusion/1"))
    assert at_truth(piece, victims()[Slot(0, 0)].x[None], victims()[Slot(0, 0)].y[None]) < 1e-4


def test_a_listener_and_a_client_are_given_nothing() -> None:
    run = federation()
    transcript = seen(run)
    assert run.defense.evidence(transcript.view("eavesdropper/1")) == []
    assert run.defense.evidence(transcript.view("client/1", 1)) == []


def test_too_few_clients_and_thresholds_are_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="needs at least 2 clients"):
        federation(plan=replace(PLAN, clients=1))
    with pytest.raises(UsageError, match="needs at least 5 clients"):
        federation(num_shares=5)
    with pytest.raises(UsageError, match="must be less than"):
        federation(num_shares=3, threshold=3)


def test_a_workflow_of_yours_is_run_as_the_stock_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    run, stock = federation("flower:flower_apps:secure"), federation(num_shares=3, threshold=2)
    assert run.defense.sums and run.run(1) and stock.run(1)
    assert largest_difference(run.parties.server.params, stock.parties.server.params) == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", r"client 0 raised .*no key"),
        ("without_mod", "train in a stage that sends no weights"),  # on a message that only sets keys up
    ],
)
def test_mods_that_raise_or_do_not_mask_are_told(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    run = federation(f"flower:flower_apps:secure_{name}")
    with pytest.raises(ProtocolError, match=words):
        run.run(1)


def test_the_seed_of_a_pairs_mask_has_32_bits() -> None:
    """The finding's script finds it among 65,536 that hold it, and takes the mask off."""
    script = Path(__file__).parents[1] / "examples" / "findings" / "flower_secagg_seed.py"
    done = subprocess.run(
        [sys.executable, str(script), "--bits", "16"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and "weights to" in done.stdout, done.stdout + done.stderr
