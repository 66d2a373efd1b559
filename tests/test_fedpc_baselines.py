"""The baselines of FedPC's paper: weight transmission from client to client, and training on the pool of all data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ppbench.adversary.victims import choose_victims
from ppbench.base.errors import ProtocolError
from ppbench.base.seeds import Seeds
from ppbench.defenses.central import Central
from ppbench.defenses.phong import Phong
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.messages import Hello
from ppbench.federation.optim import Layout, Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.wire import SERVER
from ppbench.nets.net import initial, net_spec
from ppbench.testing.scene import same

SIZES = (60, 30, 90, 40, 75)
SGD = Opt("sgd", 0.05, 0.9)
Build = Callable[..., Federation]


@pytest.fixture
def build(deal: Callable[..., dict[int, Data]]) -> Build:
    def made(defense: Defense, clients: int = 5, local: Local | None = None) -> Federation:
        plan = Plan(net_spec("mlp", (1, 8, 8), 10, {"hidden": "6"}), clients, local or Local(batch=16, opt=SGD))
        run = Federation(defense, plan, deal(SIZES[:clients]), Seeds(0))
        run.start(initial(plan.spec, 1))
        return run

    return made


def assert_exact(run: Federation, error: float) -> None:
    """The server's plain evidence of single examples explains them."""
    found = choose_victims(run.shards, "server/1", 1, 5, Seeds(3))
    for evidence in run.defense.evidence(run.probe(found.data).view("server/1")):
        data = found.data[evidence.unit[0]]
        assert at_truth(evidence, data.x[None], data.y[None]) < error


def test_weight_transmission_hands_each_client_the_model_of_the_one_before(build):
    run = build(Phong())
    run.run(2)
    assert run.wire.up - run.setup_up == run.wire.down - run.setup_down == 2 * 5 * 4 * run.plan.net.parameter_count
    transcript = run.observe()
    models = {e.receiver: e.message.params for e in transcript.mail if e.sender == SERVER}
    sent = {e.sender: e.message.params for e in transcript.mail if e.receiver == SERVER}
    assert [e.sender for e in transcript.mail if e.receiver == SERVER] == list(range(5))
    for client in range(4):
        handed = {n: models[client][n] - sent[client][n] for n in sent[client]}
        assert same(handed, models[client + 1])
    assert_exact(run, 1e-8)


def test_a_curious_client_sees_what_the_others_made_of_the_model_that_it_handed_on(build):
    """Exactly the other one's update of two clients; of more the sum of steps taken one after another."""
    for clients, error in ((2, 1e-6), (4, 0.02)):
        run = build(Phong(), clients, local=Local(batch=16, opt=Opt("sgd", 0.01)))
        found = choose_victims(run.shards, "client/1", 1, clients - 1, Seeds(0))
        view = run.probe(found.data, "local").view("client/1", 0, own=found.own)
        (evidence,) = run.defense.evidence(view)
        assert evidence.unit == found.units[0]
        truth = found.truth(evidence.unit)
        assert at_truth(evidence, truth.x[:, None], truth.y[:, None]) < error


def test_centralized_training_is_training_on_the_pool_with_one_optimizer(build):
    local = Local(batch=600, opt=SGD)  # the whole pool is one batch: no order matters
    run = build(Central(), local=local)
    params = run.parties.server.params
    layout = Layout.of(params)
    weight, moment = layout.pack(params).double(), torch.zeros(len(layout.pack(params))).double()
    x, y = (torch.cat([getattr(s, k) for s in run.shards.values()]) for k in ("x", "y"))
    for _ in range(3):
        leaf = weight.clone().requires_grad_()
        loss = run.plan.objective(layout.unpack(leaf), x.double(), y.double(), torch.ones(len(x)).double())
        (step,) = torch.autograd.grad(loss, leaf)
        moment = 0.9 * moment + step
        weight = weight - 0.05 * moment
    run.run(3)
    torch.testing.assert_close(layout.pack(run.parties.server.params).double(), weight, rtol=1e-4, atol=1e-5)
    assert run.wire.up - run.setup_up == 3 * sum(SIZES) * 4 * (64 + 10)
    assert_exact(run, 1e-10)
    found = choose_victims(run.shards, "client/1", 1, 4, Seeds(3))
    assert run.defense.evidence(run.probe(found.data).view("client/1", 0, own=found.own)) == []


def test_centralized_training_refuses_what_is_no_examples(build):
    run = build(Central())
    with pytest.raises(ProtocolError, match="Client 1 sent no examples"):
        run.defense.aggregate(run.context("real", 1, 0, SERVER), run.parties.server, {1: Hello()})
