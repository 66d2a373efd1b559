"""Clients that train alone: as a federation of one would, counted by the mean of all, and nobody sees anything."""

from dataclasses import replace

import pytest
import torch
from protocols import started

from ppbench.adversary.victims import choose_victims
from ppbench.base.errors import Exit, Overflow
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.base.tree import leaves, nbytes
from ppbench.claims.check import check_claims
from ppbench.claims.claim import Claim, Rival
from ppbench.defenses.baselines import Standalone
from ppbench.federation.contract import Context
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.federation.threats import THREATS
from ppbench.nets.net import net_spec
from ppbench.report.controls import defenses_without_result, exit_of
from ppbench.run.config import EvaluateConfig
from ppbench.run.evaluation import evaluate
from ppbench.run.train import masks_overlap, mean_square

SPEC = net_spec("mlp", (1, 8, 8), 10, {"hidden": "16"})
PLAN = Plan(SPEC, 3, Local("delta", 1, 8, Opt("adam", 1e-2)))


@pytest.fixture(scope="module")
def alone(deal):
    run = started(Standalone(), PLAN, deal([24, 30, 40]))
    assert run.run(3)
    return run


def test_a_client_trains_as_nobody_else_was_there_and_its_optimizer_lasts(deal, alone):
    shards = deal([24, 30, 40])
    others = {**shards, 0: Data(shards[0].x.flip(0), shards[0].y)}
    again = started(Standalone(), PLAN, others)
    again.run(3)
    mine, theirs = alone.parties.clients, again.parties.clients
    assert all(torch.equal(a, b) for c in (1, 2) for a, b in zip(leaves(mine[c]), leaves(theirs[c]), strict=True))
    assert not torch.equal(mine[0].params["head.weight"], theirs[0].params["head.weight"])
    assert [int(client.opt["t"]) for client in mine] == [9, 12, 15]  # three rounds of a pass in batches of 8


def test_with_gradients_a_round_is_one_step_of_the_clients_own(deal):
    opt = Opt("sgd", 0.1, momentum=0.5)
    plan = replace(PLAN, local=Local("gradient", batch=64, opt=opt), server_opt=opt)
    shards, none = deal([24] * 3), load_plugin("defenses", "none")()
    run = started(Standalone(), plan, shards)
    run.run(2)
    for client, shard in shards.items():  # FedSGD of one client
        lone = started(none, replace(plan, clients=1), {0: shard})
        lone.run(2)
        own = run.parties.clients[client].params
        assert all(torch.allclose(own[n], v, atol=1e-6) for n, v in lone.parties.server.params.items())


def test_its_accuracy_is_the_mean_over_the_clients_own_models(alone, digits):
    test = Data(digits.x[1000:1300], digits.y[1000:1300])
    own = [(PLAN.net(me.params, test.x).argmax(1) == test.y.argmax(1)).double().mean() for me in alone.parties.clients]
    assert len({round(float(value), 6) for value in own}) > 1, "equal models would prove nothing"
    assert alone.accuracy(test) == pytest.approx(float(torch.stack(own).mean()))
    assert torch.allclose(alone.outputs(test.x), PLAN.net(alone.parties.clients[0].params, test.x).double(), atol=1e-5)


def test_errors_and_masks_are_means_over_the_models_too(alone, digits):
    class Task:
        test = Data(digits.x[:50], digits.y[:50])

    every = [PLAN.net(me.params, Task.test.x).double() for me in alone.parties.clients]
    errors = torch.stack([(out - Task.test.y).square().mean(1) for out in every]).mean(0)
    assert mean_square(alone, Task)[0] == pytest.approx(float(errors.mean()), rel=1e-5)
    Task.test = Data(digits.x[:50], (digits.y[:50] > 0).float())
    right = torch.stack([((out > 0) == (Task.test.y > 0.5)).double().mean(1) for out in every]).mean(0)
    assert torch.allclose(masks_overlap(alone, Task).accuracy, right)


@pytest.mark.parametrize("threat", THREATS)
def test_no_byte_is_sent_and_no_view_holds_a_number(alone, threat):
    victims = choose_victims(alone.shards, threat, 2, 4, Seeds(0))
    for transcript in (
        alone.probe(victims.data),
        alone.probe(victims.data, "local", 2),
        alone.observe(),
        alone.release(),
    ):
        view = transcript.view(threat, own=victims.own)
        assert not any(nbytes(letter.message) for letter in view.mail)
        assert view.defense.evidence(view) == [] and not list(view.exchanges())
        if threat.startswith("collusion"):
            assert {state.party for state in view.states} <= {-1, 1, 2}
    assert (alone.wire.up, alone.wire.down, alone.setup_up, alone.setup_down) == (0, 0, 0, 0)


def test_a_model_that_is_no_number_ends_training(deal):
    run = started(Standalone(), replace(PLAN, local=Local("delta", 1, 8, Opt("sgd", 1e38))), deal([24] * 3))
    assert run.run(3) is False
    ctx = Context(PLAN, 1, "real", 1, torch.Generator())
    broken = run.parties.clients[1]
    broken = replace(broken, params={n: v * float("nan") for n, v in broken.params.items()})
    with pytest.raises(Overflow, match="Client 1's own model"):
        Standalone().reply(ctx, run.parties.clients[1], None, broken, run.shards[1])


def test_an_evaluation_says_that_nothing_can_be_read_and_is_complete(tmp_path):
    config = EvaluateConfig(
        defense="standalone", attacks=("label_recovery", "mia_loss", "adaptive_server"), attack_batch=(1,), victims=2,
        rounds=1, train=60, clients=3, budget=5, stages=("init", "final"), candidates=8,
    )  # fmt: skip
    evaluation = evaluate(config, out=tmp_path, workers=1)
    mine = [r for r in evaluation.records if r.config.defense.id == "standalone"]
    assert {r.config.attack.kind for r in mine} == {"label", "membership", "reconstruction"}
    for record in mine:
        assert record.status == "failed" and record.reason.endswith("can be read") and not record.metrics
        assert record.utility.accuracy is not None and record.cost.bytes_up == record.cost.bytes_setup == 0
    none = [r for r in evaluation.records if r.config.defense.id == "none"]
    assert {r.status for r in none} == {"complete"}
    assert defenses_without_result(evaluation.records) == [] and exit_of(evaluation.records, reliable=True) is Exit.OK
    louder = [r.model_copy(update={"cost": r.cost.model_copy(update={"bytes_up": 4.0})}) for r in mine]
    assert defenses_without_result(louder) == ["standalone"]
    claim = Claim("accuracy", None, "", "", None, "Figure 7", than=Rival("standalone"))
    (verdict,) = check_claims({"none": [claim]}, evaluation.records, [])
    assert "no record" not in getattr(verdict, "reason", "") and "beside" in verdict.finding.worst
