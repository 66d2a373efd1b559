"""TP-SMC: shares of noise under threshold Paillier (Truex et al. 2019), as compared in the MP-DP paper."""

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
    """Clients clip, add shares of the noise and encrypt; N - t + 1 of them decrypt the sum (t are honest).

    The server and fewer colluders read the noisy sum of the honest clients; with N - t + 1 colluders it reads every
    upload, which has only its share of the noise. All clients see each model. No client drops out.
    """

    name: ClassVar[str] = "tp_smc"
    paper: ClassVar[str] = "Truex et al., A Hybrid Approach to Privacy-Preserving Federated Learning, AISec@CCS 2019"
    claimed: ClassVar[tuple[Claim, ...]] = YANG2024.claims("tp_smc")
