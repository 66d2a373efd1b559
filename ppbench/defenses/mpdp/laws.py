"""The random laws of MP-DP: factors whose product is Gaussian (Yang et al., arXiv 2412.11737, Theorem 3).

With X_1..X_m of law DN*(m) and Y of law DN(sigma, 1), all independent, the product of all is N(0, sigma^2). Scales must
be positive, so they have the law |DN*(m)|, m = 1 or 2; the sign stays with the client's noise. |DN*(1)| is
sqrt(Gamma(3/2, 1)), that is chi_3 / sqrt(2), and so is the product of two independent |DN*(2)|: the law of every entry
of R. DN(sigma, 1) is uniform on (-sqrt(2) sigma, sqrt(2) sigma). All draws are float64 on CPU, from the given generator
alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

SECOND_MOMENT = 3 / 2  # of R, of law |DN*(1)|

TERMS = 30
# Mean and variance of -ln |DN*(1)|: -psi(3/2) / 2 and psi'(3/2) / 4.
_MEAN = -1 + (np.euler_gamma + 2 * math.log(2)) / 2
_VARIANCE = math.pi**2 / 8 - 1


def scale_alone(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return draws of |DN*(1)| (Eq. [13]): of scales that are alone in a weight's multiplier."""
    return (torch.randn((3, *shape), generator=generator, dtype=torch.float64).square().sum(0) / 2).sqrt()


def scale_of_two(shape: tuple[int, ...], generator: torch.Generator, terms: int = TERMS) -> Tensor:
    """Return draws of |DN*(2)| by its series (Theorem 3), the terms after the first `terms` taken as one Gaussian.

    Without that Gaussian the variance of the product is low (.98 sigma^2 at 30 terms), because each left-out term has
    mean near 0 and variance 1 / (2 (2l+1)^2). Their exact summed mean and variance are used.
    """
    log, mean, variance = torch.zeros(shape, dtype=torch.float64), _MEAN, _VARIANCE
    for term in range(1, terms + 1):
        center = math.log1p(1 / term) / 2
        gamma = torch.randn(shape, generator=generator, dtype=torch.float64).square() / 2  # of shape 1/2
        log = log - gamma / (2 * term + 1) + center / 2
        mean -= 1 / (2 * term + 1) - center
        variance -= 1 / (2 * term + 1) ** 2
    rest = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.exp(log - mean / 2 - math.sqrt(variance / 2) * rest)


def uniform_noise(sigma: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return draws of DN(sigma, 1), clients' noise (Eqs. [16], [19]): never 0, strictly within +-sqrt(2) sigma."""
    # Odd multiples of 2^-53: `rand` gives multiples of 2^-53, so doubling, shifting and the last sum are exact.
    drawn = 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1 + 2.0**-53
    return math.sqrt(2) * sigma * drawn
