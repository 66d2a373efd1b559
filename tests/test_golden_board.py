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
    assert set(expected) == set(golden.KEPT) and len(cells) == 561
    changes = golden.differences(expected, golden.figures(cells))
    advice = "python tests/golden/board.py lists all; figures move only where a change means to move them"
    assert not changes, "\n".join([f"{len(changes)} lines differ ({advice}):", *changes[:20]])


def test_what_the_records_state_is_what_their_scores_give(cells):
    assert [cell.config.cell_id() for cell in cells] == [cell.cell_id for cell in cells]


@pytest.mark.parametrize("what", ["accuracy", "score", "configuration"])
def test_a_changed_figure_is_found(golden, cells, what):
    cell = next(c for c in cells if c.config.defense.id == "dp" and c.config.attack.id == "dlg")
    if what == "accuracy":
        utility = cell.utility.model_copy(update={"accuracy": cell.utility.accuracy - 1e-6})
        changed = cell.model_copy(update={"utility": utility})
    elif what == "score":
        first = cell.victims[0].model_copy(update={"rmse": cell.victims[0].rmse + 1e-6})
        changed = cell.model_copy(update={"victims": [first, *cell.victims[1:]]})
    else:
        changed = cell.model_copy(update={"config": cell.config.model_copy(update={"seed": 1})})
    related = [c for c in cells if c.config.defense.id in ("dp", "none") and c.config.attack.id == "dlg"]
    before = golden.figures(related)
    after = golden.figures([changed if c is cell else c for c in related])
    assert golden.differences(before, after), f"a change of the {what} went unseen"


def test_no_figure_is_replaced_without_being_asked(golden, cells, tmp_path, monkeypatch):
    some = cells[:3]
    monkeypatch.setattr(golden, "HERE", tmp_path)
    monkeypatch.setattr(golden, "records", lambda: some)
    assert golden.main([]) == 1 and golden.main(["--replace-figures"]) == 2 and not list(tmp_path.iterdir())
    assert golden.main(["--replace-figures", "a reason"]) == 0 and golden.main([]) == 0
    assert golden.kept() == golden.figures(some)
