"""The attack aware that unsent entries are unknown, not zero."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ppbench.attacks.adaptive.dp import AdaptiveDP
from ppbench.defenses.ppdl import PPDL
from ppbench.federation.evidence import Evidence
from ppbench.federation.view import View


@dataclass(frozen=True)
class AdaptivePPDL(AdaptiveDP):
    """Gradient matching on the visible support: unsent entries carry no weight; which were sent is in the message.

    Where the sent entries are noisy, it searches the maximum of the posterior under the public noise law. Where the
    largest were chosen under noise, an unsent entry is probably small and is weighted accordingly (`PPDL.precision`).
    """

    name: ClassVar[str] = "adaptive_ppdl"
    version: ClassVar[str] = "3"
    targets: ClassVar[frozenset[str] | None] = frozenset({"ppdl"})
    reference: ClassVar[str] = "this project; gradient matching of Zhu, Liu and Han 2019 with a mask"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence with the noise law, each entry weighted by `PPDL.precision`."""
        evidence = super().evidence(view)
        if not isinstance(view.defense, PPDL) or not view.threat.sees_uploads:
            return evidence
        sent = {exchange.slot: exchange.answer for exchange in view.exchanges()}
        defense = view.defense
        return [replace(e, weight=defense.precision(view.plan, sent[e.unit[0]], e.observed)) for e in evidence]
