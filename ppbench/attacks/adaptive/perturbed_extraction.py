"""The true model's outputs from masked iterates, by the same means as `perturbed_membership`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ppbench.attacks.adaptive.unmask import (
    Unmask,
    data_free,
    own_regression,
    projection,
    unmasked_outputs,
    upload_identities,
)
from ppbench.attacks.extraction.query import Query
from ppbench.federation.view import View


@dataclass(frozen=True)
class UnmaskedExtraction(Query):
    """Answers with the outputs that `unmask` makes of the masked ones."""

    adaptive: ClassVar[bool] = True
    reference: ClassVar[str] = "this project; derived from the protocols of Feng et al. 2020 and Yang et al. 2024"
    unmask: ClassVar[Unmask]

    def outputs(self, view: View, x: Tensor) -> Tensor:
        """Return the un-masked outputs [Q, C] float64 of the queries."""
        return unmasked_outputs(view, x, type(self).unmask)


class ExtractRegression(UnmaskedExtraction):
    """A client fits the mask on its own labelled data and subtracts it."""

    name: ClassVar[str] = "extract_regression"
    unmask: ClassVar[Unmask] = staticmethod(own_regression)


class ExtractProjection(UnmaskedExtraction):
    """Completes the outputs across the public direction by the nearest one-hot target; see `by_projection`."""

    name: ClassVar[str] = "extract_projection"
    unmask: ClassVar[Unmask] = staticmethod(projection)


class ExtractDataFree(UnmaskedExtraction):
    """Reads the mask off the columns of the head's weight; needs no data but the queries."""

    name: ClassVar[str] = "extract_data_free"
    unmask: ClassVar[Unmask] = staticmethod(data_free)


class ExtractUpload(UnmaskedExtraction):
    """Reads the mask off surrogate gradients: those of all clients for a listener, its own for a client."""

    name: ClassVar[str] = "extract_upload"
    unmask: ClassVar[Unmask] = staticmethod(upload_identities)
    threats: ClassVar[tuple[str, ...]] = ("eavesdropper/1", "client/1")
