"""Gradient compression: codes and signs as sent, unbiased rounding, error feedback, and what attacks read of each."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppbench.attacks.adaptive.dp import AdaptiveQSGD, AdaptiveSign
from ppbench.attacks.reconstruction.closed_form import ClosedForm
from ppbench.attacks.reconstruction.ig import IG
from ppbench.base.secret_draws import SecretDraws
from ppbench.defenses.compression import QSGD, SignSGD, TopK
from ppbench.defenses.none import FullNoise
from ppbench.defenses.ppdl import PPDL, pack_codes, unpack_codes
from ppbench.federation.contract import Context
from ppbench.federation.plan import Data, Plan
from ppbench.federation.wire import Model
from ppbench.nets.net import initial, net_spec
from ppbench.testing.small_federation import Duel, psnrs

PLAN = Plan(net_spec("mlp", (1, 8, 8), 10), 2)


def context(seed: int = 0) -> Context:
    key = seed.to_bytes(32, "little")
    return Context(PLAN, 1, "real", 0, torch.Generator().manual_seed(seed), SecretDraws(key))


def update(seed: int = 0) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=draws) for name, value in initial(PLAN.spec, 0).items()}


@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(0, 255), max_size=50))
def test_codes_come_back_and_fill_bytes(width: int, numbers: list[int]) -> None:
    levels = torch.tensor([number % 2**width for number in numbers], dtype=torch.uint8)
    packed = pack_codes(levels, width)
    assert len(packed) == math.ceil(len(levels) * width / 8)
    assert unpack_codes(packed, width, len(levels)).tolist() == levels.tolist()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_is_unbiased_within_a_step_and_has_the_law_that_attackers_assume(bits: int) -> None:
    defense, whole = QSGD(bits), update()
    repeats = [defense.upload(context(seed), (), whole) for seed in range(40)]
    decoded = [defense.decode(upload, whole) for upload in repeats]
    for place, (name, value) in enumerate(whole.items()):
        step = float(value.abs().max()) / (2 ** (bits - 1) - 1)
        assert float(repeats[0].step[place]) == pytest.approx(step)
        errors = torch.stack([one[name] - value for one in decoded])
        assert float(errors.abs().max()) <= step * (1 + 1e-5)
        assert float(errors.mean(0).abs().mean()) < 0.25 * step  # of 40 roundings; of one it is a third of a step
        if value.numel() > 500 and bits > 2:  # entries spread over many steps: a uniform place within one
            law = defense.law(repeats[0], whole)
            assert float(errors.square().mean().sqrt()) == pytest.approx(law.of(name), rel=0.05)
    assert len(repeats[0].codes) == math.ceil(sum(v.numel() for v in whole.values()) * bits / 8)


def test_signs_and_sizes_are_all_that_is_sent() -> None:
    defense, whole = SignSGD(), update()
    sent = defense.upload(context(), (), whole)
    decoded = defense.decode(sent, whole)
    assert len(sent.bits) == math.ceil(sum(v.numel() for v in whole.values()) / 8)
    for name, value in whole.items():
        torch.testing.assert_close(decoded[name], value.abs().mean() * torch.where(value >= 0, 1.0, -1.0))


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([0.001, 0.05, 1.0]))
def test_what_is_left_out_waits_and_nothing_is_lost(seed: int, share: float) -> None:
    defense, ctx = TopK(theta=share), context()
    memory = defense.init_client(ctx, update())
    total, received = {n: torch.zeros_like(v) for n, v in update().items()}, None
    for round_ in range(3):
        step = update(seed + round_)
        memory, answer = defense.reply(ctx, memory, Model(step), step, Data(torch.zeros(1), torch.zeros(1)))
        sent = defense.decode(answer, step)
        assert sum(int((value != 0).sum()) for value in sent.values()) == max(1, round(share * 4810))
        total = {n: total[n] + step[n] for n in total}
        received = sent if received is None else {n: received[n] + sent[n] for n in sent}
    assert received is not None
    for name, value in total.items():
        torch.testing.assert_close(received[name] + memory[name], value, rtol=1e-4, atol=1e-5)


def test_in_the_first_round_it_is_ppdl_without_noise() -> None:
    whole, ctx = update(), context()
    defense = TopK(theta=0.1)
    _, answer = defense.reply(
        ctx, defense.init_client(ctx, whole), Model(whole), whole, Data(torch.ones(1), torch.ones(1))
    )
    plain = PPDL(theta=0.1).upload(ctx, (), whole)
    assert torch.equal(answer.value, plain.value) and type(answer) is type(plain)


@pytest.mark.parametrize(
    ("defense", "change", "words"),
    [
        (QSGD(4), lambda sent: sent.__class__(sent.codes[1:], sent.step), "bytes for 4810 entries of 4 bits"),
        (QSGD(4), lambda sent: sent.__class__(sent.codes, sent.step[1:]), "3 values for 4 tensors"),
        (SignSGD(), lambda sent: sent.__class__(sent.bits[1:], sent.size), "bytes for 4810 signs"),
    ],
)
def test_messages_of_another_size_are_refused(defense: QSGD | SignSGD, change: object, words: str) -> None:
    sent = defense.upload(context(), (), update())
    with pytest.raises(ValueError, match=words):
        defense.decode(change(sent), update())  # type: ignore[operator]


def test_fewer_bits_leave_less_of_an_image_and_knowing_the_law_helps() -> None:
    """On DLNet and digits, at random weights: eight bits are no protection."""
    reached = {}
    for bits in (8, 4):
        world = Duel(AdaptiveQSGD(), QSGD(bits)).probe(4)
        reached[bits] = {
            attack.name: min(psnrs(world, world.answers(attack), attack))
            for attack in (AdaptiveQSGD(budget=600), IG(budget=300), ClosedForm())
        }
    aware, plain = (
        {bits: max(v for n, v in one.items() if (n == "adaptive_qsgd") == own) for bits, one in reached.items()}
        for own in (True, False)
    )
    assert aware[8] > 40 and 20 < aware[4] < aware[8] and aware[4] > plain[4] + 2


def test_signs_give_digits_that_one_recognizes_and_noise_gives_none() -> None:
    world = Duel(AdaptiveSign(), SignSGD()).probe(4)
    aware = psnrs(world, world.answers(AdaptiveSign(budget=300)))
    null = Duel(AdaptiveSign(), FullNoise()).probe(4)
    noise = psnrs(null, null.answers(AdaptiveSign(budget=300)))
    assert min(aware) > 11 and max(noise) < 10.5
