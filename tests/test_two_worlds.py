"""The two-world test names what a server receives beyond a defense's word, and accuses nobody who keeps it."""

from functools import lru_cache

import pytest
from daily import every_third
from lies.ppbench_channels import (
    NOISE_LIES,
    REPLAY_LIES,
    SUM_LIES,
    TWINS,
    BesideImages,
    Escrow,
    Honest,
    LatePads,
    Quorum,
    ShyNoise,
)

from ppbench.adversary.two_worlds import world_flags, world_report
from ppbench.base.registry import load_plugin, plugins
from ppbench.testing.small_federation import DefenseTrial

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 10))]


def report(defense, seed=0, size=1):
    run = DefenseTrial(defense).federate(seed=seed)
    return world_report(run, run.parties.server.params, size)


@pytest.mark.parametrize("lie", every_third(SUM_LIES), ids=lambda lie: lie.name)
def test_no_lie_about_sums_is_believed(lie):
    assert report(lie()).channels


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 10))
@pytest.mark.parametrize("lie", [*SUM_LIES, *NOISE_LIES, *REPLAY_LIES], ids=lambda lie: lie.name)
def test_no_lie_is_believed_over_ten_seeds(lie, seed):
    outcome = report(lie(), seed)
    assert outcome.channels or outcome.refusal or outcome.explained is False


@pytest.mark.parametrize("lie", NOISE_LIES, ids=lambda lie: lie.name)
def test_noise_that_can_be_removed_vouches_for_nothing(lie):
    outcome = report(lie())
    assert outcome.channels or (lie is ShyNoise and outcome.explained is False)
    assert "law_explains" not in {flag.code for flag in flags(lie())}


@lru_cache
def flags(defense):
    run = DefenseTrial(defense).federate()
    return world_flags(run, run.parties.server.params, 1)


def test_what_cannot_be_run_again_is_said_to_be_so():
    for lie in REPLAY_LIES:
        (flag,) = flags(lie())
        assert flag.code == "not_replayable" and flag.detail.startswith("cannot be replayed: ")


def test_a_channel_is_named():
    (flag,) = flags(BesideImages())
    assert flag.code == "channel" and "Beside.beside of client 0 in round 1" in flag.detail
    (flag,) = flags(Escrow())
    assert "Generous.beside of client 0 at set-up holds secrets" in flag.detail
    (flag,) = flags(LatePads())
    assert "Beside.params of client 0 in round 1 with Beside.beside of client 0 in round 2" in flag.detail
    (flag,) = flags(Quorum())
    assert "Update.params of client 0" in flag.detail and "(and 7 more)" in flag.detail


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.__name__)
def test_an_honest_twin_is_not_accused(twin, seed):
    outcome = report(twin(), seed)
    assert not outcome.channels and not outcome.refusal
    assert outcome.explained is True or twin is not Honest


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, plugin in plugins("defenses").items() if plugin.ours])
def test_ours_are_not_accused(name):
    outcome = report(load_plugin("defenses", name)())
    assert not outcome.channels and not outcome.refusal
