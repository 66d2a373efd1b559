"""Flower's SecAgg and SecAgg+: the masks of a pair of clients come from a generator that is seeded with 32 bits.

Run: PYTHONPATH=FOLDER python examples/findings/flower_secagg_seed.py [--bits 24]
where `pip install --target FOLDER flwr` has made FOLDER; seen with Flower 1.23 and 1.42.

`pseudo_rand_gen` folds a 32-byte secret to 4 bytes by exclusive or, and seeds NumPy's Mersenne Twister with them. The
server is told each client's private mask in the last stage, so of two clients that send to it, or two among colluders,
one mask is left between it and their weights. The first masked word is a client's weighting factor, which follows from
the number of examples that it sends beside it in the clear: its mask's first word is known, and seeds can be tried.

This script masks weights as the mod of one of two clients does, finds the seed among 2 ** bits that hold it, takes the
mask off, and says how long all 2 ** 32 would take here. --bits 32 tries them all.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import factor_combine, parameters_addition, parameters_mod
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

try:
    from flwr.supercore.primitives.asymmetric import generate_key_pairs
except ImportError:  # before 1.24
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_key_pairs

CLIP, LEVELS, MODULUS, MOST, EXAMPLES = 8.0, 2**22, 2**32, 1000.0, 32
BLOCK = 2**16
STATE, MIDDLE = 624, 397


def first_words(seeds: np.ndarray) -> np.ndarray:
    """Return the first output of the Mersenne Twister for each seed, uint32: of its state that takes three words."""
    word = seeds.astype(np.uint32)
    kept = {0: word}
    for place in range(1, MIDDLE + 1):
        word = np.uint32(1812433253) * (word ^ (word >> np.uint32(30))) + np.uint32(place)
        if place in (1, MIDDLE):
            kept[place] = word
    mixed = (kept[0] & np.uint32(0x80000000)) | (kept[1] & np.uint32(0x7FFFFFFF))
    out = kept[MIDDLE] ^ (mixed >> np.uint32(1)) ^ np.where(mixed & np.uint32(1), np.uint32(0x9908B0DF), np.uint32(0))
    out ^= out >> np.uint32(11)
    out ^= (out << np.uint32(7)) & np.uint32(0x9D2C5680)
    out ^= (out << np.uint32(15)) & np.uint32(0xEFC60000)
    return out ^ (out >> np.uint32(18))


def folded(secret: bytes) -> int:
    """Return the seed that a secret becomes."""
    return int(np.bitwise_xor.reduce(np.frombuffer(secret, dtype="<u4")))


def main() -> int:
    """Mask, search, unmask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=24)
    bits = parser.parse_args().bits
    weights = [np.random.default_rng(0).normal(0, 0.1, (10, 20))]
    (mine, _), (_, theirs) = generate_key_pairs(), generate_key_pairs()
    secret = generate_shared_key(mine, theirs)

    # What the server has of one client once the private mask is gone: `secaggplus_mod._collect_masked_vectors`.
    factor = round(EXAMPLES / MOST * LEVELS)
    plain = factor_combine(factor, quantize([w * (factor / LEVELS) for w in weights], CLIP, LEVELS))
    mask = pseudo_rand_gen(secret, MODULUS, [one.shape for one in plain])
    sent = parameters_mod(parameters_addition(plain, mask), MODULUS)

    # What the server does with it. 32 examples: told in the clear, beside the masked vector.
    expected = np.uint32((int(sent[0].item()) - round(EXAMPLES / MOST * LEVELS)) % MODULUS)
    first = folded(secret) >> bits << bits  # of the 2 ** bits seeds that hold the right one; 0 for all
    begun, result = time.perf_counter(), list[int]()
    for start in range(first, first + 2**bits, BLOCK):
        some = np.arange(start, start + min(BLOCK, 2**bits), dtype=np.uint64)
        result += some[first_words(some) == expected].tolist()
    took = time.perf_counter() - begun
    for seed in result:
        guess = pseudo_rand_gen(int(seed).to_bytes(4, "little"), MODULUS, [one.shape for one in sent])
        bare = [(s - m) % MODULUS for s, m in zip(sent, guess, strict=True)]
        if all((one < LEVELS).all() for one in bare[1:]):
            (found_weights,) = dequantize(bare[1:], CLIP, LEVELS)
            error = np.abs(found_weights / (factor / LEVELS) - weights[0]).max()
            print(f"seed {seed:#010x} of {2**bits:,} tried: weights to {error:.1e}, which is the quantization's step")
    print(f"{took:.0f} s; all 2 ** 32: {took * 2 ** (32 - bits) / 3600:.2f} hours on one core, by NumPy")
    return 0 if result else 1


if __name__ == "__main__":
    raise SystemExit(main())
