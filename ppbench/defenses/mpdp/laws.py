"""The random laws of MP-DP: factors whose product is Gaussian (Yang et al., arXiv 2412.11737, Theorem 3).

With X_1..X_m of law DN*(m) and Y_1..Y_n of law DN(sigma, n), all independent, the product of all is N(0, sigma^2).
The server's scales must be positive, so they have the law |DN*(m)|; the sign stays with the client's noise, and the
product's law does not change because it is symmetric. Two laws have closed forms, which are drawn exactly:

- |DN*(1)| is sqrt(Gamma(3/2, 1)), that is chi_3 / sqrt(2): both have the Mellin transform Gamma((3+s)/2) / Gamma(3/2).
  The product of two independent |DN*(2)| has that same law: it is the law of every entry of R, in every layer.
- DN(sigma, 1) is uniform on (-sqrt(2) sigma, sqrt(2) sigma): exp(-E) of a standard exponential E is uniform.

All draws are float64 on CPU, from the given generator alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ppbench.base.errors import UsageError

SECOND_MOMENT = 3 / 2  # of R, of law |DN*(1)|

TERMS = 30
# Mean and variance of -ln |DN*(1)|: -psi(3/2) / 2 and psi'(3/2) / 4.
_MEAN = -1 + (np.euler_gamma + 2 * math.log(2)) / 2
_VARIANCE = math.pi**2 / 8 - 1


def abs_dn_star(shape: tuple[int, ...], m: int, generator: torch.Generator) -> Tensor:
    """Return draws of |DN*(m)|, the law of the server's scales r and s (Eq. [13]); all positive.

    Exact for m = 1; for m >= 2 the paper's series with `TERMS` terms and a Gaussian for the rest of it.

    Args:
        shape: shape of the result, a float64 tensor on CPU.
        m: number of such factors in the product, >= 1.
        generator: CPU generator.

    Raises:
        UsageError: m is below 1.
    """
    _count(m, "m")
    if m == 1:
        return (torch.randn((3, *shape), generator=generator, dtype=torch.float64).square().sum(0) / 2).sqrt()
    return series(shape, m, generator)


def series(shape: tuple[int, ...], m: int, generator: torch.Generator, terms: int = TERMS) -> Tensor:
    """Return draws of |DN*(m)| by its series (Theorem 3), the terms after the first `terms` taken as one Gaussian.

    Without that Gaussian the variance of the product is low (.98 sigma^2 at 30 terms), because each left-out term has
    mean near 0 and variance 1 / (m (2l+1)^2). Their exact summed mean and variance are used.
    """
    log, mean, variance = torch.zeros(shape, dtype=torch.float64), _MEAN, _VARIANCE
    for term in range(1, terms + 1):
        center = math.log1p(1 / term) / 2
        log = log - gamma(shape, m, generator) / (2 * term + 1) + center / m
        mean -= 1 / (2 * term + 1) - center
        variance -= 1 / (2 * term + 1) ** 2
    rest = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.exp(log - mean / m - math.sqrt(variance / m) * rest)


def dn(sigma: float, shape: tuple[int, ...], n: int, generator: torch.Generator) -> Tensor:
    """Return draws of DN(sigma, n), the law of the clients' independent and pairwise noise (Eqs. [16], [19]).

    For n = 1 the draws are uniform, symmetric, never 0 and strictly inside (-sqrt(2) sigma, sqrt(2) sigma).

    Args:
        sigma: standard deviation of the Gaussian product; finite, >= 0 (0 gives zeros).
        shape: shape of the result, a float64 tensor on CPU.
        n: number of such factors in the product, >= 1.
        generator: CPU generator.

    Raises:
        UsageError: sigma is negative or not finite, or n is below 1.
    """
    _count(n, "n")
    if not 0 <= sigma < math.inf:
        raise UsageError(f"MP-DP: sigma={sigma!r} of the noise cannot be used; it must be a finite number >= 0.")
    width = float((math.sqrt(2) * sigma) ** (1 / n))
    if n == 1:
        # Odd multiples of 2^-53: `rand` gives multiples of 2^-53, so doubling, shifting and the last sum are exact.
        return width * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1 + 2.0**-53)
    sign = 2.0 * torch.randint(2, shape, generator=generator) - 1
    return width * sign.double() * torch.exp(-gamma(shape, n, generator))


def gamma(shape: tuple[int, ...], parts: int, generator: torch.Generator) -> Tensor:
    """Return float64 draws of Gamma(1 / parts, 1).

    One half is half the square of a normal. torch's public gamma law takes no generator, so the others come from
    NumPy, seeded by one draw of `generator`.
    """
    if parts == 2:
        return torch.randn(shape, generator=generator, dtype=torch.float64).square() / 2
    seed = int(torch.randint(2**62, (), generator=generator))
    return torch.as_tensor(np.random.default_rng(seed).standard_gamma(1 / parts, shape), dtype=torch.float64)


def _count(value: int, name: str) -> None:
    if value < 1:
        raise UsageError(f"MP-DP: {name}={value!r} factors cannot be drawn; it must be a whole number >= 1.")
