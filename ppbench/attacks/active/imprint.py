"""Trap weights: a first linear layer that sorts the images of a batch into bins, if possible one image per bin.

All rows are one measurement of the input, biases its quantiles (the imprint of Fowl et al., "Robbing the Fed", ICLR
2022, in an existing layer instead of one in front; trap weights of Boenisch et al., "When the Curious Abandon Honesty",
EuroS&P 2023, likewise use an existing layer). Gradients of neighboring units that step differ by the images between
their quantiles; a unit that bumps has the images around its own. Weight over bias gradient of one image is the image.
Where the server reads sums alone, all other clients get weights without a gradient (Pasquini et al., "Eluding Secure
Aggregation in Federated Learning via Model Inconsistency", CCS 2022), so that the sum is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.active.bins import bin_rows, bin_trap, ratio_rows, ratio_trap
from ppbench.attacks.active.wiring import (
    Wiring,
    inverted_features,
    of_targets,
    passing,
    plausible_images,
    server_of,
    silent_weights,
    wiring,
)
from ppbench.attacks.reconstruction.search.starts import PosedVictim, posed
from ppbench.base.errors import UsageError
from ppbench.federation.acting import Before, Sent
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View


@dataclass(frozen=True)
class Imprint(Attack):
    """Trap weights in the first hidden linear layer: recovers the images that fall into a bin of their own.

    Bins are equally likely on the public examples, by their leading principal direction; without any, by brightness and
    a normal law. With fewer units than examples a bin has probability 1 / batch, and the rest of the law has no bins: 1
    in e bins then holds one image. Convolutions before the layer pass the image on.

    loud: whether gradients are made as large as possible, which drowns noise without clipping before it.
    """

    loud: bool = True

    name: ClassVar[str] = "imprint"
    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server-active/1", "server-active/1/sybil")
    standard: ClassVar[bool] = False
    reference: ClassVar[str] = (
        "Fowl et al., Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models, "
        "ICLR 2022; Boenisch et al., When the Curious Abandon Honesty, EuroS&P 2023; Pasquini et al., Eluding Secure "
        "Aggregation in Federated Learning via Model Inconsistency, CCS 2022"
    )

    def suits(self, plan: Plan) -> bool:
        """Return whether the network has a hidden linear layer with biases behind layers that can pass the image on."""
        return plan.spec.classes > 1 and wiring(plan) is not None

    def crafted(self, before: Before, generator: torch.Generator) -> Sent:
        """Return the trap for the target (or for all), and weights without a gradient for the others."""
        wired = _wired(before.plan)
        params = {name: value.detach().cpu() for name, value in before.server.params.items()}
        trap = {**params, **passing(wired.before, params, before.plan.data_range)}
        trap |= (bin_trap if wired.biased else ratio_trap)(wired, trap, before, self.loud)
        return Sent(trap, None if before.target is None else silent_weights(wired.last, params, before.plan.loss))

    def evidence(self, view: View) -> list[Evidence]:
        """Return the defense's evidence; from a cohort where only the target has a gradient, the target's."""
        return of_targets(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge: the images in bins, then grey ones; no labels."""
        victims = posed(self.evidence(view), view.plan, challenges, generator)
        return [self._answer(victim, view) for victim in victims]

    def _answer(self, victim: PosedVictim, view: View) -> Guess:
        images = victim.image("grey")
        server = server_of(view, victim.challenge.unit[0])
        if victim.evidence is None or server is None:
            return Guess(x=images, evaluations=1)
        wired, params = _wired(view.plan), {name: value.detach().cpu() for name, value in server.params.items()}
        rows = (bin_rows if wired.biased else ratio_rows)(wired, params, victim.evidence, view.plan)
        kept = plausible_images(inverted_features(view.plan, wired.before, params, rows), view.plan)[: len(images)]
        images[: len(kept)] = kept.float()
        return Guess(x=images, evaluations=1)


@dataclass(frozen=True)
class QuietImprint(Imprint):
    """Trap weights with small gradients of one size: sparsifiers keep more of them, and they fit the range of masks."""

    name: ClassVar[str] = "imprint_quiet"

    loud: bool = False


def _wired(plan: Plan) -> Wiring:
    wired = wiring(plan)
    if wired is None:
        raise UsageError(
            f"Attack 'imprint' needs a hidden linear layer with biases, behind convolutions and pools alone; model "
            f"{plan.spec.model!r} has none: take --model mlp, or cnn with --model-set hidden=256."
        )
    return wired
