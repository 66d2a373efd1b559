"""TP-SMC: parts of noise under threshold Paillier (Truex et al. 2019), as the MP-DP paper compares with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ppbench.defenses.claims import paper
from ppbench.defenses.encrypted.noisy import ReducedNoise
from ppbench.defenses.encrypted.threshold import ThresholdDefense
from ppbench.federation.contract import Claim

YANG2024 = paper("yang2024")


@dataclass(frozen=True)
class TPSMC(ReducedNoise, ThresholdDefense):
    """Clients clip, add parts of the noise and encrypt; N - t + 1 of them decrypt the sum, t being honest.

    The server and fewer colluders read the noisy sum of the honest clients; as many open every upload, with its part of
    the noise alone. All clients see each model. Nobody drops out.
    """

    name: ClassVar[str] = "tp_smc"
    paper: ClassVar[str] = "Truex et al., A Hybrid Approach to Privacy-Preserving Federated Learning, AISec@CCS 2019"
    claimed: ClassVar[tuple[Claim, ...]] = YANG2024.claims("tp_smc")
