"""A baseline moves whole, with a reason, and in no other way."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ppbench.base.errors import UsageError
from ppbench.claims.check import PAPER_CLAIMS, claimed
from ppbench.commands.results import baseline as command
from ppbench.records.run_files import Origin, origin_of, save_origin
from ppbench.records.store import Store
from ppbench.report.compare.outcome import compare
from ppbench.report.controls import UNREAD
from ppbench.report.integrity import HISTORY, history
from ppbench.report.page.board import write_board
from ppbench.verification import baseline as module
from ppbench.verification import recheck, verify
from ppbench.verification.baseline import accept


@pytest.fixture
def run(fabricate, pictured, tmp_path, monkeypatch):
    """Return a maker of finished runs, with images, times and a cache; boards are tables alone, to be quick."""

    def board(store, claims):
        store.csv_path.write_text("")
        (store.out / "figures").mkdir(exist_ok=True)
        store.html_path.write_text("a page")
        return []

    monkeypatch.setattr(module, "write_board", board)
    monkeypatch.setattr(module, "_OURS", module._OURS - {"leaderboard.csv"})

    def make(name, **dp):
        store = Store(tmp_path / name)
        points = [("none", None, 30.0), ("full_noise", None, 5.0), *(("dp", float(v[1:]), s) for v, s in dp.items())]
        for defense, value, share in points:
            record = fabricate(defense, value, "dlg", "reconstruction", share, control="sigma")
            record, tensors = pictured(record.model_copy(update={"asked": "q"}))
            store.save(record, seconds=1.0, tensors=tensors)
        save_origin(store.out, "ppbench evaluate --defense dp")
        (store.out / "cache").mkdir()
        (store.out / "times").mkdir()
        return store.out

    return make


def test_a_baseline_holds_the_records_and_why_and_no_images_and_each_move_what_changed(run, tmp_path):
    new, base = run("new", _1=10.0, _2=9.0), tmp_path / "base"
    line = accept(new, base, "  the first\none ")
    assert (line.reason, line.cells) == ("the first one", 4)
    assert line.moved.model_dump() == dict(added=4, removed=0, changed=0)
    ids = Store(new).ids()
    assert origin_of(Store(base)) == origin_of(Store(new)) != Origin(), "which command, day and commit it is of"
    names = {str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()}
    assert names == {"ppbench.json", "origin.json", HISTORY, "leaderboard.html", *(f"records/{i}.json" for i in ids)}
    assert [r.model_dump() for r in Store(base).load_all()] == [r.model_dump() for r in Store(new).load_all()]
    assert verify(base, claimed) == [] and history(base) == [line]
    assert Store(base).images(Store(base).load_all()[0]) is None and Store(new).images(Store(new).load_all()[0])
    assert compare(base, new).exit_code == 0
    accept(run("two", _1=12.0, _3=9.0), base, "second")
    first, second = history(base)
    assert first == line and second.reason == "second"
    assert second.moved.model_dump() == dict(added=1, removed=1, changed=1)
    values = [r.config.defense.control.value for r in Store(base).load_all() if r.config.defense.control]
    assert sorted(values) == [1.0, 3.0], "the old records leave together"
    assert verify(base) == []


def test_an_edit_by_hand_is_found(run, tmp_path):
    new, base = run("new", _1=10.0), tmp_path / "base"
    accept(new, base, "first")
    path = next(p for p in (base / "records").iterdir() if '"dp"' in p.read_text())
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before)))
    assert verify(base) == [], "how a file is laid out says nothing"
    data = json.loads(before)
    data["flags"] += [dict(code="x", severity="info", detail="x")]
    path.write_text(json.dumps(data))
    assert any("digest" in problem and "baseline accept" in problem for problem in verify(base))
    with pytest.raises(UsageError, match=r"BASELINE: .*digest"):
        compare(base, new)
    path.unlink()
    assert any("of 3" in problem for problem in verify(base)), "a row that was taken away"
    path.write_text(before)
    lines = (base / HISTORY).read_text()
    (base / HISTORY).write_text(lines + "{}\n")
    assert any("line 2" in problem for problem in verify(base))
    (base / HISTORY).unlink()
    assert any(f"{HISTORY} is missing" in problem for problem in verify(base))


def test_what_may_not_be_accepted(run, tmp_path):
    new, base = run("new", _1=10.0), tmp_path / "base"
    refused = [
        (new, base, " \n", "moves for a reason"),
        (tmp_path / "no", base, "r", "no folder"),
        (new, new, "r", "one folder"),
        (new, run("other", _1=9.0), "r", "not an accepted baseline"),
        (new, tmp_path / "a" / "b", "r", "There is no folder"),
    ]
    for source, target, reason, words in refused:
        with pytest.raises(UsageError, match=words):
            accept(source, target, reason)
    assert not base.exists()
    accept(new, base, "first")
    (base / "README.md").write_text("mine")
    with pytest.raises(UsageError, match=r"README\.md"):
        accept(new, base, "r")
    (base / "README.md").unlink()
    link = tmp_path / "link"
    link.symlink_to(base)
    with pytest.raises(UsageError, match="is a link"):
        accept(new, link, "r")
    path = next((new / "records").glob("*[0-9a-f].json"))
    path.write_text(path.read_text().replace('"value": ', '"value": 1', 1))
    with pytest.raises(UsageError, match=r"has problems: .*nothing was accepted"):
        accept(new, base, "r")
    with pytest.raises(UsageError, match="is an accepted baseline"):
        Store(base).prepare()
    assert len(history(base)) == 1 and verify(base) == []


def test_cells_of_the_same_suite_are_kept_where_that_is_asked_for(run, tmp_path):
    base, first, second = tmp_path / "base", run("first", _1=10.0), run("second", _2=9.0)
    accept(first, base, "seed 0")
    line = accept(second, base, "seed 1", keep=True)
    assert line.moved.model_dump() == dict(added=1, removed=0, changed=0)
    assert Store(base).ids() == sorted({*Store(first).ids(), *Store(second).ids()}) and verify(base, claimed) == []
    assert accept(second, base, "all of it").moved.removed == 1, "nobody keeps what nobody asked to keep"
    accept(first, base, "seed 0 again")
    path = next(p for p in (base / "records").glob("*.json") if p.stem not in Store(second).ids())
    before = path.read_text()
    path.write_text(before.replace('"value": ', '"value": 1', 1))
    with pytest.raises(UsageError, match="whose cells are to be kept, has problems"):
        accept(second, base, "seed 1 again", keep=True)
    path.write_text(before)
    other = run("other", _2=9.0)
    for record in Store(other).load_all():
        config = record.config.model_copy(update={"suite": "evaluate/2"})
        Store(other).save(record.model_copy(update={"config": config, "cell_id": config.cell_id(), "artifacts": []}))
        for path in Store(other).folder.glob(f"{record.cell_id}.*"):
            path.unlink()
    assert accept(other, base, "another suite", keep=True).moved.removed == 3, "cells of another suite go"


def test_failed_cells_and_controls_that_do_not_hold_are_not_accepted(run, fabricate, pictured, tmp_path):
    base, new = tmp_path / "base", run("new", _1=10.0)
    Store(new).save(fabricate("dp", 2.0, "dlg", "reconstruction", 9.0, control="sigma", status="failed"))
    with pytest.raises(UsageError, match=r"1 of 4 cells in .* failed, such as dp under dlg"):
        accept(new, base, "a good reason")
    weak = run("weak", _1=10.0)
    record, tensors = pictured(fabricate("none", None, "dlg", "reconstruction", 8.0, control="sigma"))
    Store(weak).save(record.model_copy(update={"asked": "q"}), tensors=tensors)
    with pytest.raises(UsageError, match=r"control none: .*needs controls that hold"):
        accept(weak, base, "a good reason")
    assert not base.exists()
    gone = run("gone", _1=10.0)
    Store(gone).save(fabricate("dp", 2.0, "dlg", "reconstruction", 9.0, control="sigma", status="diverged"))
    unread = fabricate("standalone", None, "dlg", "reconstruction", status="failed")
    Store(gone).save(unread.model_copy(update={"reason": f"attack 'dlg': nothing in the view of server/1 {UNREAD}"}))
    assert accept(gone, base, "what diverged is a result, and what nothing can be read of").cells == 5


@pytest.mark.parametrize("target", [".", "..", "../here"])
def test_the_current_folder_is_refused_and_a_path_with_dots_is_not(run, tmp_path, monkeypatch, target):
    new, here = run("new", _1=10.0), tmp_path / "deep" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    with pytest.raises(UsageError, match=r"is the current folder or holds it"):
        accept(new, Path(target), "r")
    assert not list(here.iterdir())
    (here.parent / "there").mkdir()
    accept(new, Path("../there/../beside"), "r")
    assert verify(tmp_path / "deep" / "beside") == []


@pytest.mark.parametrize("place", ["records", "board", "rename"])
def test_a_failure_leaves_the_old_baseline_and_nothing_else(run, tmp_path, monkeypatch, place):
    base = tmp_path / "base"
    accept(run("one", _1=10.0), base, "first")
    before, new = {p: p.read_bytes() for p in base.rglob("*") if p.is_file()}, run("two", _1=12.0)
    around = sorted(tmp_path.iterdir())

    def broken(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if place == "rename":
            whole = Path.rename
            patch.setattr(
                Path, "rename", lambda self, to: whole(self, to) if self == base or ".old~" in self.name else broken()
            )
        else:
            patch.setattr(module, "write_atomic" if place == "records" else "write_board", broken)
        with pytest.raises(UsageError, match="No space is left"):
            accept(new, base, "second")
    assert sorted(tmp_path.iterdir()) == around
    assert {p: p.read_bytes() for p in base.rglob("*") if p.is_file()} == before and verify(base) == []


def test_the_board_of_a_baseline_is_made_without_images(fabricate, pictured, tmp_path):
    store = Store(tmp_path / "new")
    for defense, share in (("none", 30.0), ("full_noise", 5.0)):
        record, tensors = pictured(fabricate(defense, None, "dlg", "reconstruction", share))
        store.save(record, tensors=tensors)
    write_board(store, PAPER_CLAIMS)
    base = tmp_path / "base"
    accept(store.out, base, "first")
    assert verify(base, claimed) == []
    assert {p.name for p in base.iterdir()} == {*module.BOARD_FILES, "records", "ppbench.json", HISTORY}
    for name in ("leaderboard.csv", "worst_case.csv"):
        assert (base / name).read_bytes() == (store.out / name).read_bytes()
    page = (base / "leaderboard.html").read_text()
    assert "data:image/png" not in page and "Reconstructions were left out of this baseline." in page


def test_the_command_asks_for_a_reason(run, tmp_path, monkeypatch):
    monkeypatch.setattr(recheck, "recheck", lambda *_: recheck.Findings((), ()))  # these records are of no data
    new, base = run("new", _1=10.0), tmp_path / "base"
    without = CliRunner().invoke(command, ["accept", str(new), str(base)])
    assert without.exit_code == 2 and not base.exists()
    done = CliRunner().invoke(command, ["accept", str(new), str(base), "--reason", "first"])
    assert done.exit_code == 0, done.exception
    assert "3 cells: 3 added, 0 removed, 0 changed" in done.output
