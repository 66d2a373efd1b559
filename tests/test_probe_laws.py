"""Clients that protect the probe alone are found out; honest ones, which a probe makes act otherwise, are not."""

import pytest
from daily import every_third
from honest import DISHONEST, HONEST

from ppbench.adversary.victims import choose_victims
from ppbench.base.seeds import Seeds
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Local, Opt, Plan
from ppbench.nets.net import initial, net_spec
from ppbench.run.detection import probe_flags

SEEDS = range(10)
ADAM = Opt("adam", lr=5e-3)


@pytest.fixture(scope="module")
def remarks(deal):
    """Return the flags of a small federation under a defense, before training or after some rounds."""

    def make(defense, seed, rounds=0, kind="gradient", opt=ADAM):
        plan = Plan(net_spec("dlnet", (1, 8, 8), 10, {"nconv": 2}), 6, Local("delta", batch=8, opt=opt))
        run = Federation(defense(), plan, deal([24] * 6), Seeds(seed))
        run.start(initial(plan.spec, seed))
        run.run(rounds)
        victims = choose_victims(run.shards, "server/1", 1, 6, Seeds(seed)).data
        return [flag.code for flag in probe_flags(run, run.probe(victims, kind), victims)]

    return make


@pytest.mark.parametrize(
    "defense",
    every_third(HONEST),
    ids=lambda d: d.name,
)
def test_an_honest_law_is_never_accused(defense, remarks):
    """Clipping leaves small updates of training as they are, and does not a probe's gradient: it is one law."""
    assert [remarks(defense, seed, rounds=seed) for seed in SEEDS[:2]] == [[]] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("defense", HONEST, ids=lambda d: d.name)
def test_an_honest_law_is_never_accused_over_ten_seeds(defense, remarks):
    for opt in (ADAM, Opt("sgd", lr=0.1)):
        for kind in ("gradient", "local"):
            assert [remarks(defense, seed, seed % 4, kind, opt) for seed in SEEDS] == [[]] * len(SEEDS)


@pytest.mark.parametrize("defense", every_third(DISHONEST), ids=lambda d: d.name)
def test_what_protects_the_probe_alone_is_accused(defense, remarks):
    assert remarks(defense, 0) == ["probe_noticed"]


@pytest.mark.nightly
@pytest.mark.parametrize("defense", DISHONEST, ids=lambda d: d.name)
def test_what_protects_the_probe_alone_is_accused_over_ten_seeds(defense, remarks):
    rounds = 0 if defense.name == "every_second" else 1
    assert [remarks(defense, seed, rounds) for seed in SEEDS] == [["probe_noticed"]] * len(SEEDS)
