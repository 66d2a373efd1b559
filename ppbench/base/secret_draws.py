"""What a party keeps secret is drawn here, from a stream cipher: nobody who sees some draws can tell others.

torch's generator is a Mersenne twister. Its whole state follows by linear algebra from a thousand of its numbers, and
an upload shows that many wherever a gradient is zero; then noise can be subtracted exactly (the attack `noise_replay`).
So noise, masks, keys, private parameters and secret samples come from ChaCha20 (RFC 7539), keyed by SHA-256; what is
public anyway, as the order of batches, may come from torch's generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Tree, node, tree_map

_Words = NDArray[np.uint64]
_Floats = NDArray[np.float64]

KEY_BYTES = 32
AT_ONCE = 2**15
"""Numbers that are made at a time, so that they stay in a core's cache."""
_ZEROS = bytes(8 * AT_ONCE)
_ONE = np.uint64(0x3FF << 52)  # the bits of 1.0; with 52 random bits below them a number in [1, 2)


class SecretDraws:
    """Draws of one party for one purpose: functions of a key alone, and equal on every device.

    Each call draws from a stream of its own, by its number as nonce, so how much earlier calls drew does not matter.
    Tensors are made on the CPU.

    Numbers have 52 random bits. Normal ones are the inverse distribution function of uniform ones, in float64, so one
    number is one word of the stream and none exceeds 8.3 in size. A million take 15 ms of a core, where `torch.randn`
    takes 6 and Box and Muller's pairs in float64 took 11; a call takes 25 us more.
    """

    def __init__(self, key: bytes) -> None:
        """Draw by a key of 32 bytes; with b"" every draw raises ProtocolError."""
        self._key, self._calls = key, 0

    @staticmethod
    def of(key: Tensor) -> SecretDraws:
        """Return the draws of a key [32] uint8."""
        return SecretDraws(key.detach().cpu().numpy().tobytes())

    @property
    def key(self) -> Tensor:
        """The key, [32] uint8, from which all is drawn again."""
        return torch.frombuffer(bytearray(self._key), dtype=torch.uint8)

    def random_bytes(self, shape: Sequence[int]) -> Tensor:
        """Return uniform bytes [*shape], uint8."""
        count = math.prod(shape)
        words = np.concatenate([np.zeros(0, np.uint64), *self._words(-(-count // 8))])
        return torch.from_numpy(words.view(np.uint8)[:count].copy()).view(tuple(shape))

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Return uniform numbers strictly between 0 and 1 [*shape], float64: odd multiples of 2^-53, exact."""
        return self._filled(shape, torch.float64, uniform_of)

    def normal(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return standard normal numbers [*shape], computed in float64."""
        return self._filled(shape, dtype, normal_of)

    def laplace(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return Laplace numbers of scale 1 [*shape], computed in float64."""
        return self._filled(shape, dtype, laplace_of)

    def bernoulli(self, probability: float, shape: Sequence[int]) -> Tensor:
        """Return bool [*shape], each True with `probability`."""
        return self.uniform(shape) < probability

    def integers(self, low: int, high: int, shape: Sequence[int]) -> Tensor:
        """Return int64 [*shape], uniform on low, ..., high - 1, without bias: words beyond a multiple are redrawn."""
        span, count = high - low, math.prod(shape)
        last = np.uint64(2**64 - 1 - 2**64 % span)
        words = np.concatenate([np.zeros(0, np.uint64), *self._words(count)])
        while (beyond := words > last).any():
            words[beyond] = np.concatenate([*self._words(int(beyond.sum()))])
        return torch.from_numpy((words % np.uint64(span)).astype(np.int64)).view(tuple(shape)) + low

    def permutation(self, count: int) -> Tensor:
        """Return 0, ..., count - 1 in random order, int64 [count]."""
        while True:
            words = np.concatenate([np.zeros(0, np.uint64), *self._words(count)])
            order = words.argsort(kind="stable")
            if not (words[order][1:] == words[order][:-1]).any():  # ties would favor the given order
                return torch.from_numpy(order)

    def _filled(self, shape: Sequence[int], dtype: torch.dtype, law: Callable[[_Words], _Floats]) -> Tensor:
        numbers, first = torch.empty(math.prod(shape), dtype=dtype), 0
        for words in self._words(len(numbers)):
            numbers[first : first + len(words)] = torch.from_numpy(law(words))
            first += len(words)
        return numbers.view(tuple(shape))

    def _words(self, count: int) -> Iterator[_Words]:
        """Return an iterator over `count` uniform words, `AT_ONCE` or fewer at a time."""
        if len(self._key) != KEY_BYTES:
            raise ProtocolError("A context without `secret` draws no secrets; hand it on from the context of the step.")
        nonce = bytes(4) + self._calls.to_bytes(12, "little")  # the first 4 bytes count blocks
        self._calls += 1
        cipher = Cipher(algorithms.ChaCha20(self._key, nonce), mode=None).encryptor()
        sizes = (min(AT_ONCE, count - first) for first in range(0, count, AT_ONCE))
        return (np.frombuffer(cipher.update(_ZEROS[: 8 * size]), "<u8").astype(np.uint64, copy=False) for size in sizes)


NO_SECRETS = SecretDraws(b"")
"""Draws of a context that was made for reading, which draws nothing."""


def uniform_of(words: _Words) -> _Floats:
    """Return numbers in (0, 1) of the 52 highest bits of words: (k + 1/2) / 2^52, exact."""
    return (words >> np.uint64(12) | _ONE).view(np.float64) - (1 - 2.0**-53)


def normal_of(words: _Words) -> _Floats:
    """Return the quantiles of the standard normal law at the uniform numbers of words."""
    normal: _Floats = torch.special.ndtri(torch.from_numpy(uniform_of(words))).numpy()
    return normal


def laplace_of(words: _Words) -> _Floats:
    """Return the quantiles of the Laplace law of scale 1 at the uniform numbers of words."""
    centered = uniform_of(words) - 0.5
    laplace: _Floats = np.copysign(np.log1p(-2 * np.abs(centered)), centered)
    return laplace


# -- Noise of a round of local steps, drawn step by step --
# A client's noise for all steps is steps times as large as its model, and under vmap all clients' noise would be in
# memory at once. So for a large parameter only a key for each step is stored, and each step draws by its key. That is a
# pure function of the keys, so it works under vmap (client by client outside).

Law = Literal["gaussian", "laplace"]
EAGER_NUMBERS = 4096
"""Numbers per step below which a parameter's noise is drawn at once."""


@node
class DeferredNoise:
    """Noise of one parameter that is not drawn yet.

    keys: [steps, 32] uint8, of each step's draws. shape, law: see `noise`.
    """

    keys: Tensor
    shape: tuple[int, ...]
    law: Law

    def at(self, t: int) -> Tensor:
        """Return the noise of step `t` [*shape], float32, on the device of `keys`."""
        return _draw(self.keys[t], self.shape, self.law)


def noise(secret: SecretDraws, steps: int, shape: tuple[int, ...], law: Law = "gaussian") -> Tree:
    """Return noise of scale 1 for `steps` local steps, float32 [steps, *shape], or a `DeferredNoise` of it.

    Read it by `at_step`.
    """
    if math.prod(shape) < EAGER_NUMBERS:
        return drawn(secret, (steps, *shape), law)
    return DeferredNoise(secret.random_bytes((steps, KEY_BYTES)), tuple(shape), law)


def drawn(secret: SecretDraws, shape: Sequence[int], law: Law) -> Tensor:
    """Return noise of scale 1, float32 [*shape]: standard normal or Laplace."""
    return secret.normal(shape) if law == "gaussian" else secret.laplace(shape)


def at_step(tree: Tree, t: int) -> Tree:
    """Return the noise of local step `t` from a tree with leading axis steps, `DeferredNoise`, or a dict of these."""
    if isinstance(tree, dict):
        return {name: at_step(value, t) for name, value in tree.items()}
    return tree.at(t) if isinstance(tree, DeferredNoise) else tree_map(lambda leaf: leaf[t], tree)


def _draw(key: Tensor, shape: tuple[int, ...], law: Law) -> Tensor:
    numbers: Tensor = _Draw.apply(key, shape, law)  # type: ignore[no-untyped-call]
    return numbers


class _Draw(torch.autograd.Function):
    """A step's noise of a client, or, under vmap, of each client."""

    @staticmethod
    def forward(key: Tensor, shape: tuple[int, ...], law: Law) -> Tensor:
        return drawn(SecretDraws.of(key), shape, law).to(key.device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing: drawn numbers have no derivative."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, key: Tensor, shape: tuple[int, ...], law: Law) -> tuple[Tensor, int]:
        keys = key.expand(info.batch_size, -1) if in_dims[0] is None else key.movedim(in_dims[0], 0)
        return torch.stack([_draw(one, shape, law) for one in keys]), 0
