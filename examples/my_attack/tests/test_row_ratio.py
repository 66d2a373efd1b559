"""Does it find what was planted, nothing in nothing, and does it behave?"""

from __future__ import annotations

from row_ratio import RowRatio

from ppbench.testing import check_attack


def test_the_contract_is_kept() -> None:
    """All properties of its kind are asked; a ratio is exact, so more than the usual 30 dB is asked for."""
    check_attack(RowRatio, decibels=60)
