"""TP-SMC, HybridAlpha and PILE: exactly which sums who decrypts, under which collusion; what encryption weighs."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from ppbench.attacks.adaptive.encrypted import AdaptiveEncrypted
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.defenses.encrypted import sums as shares
from ppbench.defenses.encrypted.sums import Ciphertext, Decrypt, Partial, _streams, ciphertext_words
from ppbench.defenses.mpdp.accounting import theta_max
from ppbench.federation.contract import functional, paillier
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Context, Opt
from ppbench.federation.wire import SERVER
from ppbench.nets.net import initial
from ppbench.records.run_files import ClientTime
from ppbench.report.costs import encryption_sentence
from ppbench.run import cost
from ppbench.run import cost as ciphers
from ppbench.testing.small_federation import DefenseTrial, digit_shards, scene_victims

NAMES = ["tp_smc", "hybridalpha", "pile"]
NOISY = ["tp_smc", "hybridalpha"]
LOUD = {"epsilon": 1e6, "bound": 2.0}  # hardly any noise, and nothing is clipped


def made(name, **changes):
    return replace(load_plugin("defenses", name)(), **changes)


def federation(defense, clients=4, **changes):
    plan = replace(DefenseTrial(defense).plan, clients=clients, server_opt=Opt("sgd", 0.1), **changes)
    run = Federation(defense, plan, digit_shards([48] * clients), Seeds(0))
    run.start(initial(plan.spec, 1))
    return run


def probed(defense, threat="server/1", clients=4, batch=2, count=8):
    run = federation(defense, clients)
    victims = scene_victims(run, threat, batch, count)
    return run, victims, run.probe(victims.data).view(threat, own=victims.own)


def truth(victims, evidence):
    x, y = (torch.stack([getattr(victims.data[slot], part) for slot in evidence.unit]) for part in ("x", "y"))
    return at_truth(evidence, x, y)


def plain(view, unit, members):
    """What each of `members` sent, as they know it themselves, [values] int64 by client."""
    states = {c: view.state_at(unit[c], c) for c in members}
    return {c: view.defense._bare(view, unit[c], {c: states[c]}) for c in members}


def all_states(defense, clients=4):
    """A whole cohort's exchanges, and the transcript's view with everybody's states: nobody in ppbench has it."""
    run = federation(defense, clients)
    transcript = run.probe(scene_victims(run, count=clients).data)
    view = replace(transcript.view("server/1"), states=transcript.states)
    return view, defense.uploads(view)[0]


# -- the sum ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_the_server_decrypts_the_sum_of_what_clients_encrypted_to_the_bit(name):
    view, unit = all_states(made(name))
    own = plain(view, unit, range(4))
    assert torch.equal(view.defense.total(view, unit), sum(own.values()))
    for client, exchange in enumerate(unit):
        hidden = ciphertext_words(client, exchange.answer, len(own[client]))
        assert float((hidden == own[client]).double().mean()) < 1e-3
        # What encrypts fills all 64 bits evenly; what is encrypted does not.
        assert abs(float((hidden >> 62).double().mean()) + 0.5) < 0.1 < float((own[client] >> 62 == 0).double().mean())


@pytest.mark.parametrize("name", NAMES)
def test_the_server_sees_whole_cohorts_and_nobody_alone(name):
    _, victims, view = probed(made(name, **(LOUD if name in NOISY else {})))
    evidence = view.defense.evidence(view)
    assert [len(e.unit) for e in evidence] == [4]
    assert all(truth(victims, e) < (0.05 if name in NOISY else 1e-12) for e in evidence)
    assert view.defense.opened(view, ()) and all(len(e.unit) == 4 for e in view.defense.opened(view, ()))


@pytest.mark.parametrize("name", NAMES)
def test_a_round_moves_the_model_by_the_mean(name):
    run = federation(made(name, **(LOUD if name in NOISY else {})))
    plainly = federation(made("none"), **{k: getattr(run.plan, k) for k in ("spec", "loss", "local")})
    before = {n: v.clone() for n, v in run.parties.server.params.items()}
    run.run(1), plainly.run(1)
    assert run.plan.spec == plainly.plan.spec
    mine, theirs = (torch.cat([(p[n] - before[n]).flatten() for n in before]) for p in
                    (run.parties.server.params, plainly.parties.server.params))  # fmt: skip
    assert float(torch.cosine_similarity(mine, theirs, 0)) > 0.9


# -- collusion -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("honest", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("name", ["tp_smc", "pile"])
def test_below_the_threshold_no_coalition_opens_an_upload_and_at_it_every_one_does(name, honest):
    defense = made(name, honest=honest)
    view, unit = all_states(defense)
    threshold = {0.5: 3, 0.75: 2, 1.0: 1}[honest]
    assert defense.threshold(view.plan) == threshold
    own = plain(view, unit, range(4))
    for size in range(4):
        for members in combinations(range(4), size):
            states = {c: view.state_at(unit[c], c) for c in members}
            for client in set(range(4)) - set(members):
                bare = defense._bare(view, unit[client], states)
                assert (bare is not None) == (size >= threshold)
                assert bare is None or torch.equal(bare, own[client])
            if 0 < size < threshold:
                rest = defense._rest(view, unit, states)
                assert torch.equal(rest, sum(own[c] for c in set(range(4)) - set(members)))


def test_one_honest_decryptor_hides_an_upload_from_who_has_all_that_others_decrypt_by():
    defense = made("tp_smc", honest=0.5)
    view, unit = all_states(defense)
    exchange, own = unit[3], plain(view, unit, [3])[3]
    ctx = Context(view.plan, exchange.round, view.session(exchange), 3, torch.Generator())
    keys, words = view.state_at(exchange, 3).keys, ciphertext_words(3, exchange.answer, len(own))
    for missing in range(3):
        known = [d for d in range(3) if d != missing]
        left = words - _streams(keys, ctx, known, len(own)) - own
        assert float((left == 0).double().mean()) < 1e-3
        assert abs(float((left >> 62).double().mean()) + 0.5) < 0.1


def test_shares_of_a_key_give_it_back_at_the_threshold_and_another_one_below():
    secret = Seeds(0).secret("party")
    key = secret.random_bytes((32,))
    dealt = shares.split_key(key, 5, 3, secret)
    for members in combinations(range(5), 3):
        assert torch.equal(shares.joined_key({c: dealt[c] for c in members}), key)
    for members in combinations(range(5), 2):
        assert int((shares.joined_key({c: dealt[c] for c in members}) == key).sum()) < 8


def test_hybridalphas_upload_is_bare_to_all_the_others_alone():
    defense = made("hybridalpha")
    view, unit = all_states(defense)
    own = plain(view, unit, range(4))
    for members in ((1,), (1, 2), (2, 3)):
        assert defense._bare(view, unit[0], {c: view.state_at(unit[c], c) for c in members}) is None
    states = {c: view.state_at(unit[c], c) for c in (1, 2, 3)}
    assert torch.equal(defense._bare(view, unit[0], states), own[0])


@pytest.mark.parametrize("name", NAMES)
def test_colluders_read_client_0_and_fewer_of_them_its_sum_with_the_honest(name):
    _, victims, view = probed(made(name, **(LOUD if name in NOISY else {})), "collusion/1", count=2)
    assert {len(e.unit) for e in view.defense.evidence(view)} == {1}
    few = view.defense.opened(view, [3])
    assert [[s.client for s in e.unit] for e in few] == [[0, 1, 2]] * len(few) and few
    many = AdaptiveEncrypted(colluders=3).evidence(view)
    one = AdaptiveEncrypted(colluders=1).evidence(view)
    assert {e.unit[0].client for e in [*many, *one]} == {0} and {len(e.unit) for e in [*many, *one]} == {1}
    close, far = truth(victims, many[0]), truth(victims, one[0])
    assert close < (0.2 if name in NOISY else 1e-12) and far > 2 * close + 1e-3


# -- others ----------------------------------------------------------------------------------------------------------
def test_a_listener_decrypts_what_clients_decrypt_and_nothing_that_needs_a_key():
    units = {}
    for name in NAMES:
        _, _, view = probed(made(name), "eavesdropper/1")
        units[name] = [len(e.unit) for e in view.defense.evidence(view)]
    assert units == {"tp_smc": [4], "hybridalpha": [], "pile": [4]}


@pytest.mark.parametrize("name", NOISY)
def test_every_client_reads_the_others_mean_off_two_delivered_models(name):
    _, victims, view = probed(made(name, **LOUD), "client/1")
    evidence = view.defense.evidence(view)
    assert evidence and all([s.client for s in e.unit] == [1, 2, 3] for e in evidence)
    assert all(truth(victims, e) < 0.2 for e in evidence)
    own = replace(view, states=())  # a party without keys does not know what it sent
    with pytest.raises(AttributeError):
        own.defense.evidence(own)


def test_piles_clients_get_a_perturbed_model_and_no_gradient():
    run, _, view = probed(made("pile"), "client/1")
    assert view.defense.evidence(view) == [] and view.defense.masked
    true = run.parties.server.params["head.weight"]
    sent = view.broadcasts(view.data[0][0])[0].params["head.weight"]
    assert float((sent.float() - true).abs().mean()) > float(true.abs().mean())


def test_the_authority_gives_no_key_for_few_clients():
    defense = made("hybridalpha")
    with pytest.raises(ProtocolError, match="no key for a sum of 2 clients; ask for 3"):
        defense.key_for([0, 1])
    defense.key_for([0, 1, 2])
    with pytest.raises(UsageError, match=r"least=3 cannot be used; it must be at most the number of clients, 2\."):
        federation(defense, clients=2)


# -- noise -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", NOISY)
def test_honest_parts_of_the_noise_add_up_to_the_budget(name):
    defense = made(name, honest=0.75, bound=2.0)
    view, unit = all_states(defense)
    plan = view.plan
    assert defense.trusted(plan) == 3
    assert 2 * defense.sigma(plan) ** 2 == pytest.approx(2.0**2 / theta_max(3.0, 1e-5))
    assert defense.noise(plan).std == defense.sigma(plan)
    own = plain(view, unit, [1])[1].double() / 2.0**40 * 4  # a clipped gradient of norm 2 hardly counts
    assert float(own.std()) == pytest.approx(defense.sigma(plan), rel=0.05)
    assert "epsilon" in defense.why_no_epsilon(plan, None, 10) and defense.guarantee(plan, 48, 10) is None


def test_updates_are_clipped_to_the_bound():
    view, unit = all_states(made("tp_smc", epsilon=1e6, bound=1e-3))
    sent = plain(view, unit, [0])[0].double() / 2.0**40 * 4
    noise = made("tp_smc", epsilon=1e6, bound=1e-3).sigma(view.plan) * len(sent) ** 0.5
    assert float(sent.norm()) < 1e-3 + 1.2 * noise


# -- bytes and seconds -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "size", "per"), [("tp_smc", 512, 31), ("hybridalpha", 96, 1), ("pile", 512, 31)])
def test_ciphertexts_weigh_what_real_ones_do(name, size, per):
    run, _, view = probed(made(name))
    numbers = run.plan.net.parameter_count * (3 if name == "pile" else 1)
    weight = -(-numbers // per) * size
    letters = [e for e in view.mail if isinstance(e.message, Ciphertext | Partial | Decrypt)]
    assert {e.nbytes for e in letters} == {weight}
    decrypting = {e.sender for e in letters if isinstance(e.message, Partial)}
    assert decrypting == ({0, 1, 2} if name != "hybridalpha" else set())
    assert {e.sender for e in letters if isinstance(e.message, Decrypt)} <= {SERVER}


def test_a_longer_modulus_has_more_slots_and_costs_more_bytes():
    small, large = paillier(2048, 5, 3, 1000), paillier(3072, 5, 3, 1000)
    assert (small.slots, large.slots) == (31, 47) and (small.size, large.size) == (512, 768)
    assert small.nbytes(1000) == 33 * 512 and functional(5, 1000).nbytes(1000) == 96_000


def test_seconds_scale_with_the_ciphertexts_and_say_what_was_timed():
    one = ciphers.Seconds(encrypt=2.0, partial=1.0, decrypt=5.0, library="a library 1")
    result = ciphers.round_times(one, paillier(2048, 5, 3, 100))
    assert (result.client, result.server) == (12.0, 20.0)  # four ciphertexts of 31 numbers
    twice = ciphers.round_times(one, paillier(2048, 5, 3, 8 * 31))
    assert (twice.client, twice.server) == (24.0, 40.0)
    sentence = encryption_sentence(result)
    assert sentence == "encryption adds 12 s a client and round, 20 s at the server (a library 1)"
    many = result.model_copy(update={"client": 571.2, "server": 1567.2})
    assert encryption_sentence(many).startswith("encryption adds 571 s a client and round, 1,570 s at the server (")


def test_without_the_libraries_the_cost_says_what_to_install_and_all_else_works(monkeypatch):
    def missing(*_):
        raise ModuleNotFoundError("No module named 'phe'")

    monkeypatch.setattr(ciphers, "time_operations", missing)
    monkeypatch.setattr(cost, "BUDGET_S", 0.0)
    run = federation(made("tp_smc"))
    result = cost.client_cost(run, run.parties.server.params).time
    assert isinstance(result, ClientTime) and result.seconds > 0
    assert encryption_sentence(result.encryption) == "encryption not timed: install ppbench-fl[crypto]"
    assert ciphers.encryption_time(made("none").ciphering(run.plan)) is None and encryption_sentence(None) == ""


@pytest.mark.parametrize("form", [paillier(2048, 5, 3, 31), functional(5, 1)])
def test_real_libraries_are_timed(form):
    pytest.importorskip("phe" if form.scheme == "paillier" else "mife")
    result = ciphers.encryption_time(form)
    assert result.reason == "" and 0 < result.client < 60 and 0 < result.server < 60
    assert result.library.startswith("phe" if form.scheme == "paillier" else "pymife")


# -- the attack ------------------------------------------------------------------------------------------------------
def hits(name, colluders, **changes):
    _, victims, view = probed(made(name, **changes), "collusion/1", batch=1, count=2)
    attack = AdaptiveEncrypted(budget=300, colluders=colluders)
    guesses = attack.run(view, victims.challenges(), torch.Generator().manual_seed(0))
    errors = [float((g.x - victims.data[c.unit[0]].x).square().mean())
              for g, c in zip(guesses, victims.challenges(), strict=True)]  # fmt: skip
    return sum(error < 0.01 for error in errors)


def test_enough_colluders_rebuild_images_and_too_few_do_not():
    assert hits("pile", 0) == hits("pile", 3) == 2
    assert hits("pile", 1) == 0


def test_hardly_any_noise_does_not_hide_an_upload_from_colluders():
    assert hits("tp_smc", 0, **LOUD) > 0


def test_a_paper_budget_leaves_no_image():
    assert hits("tp_smc", 0) == hits("hybridalpha", 0) == 0
