"""The two-world test names what a server receives beyond a defense's word, and accuses nobody who keeps it."""

import re
from functools import lru_cache

import pytest
import torch
from daily import all_but_nightly
from lies.ppbench_channels import (
    NOISE_LIES,
    REPLAY_LIES,
    SUM_LIES,
    TWINS,
    Behaved,
    BesideImages,
    BytePads,
    Escrow,
    Honest,
    LatePads,
    LateSeed,
    Resent,
    SaltedNoise,
    ShyNoise,
    TiledNoise,
    keyed,
)

from ppbench.adversary.replay import replayed_evidence
from ppbench.adversary.two_worlds import world_flags, world_report
from ppbench.adversary.worlds import GENERATOR, Redrawn
from ppbench.base.registry import load_plugin, plugins
from ppbench.base.secret_draws import SecretDraws
from ppbench.base.tree import norm
from ppbench.federation.contract import plain_evidence
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER
from ppbench.testing.small_federation import DefenseTrial, same_tensors, scene_victims

DAILY = "lie_public_pairs", "lie_client_pads", "lie_seed_beside"
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 10))]


def daily_of(lies):
    return all_but_nightly(lies, [lie for lie in lies if lie.name not in DAILY])


def report(defense, seed=0, size=1):
    run = DefenseTrial(defense).federate(seed=seed)
    return world_report(run, run.parties.server.params, size)


@pytest.mark.parametrize("lie", daily_of(SUM_LIES), ids=lambda lie: lie.name)
def test_no_lie_about_sums_is_believed(lie):
    assert report(lie()).channels


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 10))
@pytest.mark.parametrize("lie", [*SUM_LIES, *NOISE_LIES, *REPLAY_LIES], ids=lambda lie: lie.name)
def test_no_lie_is_believed_over_ten_seeds(lie, seed):
    outcome = report(lie(), seed)
    assert outcome.channels or outcome.refusal or outcome.explained is False


@pytest.mark.parametrize("lie", daily_of(NOISE_LIES), ids=lambda lie: lie.name)
def test_noise_that_can_be_removed_vouches_for_nothing(lie):
    outcome = report(lie())
    assert outcome.channels or (lie in (ShyNoise, TiledNoise) and outcome.explained is False)
    assert "law_explains" not in {flag.code for flag in flags(lie())}


@lru_cache
def flags(defense):
    run = DefenseTrial(defense).federate()
    return world_flags(run, run.parties.server.params, 1)


def test_what_cannot_be_run_again_is_said_to_be_so():
    for lie in REPLAY_LIES:
        (flag,) = flags(lie())
        assert flag.code == "not_replayable" and flag.detail.startswith("cannot be replayed: ")


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (BesideImages, "Beside.beside of client 0 in round 1"),
        (LateSeed, "Beside.beside of client 0 in round 2 says what the noise of uploads is"),
        pytest.param(Escrow, "Generous.beside of client 0 at set-up holds secrets", marks=pytest.mark.nightly),
        pytest.param(
            LatePads,
            r"Beside.params of client 0 in round 1 with Beside.beside of client 0 in round 2.* \(and \d+ more\)$",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_channel_is_named(lie, words):
    (flag,) = flags(lie())
    assert flag.code == "channel" and re.search(words, flag.detail)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "twin",
    all_but_nightly(TWINS, [twin for twin in TWINS if twin not in (Resent, SaltedNoise)]),
    ids=lambda twin: twin.__name__,
)
def test_an_honest_twin_is_not_accused(twin, seed):
    outcome = report(twin(), seed)
    assert not outcome.channels and not outcome.refusal
    assert outcome.explained is True or twin not in (Honest, SaltedNoise)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, plugin in plugins("defenses").items() if plugin.ours])
def test_ours_are_not_accused(name):
    outcome = report(load_plugin("defenses", name)())
    assert not outcome.channels and not outcome.refusal


def uploaded(defense):
    """Return what each client uploads [C, P] in a probe of the small federation."""
    run = DefenseTrial(defense).federate()
    evidence = plain_evidence(run.probe(scene_victims(run, batch=1).data).view("server/1"))
    first = {e.unit[0].client: e.observed for e in reversed(evidence)}
    return torch.stack([torch.cat([value.flatten() for value in first[c].values()]) for c in sorted(first)])


def tile_off(uploads):
    """Return uploads without what they repeat every hundred numbers."""
    tiles = torch.stack([torch.cat([u, u.new_full((-len(u) % 100,), torch.nan)]) for u in uploads])
    repeated = tiles.view(len(uploads), -1, 100).nanmedian(1).values
    return uploads - repeated.repeat(1, tiles.shape[1] // 100)[:, : uploads.shape[1]]


def public_pad_off(uploads):
    pads = [0.1 * torch.randn(uploads.shape[1], generator=keyed(client, 1)) for client in range(len(uploads))]
    return uploads - torch.stack(pads)


@pytest.mark.parametrize(("lie", "noise_off"), [(TiledNoise, tile_off), (Behaved, public_pad_off)])
def test_breaking_a_setting_without_its_randomness_would_vouch_for_a_lie(lie, noise_off, monkeypatch):
    """Why `Knowledge.vouches` takes no such proof. Bare uploads are undefended, noisy ones withstand who believes the
    law, and fall to who does not; the law's likelihood is not deceived."""
    updates, noisy = uploaded(load_plugin("defenses", "none")()), uploaded(lie())
    with monkeypatch.context() as patch:
        patch.setattr(SecretDraws, "normal", lambda self, shape, dtype=torch.float32: torch.zeros(shape, dtype=dtype))
        assert torch.equal(uploaded(lie()), updates)
    hidden, shown = ((uploads - updates).norm() for uploads in (noisy, noise_off(noisy)))
    assert hidden > updates.norm() and shown < 0.1 * hidden
    outcome = report(lie())
    assert outcome.explained is not True or outcome.channels


def test_single_draws_of_a_client_in_a_round_are_redrawn():
    def drawn(seeds, round_, party=0):
        purposes = "party", "step", "session", round_, 0, party
        secret = seeds.secret(*purposes)
        numbers = torch.stack([secret.uniform((3,)) for _ in range(3)])
        return torch.cat([numbers, torch.rand(1, 3, generator=seeds.generator(*purposes)).double()])

    def redrawn(calls, *place):
        return (drawn(Redrawn(0, "", 1, 2, calls), *place) != drawn(Redrawn(0, "", 1), *place)).any(1).tolist()

    assert redrawn(None, 1) == [True] * 4 and redrawn({1}, 1) == [False, True, False, False]
    assert redrawn({GENERATOR}, 1) == [False] * 3 + [True]
    assert not any(redrawn(None, 0)) and not any(redrawn(None, 1, SERVER)), "neither set-up nor the server"
    assert drawn(Redrawn(0, "", 1, 2, {0, 1, 2, GENERATOR}), 1).equal(drawn(Redrawn(0, "", 2), 1))


def test_a_replay_is_the_run_in_its_dtype():
    """Pads of the float32 weights' bytes come off: with float64 weights the server would make others."""
    run = DefenseTrial(BytePads()).federate()
    view = run.probe(scene_victims(run, batch=1).data).view("server/1")
    bare = DefenseTrial(load_plugin("defenses", "none")()).federate()
    computed = plain_evidence(bare.probe(scene_victims(bare, batch=1).data).view("server/1"))
    updates = {e.unit: e.observed for e in computed}
    first = {e.unit: e.observed for e in reversed(replayed_evidence(view)) if len(e.unit) == 1}
    assert first.keys() == updates.keys()
    for unit, update in updates.items():
        assert norm({name: first[unit][name] - value for name, value in update.items()}) < 1e-3 * norm(update)


def test_a_view_holds_what_its_party_received_at_set_up(tmp_path):
    run = DefenseTrial(load_plugin("defenses", "secagg")()).federate()
    run.save(tmp_path)
    victims = scene_victims(run).data
    views = {threat: run.probe(victims).view(threat) for threat in ("server/1", "client/1")}
    sent = {(e.sender, e.receiver) for e in views["server/1"].set_up}
    assert sent == {(c, -1) for c in range(4)} | {(-1, c) for c in range(4)}
    assert {(e.sender, e.receiver) for e in views["client/1"].set_up} == {(0, -1), (-1, 0)}
    again = DefenseTrial(load_plugin("defenses", "secagg")()).federate(start=False)
    again.restore(tmp_path)
    restored = again.probe(victims).view("server/1")
    assert same_tensors([e.message for e in restored.set_up], [e.message for e in views["server/1"].set_up])
    restored.save(tmp_path / "view")
    loaded = View.load(tmp_path / "view")
    assert [e.sender for e in loaded.set_up] == [e.sender for e in restored.set_up]
    assert same_tensors([e.message for e in loaded.set_up], [e.message for e in restored.set_up])
    assert len(loaded.mail) == len(restored.mail)
