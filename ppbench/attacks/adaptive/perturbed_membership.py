"""Membership inference on masked iterates by attackers that remove the mask first (PBPFL, MP-DP and variants)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.attacks.adaptive.unmask import (
    Unmask,
    data_free,
    own_regression,
    projection,
    unmasked_outputs,
    upload_identities,
)
from ppbench.attacks.extraction.query import MASKED
from ppbench.attacks.membership.loss import LossThreshold
from ppbench.federation.view import View


@dataclass(frozen=True)
class Unmasked(LossThreshold):
    """A record is a member if its loss is small in the outputs that `unmask` makes of the masked ones."""

    adaptive: ClassVar[bool] = True
    targets: ClassVar[frozenset[str] | None] = MASKED
    reference: ClassVar[str] = "this project; loss threshold of Yeom et al. 2018 on un-masked outputs"
    unmask: ClassVar[Unmask]

    def signal(self, view: View, challenge: Challenge) -> Tensor:
        """Return the un-masked outputs [Q, C] float64 of the candidates."""
        assert challenge.x is not None  # `run` has checked
        return unmasked_outputs(view, challenge.x, type(self).unmask, challenge.labels)


class UnmaskRegression(Unmasked):
    """A client fits the mask on its own labelled data, by least squares, and subtracts it."""

    name: ClassVar[str] = "unmask_regression"
    unmask: ClassVar[Unmask] = staticmethod(own_regression)


class UnmaskProjection(Unmasked):
    """Uses the outputs across the mask's public direction only: nothing is estimated.

    Where the direction is secret (MP-DP with one coefficient per class), as `unmask_data_free`. With one output nothing
    remains and every decision is random.
    """

    name: ClassVar[str] = "unmask_projection"
    unmask: ClassVar[Unmask] = staticmethod(projection)


class UnmaskDataFree(Unmasked):
    """Reads the mask off the columns of the head's weight; needs no data but the inputs in question."""

    name: ClassVar[str] = "unmask_data_free"
    unmask: ClassVar[Unmask] = staticmethod(data_free)


class UnmaskUpload(Unmasked):
    """Reads the mask off surrogate gradients: those of all clients for a listener, its own for a client."""

    name: ClassVar[str] = "unmask_upload"
    unmask: ClassVar[Unmask] = staticmethod(upload_identities)
    threats: ClassVar[tuple[str, ...]] = ("eavesdropper/1", "client/1")
