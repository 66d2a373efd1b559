"""Two tests are enough: does it keep the contract, and what does it let leak?"""

from __future__ import annotations

import pytest
from sign_sgd import SignSGD

from ppbench.testing import check_defense


def test_the_contract_is_kept() -> None:
    """All properties are asked; failures are told together."""
    check_defense(SignSGD)


@pytest.mark.ppbench(suite="small.toml", defense="sign_sgd", max_psnr=15, max_asr=0.7)
def test_images_stay_hidden_and_members_too(ppbench) -> None:
    """Limits of the marker are judged before this body; labels have none, because signs tell them."""
    assert ppbench.worst["labels"].value > 0.5
    assert {record.config.defense.control.value for record in ppbench.records} == {3, 5}


@pytest.mark.ppbench(suite="small.toml", defense="sign_sgd")
def test_nothing_got_worse(ppbench) -> None:
    """Skips until there is a baseline: `ppbench baseline accept RESULTS BASELINE --reason ...`."""
    assert ppbench.compare().exit_code == 0
