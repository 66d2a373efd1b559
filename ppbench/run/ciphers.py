"""How long real encryption takes: each operation once with a library, times how often a round does it.

The rounds of ppbench encrypt nothing (`defenses/encrypted`). Libraries are those of the extra "crypto": python-paillier
and gmpy2, pymife. Operations on one ciphertext take equally long whatever it holds, so one of each is enough.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version

from ppbench.federation.ciphering import Ciphering
from ppbench.records.times import EncryptionTime

TIMINGS = 3
"""Times each operation is done; the median counts."""
NO_LIBRARY = "not timed: install ppbench-fl[crypto]"


@dataclass(frozen=True)
class Seconds:
    """Seconds of one operation on one ciphertext. partial: a client's part of a decryption, 0 where there is none.

    decrypt: the server's, of one sum: adding up and decrypting.
    """

    encrypt: float
    partial: float
    decrypt: float
    library: str


def encryption_time(form: Ciphering | None) -> EncryptionTime | None:
    """Return the time that encryption adds to a round; None without encryption; only a reason without the libraries."""
    if form is None:
        return None
    try:
        seconds = time_operations(form.scheme, form.bits, form.clients, form.threshold)
    except ImportError:
        return EncryptionTime(client=None, server=None, library="", reason=NO_LIBRARY)
    return round_times(seconds, form)


def round_times(seconds: Seconds, form: Ciphering) -> EncryptionTime:
    """Return the times of one client and of the server: seconds per ciphertext times the number of ciphertexts."""
    blocks = form.blocks(form.values)
    return EncryptionTime(
        client=blocks * (seconds.encrypt + seconds.partial),
        server=blocks * seconds.decrypt,
        library=seconds.library,
        reason="",
    )


@lru_cache
def time_operations(scheme: str, bits: int, clients: int, threshold: int) -> Seconds:
    """Return the seconds of one operation of each kind, measured once per process (ImportError: no library)."""
    return _paillier(bits, clients, threshold) if scheme == "paillier" else _functional(clients)


def _paillier(bits: int, clients: int, threshold: int) -> Seconds:
    """Time python-paillier's encryption; a partial decryption is a power c^(2 D s) mod n^2 (Damgard and Jurik 2001).

    s, a share of the secret, is as long as n^2, and D = N!. The server multiplies N ciphertexts and then raises each
    of `threshold` parts to a Lagrange coefficient times 2 D.
    """
    import gmpy2
    from phe import paillier

    public, _ = paillier.generate_paillier_keypair(n_length=bits)
    square, factorial = gmpy2.mpz(public.nsquare), gmpy2.mpz(2 * math.factorial(clients))
    cipher, share = gmpy2.mpz(public.raw_encrypt(1)), gmpy2.mpz(public.nsquare // 3)
    encrypt = _median(lambda: public.raw_encrypt(7))
    partial = _median(lambda: gmpy2.powmod(cipher, factorial * share, square))
    multiply = _median(lambda: cipher * cipher % square)
    power = _median(lambda: gmpy2.powmod(cipher, factorial, square))
    library = f"phe {version('phe')}, gmpy2 {version('gmpy2')}"
    return Seconds(encrypt, partial, (clients - 1 + threshold) * multiply + threshold * power, library)


def _functional(clients: int) -> Seconds:
    """Time pymife's multi-input scheme over Curve25519, without the discrete logarithm that reads a sum out."""
    from mife.data.curve25519 import Curve25519
    from mife.multi.damgard import FeDamgardMulti

    key = FeDamgardMulti.generate(clients, 1, Curve25519())
    inputs = [key.get_enc_key(client) for client in range(clients)]
    encrypt = _median(lambda: FeDamgardMulti.encrypt([0], inputs[0]))
    sent = [FeDamgardMulti.encrypt([0], one) for one in inputs]
    function, public = FeDamgardMulti.keygen([[1]] * clients, key), key.get_public_key()
    decrypt = _median(lambda: FeDamgardMulti.decrypt(sent, public, function, (0, 1)))
    return Seconds(encrypt, 0.0, decrypt, f"pymife {version('pymife')}")


def _median(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(TIMINGS):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
