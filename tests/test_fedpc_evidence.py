"""What parties can tell from FedPC's messages and masks; its ternary vectors; the baselines of its paper."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from protocols import UNEQUAL, answers, flat, trained, unequal
from torch import Tensor

from ppbench.adversary.victims import choose_victims
from ppbench.base.errors import ProtocolError
from ppbench.base.seeds import Seeds
from ppbench.defenses.baselines import Central, Phong
from ppbench.defenses.fedpc.messages import (
    SEND_TERNARY,
    Command,
    Masked,
    Ternary,
    decoded,
    encoded,
    first_ternary,
    later_ternary,
    pack_trits,
    unpack_trits,
    word_dtype,
)
from ppbench.defenses.fedpc.protocol import FedPC, command_answers, pilots, step_signs
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Layout, Local, Opt
from ppbench.federation.view import Transcript
from ppbench.federation.wire import SERVER, Hello
from ppbench.testing.small_federation import same_tensors

SGD = Opt("sgd", 0.05, 0.9)


@pytest.fixture
def build(deal):
    return partial(unequal, deal)


# -- what parties can tell -------------------------------------------------------------------------------------------
def probed(run: Federation, kind: str = "gradient", rounds: int = 1, batch: int = 1, threat: str = "server/1"):
    victims = choose_victims(run.shards, threat, batch, 2 * batch, Seeds(3), roles=2)
    return victims, run.probe(victims.data, kind, rounds)


@pytest.mark.parametrize("threat", ["server/1", "eavesdropper/1", "collusion/1"])
def test_ternaries_tell_the_exact_signs_of_what_their_sender_does_not_send(build, threat):
    run = build(FedPC())
    run.run(2)
    _, transcript = probed(run, "local", 2)
    view, seen = transcript.view(threat), 0
    for exchange in command_answers(view):
        place = exchange.slot.probe, exchange.round, exchange.step, exchange.slot.client
        (state,) = [s.state for s in transcript.states if (s.probe, s.round, s.step, s.party) == place]
        signs_ = step_signs(view, exchange)
        if signs_ is None:  # a listener has not heard the broadcast before its first round
            assert threat == "eavesdropper/1" and exchange.round == 3
            continue
        true = flat(state.last) - flat(state.trained)
        known = flat(signs_) != 0
        assert torch.equal(flat(signs_)[known], true.sign()[known])
        seen += int(known.sum()) if isinstance(exchange.answer, Ternary) else 0
    assert seen > 300


def test_in_round_1_a_ternary_tells_the_sign_itself(build):
    run = build(FedPC(rates="1"))
    view = run.observe().view("server/1")
    truth = trained(run.observe())
    start = flat(run.parties.server.params)
    for exchange in command_answers(view):
        result, true = flat(step_signs(view, exchange)), start - flat(truth[exchange.slot.client])
        assert torch.equal(result[result != 0], true.sign()[result != 0])
        if isinstance(exchange.answer, Ternary):
            assert torch.equal(result != 0, true.abs() > 0.05)


def test_a_plain_attacker_holds_the_exact_gradient_of_a_pilot_whose_rate_is_public(build):
    run = build(FedPC(rates="1"))
    run.run(2)
    result, transcript = probed(run)
    roles = transcript.roles()
    pieces = {e.unit[0]: e for e in run.defense.evidence(transcript.view("server/1"))}
    assert set(pieces) == set(result.data) and set(roles.values()) == {"pilot", "ternary"}
    for slot, evidence in pieces.items():
        assert evidence.channel == roles[slot]
        x, y = result.data[slot].x[None], result.data[slot].y[None]
        exact, true = at_truth(evidence, x, y), flat(evidence.simulate(x, y)).detach()
        assert exact < 1e-8 if roles[slot] == "pilot" else exact > 0.1
        assert float(torch.cosine_similarity(flat(evidence.observed), true, dim=0)) > 0.2, "it points the other way"
    assert len({id(e.simulate) for e in pieces.values()}) == 1
    secret = build(FedPC(rates="2"))
    result, transcript = probed(secret)
    wrong = [e for e in secret.defense.evidence(transcript.view("server/1")) if e.channel == "pilot"]
    truth = [at_truth(e, result.data[e.unit[0]].x[None], result.data[e.unit[0]].y[None]) for e in wrong]
    assert truth == pytest.approx([0.25] * len(wrong), abs=1e-4)  # (2g - g)^2 / (2g)^2: its rate is twice the plan's


def test_a_curious_client_sees_the_pilots_update_up_to_the_correction(build):
    run = build(FedPC(rates="1"))
    run.run(3)
    victims = choose_victims(run.shards, "client/1", 4, 16, Seeds(3))
    transcript = run.probe(victims.data)
    pilot, server = pilots(transcript.view("server/1"))[0, 4], run.parties.server
    evidence = run.defense.evidence(transcript.view("client/1", 0 if pilot else 1, own=victims.own))
    (piece,) = evidence
    assert len(piece.unit) == 4 and piece.channel == "aggregate"
    (state,) = [s.state for s in transcript.states if (s.party, s.step) == (pilot, 1)]
    update = (flat(server.params) - flat(state.trained)) / 0.05
    off = (flat(piece.observed) - update).abs()
    bound = 0.2 * (flat(server.params) - flat(server.own.before)).abs() / 0.05
    assert bool((off <= bound + 1e-4).all())
    assert run.defense.evidence(transcript.view("client/1", pilot, own=victims.own)) == []


# -- masks -----------------------------------------------------------------------------------------------------------
def test_masks_change_what_is_seen_and_nothing_of_what_is_learnt(build):
    plain, hidden = build(FedPC()), build(FedPC(masks="ring"))
    for run in (plain, hidden):
        run.run(4)
    assert same_tensors(plain.parties.server.params, hidden.parties.server.params)
    assert same_tensors(plain.parties.server.own, hidden.parties.server.own)
    transcript, count = hidden.observe(), hidden.plan.net.parameter_count
    sent = answers(transcript, Masked)
    assert len(sent) == 4 and {m.words.dtype for m in sent.values()} == {torch.int16}
    bare = {c: hidden.defense.ternary(hidden.context("observed", 5, 1, c), _at(transcript, c)) for c in sent}
    total = sum(UNEQUAL[c] * t.long() for c, t in bare.items())
    assert torch.equal(hidden.defense.votes(hidden.parties.server, sent), total)
    for client, message in sent.items():
        same_sign = (message.words.sign() == bare[client].sign())[bare[client] != 0].double().mean()
        assert abs(float(same_sign) - 0.5) < 4 * 0.5 / (0.3 * count) ** 0.5
        assert float(message.words.double().std()) > 2**16 / 12**0.5 * 0.9  # uniform over all words
        assert step_signs(transcript.view("server/1"), next(e for e in command_answers(transcript.view("server/1"))
                     if e.slot.client == client)) is None  # fmt: skip


def _at(transcript: Transcript, client: int) -> Any:
    return next(s.state for s in transcript.states if (s.party, s.step) == (client, 1))


def test_words_are_as_wide_as_the_sum_needs():
    assert word_dtype(torch.tensor([2**14, 2**14 - 1])) == torch.int16
    assert word_dtype(torch.tensor([2**14, 2**14])) == torch.int32
    assert word_dtype(torch.tensor([2**31])) == torch.int64


def test_masked_ternaries_are_evidence_about_all_their_senders_together(build):
    run = build(FedPC(masks="ring"))
    run.run(2)
    result, transcript = probed(run)
    pieces = run.defense.evidence(transcript.view("server/1"))
    roles = transcript.roles()
    for evidence in pieces:
        assert {roles[slot] for slot in evidence.unit} == {"pilot" if evidence.channel == "pilot" else "ternary"}
    assert sorted(len(e.unit) for e in pieces) == [1, 1, 4, 4] and len(result.data) == 10
    assert {e.channel for e in run.defense.evidence(transcript.view("eavesdropper/1"))} <= {"pilot"}


def test_all_other_senders_together_take_a_mask_off(build):
    """Masks are worth nothing against N-1 colluders and the server: they hold every key that the victim's uses."""
    run = build(FedPC(masks="ring"))
    run.run(1)
    transcript = run.observe()
    assert 0 in answers(transcript, Masked), "client 0 is the pilot: the test proves nothing"
    bare = next(e.answer for e in command_answers(transcript.view("collusion/1")) if e.slot.client == 0)
    trits = flat(run.defense.decode(bare, run.parties.server.params)).to(torch.int8)
    assert torch.equal(trits, run.defense.ternary(run.context("observed", 2, 1, 0), _at(transcript, 0)))


@pytest.mark.parametrize("senders", [[0, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1]])
def test_a_client_masks_for_no_set_that_hides_nothing(build, senders):
    run = build(FedPC(masks="ring"))
    run.run(1)
    me, command = _at(run.observe(), 0), Command(torch.tensor(SEND_TERNARY), torch.tensor(senders).bool())
    with pytest.raises(ProtocolError, match="asks client 0 to mask a ternary vector for itself alone"):
        run.defense.reply(run.context("real", 2, 1, 0), me, command, (), run.shards[0])


# -- the paper's baselines --------------------------------------------------------------------------------------------
def assert_exact(run: Federation, error: float) -> None:
    """The server's plain evidence of single examples explains them."""
    victims = choose_victims(run.shards, "server/1", 1, 5, Seeds(3))
    for evidence in run.defense.evidence(run.probe(victims.data).view("server/1")):
        data = victims.data[evidence.unit[0]]
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
        assert same_tensors(handed, models[client + 1])
    assert_exact(run, 1e-8)


def test_a_curious_client_sees_what_the_others_made_of_the_model_that_it_handed_on(build):
    """Exactly the other one's update of two clients; of more the sum of steps taken one after another."""
    for clients, error in ((2, 1e-6), (4, 1e-3)):
        run = build(Phong(), clients, local=Local(batch=16, opt=Opt("sgd", 1e-3)))
        victims = choose_victims(run.shards, "client/1", 1, clients - 1, Seeds(0))
        view = run.probe(victims.data, "local").view("client/1", 0, own=victims.own)
        (evidence,) = run.defense.evidence(view)
        assert evidence.unit == victims.units[0]
        truth = victims.truth(evidence.unit)
        assert at_truth(evidence, truth.x[:, None], truth.y[:, None]) < error


def test_centralized_training_is_training_on_the_pool_with_one_optimizer(build):
    local = Local(batch=600, opt=SGD)  # the whole pool is one batch: no order matters
    run = build(Central(), local=local)
    params = run.parties.server.params
    layout = Layout.of(params)
    weight, moment = flat(params).double(), torch.zeros(len(flat(params))).double()
    x, y = (torch.cat([getattr(s, k) for s in run.shards.values()]) for k in ("x", "y"))
    for _ in range(3):
        leaf = weight.clone().requires_grad_()
        loss = run.plan.objective(layout.unpack(leaf), x.double(), y.double(), torch.ones(len(x)).double())
        (step,) = torch.autograd.grad(loss, leaf)
        moment = 0.9 * moment + step
        weight = weight - 0.05 * moment
    run.run(3)
    torch.testing.assert_close(flat(run.parties.server.params).double(), weight, rtol=1e-4, atol=1e-5)
    assert run.wire.up - run.setup_up == 3 * sum(UNEQUAL[:5]) * 4 * (64 + 10)
    assert_exact(run, 1e-10)
    victims = choose_victims(run.shards, "client/1", 1, 4, Seeds(3))
    assert run.defense.evidence(run.probe(victims.data).view("client/1", 0, own=victims.own)) == []


def test_centralized_training_refuses_what_is_no_examples(build):
    run = build(Central())
    with pytest.raises(ProtocolError, match="Client 1 sent no examples"):
        run.defense.aggregate(run.context("real", 1, 0, SERVER), run.parties.server, {1: Hello()})


# -- ternary vectors ---------------------------------------------------------------------------------------------------
PER_BYTE = {"two_bits": 4, "base3": 5}
each_packing = pytest.mark.parametrize("packing", PER_BYTE)


def trits_of(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int8)


@each_packing
@given(st.lists(st.sampled_from([-1, 0, 1]), max_size=70))
@settings(max_examples=60)
def test_packings_read_back_in_the_least_bytes(packing, values):
    data = pack_trits(trits_of(values), packing)
    assert data.dtype == torch.uint8 and len(data) == math.ceil(len(values) / PER_BYTE[packing])
    recovered = unpack_trits(data, len(values), packing)
    assert recovered.dtype == torch.int8 and recovered.tolist() == values


def test_entries_lie_lowest_bits_first():
    # 0 -> 00, 1 -> 01, -1 -> 11: entries 0, 1, -1, 0 give 00 11 01 00, the fifth a byte of its own.
    assert pack_trits(trits_of([0, 1, -1, 0, 1]), "two_bits").tolist() == [0b00110100, 0b01]
    assert pack_trits(trits_of([1, -1, 0, 0, 1, -1]), "base3").tolist() == [1 + 2 * 3 + 81, 2]


@each_packing
@given(st.lists(st.integers(0, 255), min_size=1, max_size=12), st.integers(0, 3))
@settings(max_examples=150)
def test_what_is_read_is_only_what_would_be_written(packing, values, short):
    data, count = torch.tensor(values, dtype=torch.uint8), PER_BYTE[packing] * len(values) - short
    pairs = [value >> shift & 3 for value in values for shift in (0, 2, 4, 6)]
    wrong = 2 in pairs or any(pairs[count:])
    if packing == "base3":
        wrong = max(values) > 242 or values[-1] >= 3 ** (5 - short)
    if wrong:
        with pytest.raises(ValueError, match="stands for nothing or padding not 0"):
            unpack_trits(data, count, packing)
    else:
        assert torch.equal(pack_trits(unpack_trits(data, count, packing), packing), data)


@each_packing
@pytest.mark.parametrize(
    "data",
    [torch.zeros(3, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), torch.zeros(2, dtype=torch.int8),
     torch.zeros(2, 1, dtype=torch.uint8)],
)  # fmt: skip
def test_a_wrong_length_dtype_or_shape_is_refused(packing, data):
    with pytest.raises(ValueError, match=r"7 entries take uint8 of shape \(2,\)"):
        unpack_trits(data, 7, packing)


@each_packing
def test_padded_messages_are_as_long_as_a_model_and_padded_with_zeros(packing):
    trits = trits_of([1, -1, 0, 1, 1, -1, 0])
    data = encoded(trits, packing, padded=True)
    assert len(data) == 4 * len(trits) and torch.equal(decoded(data, len(trits), packing, padded=True), trits)
    assert torch.equal(encoded(trits, packing, padded=False), data[:2])
    data[-1] = 1
    with pytest.raises(ValueError, match="padded with zeros to 28 bytes"):
        decoded(data, len(trits), packing, padded=True)


def test_the_first_rule_takes_the_threshold_itself_for_no_move():
    step = torch.tensor([-0.3, -0.25, 0.0, 0.25, 0.3])
    for alpha in (0.25, torch.tensor(0.25)):
        assert first_ternary(step, alpha).tolist() == [-1, 0, 0, 0, 1]  # Eq. 4: 0 where |D| <= alpha


def test_the_later_rule_takes_the_threshold_itself_for_a_move():
    previous = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    step = torch.tensor([0.25, 0.24, -0.25, 0.25, -0.24, -0.25])
    assert later_ternary(step, previous, 0.25).tolist() == [1, 0, -1, -1, 0, 1]  # Eq. 5: 0 where |D| < beta |Dp|
    # Where the model stood still there is no direction to tell; tiny steps keep theirs, though a product underflows.
    assert later_ternary(torch.tensor([1.0, -1.0, 0.0]), torch.zeros(3), 0.2).tolist() == [0, 0, 0]
    assert later_ternary(torch.tensor([1e-30, -1e-30]), torch.full((2,), 1e-30), 0.2).tolist() == [1, -1]


@given(st.integers(0, 2**31 - 1), st.floats(0.01, 0.99))
@settings(max_examples=60)
def test_what_is_told_is_the_exact_direction_and_at_least_the_threshold(seed, beta):
    generator = torch.Generator().manual_seed(seed)
    step, previous = torch.randn(2, 50, generator=generator)
    result = later_ternary(step, previous, beta)
    seen = result != 0
    assert torch.equal((result * previous.sign())[seen], step.sign()[seen])
    assert bool((step.abs() >= beta * previous.abs())[seen].all())
    assert bool((step.abs() < beta * previous.abs())[~seen].all())
