"""No defense: plain FedAvg or FedSGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ppbench.federation.contract import Defense


@dataclass(frozen=True)
class NoDefense(Defense):
    """Plain federated averaging; the control that every attack must break."""

    name: ClassVar[str] = "none"
    paper: ClassVar[str] = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017"
