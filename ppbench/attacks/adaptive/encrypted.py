"""Attacks on TP-SMC, HybridAlpha and PILE: what sums and coalitions open is inverted as far as noise lets it.

Encryption hides single uploads; nothing hides that a sum of few clients is a gradient of few batches, that enough
clients decrypt whatever they like, and that an upload alone carries only a part of the noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.adaptive.dp import AdaptiveDP
from ppbench.attacks.adaptive.inversion import invert
from ppbench.defenses.encrypted.sums import EncryptedSums
from ppbench.federation.bounds import whole
from ppbench.federation.evidence import Evidence
from ppbench.federation.threats import TARGET
from ppbench.federation.view import View
from ppbench.federation.wire import Slot


@dataclass(frozen=True)
class AdaptiveEncrypted(AdaptiveDP):
    """Inverts what the server or a coalition with it decrypts: noisy sums as `adaptive_dp`, exact ones by algebra too.

    The server has the cohort's sum. Colluders who are enough to decrypt have client 0's own upload; fewer the sum of
    the honest clients, which is taken for client 0's gradient. colluders: how many clients, the last ones, hand the
    server of "collusion/1" their states; 0: all of them.
    """

    colluders: Annotated[int, whole(0, 10_000)] = 0

    name: ClassVar[str] = "adaptive_encrypted"
    version: ClassVar[str] = "1"
    targets: ClassVar[frozenset[str] | None] = frozenset({"tp_smc", "hybridalpha", "pile"})
    threats: ClassVar[tuple[str, ...]] = ("server/1", "collusion/1", "client/1", "eavesdropper/1")
    reference: ClassVar[str] = "this project; sums and coalitions of Truex et al. 2019, Section 3.2, inverted"

    def evidence(self, view: View) -> list[Evidence]:
        """Return what can be decrypted, with the noise that is in it; a coalition's as if of client 0 alone."""
        found = super().evidence(view)
        if not view.threat.colludes or not isinstance(view.defense, EncryptedSums):
            return found
        clients, noise = view.plan.clients, view.defense.noise(view.plan)
        members = range(1 if self.colluders == 0 else max(1, clients - self.colluders), clients)
        opened = view.defense.opened(view, members)
        laws = (None if noise is None else replace(noise, std=noise.std / len(e.unit) ** 0.5) for e in opened)
        return [replace(e, unit=_target(e), noise=law) for e, law in zip(opened, laws, strict=True)]

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge."""
        if view.defense.noise(view.plan) is None:
            return invert(self.evidence(view), view.plan, challenges, generator, self.budget)
        return super().run(view, challenges, generator)


def _target(found: Evidence) -> tuple[Slot, ...]:
    return tuple(slot for slot in found.unit if slot.client == TARGET)
