"""Every figure and every cell's name of the committed digits-quick board: what this code makes of the records."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def golden(script):
    return script(Path(__file__).parent / "golden" / "board.py")


@pytest.fixture(scope="module")
def cells(golden):
    return golden.records()


def test_every_figure_and_every_name_is_what_it_was(golden, cells):
    expected = golden.kept()
    assert set(expected) == set(golden.KEPT) and len(cells) == 629
    changes = golden.differences(expected, golden.figures(cells))
    advice = "python tests/golden/board.py lists all; figures move only where a change means to move them"
    assert not changes, "\n".join([f"{len(changes)} lines differ ({advice}):", *changes[:20]])


def test_what_the_records_state_is_what_their_scores_give(cells):
    assert [cell.config.cell_id() for cell in cells] == [cell.cell_id for cell in cells]
