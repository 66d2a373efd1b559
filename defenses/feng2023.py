"""What Feng et al., BAFFLE: A Baseline of Backpropagation-Free Federated Learning (2023), print about it."""

from __future__ import annotations

from ppbench.federation.contract import Claim

PAPER = "Feng et al., BAFFLE: A Baseline of Backpropagation-Free Federated Learning, ECCV 2024 (arXiv 2301.12195)"


def claims() -> tuple[Claim, ...]:
    """Return what the paper prints."""
    return ()
