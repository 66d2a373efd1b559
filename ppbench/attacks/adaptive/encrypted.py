"""Attacks on TP-SMC, HybridAlpha and PILE: what the server or a coalition decrypts is inverted as far as noise permits.

Encryption hides single uploads. But a sum over few clients is a gradient of few batches, enough clients together can
decrypt any upload, and a single upload carries only a part of the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.adaptive.dp import AdaptiveDP, with_law
from ppbench.attacks.adaptive.inversion import invert_evidence
from ppbench.defenses.encrypted.sums import EncryptedSums
from ppbench.federation.bounds import whole_number
from ppbench.federation.evidence import Evidence
from ppbench.federation.threats import TARGET
from ppbench.federation.view import View


@dataclass(frozen=True)
class AdaptiveEncrypted(AdaptiveDP):
    """Inverts what the server or a coalition with it decrypts: noisy sums as `adaptive_dp`, exact ones by algebra too.

    The server has the cohort's sum. Enough colluders decrypt client 0's own upload; fewer have the sum over the honest
    clients, which is taken for client 0's gradient. colluders: number of clients, the last ones, that give the server
    of "collusion/1" their states; 0: all.
    """

    colluders: Annotated[int, whole_number(0, 10_000)] = 0

    name: ClassVar[str] = "adaptive_encrypted"
    version: ClassVar[str] = "5"
    targets: ClassVar[frozenset[str] | None] = frozenset({"tp_smc", "hybridalpha", "pile"})
    threats: ClassVar[tuple[str, ...]] = ("server/1", "collusion/1", "client/1", "eavesdropper/1")
    reference: ClassVar[str] = "this project; sums and coalitions of Truex et al. 2019, Section 3.2, inverted"

    def evidence(self, view: View) -> list[Evidence]:
        """Return what can be decrypted, with its noise law; a coalition's evidence is about client 0 alone."""
        evidence = super().evidence(view)
        if not view.threat.colludes or not isinstance(view.defense, EncryptedSums):
            return evidence
        clients = view.plan.clients
        members = range(1 if self.colluders == 0 else max(1, clients - self.colluders), clients)
        opened = with_law(view.defense.noise(view.plan), view.defense.opened(view, members))
        return [replace(e, unit=tuple(slot for slot in e.unit if slot.client == TARGET)) for e in opened]

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge."""
        if view.defense.noise(view.plan) is None:
            return invert_evidence(self.evidence(view), view.plan, challenges, generator, self.budget)
        return super().run(view, challenges, generator)
