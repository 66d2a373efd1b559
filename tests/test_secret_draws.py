"""Secret draws: the stream is ChaCha20 by SHA-256, the laws are right, and nothing but the key decides."""

from __future__ import annotations

import copy
import hashlib
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.secret_draws import AT_ONCE, SecretDraws, laplace_of, normal_of, uniform_of
from ppbench.base.seeds import Seeds

DRAWS = 200_000
# RFC 7539, A.1, test vectors 1 and 2: key and nonce of zeros, blocks 0 and 1.
KEYSTREAM = bytes.fromhex(
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
    "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
)
# A.1, test vector 5: the same key, nonce 2 in its last byte.
NONCE_2 = bytes.fromhex("c2c64d378cd536374ae204b9ef933fcd")
CALLS: dict[str, Callable[[SecretDraws], Tensor]] = {
    "bytes": lambda secret: secret.random_bytes((3, 50)),
    "uniform": lambda secret: secret.uniform((3, 50)),
    "normal": lambda secret: secret.normal((3, 50)),
    "laplace": lambda secret: secret.laplace((3, 50), torch.float64),
    "bernoulli": lambda secret: secret.bernoulli(0.5, (3, 50)),
    "integers": lambda secret: secret.integers(-5, 2**40, (3, 50)),
    "permutation": lambda secret: secret.permutation(150),
}


def drawn(seed: int = 0) -> SecretDraws:
    return Seeds(seed).secret("party")


def test_the_stream_is_that_of_the_standard() -> None:
    assert SecretDraws(bytes(32)).random_bytes((128,)).numpy().tobytes() == KEYSTREAM
    secret = SecretDraws(bytes(32))
    secret._calls = 2 << 88  # the last byte of the nonce
    assert secret.random_bytes((16,)).numpy().tobytes() == NONCE_2


def test_the_key_is_a_digest_of_master_seed_salt_role_and_indices() -> None:
    text = b"7/ab12/secret/party/step/probe-0/3/1/4"
    key = Seeds(7, "ab12").secret("party", "step", "probe-0", 3, 1, 4).key
    assert key.numpy().tobytes() == hashlib.sha256(text).digest()
    assert SecretDraws.of(key).normal((5,)).tolist() == SecretDraws(hashlib.sha256(text).digest()).normal((5,)).tolist()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_equal_keys_draw_equally_and_a_salt_role_or_index_changes_all(call: Callable[[SecretDraws], Tensor]) -> None:
    right = call(Seeds(0, "a").secret("party", 1))
    assert torch.equal(call(Seeds(0, "a").secret("party", 1)), right)
    others = [Seeds(1, "a"), Seeds(0), Seeds(0, "b")]
    draws = [call(seeds.secret("party", 1)) for seeds in others]
    draws += [call(Seeds(0, "a").secret(*where)) for where in (("party", 2), ("other", 1))]
    for other in draws:
        assert not torch.equal(other, right)
        if right.is_floating_point():
            assert not bool((other == right).any())


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_call_draws_anew_whatever_was_drawn_before(call: Callable[[SecretDraws], Tensor]) -> None:
    first, second = drawn(), drawn()
    first.uniform((3,))
    second.permutation(1000)
    again, copied = call(first), pickle.loads(pickle.dumps(copy.deepcopy(second)))
    assert torch.equal(again, call(second)) and torch.equal(again, call(copied))
    assert not torch.equal(call(first), again)


def test_a_long_draw_is_the_stream_piece_by_piece() -> None:
    count = 2 * AT_ONCE + 3
    words = drawn().random_bytes((8 * count,)).numpy().view("<u8")
    for dtype, call, law in (
        (torch.float64, lambda secret: secret.uniform((count,)), uniform_of),
        (torch.float64, lambda secret: secret.normal((count,), torch.float64), normal_of),
        (torch.float32, lambda secret: secret.laplace((count,)), laplace_of),
    ):
        assert torch.equal(call(drawn()), torch.from_numpy(law(words)).to(dtype))


@pytest.mark.parametrize(
    ("call", "law", "moment"),
    [
        (lambda secret: secret.uniform((DRAWS,)), stats.uniform, lambda k: 1 / (k + 1)),
        (lambda secret: secret.normal((DRAWS,)), stats.norm, lambda k: 0.0 if k % 2 else math.prod(range(1, k, 2))),
        (lambda secret: secret.laplace((DRAWS,)), stats.laplace, lambda k: 0.0 if k % 2 else math.factorial(k)),
    ],
    ids=["uniform", "normal", "laplace"],
)
def test_numbers_have_their_law(
    call: Callable[[SecretDraws], Tensor], law: stats.rv_continuous, moment: Callable[[int], float]
) -> None:
    numbers = call(drawn()).double().numpy()
    assert stats.kstest(numbers, law.cdf).pvalue > 1e-3
    for order in range(1, 5):
        spread = math.sqrt((moment(2 * order) - moment(order) ** 2) / DRAWS)
        assert float((numbers**order).mean()) == pytest.approx(moment(order), abs=4 * spread)
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 4 / math.sqrt(DRAWS)


def test_the_extremes_of_the_stream_are_finite_and_mirror_each_other() -> None:
    low, high = np.zeros(1, np.uint64), np.full(1, 2**64 - 1, np.uint64)
    assert uniform_of(low)[0] == 2.0**-53 and uniform_of(high)[0] == 1 - 2.0**-53
    assert 8.2 < normal_of(high)[0] < 8.3 and normal_of(low)[0] == pytest.approx(-normal_of(high)[0], rel=1e-12)
    assert laplace_of(high)[0] == pytest.approx(52 * math.log(2)) and laplace_of(low)[0] == -laplace_of(high)[0]
    middle = np.array([2**63 - 2**12, 2**63], np.uint64)
    assert uniform_of(middle).tolist() == [0.5 - 2.0**-53, 0.5 + 2.0**-53]


@pytest.mark.parametrize(("low", "high"), [(0, 2), (-1, 2), (0, 7), (5, 6), (0, 65_537)])
def test_integers_are_uniform_on_all_values(low: int, high: int) -> None:
    counts = torch.bincount(drawn().integers(low, high, (DRAWS,)) - low, minlength=high - low)
    assert len(counts) == high - low and (high - low == 1 or stats.chisquare(counts.numpy()).pvalue > 1e-3)


def test_words_beyond_a_multiple_are_drawn_again() -> None:
    """Of 3 * 2^62 values a quarter of all words would fall on the first third a second time."""
    numbers = drawn().integers(0, 3 << 61, (DRAWS,))
    counts = torch.bincount(numbers // (1 << 61), minlength=3)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_permutations_are_uniform_and_coins_have_their_probability() -> None:
    secret = drawn()
    orders = torch.stack([secret.permutation(4) for _ in range(4800)])
    assert bool((orders.sort(1).values == torch.arange(4)).all())
    counts = (orders * torch.tensor([64, 16, 4, 1])).sum(1).unique(return_counts=True)[1]
    assert len(counts) == 24 and stats.chisquare(counts.numpy()).pvalue > 1e-3
    for probability in (0.0, 0.01, 0.5, 1.0):
        share = float(secret.bernoulli(probability, (DRAWS,)).double().mean())
        assert share == pytest.approx(probability, abs=4 * math.sqrt(probability * (1 - probability) / DRAWS))


def test_nothing_is_drawn_of_no_key_and_an_empty_shape_is_fine() -> None:
    with pytest.raises(ProtocolError, match="without `secret` draws no secrets"):
        SecretDraws(b"").normal((1,))
    secret = drawn()
    assert secret.normal((0, 3)).shape == (0, 3) and secret.random_bytes((0,)).shape == (0,)
    assert secret.integers(0, 3, ()).shape == () and len(secret.permutation(0)) == 0
