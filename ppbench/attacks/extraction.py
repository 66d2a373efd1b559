"""The outputs of a model as its receiver computes them: the start of extraction attacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.membership.model_queries import model_outputs
from ppbench.base.errors import UsageError
from ppbench.federation.view import View

MASKED = frozenset({"pbpfl", "pbpfl_ext", "mpdp", "mp_dp_naive", "mp_cdp", "mpdp_h"})
"""Defenses whose clients train on a masked model; under other defenses a model received is the true one."""


@dataclass(frozen=True)
class Query(Attack):
    """Answers with the outputs of the last model received, as it is: what a mask on the model should prevent.

    An adaptive attack overrides `outputs`. Outputs that are not finite, or a view without a model, count as 0, which
    agrees with the true model by chance only.
    """

    name: ClassVar[str] = "query"
    kind: ClassVar[Kind] = "extraction"
    threats: ClassVar[tuple[str, ...]] = ("client/1",)
    targets: ClassVar[frozenset[str] | None] = MASKED
    reference: ClassVar[str] = "this project; no attack: the answer if the model received is taken for the true one"

    def outputs(self, view: View, x: Tensor) -> Tensor:
        """Return the outputs [Q, C] float64, on CPU, of queries x; NaN where there is no model."""
        return model_outputs(view, x)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return the outputs [Q, C] float64 of every challenge's queries (UsageError for one without any)."""
        guesses = []
        for challenge in challenges:
            if challenge.x is None:
                raise UsageError(
                    f"Attack {self.name!r} was given a challenge without queries; an extraction challenge must have "
                    "inputs."
                )
            outputs = self.outputs(view, challenge.x)
            guesses.append(Guess(outputs=torch.where(outputs.isfinite().all(-1, keepdim=True), outputs, 0.0)))
        return guesses
