"""The attack aware of SPN: the head's gradient is exact, and the cotangent at the features is unknown.

SPN (Fan et al. 2020) perturbs the backbone's gradient by a secret head. The public head's gradient is unchanged, and
the total cotangent at the features can be searched as an unknown, as `feature_inversion` does anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ppbench.attacks.reconstruction.feature_inversion import FeatureInversion
from ppbench.federation.evidence import Evidence
from ppbench.federation.view import View


@dataclass(frozen=True)
class AdaptiveSPN(FeatureInversion):
    """Feature inversion that explains only the part that SPN leaves exact: the public head's gradient."""

    name: ClassVar[str] = "adaptive_spn"
    version: ClassVar[str] = "3"
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"spn"})
    contains: ClassVar[str] = "feature_inversion"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence with weight on the public head alone: the part that SPN leaves exact."""
        return [
            replace(e, weight={n: torch.full_like(v, float(n.startswith("head."))) for n, v in e.observed.items()})
            for e in super().evidence(view)
        ]
