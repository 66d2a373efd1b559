"""Draws with a secret hang on all of it: torch's generators keep 32 bits of a seed, and these can all be tried."""

import numpy as np
import torch

from ppbench.base.seeds import PLACE, TWISTER, Seeds

SALT = "ab" * 32


def words(generator):
    """Return the words of a generator's Mersenne twister."""
    state = generator.get_state()
    assert len(state) == 5056, "torch keeps its generator otherwise; see PLACE"
    return np.frombuffer(state[PLACE : PLACE + 8 * TWISTER].numpy().tobytes(), "<u8")


def of_seed(seed):
    """Return the words that the twister begins with (Matsumoto and Nishimura 2002)."""
    results = [seed & 0xFFFFFFFF]
    for place in range(1, TWISTER):
        results.append((1812433253 * (results[-1] ^ (results[-1] >> 30)) + place) & 0xFFFFFFFF)
    return np.array(results, dtype=np.uint64)


def test_without_a_secret_draws_are_those_of_the_seed_of_which_torch_keeps_half():
    seed = Seeds(3).seed("noise", 1)
    plain = Seeds(3).generator("noise", 1)
    assert (words(plain) == of_seed(seed)).all() and seed >= 2**32
    again = torch.Generator().manual_seed(seed % 2**32)
    assert torch.equal(torch.randn(40, generator=plain), torch.randn(40, generator=again))


def test_with_one_they_hang_on_all_of_it_and_are_no_seeds():
    made = Seeds(3, SALT).generator("noise", 1)
    result = words(made)
    assert not (result == of_seed(int(result[0]))).any(where=np.arange(TWISTER) > 0) and result.max() < 2**32
    same, other = Seeds(3, SALT).generator("noise", 1), Seeds(3, SALT[:-1] + "c").generator("noise", 1)
    first, again, apart = (torch.randn(1000, generator=g) for g in (made, same, other))
    assert torch.equal(first, again) and abs(float(first @ apart)) < 150
    assert abs(float(first.mean())) < 0.15 and 0.85 < float(first.var()) < 1.15
