"""Trap weights: a first linear layer that sorts the images of a batch into bins, one image a bin where it can.

All rows are one measurement of the input, biases its quantiles (the imprint of Fowl et al., "Robbing the Fed", ICLR
2022, put into a layer that is there instead of one in front; trap weights of Boenisch et al., "When the Curious Abandon
Honesty", EuroS&P 2023, likewise use the layer that is there). Of units that step, gradients of neighbors differ by the
images between their quantiles; of units that bump, each has those around its own. Weight over bias gradient of one
image is the image. Where the server reads sums alone all others get weights without a gradient (Pasquini et al.,
"Eluding Secure Aggregation in Federated Learning via Model Inconsistency", CCS 2022), so that the sum is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.active import bins, ratios
from ppbench.attacks.active.target import of_targets, plausible, server_of
from ppbench.attacks.active.wiring import Wiring, inverted, passing, silent, wiring
from ppbench.attacks.reconstruction.search.starts import Victim, posed
from ppbench.base.errors import UsageError
from ppbench.federation.acting import Before, Sent
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View


@dataclass(frozen=True)
class Imprint(Attack):
    """Trap weights in the first hidden linear layer: as many of a batch's images as fall into a bin of their own.

    Bins are equally likely on the public examples, by their leading principal direction; without any, by brightness and
    a normal law. With fewer units than examples each bin is as likely as one example of the batch, and the rest of the
    law goes without: 1 in e bins then holds one image. Convolutions before the layer pass the image on.

    loud: whether gradients are made as large as can be, which drowns noise that has no clipping before it.
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
        """Return the trap, and for all but a target weights without a gradient."""
        wired = _wired(before.plan)
        params = {name: value.detach().cpu() for name, value in before.server.params.items()}
        trap = {**params, **passing(wired.before, params, before.plan.data_range)}
        trap |= (bins if wired.biased else ratios).sown(wired, trap, before, self.loud)
        return Sent(trap, None if before.target is None else silent(wired.last, params, before.plan.loss))

    def evidence(self, view: View) -> list[Evidence]:
        """Return what the defense makes of uploads; of a cohort where one client alone has a gradient, that one's."""
        return of_targets(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge: images that bins show, then grey ones; labels are not told."""
        victims = posed(self.evidence(view), view.plan, challenges, generator)
        return [self._answer(victim, view) for victim in victims]

    def _answer(self, victim: Victim, view: View) -> Guess:
        images = victim.image("grey")
        server = server_of(view, victim.challenge.unit[0])
        if victim.evidence is None or server is None:
            return Guess(x=images, evaluations=1)
        wired, params = _wired(view.plan), {name: value.detach().cpu() for name, value in server.params.items()}
        shown = (bins if wired.biased else ratios).shown(wired, params, victim.evidence, view.plan)
        kept = plausible(inverted(view.plan, wired.before, params, shown), view.plan)[: len(images)]
        images[: len(kept)] = kept.float()
        return Guess(x=images, evaluations=1)


@dataclass(frozen=True)
class QuietImprint(Imprint):
    """Trap weights of small gradients of one size: sparsifiers keep more of them, masks have a range for them."""

    name: ClassVar[str] = "imprint_quiet"

    loud: bool = False


def _wired(plan: Plan) -> Wiring:
    found = wiring(plan)
    if found is None:
        raise UsageError(
            f"Attack 'imprint' needs a hidden linear layer with biases, behind convolutions and pools alone; model "
            f"{plan.spec.model!r} has none: take --model mlp, or cnn with --model-set hidden=256."
        )
    return found
