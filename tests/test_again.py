"""`find_cell`: experiment, group and cell have the name of the record, or UsageError."""

from pathlib import Path

import pytest

from ppbench.base.errors import UsageError
from ppbench.records.store import Store
from ppbench.run.cells import find_cell

BOARD = Path(__file__).parent.parent / "leaderboards" / "results" / "digits-quick" / "records.zip"


def test_every_cell_of_a_board_is_found_again_controls_under_attacks_on_others_too():
    records = Store(BOARD).load_all()
    chosen = [*records[::9], *(r for r in records if r.config.attack.follows and r.config.defense.id == "full_noise")]
    assert {r.config.stage for r in chosen} >= {"init", "final"} and any(
        "adaptive" in r.config.attack.id for r in chosen
    )
    for record in chosen:
        experiment, group, cell = find_cell(record.config, "digits")
        assert cell.id == record.cell_id and cell.attack.name == record.config.attack.id
        assert experiment.points[group.point].defense.name == record.config.defense.id


def test_what_is_asked_for_otherwise_today_is_no_cell_of_that_name():
    config = Store(BOARD).load_all()[0].config
    older = config.model_copy(update={"attack": config.attack.model_copy(update={"version": "0"})})
    with pytest.raises(UsageError, match="cannot be computed again"):
        find_cell(older, "digits")
    secret = config.model_copy(update={"data": config.data.model_copy(update={"salt": "0" * 32})})
    with pytest.raises(UsageError, match="drawn with a secret"):
        find_cell(secret, "digits")
