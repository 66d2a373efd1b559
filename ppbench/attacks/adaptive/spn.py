"""The attack aware of SPN: the head's gradient is exact, and the cotangent at the features is unknown.

SPN (Fan et al. 2020) perturbs the backbone's gradient by a secret head. The public head's gradient is unchanged, and
the total cotangent at the features is an unknown: of linear systems (`closed_form`), else of the search in
`feature_inversion`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.adaptive.inversion import is_affordable
from ppbench.attacks.reconstruction.closed_form import SMALL, ClosedForm
from ppbench.attacks.reconstruction.feature_inversion import FeatureInversion
from ppbench.federation.evidence import Evidence
from ppbench.federation.view import View


@dataclass(frozen=True)
class AdaptiveSPN(FeatureInversion):
    """Linear systems, else feature inversion, by what SPN leaves exact: the public head's gradient."""

    name: ClassVar[str] = "adaptive_spn"
    version: ClassVar[str] = "6"
    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = frozenset({"spn"})
    contains: ClassVar[str] = "feature_inversion"

    def evidence(self, view: View) -> list[Evidence]:
        """Return the plain evidence with weight on the public head alone: the part that SPN leaves exact."""
        return [
            replace(e, weight={n: torch.full_like(v, float(n.startswith("head."))) for n, v in e.observed.items()})
            for e in super().evidence(view)
        ]

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge: by linear systems where these are exact, else as `feature_inversion`."""
        guesses, attack = dict[int, Guess](), ClosedForm(largest_batch=SMALL)
        budget = self.inversion_budget + self.joint_budget
        if attack.suits(view.plan):
            answers = attack.answer(view.defense.evidence(view), view.plan, challenges, generator)
            guesses = {i: guess for i, guess in enumerate(answers) if is_affordable(guess, budget)}
        left = [i for i in range(len(challenges)) if i not in guesses]
        searched = super().run(view, [challenges[i] for i in left], generator) if left else []
        guesses |= dict(zip(left, searched, strict=True))
        return [guesses[i] for i in range(len(challenges))]
