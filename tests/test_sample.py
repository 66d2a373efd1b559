"""Rounds of drawn clients: who takes part, what is refused, and what a record says of it."""

import pytest
import torch

from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.defenses.dp import DP
from ppbench.defenses.none import NoDefense
from ppbench.defenses.secagg import SecureAggregation
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Plan
from ppbench.nets.net import initial, net_spec
from ppbench.run.config import EvaluateConfig
from ppbench.run.task import describe, make_task

CLIENTS, DRAWN = 12, 3


def federation(defense=None, sample=DRAWN, seed=0):
    plan = Plan(net_spec("mlp", (4,), 2), CLIENTS, sample=sample)
    x, y = torch.rand(CLIENTS, 6, 4, generator=torch.Generator().manual_seed(0)), torch.eye(2).repeat(3, 1)
    run = Federation(defense or NoDefense(), plan, {c: Data(x[c], y) for c in range(CLIENTS)}, Seeds(seed))
    run.start(initial(plan.spec, 1))
    return run


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
