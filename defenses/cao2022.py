"""What Cao et al., A Federated Deep Learning Framework (FedPC, 2022), print about their defense and its baselines."""

from __future__ import annotations

from ppbench.federation.contract import Claim

PAPER = (
    "Cao et al., A Federated Deep Learning Framework for Privacy Preservation and Communication Efficiency, "
    "Journal of Systems Architecture 124, 2022"
)


def claims(defense: str) -> tuple[Claim, ...]:
    """Return what the paper prints about "fedpc", "phong" or "central"."""
    return ()
