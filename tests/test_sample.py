"""Rounds of drawn clients: who takes part, what is refused, and what a record says of it."""

import pytest
import torch

from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.defenses.dp import DP
from ppbench.defenses.none import NoDefense
from ppbench.defenses.secagg import SecureAggregation
from ppbench.defenses.spn import SPN
from ppbench.federation import engine
from ppbench.federation.drive import Parties
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Plan
from ppbench.federation.threats import CURIOUS_CLIENT
from ppbench.nets.net import initial, net_spec
from ppbench.run.config import EvaluateConfig
from ppbench.run.cost import measured_client
from ppbench.run.task import describe, make_task
from ppbench.testing.small_federation import same_tensors

CLIENTS, DRAWN = 12, 3


def federation(defense=None, sample=DRAWN, seed=0, start=True):
    plan = Plan(net_spec("mlp", (4,), 2), CLIENTS, sample=sample)
    x, y = torch.rand(CLIENTS, 6, 4, generator=torch.Generator().manual_seed(0)), torch.eye(2).repeat(3, 1)
    run = Federation(defense or NoDefense(), plan, {c: Data(x[c], y) for c in range(CLIENTS)}, Seeds(seed))
    if start:
        run.start(initial(plan.spec, 1))
    return run


def states(run):
    return run.parties.server, list(run.parties.clients)


def test_each_round_has_clients_of_its_own_and_one_seed_draws_them_alike():
    run = federation()
    cohorts = [run.cohort(round_) for round_ in range(1, 41)]
    assert all(cohort == sorted(set(cohort)) and len(cohort) == DRAWN for cohort in cohorts)
    assert {client for cohort in cohorts for client in cohort} == set(range(CLIENTS))
    assert cohorts == [federation(seed=0).cohort(round_) for round_ in range(1, 41)]
    assert cohorts != [federation(seed=1).cohort(round_) for round_ in range(1, 41)]
    assert list(federation(sample=0).cohort(1)) == list(range(CLIENTS))


def test_only_those_drawn_send():
    run, everybody = federation(DP(sigma=0.0)), federation(DP(sigma=0.0), sample=0)
    before = run.wire.up, everybody.wire.up
    run.run(4), everybody.run(4)
    assert (run.wire.up - before[0]) * CLIENTS == (everybody.wire.up - before[1]) * DRAWN
    sent = {letter.sender for letter in run.observe().mail} - {-1}
    assert sent == set(run.cohort(5))


def test_a_sum_that_needs_everybody_is_refused_and_so_are_more_than_all():
    with pytest.raises(UsageError, match=r"^Defense 'secagg' needs all clients in every round, not 3 of 12; leave out"):
        federation(SecureAggregation())
    with pytest.raises(UsageError, match=r"^sample=11 of 10 clients cannot be drawn"):
        make_task(EvaluateConfig(defense="dp", sample=11))


def test_a_record_names_the_sample_only_where_some_are_drawn():
    """So that cells of before have the names that they had."""
    configs = [EvaluateConfig(defense="dp", sample=sample) for sample in (3, 10, 0)]
    drawn, all_of_them, default = (describe(make_task(config), config)[2] for config in configs)
    assert drawn.model_dump()["sample"] == 3
    assert "sample" not in default.model_dump() and all_of_them == default


# -- states of clients: those that took part are kept, the others are drawn again --


def test_states_that_are_drawn_again_are_those_that_are_held():
    run, twin = federation(SPN()), federation(SPN())
    twin.parties = Parties(*states(twin))
    assert same_tensors(states(run), states(twin))
    run.run(4), twin.run(4)
    assert same_tensors(states(run), states(twin))
    assert same_tensors(run.parties.clients[1:4], twin.parties.clients[1:4])
    drawn = sorted({client for round_ in range(1, 5) for client in run.cohort(round_)})
    assert run.parties.clients.changed() == drawn and len(drawn) < CLIENTS


@pytest.mark.parametrize("per_file", [5, 100])
def test_a_checkpoint_holds_the_states_of_clients_that_took_part(tmp_path, monkeypatch, per_file):
    monkeypatch.setattr(engine, "CLIENTS_PER_FILE", per_file)
    whole, half, rest = federation(SPN()), federation(SPN()), federation(SPN(), start=False)
    whole.run(3), half.run(1), half.save(tmp_path)
    first = whole.cohort(1)
    assert sorted(path.name for path in tmp_path.glob("clients*")) == [
        f"clients{number}.safetensors" for number in sorted({client // per_file for client in first})
    ]
    rest.restore(tmp_path)
    assert rest.parties.clients.changed() == list(first)
    assert same_tensors(states(half), states(rest))
    rest.run(3)
    assert same_tensors(states(whole), states(rest)) and whole.wire.up == rest.wire.up
    again = tmp_path / "again"
    again.mkdir()
    rest.save(again)
    third = federation(SPN(), start=False)
    third.restore(again)
    assert same_tensors(states(third), states(rest))


def test_a_checkpoint_that_lacks_states_is_refused(tmp_path):
    sampled, everybody = federation(SPN()), federation(SPN(), sample=0, start=False)
    sampled.run(1)
    sampled.save(tmp_path)
    with pytest.raises(UsageError, match="no state of this federation"):
        everybody.restore(tmp_path)


def test_idle_clients_are_in_no_memory_of_set_up_a_delivery_or_a_measurement():
    run = federation(SPN())
    assert run.parties.clients.changed() == []
    seen = run.release(CURIOUS_CLIENT)
    assert [record.party for record in seen.states] == [CURIOUS_CLIENT.client]
    whole = run.release().view(CURIOUS_CLIENT)
    assert same_tensors([s.state for s in seen.view(CURIOUS_CLIENT).states], [s.state for s in whole.states])
    client = measured_client(run, 7)
    assert sorted(client.drive.data) == [0, 1, 7] and client.index == 7
    assert run.parties.clients.changed() == []
